"""Seconds of a batch over those of forward + backward, wall-clock; all rows take turns.

Verified batches (0, 1, 128, 16384, ...) and those before CUDA graphs are captured are in the fixed part: times are
slopes between two runs whose numbers of batches have none of them in between.
"""

from __future__ import annotations

import gc
import math
import statistics
from functools import partial

from common import BASELINE, Run, Slope, forward_backward, slope_turn
from models import Task

import neuromanifold as nm
from gpu.memory import NOTE, memory_row
from gpu.models import ARCHITECTURES, PRECISIONS, TASKS, in_precision, parameters, precision
from gpu.session import Missing, Row, Session

PER_BATCH, PER_SAMPLE, GRAPHS = "per batch", "per sample, eager", "per sample, CUDA graphs"
ROWS: dict[str, tuple[nm.Estimator, str, bool]] = {  # estimator, granularity, whether CUDA graphs are captured
    PER_SAMPLE: (nm.Hutchinson(), "auto", False),
    GRAPHS: (nm.Hutchinson(), "auto", True),
    PER_BATCH: (nm.Hutchinson(), "batch", False),
    "per batch, Hutchinson(deflate=0)": (nm.Hutchinson(deflate=0), "batch", False),
    "per batch, Upper": (nm.Hutchinson(envelope=nm.Upper()), "batch", False),
    "per batch, Lower(2)": (nm.Hutchinson(envelope=nm.Lower(2)), "batch", False),
    "per sample, Hutchinson(deflate=0)": (nm.Hutchinson(deflate=0), "auto", False),
    "per sample, MonteCarlo()": (nm.MonteCarlo(), "auto", False),
    "per sample, Empirical()": (nm.Empirical(), "auto", False),
}
MAIN = (PER_SAMPLE, GRAPHS, PER_BATCH)  # of every precision; the others with --all-rows, in fp32
ALL_OF, GROUP = 128, 4  # samples whose fourth powers are all taken; then of so many batches, those of one
BETWEEN, CAPTURED = 17, 24  # batches after one that is verified; until all variants of a batch are captured
SECONDS, LONG, MOST = 0.2, 0.03, 200  # of the batches that a time comes from; of a long batch; batches


def run_times(session: Session) -> None:
    """Times and memory of each task in each precision; every task gets its share of the time."""
    memory: list[Row] = []
    names = session.options.only or list(TASKS)
    for k, name in enumerate(names):
        with session.share(1 / (len(names) - k)):
            session.tell(name)
            task = session.guarded(name, partial(session.task, name))
            if not isinstance(task, Missing):
                _run_task(session, name, task, memory)
            del task
        session.free()


def _run_task(session: Session, name: str, task: Task, memory: list[Row]) -> None:
    shape = "×".join(str(size) for value in task.inputs.values() for size in value.shape)
    heading = f"{name}: {parameters(task.model) / 1e6:.1f} M parameters, inputs {shape}, C={task.classes}"
    rows: list[Row] = []
    for which in (which for which in PRECISIONS if which in session.options.precision):
        with precision(which):
            cast = session.guarded(f"{name} {which}", partial(in_precision, task, which))
            if isinstance(cast, Missing):
                continue
            runs = runs_of(cast, name, session.options.all_rows and which == "fp32")
            rows += time_rows(session, name, which, cast, runs)
            if session.device.type == "cuda":
                memory.append(memory_row(session, name, which, cast, runs[BASELINE], runs[PER_SAMPLE]))
        session.add(heading, rows)
        session.add("Memory", memory, NOTE)


def runs_of(task: Task, name: str, every: bool = False) -> dict[str, Run]:
    """Return forward + backward and the rows of a task, as functions of batches."""
    language = ARCHITECTURES[TASKS[name][0]].language
    rows = [row for row in (ROWS if every else MAIN) if not (language and "Empirical" in row)]
    return {BASELINE: partial(forward_backward, task.model), **{row: partial(_estimate, task, row) for row in rows}}


def _estimate(task: Task, row: str, data: list[object]) -> nm.DiagonalFisher:
    estimator, granularity, graphs = ROWS[row]
    return nm.fisher_diagonal(task.model, data, estimator, granularity=granularity, cuda_graphs=graphs)


def time_rows(session: Session, name: str, which: str, task: Task, runs: dict[str, Run]) -> list[Row]:
    """Return a row for each run, with its ratio to forward + backward."""
    title = f"{name} {which}"
    rows: list[Row] = []
    slopes = take_turns(session, title, task, runs)
    base = slopes[BASELINE]
    for row, found in slopes.items():
        if isinstance(found, Missing) or isinstance(base, Missing):
            why = found.reason if isinstance(found, Missing) else "no baseline"
            rows.append({"row": row, "precision": which, "why": why})
            continue
        ratio, spread = found.over(base)
        fixed = 1000 * statistics.median(found.fixed)
        numbers = {"ms": 1000 * found.median, "ratio": ratio, "±": spread, "fixed, ms": fixed}
        rows.append({"row": row, "precision": which, **numbers})
        session.tell(f"{title} · {row} · {1000 * found.median:.2f} ms · {ratio:.3f} ± {spread:.3f} · fixed {fixed:.0f}")
    return rows


def take_turns(session: Session, title: str, task: Task, runs: dict[str, Run]) -> dict[str, Slope | Missing]:
    """Return the slope of each run, or why there is none; the baseline comes first in every turn."""
    found: dict[str, Slope | Missing] = {}
    steady = math.ceil(ALL_OF / len(task.labels))  # batches until then
    for name, run in runs.items():  # compiles what there is to compile
        warm = 1 if session.options.quick else steady + GROUP
        one = session.guarded(
            f"{title} · {name}", lambda run=run, warm=warm: session.seconds(lambda: run([task.batch] * warm))
        )
        found[name] = one if isinstance(one, Missing) else Slope([], [])
    if isinstance(found[BASELINE], Missing):
        return found
    batch = session.seconds(lambda: runs[BASELINE]([task.batch] * GROUP)).wall / GROUP
    gc.collect()
    gc.freeze()  # so that Python does not look through all modules in the middle of a run
    for _ in range(1 if batch > LONG else session.options.repeats):  # a long batch times no Python
        for name, run in runs.items():
            slope = found[name]
            if isinstance(slope, Missing):
                continue
            counts = _counts(name == GRAPHS, batch > LONG and steady <= GROUP, batch, session.options.quick)
            turn = partial(slope_turn, run, task.batch, counts, session.device, slope)
            missing = session.guarded(f"{title} · {name}", turn)
            if isinstance(missing, Missing) and (missing.reason.startswith("fails") or not slope.batch):
                found[name] = missing
    gc.unfreeze()
    return found


def _counts(graphs: bool, few: bool, batch: float, quick: bool) -> tuple[int, int]:
    """Return two numbers of batches, a multiple of GROUP apart, with no verified batch in between."""
    if quick:
        return 1, 2
    between = min(MOST, max(2 * GROUP, GROUP * math.ceil(SECONDS / batch / GROUP)))
    if graphs:
        return CAPTURED, CAPTURED + between
    return (GROUP, 3 * GROUP) if few else (BETWEEN, BETWEEN + between)
