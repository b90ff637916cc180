"""The whole run: every task, every column, tables and plots; what is finished is not done again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from neuromanifold.core.checks import message
from neuromanifold.experiments.paper.columns import COLUMNS
from neuromanifold.experiments.paper.folder import Folder, Settings
from neuromanifold.experiments.paper.measure import Watch, describe, exact_diagonal, measure, wanted_columns
from neuromanifold.experiments.paper.pictures import draw_histograms, draw_passes
from neuromanifold.experiments.paper.sources import Prepared, Source, Tell, prepare
from neuromanifold.experiments.paper.speed import ROUNDS, measure_speed
from neuromanifold.experiments.paper.table import write_tables
from neuromanifold.experiments.paper.tasks import PaperTask

_BYTES = 8  # of a diagonal for each parameter: value and standard error


def reproduce(
    tasks: Sequence[PaperTask],
    folder: Folder,
    settings: Settings,
    sources: Mapping[str, Source],
    tell: Tell,
    watch: Watch,
    keep: bool = True,
    rounds: int = ROUNDS,
    most_probes: int | None = None,
) -> str:
    """Run what is not yet finished of the tasks; returns the table of everything in the folder.

    Args:
        tasks: of `TASKS`.
        folder: where everything is kept, and found again.
        settings: those of the folder.
        sources: by task, what to use instead of the hub's names.
        tell: called with a line about what has been found.
        watch: makes the progress observer of a run.
        keep: the diagonals of the table's columns as well, and not only the exact one.
        rounds: of the timing; 0 for none.
        most_probes: where the curve over probes ends, if not at C - 1.

    """
    text = ""
    for task in tasks:
        prepared = prepare(task, sources.get(task.name, Source()), settings, folder, tell)
        _check_space(prepared, folder, keep)
        _say_facts(prepared, folder, tell)
        _measure_all(prepared, folder, settings.seed, tell, watch, keep, most_probes)
        if rounds:
            speed = measure_speed(prepared, folder, rounds)
            tell(f"{task.name}: timed on {speed['device']}")
        _draw(prepared, folder, settings, tell, watch)
        text = write_tables(folder)
    return text


def _measure_all(
    prepared: Prepared, folder: Folder, seed: int, tell: Tell, watch: Watch, keep: bool, most_probes: int | None
) -> None:
    task = prepared.task.name
    columns = wanted_columns(prepared, most_probes)
    pending = [column for column in columns if folder.numbers(task, column.key) is None]
    if len(pending) < len(columns):
        tell(f"{task}: {len(columns) - len(pending)} of {len(columns)} estimators were finished before")
    if not pending:
        return
    exact = exact_diagonal(prepared, folder, seed, watch)
    p = exact.provenance
    tell(f"{task}: exact, {p.passes / p.batches:g} passes a batch, trace {exact.trace.sum:.4g}")
    for column in pending:
        numbers = measure(prepared, column, exact, folder, seed, watch, keep)
        errors = ", ".join(f"{group} {found['relmae']:.3g}" for group, found in numbers["errors"].items())
        tell(f"{task}: {column.text} per {column.per}, {numbers['passes']:g} passes a batch: RelMAE {errors}")


def _draw(prepared: Prepared, folder: Folder, settings: Settings, tell: Tell, watch: Watch) -> None:
    """Plot if matplotlib is installed; a rerun with it makes only the plots."""
    task = prepared.task
    if find_spec("matplotlib") is None:
        tell(f"{task.name}: no plots, since matplotlib is missing: pip install 'neuromanifold[plots]', then run again.")
        return
    if not folder.file(task.name, "histograms.pdf").exists():
        draw_histograms(folder, task, prepared.title, exact_diagonal(prepared, folder, settings.seed, watch).sums)
    draw_passes(folder, task, prepared.title, prepared.data.samples, prepared.data.batch_size, prepared.classes)


def _say_facts(prepared: Prepared, folder: Folder, tell: Tell) -> None:
    facts = describe(prepared, folder)
    said = [prepared.model.about, prepared.data.about, f"C = {prepared.classes}"]
    said.append(f"mean largest probability {facts['mean_largest_probability']:.3f}")
    said += [f"{100 * facts['accuracy']:.1f} % accuracy"] if facts["accuracy"] is not None else []
    tell(f"{prepared.task.name}: {'; '.join(said)}")


def _check_space(prepared: Prepared, folder: Folder, keep: bool) -> None:
    """Refuse before a run of hours if the disk has no room for the diagonals and a checkpoint that is replaced."""
    task = prepared.task.name
    done = sum(folder.file(task, f"{column.key}.safetensors").exists() for column in COLUMNS)
    files = 3 + (len(COLUMNS) - done if keep else 0)
    need = _BYTES * files * sum(parameter.numel() for parameter in prepared.module.parameters())
    free = shutil.disk_usage(folder.path).free
    if need > free:
        advice = "Make room, choose another folder with --out, or keep only the exact diagonals with --exact-only."
        got = f"{free / 1e9:,.1f} GB in {folder.path}"
        raise ValueError(message("out", f"where {need / 1e9:,.1f} GB are free (task {task})", got, advice))
