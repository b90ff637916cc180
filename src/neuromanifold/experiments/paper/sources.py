"""Model and rows of a task, from the hub or from local folders and files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuromanifold.diagnostics.memory import free
from neuromanifold.experiments.paper.folder import PaperRun, PaperSettings
from neuromanifold.experiments.paper.tasks import PaperTask
from neuromanifold.hf import (
    LabelError,
    LoadedData,
    LoadedModel,
    LoadError,
    Task,
    check_data_source,
    check_model_source,
    load_data,
    load_model,
)
from neuromanifold.hf.columns import USUAL, parse_columns
from neuromanifold.hf.errors import hub_error
from neuromanifold.hf.functions import is_function_name
from neuromanifold.hf.tables import BUILDERS, read_table
from neuromanifold.problem.fingerprint import fingerprint

_PART = 4  # one in so many bytes of the free memory is for batches that every estimator reads again
_LOCAL = {"model": "FOLDER", "data": "FILE"}


@dataclass(frozen=True)
class Source:
    """Model, data and columns that the user gives instead of the hub's names."""

    model: str | None = None
    data: str | None = None
    columns: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A task with its model and its rows."""

    task: PaperTask
    model: LoadedModel
    data: LoadedData
    labelled: bool  # whether the rows have labels of the model's classes
    left_out: int  # rows that had none
    own: bool  # whether model or data are not those that the task names

    @property
    def name(self) -> str:
        """The task's name on the command line and in the folder."""
        return self.task.name

    @property
    def module(self) -> nn.Module:
        """The network that was loaded for the task."""
        return self.model.module

    @property
    def title(self) -> str:
        """The title of the task's plots."""
        return f"{self.model.about.rstrip('/')}, in place of {self.task.title}" if self.own else self.task.title

    @property
    def classes(self) -> int:
        """The network's number of classes C."""
        return self.model.classes or self.task.classes

    def batches(self, count: int) -> list[dict[str, Any]]:
        """The first `count` batches; where there are fewer, they are repeated."""
        some = replace(self.data, rows=self.data.rows[: count * self.data.batch_size])
        made = [batch for batch in some if isinstance(batch, dict)]
        return [made[i % len(made)] for i in range(count)]


def check_sources(task: PaperTask, source: Source) -> None:
    """Raise a LoadError for local files that cannot be used, before anything is loaded."""
    model, data = source.model or task.model, source.data or task.data
    with _hints(task, source):
        if is_function_name(model):
            raise LoadError(f"`model`: {model} is a function; here it must be a folder or a name on the hub.")
        if is_function_name(data):
            raise LoadError(f"`data`: {data} is a function; here it must be a file, a folder or a name on the hub.")
        check_data_source(data)
        check_model_source(model)


def prepare(run: PaperRun, task: PaperTask, source: Source) -> Prepared:
    """Load the model, choose the rows, and enter both into the folder."""
    folder, settings = run.folder, run.folder.settings
    with _hints(task, source):
        model = _load_model(task, source, settings)
        data = _load_data(task, source, settings, model, labels=True)
        begun = {"model": model.about, "source": data.about}
        folder.check(task.name, begun)
        rows, labelled, left_out = _rows(run, task, model, data)
        if not labelled:
            data = _load_data(task, source, settings, model, labels=False)
    own = source.model is not None or source.data is not None
    about = f"{data.about}, {len(rows):,} of them drawn with seed {settings.seed}"
    about += f", {left_out:,} without a usable label left out" if left_out else ""
    memory = (free(torch.device("cpu")) or 0) // _PART
    data = replace(data, rows=tuple(rows), about=about).cached(memory)
    prepared = Prepared(task, model, data, labelled, left_out, own)
    folder.claim(task.name, {**begun, **_identity(prepared)})
    if folder.numbers(task.name, "rows") is None:
        folder.keep(task.name, "rows", "rows", {"rows": rows, "labelled": labelled, "left_out": left_out})
    return prepared


@contextmanager
def _hints(task: PaperTask, source: Source) -> Iterator[None]:
    """Add to an error which task it was, and how to use local copies."""
    try:
        yield
    except LoadError as error:
        options = [f"--{name} {kind}" for name, kind in _LOCAL.items() if getattr(source, name) is None]
        hint = f" For local copies: neuromanifold reproduce {task.name} {' '.join(options)}." if options else ""
        raise LoadError(f"Task {task.name}: {error}{hint}") from error


