"""Data: a local file or folder, a hub data set, or module:function, as batches for a model.

Batches come in a fixed order and are collated when they are iterated, as often as they are iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.hf.columns import LabelReader, causal_roles, find_column, find_columns, parse_columns
from neuromanifold.hf.encoders import Encode, audio_encoder, image_encoder, number_encoder, text_encoder
from neuromanifold.hf.errors import LoadError
from neuromanifold.hf.functions import find_function, is_function_name
from neuromanifold.hf.models import LoadedModel, Task
from neuromanifold.hf.tables import Table, check_data_source, read_table

Batch = dict[str, Tensor] | tuple[Tensor, ...]
_CHUNK = 4096  # rows that are read at a time to find empty texts


@dataclass(frozen=True)
class LoadedData:
    """A re-iterable of batches; the same batches in the same order each time."""

    rows: tuple[int, ...]
    batch_size: int
    collate: Callable[[list[int]], Batch]
    about: str  # the data in one line, for provenance
    dtype: torch.dtype = torch.float32  # of inputs that are not integers

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches; a thread collates one batch ahead."""
        parts = [list(self.rows[i : i + self.batch_size]) for i in range(0, len(self.rows), self.batch_size)]
        with ThreadPoolExecutor(1, "batches") as thread:
            ahead = thread.submit(self._batch, parts[0])
            for part in parts[1:]:
                batch, ahead = ahead.result(), thread.submit(self._batch, part)
                yield batch
            yield ahead.result()

    @property
    def samples(self) -> int:
        """How many rows all batches together have."""
        return len(self.rows)

    def with_batch_size(self, batch_size: int) -> LoadedData:
        """Return the same rows in batches of another size."""
        return replace(self, batch_size=integer_in_range(batch_size, "batch_size", 1, 10**9, "samples in a batch"))

    def cached(self, max_bytes: int) -> LoadedData:
        """Return the same data, which keeps collated batches in memory for later passes, up to `max_bytes`."""
        return replace(self, collate=_cached(self.collate, max_bytes))

    def _batch(self, rows: list[int]) -> Batch:
        batch = self.collate(rows)
        if isinstance(batch, dict):
            return {name: value if name == "labels" else self._cast(value) for name, value in batch.items()}
        return (self._cast(batch[0]), *batch[1:])

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


@dataclass(frozen=True)
class FunctionData:
    """Batches that the user's function returns, at most `batches` of them."""

    function: Callable[[], Iterable[object]]
    about: str
    batches: int | None = None

    def __iter__(self) -> Iterator[object]:
        return islice(iter(self.function()), self.batches)

    def __len__(self) -> int:
        found = self.function()
        if not isinstance(found, Sized):
            raise TypeError("a generator has no length")  # as a DataLoader of an iterable data set raises
        return len(found) if self.batches is None else min(len(found), self.batches)


def load_data(
    source: str,
    model: LoadedModel,
    *,
    split: str = "train",
    subset: str | None = None,
    columns: str | Mapping[str, str] | None = None,
    labels: bool | None = None,
    batch_size: int = 32,
    batches: int | None = None,
    max_length: int | None = None,
    mask: float = 0.15,
    seed: int = 0,
) -> LoadedData | FunctionData:
    """Load data as a re-iterable of batches for a model, preprocessed by the model's own processor.

    Rows come in a random order that depends on `seed` alone, the same in every pass.

    Args:
        source: a file (.csv, .tsv, .json, .jsonl, .parquet, .npz), a folder with a folder of images or audio files for
            each class, a copy of a data set (as on the hub, or by `save_to_disk`), a data set's name on the hub, or
            `package.module:function`, where the function returns batches.
        model: what `load_model` returns.
        split: part of a data set or folder, such as "validation".
        subset: configuration of a data set, such as "sst2" of "glue".
        columns: which column holds what, such as "text=sentence,label=class"; usual names are found without.
        labels: required (True), left out (False), or used where there are some (None).
        batch_size: rows in a batch.
        batches: number of batches; by default all.  A smaller subset is the beginning of a larger one.
        max_length: truncate text to this many tokens, audio to this many samples.
        mask: share of tokens that is masked, for masked language models.
        seed: random seed of the order of the rows, and of the masking.

    Returns:
        Batches for `nm.fisher_diagonal(model.module, ...)`, which can be iterated over several times.

    Raises:
        LoadError: there is no such file or data set, no column for what the model needs, or a row that cannot be read.

    Example:
        >>> import tempfile
        >>> import numpy
        >>> import transformers
        >>> folder = tempfile.mkdtemp()
        >>> sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8}
        >>> config = transformers.ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
        >>> transformers.ViTForImageClassification(config).save_pretrained(folder)
        >>> _ = transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
        >>> numpy.savez(f"{folder}/images.npz", images=numpy.zeros((6, 8, 8, 3), dtype="uint8"))
        >>> loaded = nm.load_model(folder, device="cpu")
        >>> data = nm.load_data(f"{folder}/images.npz", loaded, batch_size=3)
        >>> [batch["pixel_values"].shape for batch in data]
        [torch.Size([3, 3, 8, 8]), torch.Size([3, 3, 8, 8])]
    """
    source = str(source)
    check_data_source(source, split, subset, columns)
    integer_in_range(batch_size, "batch_size", 1, 10**9, "samples in a batch")
    if batches is not None:
        integer_in_range(batches, "batches", 1, 10**12, "how many batches")
    if is_function_name(source):
        return _data_from_function(source, batches)
    parameter = next(iter(model.module.parameters()), None)
    if parameter is None:
        raise LoadError(message("model", "a module with parameters", "one without"))
    given = parse_columns(columns, model.task)
    media = str(model.task) if model.task in (Task.IMAGE, Task.AUDIO) else None
    table = read_table(source, split, subset, media)
    collate = _collate(table, model, given, labels, max_length, mask, seed)
    rows, empty = _choose_rows(table, model, given, None if batches is None else batches * batch_size, seed)
    if not rows:
        raise LoadError(f"{table.name} has no rows" + (" with text." if table.rows else "."))
    part = "all" if len(rows) + empty == table.rows else f"{len(rows):,} (seed {seed})"
    about = table.name + (f", {mask:g} masked" if model.task is Task.MASKED else "")
    about += f", {part} of {table.rows:,} rows" + (f", {empty:,} without text left out" if empty else "")
    return LoadedData(tuple(rows), batch_size, collate, about, parameter.dtype)


