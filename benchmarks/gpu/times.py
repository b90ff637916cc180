"""Seconds of a batch over those of plain, by the clock; all rows take turns.

A run over k batches takes fixed + k·batch: "ms" is (time of 3k batches - time of k batches)/2k, for plain as for all
others, and "fixed" what is left, the passes of the trial and everything else that happens once a call.  Medians over
the turns; ± is half the range of their ratios.  The columns of the device are filled in later (gpu_device.py).
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from common import table
from gpu_memory import memory_row, memory_text
from gpu_models import ARCHITECTURES, PRECISIONS, TASKS, in_precision, logits, parameters, precision
from gpu_profile import Work
from gpu_session import Clocked, Session
from models import Task
from torch.nn.functional import cross_entropy

import neuromanifold as nm

BATCHWISE, SAMPLEWISE, REPLAYED = "batch-wise, deflated", "sample-wise, deflated", "sample-wise, deflated, replayed"
ROWS = {
    BATCHWISE: (nm.Hutchinson(), "batch"),
    SAMPLEWISE: (nm.Hutchinson(), "auto"),
    REPLAYED: (nm.Hutchinson(), "auto"),
    "batch-wise, F": (nm.Hutchinson(deflate=0), "batch"),
    "batch-wise, Upper": (nm.Hutchinson(envelope=nm.Upper()), "batch"),
    "batch-wise, Lower(2)": (nm.Hutchinson(envelope=nm.Lower(2)), "batch"),
    "sample-wise, Hutchinson(deflate=0)": (nm.Hutchinson(deflate=0), "auto"),
    "sample-wise, MonteCarlo()": (nm.MonteCarlo(), "auto"),
    "sample-wise, Empirical()": (nm.Empirical(), "auto"),
}
MAIN = (BATCHWISE, SAMPLEWISE)  # of every precision, and on the device; all rows by the clock of fp32
ALL_OF, ALL_KINDS = (
    128,
    4,
)  # samples, then batches after which every kernel is compiled: with fourth powers, and without
WARM = 20  # batches until everything that is replayed has been recorded
LARGER = 4  # times the samples, in bf16
GOALS = {"transformer": {"fp32": 1.05, "tf32": 1.20, "bf16": 1.20}, "convolutional": dict.fromkeys(PRECISIONS, 1.25)}
BATCHWISE_GOAL, LOWER_GOAL = 1.03, 1.02
FEWEST = 8  # k: in the first eight batches of a run, more is read back (pullback/sums.py)
SECONDS = 0.3  # of the 2k batches that a time per batch comes from
LONG = 0.03  # seconds for one plain batch: then one turn of what is replayed, which takes many batches
SLOW = 1.5  # seconds for one batch: then one turn, of one and of three batches
HEADER = ["row", "precision", "ms", "over plain", "±", "fixed, ms"]
HEADER += ["device, ms", "device over plain", "busy", "goal", "met"]
EMPTY = [""] * (len(HEADER) - 4)  # after the row, the precision and why there is no number


# ----------------------------------------------------------------------------------------------------------- sections


def run_times(session: Session, tasks: list[str]) -> None:
    """Times and memory of each task in each precision."""
    memory: list[list[str]] = []
    for name in tasks:
        session.tell(name)
        task = session.guarded(name, lambda name=name: session.task(name))
        if isinstance(task, str):
            session.keep(name, task)
        else:
            _run_task(session, name, task, memory)
            del task
        session.free()


def _run_task(session: Session, name: str, task: Task, memory: list[list[str]]) -> None:
    shape = "×".join(str(size) for value in task.inputs.values() for size in value.shape)
    heading = f"{name}: {parameters(task.model) / 1e6:.1f} M parameters, inputs {shape}, C={task.classes}"
    lines: list[list[str]] = []
    session.tables[heading] = HEADER, lines

    def one(which: str) -> list[list[str]]:
        cast = in_precision(task, which)
        functions = works(cast, name, which, session.options.main)
        if session.device.type == "cuda":
            memory.append(memory_row(session, name, which, cast, functions["plain"], functions[SAMPLEWISE]))
        return time_lines(session, Title(name, 1, which, heading), cast, functions)

    for which in (which for which in PRECISIONS if which in session.options.precision):
        lines += _guarded(session, name, which, one)
        session.keep(heading, table(HEADER, lines))
        if memory:
            session.keep("Memory", memory_text(memory))


def run_larger(session: Session, tasks: list[str]) -> None:
    """Transformers in bf16 with so many samples that launching kernels does not take longer than doing them."""
    heading, header, lines = "Larger batches", ["task", *HEADER], []
    session.tables[heading] = header, lines
    transformers = [name for name in tasks if ARCHITECTURES[TASKS[name][0]].kind == "transformer"]
    for name in transformers if "bf16" in session.options.precision else []:

        def one(which: str, name: str = name) -> list[list[str]]:
            task = in_precision(session.task(name, LARGER), which)
            functions = {
                row: work for row, work in works(task, name, which, True).items() if row in ("plain", SAMPLEWISE)
            }
            found = time_lines(session, Title(name, LARGER, which, heading), task, functions)
            for line in found:
                line[0] += f", B={len(task.labels)}"
            return found

        found = _guarded(session, name, "bf16", one)
        for line in found:
            line.insert(0, name)  # in place, because it is to be filled in
        lines += found
        session.keep(heading, table(header, lines))
        session.free()


def _guarded(session: Session, name: str, which: str, lines: Callable[[str], list[list[str]]]) -> list[list[str]]:
    """Made in a precision; or one that says why there are none."""
    with precision(which):
        found = session.guarded(f"{name} {which}", lambda: lines(which))
    return [["", which, "", found, *EMPTY]] if isinstance(found, str) else found


# -------------------------------------------------------------------------------------------------------------- works

Works = dict[str, Work]


def plain(task: Task, data: Iterable[object]) -> None:
    """Forward and backward into .grad, once for each batch."""
    for _ in data:
        task.model.zero_grad(set_to_none=True)
        z = logits(task.model, task.inputs)
        cross_entropy(z.flatten(0, -2), task.labels.flatten(), reduction="sum").backward()


def fisher(task: Task, row: str, data: Iterable[object]) -> nm.DiagonalFisher:
    """A row of this library."""
    estimator, granularity = ROWS[row]
    return nm.fisher_diagonal(task.model, data, estimator, granularity=granularity, replay=row == REPLAYED)


def works(task: Task, name: str, which: str, main: bool) -> Works:
    """Plain and the rows of a task in a precision."""
    words = ARCHITECTURES[TASKS[name][0]].words
    every = which == "fp32" and not main
    rows = [row for row in (ROWS if every else (*MAIN, REPLAYED)) if not (words and "Empirical" in row)]
    ours = {row: lambda data, row=row: fisher(task, row, data) for row in rows}
    return {"plain": lambda data: plain(task, data), **ours}


# -------------------------------------------------------------------------------------------------------------- times


class Time(NamedTuple):
    """Seconds of a batch and of what happens once, for each turn."""

    batch: list[float]
    fixed: list[float]

    def over(self, plain: Time) -> tuple[float, float]:
        """The ratio of the medians, and half the range of the turns' ratios."""
        ratios = [own / other for own, other in zip(self.batch, plain.batch, strict=False)]
        return statistics.median(self.batch) / statistics.median(plain.batch), (max(ratios) - min(ratios)) / 2


