"""Error against cost of every estimator on one network: points, the curve over `probes`, and their plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CostAxis = Literal["passes", "time"]

FLOOR, CEILING = 1e-4, 10.0  # what is beyond is drawn there: below is only rounding, above stands the number
_NUDGE = 0.87  # per batch stands a little to the left of per sample, so that points of equal cost can be told apart
_COLOURS = {"Hutchinson": "C0", "MonteCarlo": "C1", "Empirical": "C2", "SquaredBatchGradient": "C3"}
_MARKERS = {"envelope=Upper()": "^", "envelope=Lower(rank=1)": "v", "envelope=Lower(rank=2)": "<", "Hutchinson()": "D"}
COST_LABELS = {"passes": "backward passes for a batch", "time": "time over forward + backward"}


@dataclass(frozen=True)
class EstimatorPoint:
    """One estimator on one network."""

    name: str
    per_sample: bool  # whether the gradient of each sample is squared, or that of each batch
    unbiased: bool
    cost: float
    error: float  # RelMAE, a mean over the seeds

    @property
    def height(self) -> float:
        """The error, moved to the edge of the plot where it is beyond it."""
        return min(max(self.error, FLOOR), CEILING)


@dataclass(frozen=True)
class ErrorCost:
    """All estimators on one network: single ones, and the curve over `probes` from one pass to exact."""

    task: str
    classes: int
    samples: int
    batch_size: int
    points: tuple[EstimatorPoint, ...]
    curve: tuple[EstimatorPoint, ...]

    @property
    def paper(self) -> EstimatorPoint:
        """The paper's 𝔽: without deflation, squared per batch."""
        return next(one for one in self.points if one.name == "Hutchinson(deflate=0)" and not one.per_sample)


def draw_error_cost(axes: Axes, network: ErrorCost, cost: CostAxis = "passes") -> None:
    """One panel: every estimator as a point, filled if it squares per sample, and the curve over `probes`."""
    curve = network.curve
    x, y = [one.cost for one in curve], [one.height for one in curve]
    style: dict[str, Any] = {"color": "C0", "marker": "D", "markersize": 5}
    axes.plot(x, y, label="Hutchinson(probes=1 ... C-1) per sample", **style)
    level = "level of Hutchinson(deflate=0) per batch"
    axes.axhline(network.paper.error, color="0.6", linestyle=":", zorder=1, label=level)
    for one in network.points:
        left = one.cost if one.per_sample else _NUDGE * one.cost
        axes.plot([left], [one.height], label=label(one), **_style(one))
        if one.error > CEILING:
            axes.annotate(f"{one.error:.0f}", (left, CEILING), (5, -3), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 1.6, 1.6 * CEILING)
    axes.set_xlabel(COST_LABELS[cost])
    axes.set_title(f"{network.task}: C = {network.classes}, {network.samples} samples, B = {network.batch_size}")
    axes.title.set_fontsize(9)
    axes.tick_params(which="both", labelsize=8)
    _plain_ticks(axes, [one.cost for one in (*network.points, *curve)])


def label(point: EstimatorPoint) -> str:
    """The estimator, what is squared, and whether it is biased."""
    return f"{point.name} per {'sample' if point.per_sample else 'batch'}{'' if point.unbiased else ', biased'}"


def _style(point: EstimatorPoint) -> dict[str, Any]:
    colour = _COLOURS.get(point.name.split("(")[0], "0.3")
    marker = next((marker for key, marker in _MARKERS.items() if key in point.name), "o")
    fill = colour if point.per_sample else "white"
    return {"linestyle": "none", "marker": marker, "color": colour, "markerfacecolor": fill, "markersize": 6}


def _plain_ticks(axes: Axes, costs: list[float]) -> None:
    """Label powers of two on the cost axis, also where a panel has a single cost; "exact" at the lower edge."""
    from matplotlib.ticker import NullFormatter, NullLocator

    low, high = min([*costs, 1.0]), max([*costs, 1.0])
    ticks = [tick for tick in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if tick <= high * 1.01]
    axes.set_xlim(0.7 * low, 1.4 * max(high, 1.5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([FLOOR, 1e-3, 1e-2, 0.1, 1, 10], ["exact", "0.001", "0.01", "0.1", "1", "10"])
    axes.yaxis.set_minor_formatter(NullFormatter())
