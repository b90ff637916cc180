"""The whole run: every task, every column, tables and plots; what is finished is not done again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from neuromanifold.core.checks import message
from neuromanifold.experiments.paper.columns import COLUMNS
from neuromanifold.experiments.paper.figures import draw_histograms, draw_passes
from neuromanifold.experiments.paper.folder import PaperRun
from neuromanifold.experiments.paper.measure import describe, exact_diagonal, measure, wanted_columns
from neuromanifold.experiments.paper.sources import Prepared, Source, check_sources, prepare
from neuromanifold.experiments.paper.speed import measure_speed
from neuromanifold.experiments.paper.table import write_tables
from neuromanifold.experiments.paper.tasks import PaperTask
from neuromanifold.results.files import byte_size

_BYTES = 8  # of a diagonal for each parameter: value and standard error


def reproduce(run: PaperRun, tasks: Sequence[PaperTask], sources: Mapping[str, Source]) -> str:
    """Run the unfinished steps of the tasks, and return the table of everything in the folder.

    `sources` has for a task the model and data to use instead of those on the hub.
    """
    text = ""
    for task in tasks:
        check_sources(task, sources.get(task.name, Source()))
    for task in tasks:
        prepared = prepare(run, task, sources.get(task.name, Source()))
        _check_space(run, prepared)
        _log_facts(run, prepared)
        _measure_all(run, prepared)
        if run.rounds:
            run.log(f"{task.name}: timed on {measure_speed(prepared, run.folder, run.rounds)['device']}")
        _draw(run, prepared)
        text = write_tables(run.folder)
    return text


def _measure_all(run: PaperRun, prepared: Prepared) -> None:
    task, columns = prepared.name, wanted_columns(prepared, run.most_probes)
    pending = [column for column in columns if run.folder.numbers(task, column.key) is None]
    if len(pending) < len(columns):
        run.log(f"{task}: {len(columns) - len(pending)} of {len(columns)} estimators were finished before")
    if not pending:
        return
    exact = exact_diagonal(run, prepared)
    p = exact.provenance
    run.log(f"{task}: exact, {p.passes / p.batches:g} passes per batch, trace {exact.trace.sum:.4g}")
    for column in pending:
        numbers = measure(run, prepared, column, exact)
        errors = ", ".join(f"{group} {found['relmae']:.3g}" for group, found in numbers["errors"].items())
        run.log(f"{task}: {column.text} per {column.per}, {numbers['passes']:g} passes per batch: RelMAE {errors}")


def _draw(run: PaperRun, prepared: Prepared) -> None:
    """Plot if matplotlib is installed; a rerun with it makes only the plots."""
    if find_spec("matplotlib") is None:
        advice = "pip install 'neuromanifold[plots]', then run again."
        run.log(f"{prepared.name}: no plots, since matplotlib is missing: {advice}")
        return
    if not run.folder.file(prepared.name, "histograms.pdf").exists():
        draw_histograms(run.folder, prepared, exact_diagonal(run, prepared).sums)
    draw_passes(run.folder, prepared)


def _log_facts(run: PaperRun, prepared: Prepared) -> None:
    facts = describe(run, prepared)
    said = [prepared.model.about, prepared.data.about, f"C = {prepared.classes}"]
    said.append(f"mean largest probability {facts['mean_largest_probability']:.3f}")
    said += [f"{100 * facts['accuracy']:.1f} % accuracy"] if facts["accuracy"] is not None else []
    run.log(f"{prepared.name}: {'; '.join(said)}")


def _check_space(run: PaperRun, prepared: Prepared) -> None:
    """Refuse before a run of hours if the disk has no room for the diagonals and a checkpoint that is replaced."""
    done = sum(run.folder.file(prepared.name, f"{column.key}.safetensors").exists() for column in COLUMNS)
    files = 3 + (len(COLUMNS) - done if run.keep else 0)
    need = _BYTES * files * sum(parameter.numel() for parameter in prepared.module.parameters())
    free = shutil.disk_usage(run.folder.path).free
    if need > free:
        advice = "Make room, choose another folder with --out, or keep only the exact diagonals with --exact-only."
        expected = f"where {byte_size(need)} are free (task {prepared.name})"
        raise ValueError(message("out", expected, f"{byte_size(free)} in {run.folder.path}", advice))
