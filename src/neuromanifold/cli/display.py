"""The live display of a run: how far, samples per second, time left, current relative error."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from neuromanifold.problem.progress import Observer, RunProgress

COLUMNS: tuple[str | ProgressColumn, ...] = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.completed}/{task.fields[of]} batches"),
    TextColumn("{task.fields[rate]}"),
    TimeRemainingColumn(),
    TextColumn("{task.fields[error]}"),
)


def length(data: object) -> int | None:
    """How many batches, where the data know it."""
    if isinstance(data, Sized):
        with suppress(TypeError):  # a generator
            return len(data)
    return None


@contextmanager
def live(total: int | None, wanted: bool) -> Iterator[Observer | None]:
    """What to hand to the run as an observer; where nobody looks at a terminal, nothing."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield None
        return
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        of = "?" if total is None else str(total)
        task = progress.add_task("Fisher information", total=total, of=of, rate="", error="")
        first: list[tuple[float, RunProgress]] = []

        def observe(seen: RunProgress) -> None:
            rate, error = texts(seen, time.monotonic(), first)
            progress.update(task, completed=seen.place, rate=rate, error=error)

        yield observe


def texts(seen: RunProgress, now: float, first: list[tuple[float, RunProgress]]) -> tuple[str, str]:
    """Samples per second since the first look (not counting what a checkpoint had), and the relative error."""
    if not first:
        first.append((now, seen))
    start, begun = first[0]
    rate = (seen.samples - begun.samples) / (now - start) if now > start else 0.0
    error = "" if seen.relative_error is None else f"± {100 * seen.relative_error:.2g} %"
    return f"{rate:.3g} samples/s" if rate else "", error
