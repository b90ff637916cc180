"""Error against cost of every estimator on real networks: what benchmarks/accuracy.py measured, as pictures.

Each network is a file accuracy-TASK.json, so that the pictures can be made without the network and its data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from neuromanifold.core.checks import message

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cost = Literal["passes", "time"]
Group = Literal["rest", "embeddings", "all"]

FLOOR, CEILING = 1e-4, 10.0  # what is beyond is drawn there: below is only rounding, above stands the number
_NUDGE = 0.87  # batches stand a little to the left of samples, so that points of equal cost can be told apart
_COLOURS = {"Hutchinson": "C0", "MonteCarlo": "C1", "Empirical": "C2", "SquaredBatchGradient": "C3"}
_MARKERS = {"envelope=Upper()": "^", "envelope=Lower(rank=1)": "v", "envelope=Lower(rank=2)": "<", "Hutchinson()": "D"}
_LABELS = {"passes": "backward passes for a batch", "time": "time over forward + backward"}


@dataclass(frozen=True)
class Point:
    """One estimator on one network."""

    name: str
    by_samples: bool  # each sample squared on its own, or whole batches
    unbiased: bool
    cost: float
    error: float  # RelMAE, a mean over the seeds

    @property
    def height(self) -> float:
        """Where it is drawn."""
        return min(max(self.error, FLOOR), CEILING)


@dataclass(frozen=True)
class ErrorCost:
    """All estimators on one network: single ones, and the curve over `probes` from one pass to exact."""

    task: str
    classes: int
    samples: int
    batch_size: int
    points: tuple[Point, ...]
    curve: tuple[Point, ...]

    @property
    def by_batches(self) -> Point:
        """The paper's 𝔽, squared by batches."""
        return next(one for one in self.points if one.name == "Hutchinson(deflate=0)" and not one.by_samples)


def error_cost(path: str | Path, cost: Cost = "passes", group: Group = "rest") -> ErrorCost:
    """Read one network's results; errors are those of a group of parameters, by default all but embeddings."""
    if cost not in _LABELS:
        raise ValueError(message("cost", "'passes' or 'time'", repr(cost)))
    if not Path(path).exists():
        advice = "Make it with benchmarks/accuracy.py."
        raise FileNotFoundError(message("path", "a file accuracy-TASK.json", str(path), advice))
    result = json.loads(Path(path).read_text(encoding="utf-8"))
    if group not in result["entries"]:
        raise ValueError(message("group", f"one of {list(result['entries'])} for {result['task']}", repr(group)))
    points = tuple(_point(row, cost, group) for row in result["rows"] if not row["curve"])
    curve = tuple(_point(row, cost, group) for row in result["rows"] if row["curve"])
    classes, samples, size = (int(result[key]) for key in ("classes", "samples", "batch_size"))
    return ErrorCost(result["task"], classes, samples, size, points, curve)


def all_error_costs(folder: str | Path, cost: Cost = "passes", group: Group = "rest") -> list[ErrorCost]:
    """All networks of a folder that have the group, by the number of their classes."""
    paths = sorted(Path(folder).glob("accuracy-*.json"))
    if not paths:
        advice = "Make some with benchmarks/accuracy.py."
        raise FileNotFoundError(message("folder", "one with accuracy-TASK.json in it", str(folder), advice))
    have = [path for path in paths if group in json.loads(path.read_text(encoding="utf-8"))["entries"]]
    return sorted((error_cost(path, cost, group) for path in have), key=lambda one: (one.classes, one.task))


def plot_error_cost(networks: Sequence[ErrorCost], cost: Cost = "passes", columns: int = 3) -> Figure:
    """Draw a panel for each network, and one legend."""
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(networks)))
    rows = max(1, -(-len(networks) // columns))
    figure = Figure(figsize=(3.4 * columns + 0.4, 3.4 * rows + 0.9), layout="constrained")
    draw_error_costs(figure, networks, cost, columns)
    return figure


def draw_error_costs(figure: Figure, networks: Sequence[ErrorCost], cost: Cost = "passes", columns: int = 3) -> None:
    """The panels of `plot_error_cost`, on a figure that exists."""
    columns = max(1, min(columns, len(networks)))
    panels = figure.subplots(max(1, -(-len(networks) // columns)), columns, squeeze=False, sharey=True).ravel()
    for i, axes in enumerate(panels):
        if i < len(networks):
            draw_error_cost(axes, networks[i], cost)
        else:
            axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel("RelMAE")
    entries = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=3, fontsize=7.5, frameon=False
    )


def draw_error_cost(axes: Axes, network: ErrorCost, cost: Cost = "passes") -> None:
    """One panel: every estimator as a point, filled if samples are squared, and the curve over `probes`."""
    curve = network.curve
    x, y = [one.cost for one in curve], [one.height for one in curve]
    style: dict[str, Any] = {"color": "C0", "marker": "D", "markersize": 5}
    axes.plot(x, y, label="Hutchinson(probes=1 ... C-1) by samples", **style)
    axes.axhline(
        network.by_batches.error,
        color="0.6",
        linestyle=":",
        zorder=1,
        label="level of Hutchinson(deflate=0) by batches",
    )
    for one in network.points:
        left = one.cost if one.by_samples else _NUDGE * one.cost
        axes.plot([left], [one.height], label=label(one), **_style(one))
        if one.error > CEILING:
            axes.annotate(f"{one.error:.0f}", (left, CEILING), (5, -3), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 1.6, 1.6 * CEILING)
    axes.set_xlabel(_LABELS[cost])
    axes.set_title(f"{network.task}: C = {network.classes}, {network.samples} samples, B = {network.batch_size}")
    axes.title.set_fontsize(9)
    axes.tick_params(which="both", labelsize=8)
    _plain_ticks(axes, [one.cost for one in (*network.points, *curve)])


def label(point: Point) -> str:
    """The estimator, what is squared, and whether it is biased."""
    return f"{point.name} by {'samples' if point.by_samples else 'batches'}{'' if point.unbiased else ', biased'}"


def _style(point: Point) -> dict[str, Any]:
    colour = _COLOURS.get(point.name.split("(")[0], "0.3")
    marker = next((marker for key, marker in _MARKERS.items() if key in point.name), "o")
    fill = colour if point.by_samples else "white"
    return {"linestyle": "none", "marker": marker, "color": colour, "markerfacecolor": fill, "markersize": 6}


def _plain_ticks(axes: Axes, costs: list[float]) -> None:
    """Numbers as they are on the cost axis, also where a panel has a single one; "exact" at the lower edge."""
    from matplotlib.ticker import NullFormatter, NullLocator

    low, high = min([*costs, 1.0]), max([*costs, 1.0])
    ticks = [tick for tick in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if tick <= high * 1.01]
    axes.set_xlim(0.7 * low, 1.4 * max(high, 1.5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([FLOOR, 1e-3, 1e-2, 0.1, 1, 10], ["exact", "0.001", "0.01", "0.1", "1", "10"])
    axes.yaxis.set_minor_formatter(NullFormatter())


def _point(row: dict[str, Any], cost: Cost, group: Group) -> Point:
    return Point(
        name=row["estimator"],
        by_samples=row["granularity"] == "sample",
        unbiased=row["target"] in ("unbiased", "exact"),
        cost=float(row[cost]),
        error=float(row["errors"][group]["relmae"]),
    )
