"""A plot of the bounds of a network: intervals around actual values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuromanifold.results.drawing import needs_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from neuromanifold.bounds.result import Row


def plot_rows(rows: Sequence[Row]) -> Figure:
    """A line for each statement, from its lower to its upper bound, with the actual value as a dot."""
    with needs_matplotlib():
        from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.3 * len(rows) + 1.2), layout="constrained")
    draw_rows(figure.subplots(), rows)
    return figure


def draw_rows(axes: Axes, rows: Sequence[Row]) -> None:
    """The same on axes that exist; what is zero has no place on a logarithmic axis, and is left out."""
    seen = [value for row in rows for value in row[2:5] if isinstance(value, float) and value > 0]
    low, high = (min(seen) / 2, 2 * max(seen)) if seen else (0.1, 10.0)
    for place, row in enumerate(rows):
        start, stop = (value if value is not None and value > 0 else None for value in (row.lower, row.upper))
        if start is not None or stop is not None:
            left, right = low if start is None else start, high if stop is None else stop
            axes.plot([left, right], [place, place], color="C0", linewidth=2, alpha=0.6, solid_capstyle="butt")
        for value in (start, stop):
            if value is not None:
                axes.plot([value], [place], marker="|", color="C0", markersize=11)
        if row.actual:
            axes.errorbar([row.actual], [place], xerr=[row.error], fmt="o", color="C3", markersize=5)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(rows)), [f"{row.statement.strip()}: {row.quantity}" for row in rows], fontsize=8)
    axes.set_xlabel("lower bound to upper bound; dot: actual value", fontsize=8)
    axes.invert_yaxis()
