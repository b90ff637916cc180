"""`neuromanifold show`: what a result says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from neuromanifold.cli.output import output_console, print_line, print_table
from neuromanifold.results import DiagonalFisher, load
from neuromanifold.results.summary import HEADER, NOTE, summarize


def show(
    file: Annotated[Path, typer.Argument(help="A result: fim.safetensors, or a trace's JSON file.")],
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameters", "-p", metavar="PATTERN", help="Only names that match, such as 'encoder.*'."),
    ] = None,
    sums: Annotated[bool, typer.Option("--sum", help="Sums over the samples instead of means.")] = False,
    each: Annotated[bool, typer.Option("--each", help="A row for each parameter instead of each component.")] = False,
) -> None:
    """Show a result: a row for each component of the network, with its standard error, and where it comes from."""
    result, console = load(file), output_console()
    if not isinstance(result, DiagonalFisher):
        console.print(str(result), markup=False, highlight=False, soft_wrap=True)
        return
    result = result.filter(*parameters) if parameters else result
    result = result.sum if sums else result.mean
    print_result(console, result, each)


def print_result(console: Console, result: DiagonalFisher, each: bool = False, only: Sequence[str] = ()) -> None:
    """A table with a row for each component (or parameter), and what was done, in words (or some of it)."""
    mean = result.reduction == "mean"
    found = summarize(result)
    title = f"Diagonal of the Fisher information, {'per sample' if mean else 'sum over samples'}"
    header = ("parameter" if each else HEADER[0], *HEADER[1:])
    print_table(console, title, header, found.rows(each), NOTE)
    everything = found.everything
    error = f" ± {everything.noise:.2g} (standard error, at most)" if everything.noise else " (not random)"
    for name, value in {"trace": f"{everything.total:.6g}{error}", **facts(result)}.items():
        if not only or name in only:
            print_line(console, name, value)


def facts(result: DiagonalFisher) -> dict[str, str]:
    """What was done, in words."""
    p = result.provenance
    ways = Counter(p.granularity.values())
    squared = ", ".join(f"{count} by {way}" for way, count in ways.items()) if len(ways) > 1 else next(iter(ways), "")
    tokens = f", {result.positions:,} positions" if result.positions != result.count else ""
    parts = f" in {p.parts} parts" if p.parts > 1 else ""
    found = {
        "estimator": f"{p.estimator}: {p.target}",
        "samples": f"{result.count:,}{tokens}, {p.batches} batches, {p.passes} backward passes{parts}",
        "squared by": squared,
        "likelihood": p.likelihood,
        "model": p.model,
        "data": p.data,
        "precision": f"{p.dtype} on {p.device}" if p.dtype else "",
        "seeds": ", ".join(map(str, p.seeds)),
        "versions": ", ".join(f"{name} {number}" for name, number in p.versions.items()),
        "ended": p.stopped,
    }
    return {name: value for name, value in found.items() if value}
