"""The depth chart as a matplotlib figure, for papers and notebooks; the page draws the same data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuromanifold.report.depth import depth
from neuromanifold.report.summary import Summary, short_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_depth(summary: Summary) -> Figure:
    """Mean, and median to p95, of every layer from input to output, above the share of its entries that are zero."""
    from matplotlib.figure import Figure

    data = depth([summary])
    layers = [layer for layer in data.series[0] if layer is not None]
    places = [(a + b) / 2 for a, b in zip(data.edges, data.edges[1:])]  # noqa: B905
    figure = Figure(figsize=(10, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    found = [(x, s) for x, s in zip(places, layers, strict=True) if s.total]
    if found:
        x = [place for place, _ in found]
        above.vlines(x, [s.median for _, s in found], [s.p95 for _, s in found], color="C0", alpha=0.45, linewidth=2)
        above.plot(x, [s.mean for _, s in found], "o", color="C0", markersize=4.5, label="mean (line: median to p95)")
        above.set_yscale("log")
        above.set_ylim(10.0**data.low, 10.0**data.high)
        above.legend(fontsize=8, frameon=False)
    width = 0.6 * min((b - a for a, b in zip(data.edges, data.edges[1:])), default=1.0)  # noqa: B905
    below.bar(places, [s.zero_share for s in layers], width=width, color="C0")
    below.set_ylim(0, 1)
    above.set_ylabel("$F_{ii}$")
    below.set_ylabel("zero")
    short = short_names([name for name, _, _ in data.bands], data.layers)
    middles = [(data.edges[start] + data.edges[stop]) / 2 for _, start, stop in data.bands]
    below.set_xticks(middles, [short[name] for name, _, _ in data.bands], rotation=40, ha="right", fontsize=8)
    for axes in (above, below):
        axes.set_xlim(0, 1)
        for _, start, stop in data.bands[1::2]:
            axes.axvspan(data.edges[start], data.edges[stop], color="0.95", zorder=0)
    return figure
