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
from neuromanifold.results.naming import paper_components

FORMATS = ("png", "pdf")


def draw_histograms(folder: Folder, task: PaperTask, title: str, exact: Mapping[str, Tensor]) -> None:
    """Plot the entries of the exact diagonal, as sums over the samples."""
    figure = plot_histograms(histograms(exact, groups=paper_components(list(exact))), label="exact diagonal")
    figure.suptitle(title, fontsize=11)
    for kind in FORMATS:
        save_figure(figure, folder.file(task.name, f"histograms.{kind}"))


def draw_passes(folder: Folder, task: PaperTask, title: str, samples: int, batch_size: int, classes: int) -> None:
    """Plot the errors of all parameters but embeddings against backward passes."""
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

    def point(column: Column, numbers: dict[str, Any]) -> Point:
        error = numbers["errors"].get(group, numbers["errors"]["all"])["relmae"]
        unbiased = numbers["target"] in ("unbiased", "exact")
        return Point(numbers["estimator"], column.per == "sample", unbiased, float(numbers["passes"]), float(error))

    def points(columns: list[Column]) -> tuple[Point, ...]:
        found = ((column, folder.numbers(task.name, column.key)) for column in columns)
        return tuple(point(column, numbers) for column, numbers in found if numbers is not None)

    along = curve(classes)
    alone = [column for column in COLUMNS if column not in along]
    return ErrorCost(task.row, classes, samples, batch_size, points(alone), points(along))
