"""The paper's histograms, a panel for each component, and the curve of error against passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from neuromanifold.experiments.error_cost import ErrorCost, Point, draw_error_cost
from neuromanifold.experiments.paper.columns import COLUMNS, Column, curve
from neuromanifold.experiments.paper.folder import Folder
from neuromanifold.experiments.paper.tasks import PaperTask
from neuromanifold.report.plots import histograms, plot_histograms, save_figure

FORMATS = ("png", "pdf")


def draw_histograms(folder: Folder, task: PaperTask, title: str, exact: Mapping[str, Tensor]) -> None:
    """The entries of the exact diagonal, as sums over the samples."""
    figure = plot_histograms(histograms(by_components(exact)), label="exact diagonal")
    figure.suptitle(title, fontsize=11)
    for kind in FORMATS:
        save_figure(figure, folder.file(task.name, f"histograms.{kind}"))


def draw_passes(folder: Folder, task: PaperTask, title: str, samples: int, batch_size: int, classes: int) -> None:
    """Errors of all parameters but embeddings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.subplots()
    draw_error_cost(axes, errors_against_passes(folder, task, samples, batch_size, classes))
    axes.set_title(f"{title}\nC = {classes}, {samples:,} samples, B = {batch_size}", fontsize=9)
    axes.set_ylabel("RelMAE, all but embeddings")
    figure.legend(loc="outside right upper", fontsize=7.5, frameon=False)
    for kind in FORMATS:
        save_figure(figure, folder.file(task.name, f"passes.{kind}"))


def errors_against_passes(
    folder: Folder, task: PaperTask, samples: int, batch_size: int, classes: int, group: str = "rest"
) -> ErrorCost:
    """The columns as points, and probes = 1, 2, 4, ... C - 1 as a curve."""

    def points(columns: list[Column]) -> tuple[Point, ...]:
        found = ((column, folder.numbers(task.name, column.key)) for column in columns)
        return tuple(_point(column, numbers, group) for column, numbers in found if numbers is not None)

    along = curve(classes)
    alone = [column for column in COLUMNS if column not in along]
    return ErrorCost(task.row, classes, samples, batch_size, points(alone), points(along))


def by_components(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by names "COMPONENT.i": what comes before the blocks, each block, what comes after them.

    Blocks are the members of a container that is numbered from 0, such as `encoder.layer.0`, at the first number of a
    name.  A network without such containers keeps its own names.
    """
    blocks = [_block(name) for name in values]
    containers = {block[0] for block in blocks if block is not None and block[1] == "0"}
    labels = [f"{b[0].split('.')[-1]} {b[1]}" if b is not None and b[0] in containers else "" for b in blocks]
    inside = [i for i, label in enumerate(labels) if label]
    if not inside:
        return dict(values)
    named = {}
    for i, (name, label) in enumerate(zip(values, labels, strict=True)):
        outside = "embedding" if i < inside[0] else "head" if i > inside[-1] else " ".join(name.split(".")[:2])
        named[f"{label or outside}.{i}"] = values[name]
    return named


def _block(name: str) -> tuple[str, str] | None:
    """The container and the number in it, of `a.layer.3.weight` ("a.layer", "3")."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if not at else (".".join(parts[:at]), parts[at])


def _point(column: Column, numbers: dict[str, Any], group: str) -> Point:
    unbiased = numbers["target"] in ("unbiased", "exact")
    error = numbers["errors"].get(group, numbers["errors"]["all"])["relmae"]
    return Point(numbers["estimator"], column.by == "samples", unbiased, float(numbers["passes"]), float(error))
