"""What commands print: results on standard output; notes, errors and the progress bar on standard error."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from neuromanifold.problem.progress import number_of_batches
from neuromanifold.report.tables import provenance_facts
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.summary import HEADER, NOTES, summarize
from neuromanifold.results.table import aligned, text_table
from neuromanifold.run.settings import Observer, RunProgress

_WIDE = 120  # columns of output that goes into a file
BAR_COLUMNS: tuple[ProgressColumn, ...] = (
    BarColumn(),  # shrinks on a narrow terminal
    TextColumn("{task.completed}/{task.fields[of]} batches"),
    TextColumn("{task.fields[rate]}"),
    TimeRemainingColumn(),
    TextColumn("{task.fields[error]}"),
)


def note(text: str) -> None:
    """Print a line on standard error."""
    typer.echo(text, err=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: str, left: int = 1) -> None:
    """Print a titled table as wide as the terminal at the most, with notes below."""
    width = shutil.get_terminal_size((_WIDE, 24)).columns
    typer.echo("\n".join([title, text_table(header, rows, left, width), notes, ""]))


def print_facts(facts: Mapping[str, object]) -> None:
    """Print a line for each fact, with its name in front."""
    rows = [(f"{name}:", str(value)) for name, value in facts.items()]
    typer.echo("\n".join(aligned(rows, left=2)))


def print_result(
    result: DiagonalFisher, each: bool = False, only: Sequence[str] = (), also: Mapping[str, object] | None = None
) -> None:
    """Print a table with a row for each component (or parameter), then where the result comes from (or `only` that)."""
    summary = summarize(result)
    header = ("parameter" if each else HEADER[0], *HEADER[1:])
    print_table(
        f"Diagonal of the Fisher information, {result.unit}", header, summary.rows(each), NOTES[result.error_bars]
    )
    everything, target = summary.everything, result.provenance.target.partition(" (")[0]
    total, noise = everything.total, everything.noise
    error = "not random" if target in ("exact", "unbiased") else f"not random, but {target}"
    error = error if result.error_bars else "no error bars"
    found = {"trace": f"{total:.6g}" + (f" ± {noise:.2g} (standard error, at most)" if noise else f" ({error})")}
    found |= provenance_facts(summary)
    print_facts({name: value for name, value in found.items() if not only or name in only} | dict(also or {}))


@contextmanager
def progress_bar(data: object, wanted: bool) -> Iterator[Observer | bool]:
    """Yield the observer of a run over the data that draws a progress bar; False where no terminal would show it."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield False
        return
    total = number_of_batches(data)
    with Progress(*BAR_COLUMNS, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, of="?" if total is None else total, rate="", error="")
        start: list[tuple[float, int]] = []

        def observe(run: RunProgress) -> None:
            now, done = time.monotonic(), run.tokens or run.samples
            start.append((now, done))  # rates do not count what a checkpoint had
            rate, error = bar_texts(run, now - start[0][0], done - start[0][1])
            progress.update(task, completed=run.place, rate=rate, error=error)

        yield observe


def bar_texts(run: RunProgress, seconds: float, done: int) -> tuple[str, str]:
    """Return samples or tokens per second and the relative standard error so far; empty where they are not known."""
    unit = "tokens" if run.tokens else "samples"
    error = "" if run.relative_error is None else f"rel. s.e. {100 * run.relative_error:.2g} %"
    return f"{done / seconds:.3g} {unit}/s" if done and seconds else "", error
