"""`neuromanifold compare`: how far one result is from another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from neuromanifold.cli.output import output_console, print_line, print_table
from neuromanifold.core.checks import message
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.comparison import compare as compare_entries
from neuromanifold.results.diagonal import load_diagonal
from neuromanifold.results.naming import components

HEADER = ("component", "parameters", "RelMAE", "scale", "cosine", "rank corr.", "within 2")
NOTES = """\
RelMAE:     mean of |a - b|/b over entries with b > 0
scale:      Σa/Σb
within 2:   share of entries with |a - b| within two standard errors of it,
            95 % if both estimate the same; - where nothing is random
"""


def compare(
    file: Annotated[Path, typer.Argument(help="A result.", metavar="A")],
    reference: Annotated[Path, typer.Argument(help="The result that it is compared with.", metavar="B")],
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameters", "-p", metavar="PATTERN", help="Only names that match, such as 'encoder.*'."),
    ] = None,
) -> None:
    """Compare two results entry by entry: relative error, scale, cosine, rank correlation, for each component."""
    a, b = (load_diagonal(path).mean for path in (file, reference))
    if parameters:
        a, b = a.filter(*parameters), b.filter(*parameters)
    differ = sorted({name for name in {*a, *b} if name not in a or name not in b or a[name].shape != b[name].shape})
    if differ:
        got = f"{len(differ)} that are missing from one or have another shape ({', '.join(differ[:3])})"
        advice = "Choose those that both have with --parameters."
        raise ValueError(message("A and B", "results for the same parameters", got, advice))
    groups = components(list(a))
    rows = [(name, *_cells(a, b, names)) for name, names in groups.items()]
    if len(groups) > 1:
        rows.append(("all", *_cells(a, b, list(a))))
    console = output_console()
    print_table(console, f"{file.name} against {reference.name}, per sample", HEADER, rows, NOTES)
    for letter, one in (("A", a), ("B", b)):
        p = one.provenance
        print_line(console, letter, f"{p.estimator}, {one.count:,} samples of {p.data}; {p.model}")


def _cells(a: DiagonalFisher, b: DiagonalFisher, names: Sequence[str]) -> tuple[str, ...]:
    found = compare_entries({name: a[name] for name in names}, {name: b[name] for name in names}, 1e-12)
    near = noisy = 0
    for name in names:
        error = torch.hypot(a.noise[name].double() / a.count, b.noise[name].double() / b.count)
        random = error > 0
        noisy += int(random.sum())
        near += int((random & ((a[name].double() - b[name].double()).abs() <= 2 * error)).sum())
    return (
        f"{found.entries:,}",
        f"{found.relmae_positive:.3g}",
        f"{found.mean_ratio:.4g}",
        f"{found.cosine:.4f}",
        f"{found.rank_correlation:.4f}",
        f"{100 * near / noisy:.1f} %" if noisy else "-",
    )
