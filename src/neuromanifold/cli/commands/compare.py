"""`neuromanifold compare`: how far one result is from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.console import print_facts, print_table
from neuromanifold.cli.options import Patterns
from neuromanifold.core.checks import message
from neuromanifold.diagnostics.runs import coverage
from neuromanifold.report.formats import brief
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.diagonal import load_diagonal
from neuromanifold.results.naming import components
from neuromanifold.results.table import TOTAL
from neuromanifold.uses.similarity import METRICS, task_distance

_HEADER = ("component", "parameters", "RelMAE", "scale", "cosine", "rank corr.", "2 s.e.")
_NOTES = """\
RelMAE:  mean of |a - b|/b over entries with b > 0
scale:   Σa/Σb
2 s.e.:  share of entries b > 0 with |a - b| within two standard errors of it,
         95 % if both estimate the same; –: not random
distances: between tasks, from 0 to 1, ± standard error (at most)"""


def compare_command(
    file: Annotated[Path, typer.Argument(help="A result.", metavar="A")],
    reference: Annotated[Path, typer.Argument(help="The reference.", metavar="B")],
    parameters: Patterns = None,
) -> None:
    """Compare two results: errors, scale, cosine and rank correlation of each component; distances between tasks."""
    loaded = [load_diagonal(path) for path in (file, reference)]
    a, b = (one.filter(*parameters) if parameters else one for one in loaded)
    differ = sorted(
        {name for name in {*a, *b} if name not in a.sums or name not in b.sums or a[name].shape != b[name].shape}
    )
    if differ:
        got = f"{len(differ)} that are missing from one or have another shape ({', '.join(differ[:3])})"
        advice = "Select those that both have with --parameters."
        raise ValueError(message("A and B", "results for the same parameters", got, advice))
    groups = components(list(a))
    groups |= {TOTAL: list(a)} if len(groups) > 1 else {}
    rows = [(component, *_comparison_cells(a, b, names)) for component, names in groups.items()]
    print_table(f"{file.name} against {reference.name}, per sample", _HEADER, rows, _NOTES)
    facts: dict[str, object] = {"distances": ", ".join(_distance(a, b, metric) for metric in METRICS)}
    about = {letter: (one, one.provenance) for letter, one in zip("AB", loaded, strict=True)}
    print_facts(
        facts
        | {k: f"{brief(p.estimator)}, {one.count:,} samples of {p.data}; {p.model}" for k, (one, p) in about.items()}
    )


def _comparison_cells(a: DiagonalFisher, b: DiagonalFisher, names: Sequence[str]) -> tuple[str, ...]:
    a, b = (_means(one, names) for one in (a, b))
    found = a.compare(b)
    both = a.error_bars is True and b.error_bars is True  # of single entries
    random = both and any(bool(noise.any()) for one in (a, b) for noise in one.noise.values())
    return (
        f"{found.entries:,}",
        f"{found.relmae_positive:.3g}",
        f"{found.mean_ratio:.4g}",
        f"{found.cosine:.4f}",
        f"{found.rank_correlation:.4f}",
        f"{100 * coverage(a, b):.1f} %" if random else "–",
    )


def _distance(a: DiagonalFisher, b: DiagonalFisher, metric: str) -> str:
    """The distance between the tasks as text; a dash where one is zero or below its noise."""
    try:
        return str(task_distance(a, b, metric))
    except ValueError:
        return f"{metric} –"


def _means(result: DiagonalFisher, names: Sequence[str]) -> DiagonalFisher:
    """Return some parameters of a result, with means over the samples in place of sums."""
    sums, noise, noiseless = (
        {name: part[name] / result.count for name in names if name in part}
        for part in (result.sums, result.noise, result.noiseless)
    )
    return replace(result, sums=sums, noise=noise, noiseless=noiseless, reduction="sum")