def _collate(
    table: Table, model: LoadedModel, given: Mapping[str, str], labels: bool | None, max_length: int | None,
    mask: float, seed: int,
) -> Callable[[list[int]], Batch]:  # fmt: skip
    """Return the function from row numbers to a batch: read the columns, encode them, read the labels."""
    chosen = find_columns(table, model.task, given, labels)
    classes = LabelReader(model, table.class_names.get(chosen.get("label", "")))
    encode: Encode
    if model.task is None:
        label = find_column(table, "label", given, required=False)  # is no feature, whether wanted or not
        features = ["inputs"] if "inputs" in table.columns else list(table.columns)
        if table.name.endswith(".npz") and features != ["inputs"]:
            raise LoadError(f"No 'inputs' found in {table.name} (arrays: {', '.join(table.columns)}).")
        chosen |= {name: name for name in features if name != label}
        encode = number_encoder(label)
    elif model.task is Task.IMAGE:
        encode = image_encoder(model)
    elif model.task is Task.AUDIO:
        encode = audio_encoder(model, max_length)
    else:
        encode = text_encoder(model, max_length, mask, seed, classes)

    def collate(rows: list[int]) -> Batch:
        values = {role: table.take(column, rows) for role, column in chosen.items()}
        batch = encode(values, rows)
        if "label" in values and "labels" not in batch:
            batch["labels"] = classes.tensor(values["label"], rows)
        return batch if model.task is not None else tuple(batch.values())

    return collate


def _choose_rows(
    table: Table, model: LoadedModel, given: Mapping[str, str], count: int | None, seed: int
) -> tuple[list[int], int]:
    """Return the first rows of a random order, and how many empty texts of a language model were left out."""
    order = torch.randperm(table.rows, generator=torch.Generator().manual_seed(seed)).tolist()
    if model.task not in (Task.CAUSAL, Task.MASKED):
        return order[:count], 0
    column = find_column(table, causal_roles(table, given)[-1] if model.task is Task.CAUSAL else "text", given)
    assert column is not None
    rows: list[int] = []
    empty = 0
    for start in range(0, len(order), _CHUNK):
        part = order[start : start + _CHUNK]
        for row, text in zip(part, table.take(column, part), strict=True):
            if len(rows) == count:
                return rows, empty
            if str(text or "").strip():
                rows.append(row)
            else:
                empty += 1
    return rows, empty


def _data_from_function(source: str, batches: int | None) -> FunctionData:
    """Call the function once, or for every pass if it returns an iterator."""
    found = find_function(source, "data")
    returned: Any = found() if callable(found) else found
    if not isinstance(returned, Iterable):
        raise LoadError(message("data", "a function that returns batches", type(returned).__name__))
    again: Callable[[], Iterable[object]] = (lambda: returned) if not isinstance(returned, Iterator) else found  # type: ignore[assignment]
    data = FunctionData(again, source, batches)
    with suppress(TypeError):
        if len(data) == 0:
            raise LoadError(message("data", "a function that returns at least one batch", f"none from {source}"))
    return data


def _cached(collate: Callable[[list[int]], Batch], max_bytes: int) -> Callable[[list[int]], Batch]:
    cache: dict[tuple[int, ...], Batch] = {}
    free = max_bytes

    def collate_once(rows: list[int]) -> Batch:
        nonlocal free
        key = tuple(rows)
        if key in cache:
            return cache[key]
        batch = collate(rows)
        size = sum(value.nbytes for value in (batch.values() if isinstance(batch, dict) else batch))
        if size <= free:
            cache[key], free = batch, free - size
        return batch

    return collate_once