def _load_model(task: PaperTask, source: Source, settings: PaperSettings) -> LoadedModel:
    loaded = load_model(
        source.model or task.model,
        task=task.kind,
        classes=None if task.fine_tuned else task.classes,
        dtype=settings.dtype,
        device=settings.device,
        seed=settings.seed,
        revision=None if source.model else "main",  # by this name the hub offers converted safetensors, too
    )
    if task.class_names and not loaded.class_names and (source.model is None or not task.fine_tuned):
        loaded = replace(loaded, class_names=dict(task.class_names))
    return loaded


def _load_data(
    task: PaperTask, source: Source, settings: PaperSettings, model: LoadedModel, labels: bool
) -> LoadedData:
    """All rows in a random order."""
    where = source.data or task.data
    places = getattr(model.config, "max_position_embeddings", None) if task.kind is Task.TEXT else None
    try:
        loaded = load_data(
            where,
            model,
            split="train",
            subset=task.subset if source.data is None else None,
            columns=_columns(task, source),
            labels=labels,
            batch_size=settings.batch_size,
            max_length=min(task.longest, places) if task.longest and places else task.longest,
            seed=settings.seed,
        )
    except RuntimeError as error:  # a data set that is made by a script, which the hub's library no longer runs
        if Path(where).expanduser().exists():
            raise
        raise hub_error("data", where, error) from error
    assert isinstance(loaded, LoadedData)  # functions are refused before
    return replace(loaded, about=loaded.about.replace(", all of ", ", "))


def _columns(task: PaperTask, source: Source) -> dict[str, str] | None:
    """As given; else those of the hub's data, of a file as far as it has them and no usual ones."""
    if source.columns is not None:
        return parse_columns(source.columns, task.kind)
    if source.data is None:
        return dict(task.columns) or None
    path = Path(source.data).expanduser()
    if path.suffix.lower() not in BUILDERS or not path.is_file():
        return None
    names = set(read_table(source.data).columns)
    unusual = {role: name for role, name in task.columns.items() if name in names and not names & set(USUAL[role])}
    return unusual or None


def _rows(run: PaperRun, task: PaperTask, model: LoadedModel, data: LoadedData) -> tuple[list[int], bool, int]:
    """The first rows with a usable label; all rows, and False, where most have none.  And how many were left out."""
    kept, settings = run.folder.numbers(task.name, "rows"), run.folder.settings
    if kept is not None:
        return list(kept["rows"]), bool(kept["labelled"]), int(kept["left_out"])
    wanted, size = settings.batches * settings.batch_size, settings.batch_size
    run.log(f"{task.name}: choosing {min(wanted, len(data.rows)):,} of {len(data.rows):,} rows")
    good: list[int] = []
    seen, reason = 0, ""
    while len(good) < wanted and seen < len(data.rows):
        part = list(data.rows[seen : seen + min(size, wanted - len(good))])
        found, why = _usable_rows(data, part)
        good, seen, reason = good + found, seen + len(part), reason or why
        if seen >= wanted and 2 * len(good) < seen:
            break
    if 2 * len(good) >= seen:
        return good, True, seen - len(good)
    missing = f"{seen - len(good):,} of {seen:,} rows have no label of the {model.classes} classes"
    run.log(f"{task.name}: {missing}, so columns that need labels stay empty. ({reason})")
    return list(data.rows[:wanted]), False, 0


def _usable_rows(data: LoadedData, rows: list[int]) -> tuple[list[int], str]:
    """The rows whose labels are classes of the model, and the error message of the first other one."""
    try:
        data.collate(rows)
    except LabelError as error:
        if len(rows) == 1:
            return [], str(error)
        half = len(rows) // 2
        (first, why), (second, also) = (_usable_rows(data, part) for part in (rows[:half], rows[half:]))
        return first + second, why or also
    return rows, ""


def _identity(prepared: Prepared) -> dict[str, Any]:
    """What must be the same when a task is resumed."""
    module, data = prepared.module, prepared.data
    (first,) = prepared.batches(1)
    return {
        "data": data.about,
        "own": prepared.own,
        "samples": data.samples,
        "labelled": prepared.labelled,
        "left out": prepared.left_out,
        "classes": prepared.classes,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "weights": fingerprint(*module.named_parameters(), *module.named_buffers()),
        "first batch": fingerprint(*sorted(first.items())),
    }
