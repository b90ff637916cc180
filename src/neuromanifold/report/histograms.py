"""Histograms of a Fisher diagonal, a panel for each component of the network: the paper's figure.

The entries reach over many powers of ten, so the axis is logarithmic; those that are exactly zero (dead units, words
that never occur) have no place on it and stand as a bar at the left edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.results.summary import components

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
    entries: int
    zero_share: float  # ζ, the share of entries that are zero
    mean: float  # μ, over all entries
    median: float  # over positive entries, as in the paper; nan where there are none
    p95: float  # likewise
    edges: Tensor  # [bins + 1], float64; empty where there is nothing positive
    counts: Tensor  # [bins], int64

    @property
    def shares(self) -> Tensor:
        """The counts over the number of entries: their sum and ζ make 1."""
        return self.counts.double() / self.entries


def histograms(
    values: Mapping[str, Tensor], bins: int = 40, span: Mapping[str, Tensor] | None = None
) -> list[Histogram]:
    """A histogram for each component, from input to output; components without entries are left out.

    Args:
        values: a `DiagonalFisher`, or any mapping from parameter names to tensors of entries >= 0.
        bins: how many; they cover the positive entries, and a decade at least.
        span: a second mapping with the same names that the bins shall cover too, so that both can be drawn on one axis.

    """
    integer_in_range(bins, "bins", 1, 10**6, "bins of a histogram")
    if span is not None and set(span) != set(values):
        different = sorted(set(span) ^ set(values))[0]
        raise ValueError(message("span", "a mapping with the names of `values`", f"a difference at {different!r}"))
    made = []
    for component, names in components(list(values)).items():
        entries = _entries(values, names, "values")
        others = entries[:0] if span is None else _entries(span, names, "span")
        if entries.numel():
            made.append(_histogram(component, entries, _edges(torch.cat([entries, others]), bins)))
    return made


def plot_histograms(
    drawn: Sequence[Histogram], over: Sequence[Histogram] = (), label: str = "exact", over_label: str = "estimate"
) -> Figure:
    """Draw one panel for each component; `over`, if given, as a line over it (made with the other as its `span`)."""
    from matplotlib.figure import Figure

    if over and [one.component for one in over] != [one.component for one in drawn]:
        got = str([one.component for one in over])
        raise ValueError(message("over", f"histograms of {[one.component for one in drawn]}", got))
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


def draw_histogram(
    axes: Axes, drawn: Histogram, over: Histogram | None = None, label: str = "exact", over_label: str = "estimate"
) -> None:
    """One panel: bars, the zeros at the left edge, and lines at μ, the median and p95 of the positive entries."""
    axes.set_title(
        f"{drawn.component} (n = {drawn.entries:,})\nζ = {100 * drawn.zero_share:.3g} %,  μ = {drawn.mean:.2g}",
        fontsize=9,
    )
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
    if drawn.median > 0:
        axes.axvline(drawn.mean, color="C1", linestyle=":", linewidth=1.5, label="mean μ")
        axes.axvline(drawn.median, color="0.2", linestyle="-", linewidth=1, label="median of $F_{ii} > 0$")
        axes.axvline(drawn.p95, color="0.2", linestyle="--", linewidth=1, label="$p_{95}$ of $F_{ii} > 0$")
    _draw_zeros(axes, drawn, over)


def _draw_zeros(axes: Axes, drawn: Histogram, over: Histogram | None) -> None:
    """The share of zeros as a bar inside a frame that stands for all entries."""
    from matplotlib.patches import Rectangle

    left, width = _BAR
    frame: dict[str, Any] = {"transform": axes.transAxes, "zorder": 2.5}
    axes.add_artist(Rectangle((left, 0), width, 1, facecolor="white", edgecolor="0.8", linewidth=0.6, **frame))
    text = "zeros ζ (frame: 100 %)"
    bar = Rectangle((left, 0), width, drawn.zero_share, facecolor="C0", edgecolor="none", label=text, **frame)
    axes.add_patch(bar)
    axes.text(left + width / 2, -0.03, "0", ha="center", va="top", fontsize=8, transform=axes.transAxes)
    if over is not None:
        x, y = [left, left + width], [over.zero_share, over.zero_share]
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


def _histogram(component: str, entries: Tensor, edges: Tensor) -> Histogram:
    positive = entries[entries > 0]
    bins = torch.bucketize(positive, edges[1:-1], right=True)  # the last bin holds its right edge too
    median, p95 = np.quantile(positive.numpy(), [0.5, 0.95]).tolist() if positive.numel() else [float("nan")] * 2
    return Histogram(
        component=component,
        entries=entries.numel(),
        zero_share=1 - positive.numel() / entries.numel(),
        mean=float(entries.mean()),
        median=median,
        p95=p95,
        edges=edges,
        counts=torch.bincount(bins, minlength=max(0, edges.numel() - 1)),
    )


def _edges(entries: Tensor, bins: int) -> Tensor:
    """Evenly spaced on a logarithmic axis, from the smallest positive entry to the largest, a decade at least."""
    positive = entries[entries > 0]
    if not positive.numel():
        return positive
    low, high = positive.min().log10().item(), positive.max().log10().item()
    widen = max(0.0, 1 - (high - low)) / 2
    return torch.logspace(low - widen, high + widen, bins + 1, dtype=torch.float64)


def _entries(values: Mapping[str, Tensor], names: list[str], argument: str) -> Tensor:
    """All entries of a component, checked, in float64."""
    flat = torch.cat([values[name].detach().flatten().cpu().double() for name in names])
    if flat.numel() and not bool((flat >= 0).all() & (flat < torch.inf).all()):
        got = f"{flat.min().item():g} to {flat.max().item():g} in {names[0]!r} ..."
        raise ValueError(message(argument, "finite entries >= 0, such as those of a Fisher diagonal", got))
    return flat
