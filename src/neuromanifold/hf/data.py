"""Data: a local file or folder, a data set of the hub, or module:function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from neuromanifold.core.checks import message
from neuromanifold.hf.arrays import array_rows, folder_rows, number_rows, read_npz, table_rows
from neuromanifold.hf.audio import SUFFIXES as SOUNDS
from neuromanifold.hf.audio import audio_inputs
from neuromanifold.hf.batches import LoadedData, Rows, in_batches
from neuromanifold.hf.columns import needed, parse_columns
from neuromanifold.hf.errors import LoadError
from neuromanifold.hf.functions import find_function, is_function_name
from neuromanifold.hf.images import SUFFIXES as PICTURES
from neuromanifold.hf.images import image_inputs
from neuromanifold.hf.models import LoadedModel
from neuromanifold.hf.tables import SUFFIXES as TABLES
from neuromanifold.hf.tables import Table, folder_table, hub_table, read_table
from neuromanifold.hf.tasks import Task
from neuromanifold.hf.text import text_rows

_MEDIA: dict[Task | None, tuple[str, ...]] = {Task.IMAGE: PICTURES, Task.AUDIO: SOUNDS}
_KEYS = {Task.IMAGE: "images", Task.AUDIO: "audio", None: "inputs"}


@dataclass(frozen=True)
class OwnData:
    """Batches of the user's own function, at most so many of them."""

    function: Callable[[], Iterable[object]]
    about: str
    batches: int | None = None

    def __iter__(self) -> Iterator[object]:
        return islice(iter(self.function()), self.batches)

    def __len__(self) -> int:
        found = self.function()
        if not isinstance(found, Sized):
            raise TypeError("a generator has no length")  # as a DataLoader of an iterable data set says it
        return len(found) if self.batches is None else min(len(found), self.batches)


def load_data(
    source: str,
    model: LoadedModel,
    split: str = "train",
    subset: str | None = None,
    columns: str | Mapping[str, str] | None = None,
    labels: bool | None = None,
    batch_size: int = 32,
    batches: int | None = None,
    max_length: int | None = None,
    mask: float = 0.15,
    seed: int = 0,
) -> LoadedData | OwnData:
    """Load data as batches for a model.

    Args:
        source: a CSV, TSV, JSONL, Parquet or NPZ file, a folder of images or sounds, a data set's name on the hub, or
            `package.module:function`, where the function takes no arguments and returns batches.
        model: what the data are for; its tokenizer, image processor or feature extractor makes the inputs.
        split: which part of a data set of the hub.
        subset: which configuration of a data set of the hub, such as "sst2" of "glue".
        columns: which column holds what, such as "text=sentence,label=class"; usual names are found without.
        labels: needed (True), unwanted (False), or taken where there are some (None).
        batch_size: rows in a batch.
        batches: how many batches; by default all.  The rows are drawn at random with `seed`.
        max_length: text is cut to so many tokens, sound to so many values.
        mask: the share of tokens that is masked, for masked language models.
        seed: of the order of the rows, and of the masking.

    """
    path = Path(source).expanduser()
    if (subset is not None or split != "train") and (is_function_name(source) or path.is_file()):
        got = f"--subset {subset}" if subset is not None else f"--split {split}"
        raise LoadError(message("data", "a data set of the hub for --split and --subset", f"{got} for {source}"))
    if columns is not None and (
        is_function_name(source) or _is_media(path, model.task) or path.suffix.lower() == ".npz"
    ):
        raise LoadError(message("columns", "left out for data without columns", f"{columns!r} for {source}"))
    if is_function_name(source):
        return _own(source, batches)
    given = parse_columns(columns, model.task)
    rows = _rows(source, path, model, given, split, subset, labels, max_length, mask, seed)
    parameter = next(iter(model.module.parameters()), None)
    if parameter is None:
        raise LoadError(message("model", "a module with parameters", "one without"))
    return in_batches(rows, batch_size, batches, seed, parameter.dtype)


def _own(source: str, batches: int | None) -> OwnData:
    """Called once, unless it returns an iterator, which can be used up only once."""
    found = find_function(source, "data")
    made: Any = found() if callable(found) else found
    if not isinstance(made, Iterable):
        raise LoadError(message("data", "a function that returns batches", type(made).__name__))
    again: Callable[[], Iterable[object]] = (lambda: made) if not isinstance(made, Iterator) else found  # type: ignore[assignment]
    data = OwnData(again, source, batches)
    with suppress(TypeError):
        if len(data) == 0:
            raise LoadError(message("data", "with at least one batch", f"none from {source}"))
    return data


def _rows(
    source: str,
    path: Path,
    model: LoadedModel,
    given: dict[str, str],
    split: str,
    subset: str | None,
    labels: bool | None,
    max_length: int | None,
    mask: float,
    seed: int,
) -> Rows:
    task = model.task
    if path.suffix.lower() == ".npz" or _is_media(path, task):
        if task not in (None, Task.IMAGE, Task.AUDIO):
            expected = "a table of text (CSV, JSONL, Parquet, hub)"
            raise LoadError(message("data", expected, source, f"The model's task is {task}."))
        _must_exist(path, source)
        inputs = None
        if task is not None:
            inputs = image_inputs(model) if task is Task.IMAGE else audio_inputs(model, max_length)
        if path.is_dir():
            assert inputs is not None
            return folder_rows(path, _MEDIA[task], inputs, model, labels, source)
        return array_rows(read_npz(path), _KEYS[task], inputs, model, labels, source)
    table, about = _table(source, path, split, subset)
    if task is None:
        return number_rows(table, model, given, labels, about)
    if task is Task.IMAGE:
        return table_rows(table, needed(table, "image", given), image_inputs(model), model, given, labels, about)
    if task is Task.AUDIO:
        inputs = audio_inputs(model, max_length)
        return table_rows(table, needed(table, "audio", given), inputs, model, given, labels, about)
    return text_rows(table, model, given, labels, max_length, mask, seed, about)


def _is_media(path: Path, task: Task | None) -> bool:
    """Whether it is a folder of images or sounds, rather than a copy of a data set in tables."""
    if task not in _MEDIA or not path.is_dir():
        return False
    kinds = {file.suffix.lower() for file in path.rglob("*")}
    return not kinds.isdisjoint(_MEDIA[task]) or kinds.isdisjoint(TABLES)


def _table(source: str, path: Path, split: str, subset: str | None) -> tuple[Table, str]:
    if path.suffix.lower() in TABLES:
        _must_exist(path, source)
        return read_table(path), source
    if path.is_dir():
        return folder_table(path, subset, split), " ".join(filter(None, (source, subset, split)))
    if path.is_file():
        known = ", ".join((*TABLES, ".npz"))
        advice = "Pickles are not read. Write one of these, or a function that yields batches (module:function)."
        raise LoadError(message("data", f"a file of a known kind ({known})", source, advice))
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise LoadError(message("data", "a file or folder that exists", repr(source), f"There is no {path}."))
    return hub_table(source, subset, split), " ".join(filter(None, (source, subset, split)))


def _must_exist(path: Path, source: str) -> None:
    if not path.exists():
        raise LoadError(message("data", "a file that exists", repr(source), f"There is no {path}."))