def take_turns(session: Session, title: str, task: Task, functions: Works) -> dict[str, Time | str]:
    """The time of each, or why there is none; plain comes first in every turn."""
    turns: dict[str, int] = {}  # how many for each
    slow: dict[str, bool] = {}
    failed: dict[str, str] = {}
    warm = math.ceil(ALL_OF / len(task.labels)) + ALL_KINDS
    for name, work in functions.items():  # what happens once in a process, and how long it takes at all
        first = session.guarded(f"{title} · {name}", lambda work=work: _seconds(session, task, work, warm))
        if not isinstance(first, str) and first > warm * SLOW:
            first = session.guarded(f"{title} · {name}", lambda work=work: warm * _seconds(session, task, work, 1))
        if isinstance(first, str):
            failed[name] = first
        else:
            slow[name] = first > warm * SLOW
            turns[name] = 1 if slow[name] else session.options.repeats
    if "plain" in failed:
        return failed
    one = _seconds(session, task, functions["plain"], 4) / 4
    batches = 1 if session.options.quick else max(FEWEST, math.ceil(SECONDS / 2 / one))
    count = {name: 1 if slow[name] else batches for name in turns}
    if REPLAYED in count and not session.options.quick:
        count[REPLAYED], turns[REPLAYED] = max(WARM, batches), 1 if one > LONG else turns[REPLAYED]
    times: dict[str, Time | str] = {name: Time([], []) for name in turns}
    gc.collect()
    gc.freeze()  # so that Python does not look through all modules in the middle of a run
    for turn in range(session.options.repeats):
        for name in (name for name in turns if turn < turns[name] and isinstance(times[name], Time)):
            work, k = functions[name], count[name]
            pair = session.guarded(
                f"{title} · {name}",
                lambda work=work, k=k: [_seconds(session, task, work, batches) for batches in (k, 3 * k)],
            )
            if not isinstance(pair, str):
                batch = (pair[1] - pair[0]) / (2 * k)
                times[name].batch.append(batch)
                times[name].fixed.append(pair[0] - k * batch)
            elif pair.startswith("fails") or not times[name].batch:
                times[name] = pair
    gc.unfreeze()
    return {name: times.get(name, failed.get(name, "")) for name in functions}


