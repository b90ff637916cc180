"""Error against cost of every estimator on real networks: what benchmarks/accuracy.py measured, as plots.

Each network is a file accuracy-TASK.json, so that the plots can be made without the network and its data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from neuromanifold.core.checks import message
from neuromanifold.experiments.error_cost import COST_LABELS, CostAxis, ErrorCost, EstimatorPoint, draw_error_cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Group = Literal["rest", "embeddings", "all"]


def error_cost(path: str | Path, cost: CostAxis = "passes", group: Group = "rest") -> ErrorCost:
    """Read one network's results; errors are those of a group of parameters, by default all but embeddings."""
    if cost not in COST_LABELS:
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


def all_error_costs(folder: str | Path, cost: CostAxis = "passes", group: Group = "rest") -> list[ErrorCost]:
    """All networks of a folder that have the group, by the number of their classes."""
    paths = sorted(Path(folder).glob("accuracy-*.json"))
    if not paths:
        advice = "Make some with benchmarks/accuracy.py."
        raise FileNotFoundError(message("folder", "one with accuracy-TASK.json in it", str(folder), advice))
    have = [path for path in paths if group in json.loads(path.read_text(encoding="utf-8"))["entries"]]
    return sorted((error_cost(path, cost, group) for path in have), key=lambda one: (one.classes, one.task))


def plot_error_cost(networks: Sequence[ErrorCost], cost: CostAxis = "passes", columns: int = 3) -> Figure:
    """Draw a panel for each network, and one legend."""
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(networks)))
    rows = max(1, -(-len(networks) // columns))
    figure = Figure(figsize=(3.4 * columns + 0.4, 3.4 * rows + 0.9), layout="constrained")
    draw_error_costs(figure, networks, cost, columns)
    return figure


def draw_error_costs(
    figure: Figure, networks: Sequence[ErrorCost], cost: CostAxis = "passes", columns: int = 3
) -> None:
    """Draw the panels of `plot_error_cost` on a figure that exists."""
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


def _point(row: dict[str, Any], cost: CostAxis, group: Group) -> EstimatorPoint:
    return EstimatorPoint(
        name=row["estimator"],
        per_sample=row["granularity"] == "sample",
        unbiased=row["target"] in ("unbiased", "exact"),
        cost=float(row[cost]),
        error=float(row["errors"][group]["relmae"]),
    )
