"""Matplotlib figures of a Fisher diagonal: histograms of each component, as in the paper, and layers along the depth.

The entries reach over many powers of ten, so the axis is logarithmic; those that are exactly zero (dead units, tokens
that never occur) have no place on it and stand as a bar at the left edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuromanifold.core.checks import integer_in_range, message, one_of
from neuromanifold.report.depth import depth
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.drawing import needs_matplotlib
from neuromanifold.results.naming import components, short_names
from neuromanifold.results.summary import Statistics, statistics, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4  # panels in a row
_BAR = (0.015, 0.045)  # left edge and width of the bar of zeros, in widths of the panel
_MARGIN = 0.10  # of the panel, kept free of the histogram for that bar


@dataclass(frozen=True)
class Histogram:
    """The entries of one component, in bins of equal width on a logarithmic axis."""

    component: str
    statistics: Statistics
    edges: Tensor  # [bins + 1], float64; empty where there is nothing positive
    counts: Tensor  # [bins], int64

    @property
    def shares(self) -> Tensor:
        """The counts over the number of entries: their sum and ζ make 1."""
        return self.counts.double() / self.statistics.entries


def plot(result: DiagonalFisher, kind: str) -> Figure:
    """A figure of a result: "histograms", a panel for each component, or "depth", a mark for each layer."""
    one_of(kind, "kind", "histograms", "depth")
    with needs_matplotlib(" The page of .report(path) does not."):
        return plot_depth(result) if kind == "depth" else plot_histograms(histograms(result), label="entries")


def histograms(
    values: Mapping[str, Tensor],
    bins: int = 40,
    span: Mapping[str, Tensor] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> list[Histogram]:
    """A histogram for each component, from input to output; components without entries are left out.

    Args:
        values: a `DiagonalFisher`, or any mapping from parameter names to tensors of entries >= 0.
        bins: how many; they cover the positive entries, and a decade at least.
        span: a second mapping with the same names that the bins shall cover too, so that both can be drawn on one axis.
        groups: components and the names of their parameters, by default `components` of the names.

    """
    integer_in_range(bins, "bins", 1, 10**6, "bins of a histogram")
    if span is not None and set(span) != set(values):
        different = sorted(set(span) ^ set(values))[0]
        raise ValueError(message("span", "a mapping with the names of `values`", f"a difference at {different!r}"))
    groups, made = components(list(values)) if groups is None else groups, []
    found = statistics(values, groups)
    for component, names in groups.items():
        both = [_entries(one, names) for one in (values, *([] if span is None else [span]))]
        if found[component].entries:
            edges = _edges(torch.cat(both), bins)
            places = torch.bucketize(both[0], edges[1:-1], right=True)  # the last bin holds its right edge too
            counts = torch.bincount(places, minlength=max(0, edges.numel() - 1))
            made.append(Histogram(component, found[component], edges, counts))
    return made


def plot_histograms(
    drawn: Sequence[Histogram], over: Sequence[Histogram] = (), label: str = "exact", over_label: str = "estimate"
) -> Figure:
    """One panel for each component; `over`, if given, as a line over it (made with the other as its `span`)."""
    from matplotlib.figure import Figure

    wanted, got = ([one.component for one in ones] for ones in (drawn, over))
    if over and wanted != got:
        raise ValueError(message("over", f"histograms of {wanted}", str(got)))
    columns = max(1, min(_COLUMNS, len(drawn)))
    rows = max(1, -(-len(drawn) // columns))
    figure = Figure(figsize=(max(5.0, 3.7 * columns), 3.1 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for i, axes in enumerate(panels):
        if i < len(drawn):
            draw_histogram(axes, drawn[i], over[i] if over else None, label, over_label)
        else:
            axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel("share of entries in a bin")
    entries = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def plot_depth(result: DiagonalFisher) -> Figure:
    """Mean, and median to p95, of every layer from input to output, above the share of its entries that are zero."""
    from matplotlib.figure import Figure

    data = depth([summarize(result)])
    layers = [layer for layer in data.series[0] if layer is not None]
    places = [(a + b) / 2 for a, b in pairwise(data.edges)]
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
    width = 0.6 * min((b - a for a, b in pairwise(data.edges)), default=1.0)
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


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure; the format follows from the suffix (png, svg, pdf)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def draw_histogram(
    axes: Axes, drawn: Histogram, over: Histogram | None = None, label: str = "exact", over_label: str = "estimate"
) -> None:
    """One panel: bars, the zeros at the left edge, and lines at μ, the median and p95 of the positive entries."""
    stats = drawn.statistics
    zeros = f"ζ = {100 * stats.zero_share:.3g} %"
    axes.set_title(f"{drawn.component} (n = {stats.entries:,})\n{zeros},  μ = {stats.mean:.2g}", fontsize=9)
    axes.set_xlabel("$F_{ii}$", fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.set_xscale("log")
    if drawn.edges.numel():
        axes.stairs(drawn.shares.numpy(), drawn.edges.numpy(), fill=True, color="C0", alpha=0.5, label=label)
        if over is not None and over.edges.numel():
            axes.stairs(over.shares.numpy(), over.edges.numpy(), color="C3", linewidth=1.2, label=over_label)
        axes.set_ylim(bottom=0)
        _leave_room(axes, drawn.edges)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "all zero", ha="center", va="center", transform=axes.transAxes, fontsize=9)
    if stats.median > 0:
        axes.axvline(stats.mean, color="C1", linestyle=":", linewidth=1.5, label="mean μ")
        axes.axvline(stats.median, color="0.2", linestyle="-", linewidth=1, label="median of $F_{ii} > 0$")
        axes.axvline(stats.p95, color="0.2", linestyle="--", linewidth=1, label="$p_{95}$ of $F_{ii} > 0$")
    _draw_zeros(axes, drawn, over)


def _draw_zeros(axes: Axes, drawn: Histogram, over: Histogram | None) -> None:
    """The share of zeros as a bar inside a frame that stands for all entries."""
    from matplotlib.patches import Rectangle

    left, width = _BAR
    frame: dict[str, Any] = {"transform": axes.transAxes, "zorder": 2.5}
    axes.add_artist(Rectangle((left, 0), width, 1, facecolor="white", edgecolor="0.8", linewidth=0.6, **frame))
    text = "zeros ζ (frame: 100 %)"
    bar = Rectangle(
        (left, 0), width, drawn.statistics.zero_share, facecolor="C0", edgecolor="none", label=text, **frame
    )
    axes.add_patch(bar)
    axes.text(left + width / 2, -0.03, "0", ha="center", va="top", fontsize=8, transform=axes.transAxes)
    if over is not None:
        x, y = [left, left + width], [over.statistics.zero_share] * 2
        axes.plot(x, y, color="C3", linewidth=1.5, label="_zeros of the estimate", **frame)


def _leave_room(axes: Axes, edges: Tensor) -> None:
    """Limits such that the histogram begins to the right of the bar of zeros, which has no place on the log axis."""
    from matplotlib.ticker import NullFormatter

    low, high = edges[0].log10().item(), edges[-1].log10().item()
    decades = (high - low) / (1 - _MARGIN - 0.02)
    axes.set_xlim(10 ** (low - _MARGIN * decades), 10 ** (high + 0.02 * decades))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for minor in (False, True):
        axes.set_xticks([x for x in axes.get_xticks(minor=minor) if edges[0] <= x <= axes.get_xlim()[1]], minor=minor)


def _edges(positive: Tensor, bins: int) -> Tensor:
    """Evenly spaced on a logarithmic axis, from the smallest positive entry to the largest, a decade at least."""
    if not positive.numel():
        return positive
    low, high = positive.min().log10().item(), positive.max().log10().item()
    widen = max(0.0, 1 - (high - low)) / 2
    return torch.logspace(low - widen, high + widen, bins + 1, dtype=torch.float64)


def _entries(values: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The positive entries of a component, in float64."""
    flat = torch.cat([values[name].detach().flatten().cpu().double() for name in names])
    return flat[flat > 0]