def _seconds(session: Session, task: Task, work: Work, batches: int) -> float:
    return session.seconds(lambda: work([task.batch] * batches))


# -------------------------------------------------------------------------------------------------------------- lines


class Title(NamedTuple):
    """What is timed, and in which section it is shown."""

    task: str
    times: int  # the samples
    which: str
    heading: str


def time_lines(session: Session, title: Title, task: Task, functions: Works) -> list[list[str]]:
    """Of a task in a precision, as HEADER says; three places are left free for the device."""
    name, _, which, _ = title
    text = f"{name} {which}, B={len(task.labels)}"
    times = take_turns(session, text, task, functions)
    base, lines = times["plain"], []
    for row, found in times.items():
        if isinstance(found, str) or isinstance(base, str):
            lines.append([row, which, "", found if isinstance(found, str) else "no plain", *EMPTY])
            continue
        ratio, spread = found.over(base)
        clock, fixed = statistics.median(found.batch), f"{1000 * statistics.median(found.fixed):.0f}"
        figures = [f"{1000 * clock:.2f}", f"{ratio:.3f}", f"{spread:.3f}", fixed, "", "", ""]
        lines.append([row, which, *figures, *_met(ratio, None if row == "plain" else goal(name, row, which))])
        if row in ("plain", *MAIN):
            session.clocked.append(Clocked(*title[:3], row, title.heading, lines[-1], clock))
        session.tell(f"{text} · {row} · {figures[0]} ms · {ratio:.3f} ± {spread:.3f} · fixed {fixed} ms")
    lower, full = times.get("batch-wise, Lower(2)"), times.get("batch-wise, F")
    if TASKS[name][1].classes == 100 and isinstance(lower, Time) and isinstance(full, Time):
        ratio, spread = lower.over(full)
        cells = ["", f"{ratio:.3f}", f"{spread:.3f}", "", "", "", ""]
        lines.append(["Lower(2) over F", which, *cells, *_met(ratio, LOWER_GOAL)])
        session.tell(f"{text} · Lower(2) over F · {ratio:.3f} ± {spread:.3f}")
    return lines


def goal(name: str, row: str, which: str) -> float | None:
    """The largest ratio, by the clock, that is good enough."""
    if row.startswith("batch-wise"):
        return BATCHWISE_GOAL
    return GOALS[ARCHITECTURES[TASKS[name][0]].kind][which] if row in (SAMPLEWISE, REPLAYED) else None


def _met(ratio: float, limit: float | None) -> list[str]:
    return ["", ""] if limit is None else [f"≤ {limit:.2f}", "yes" if 0 < ratio <= limit else "no"]
