"""The paper's histograms, a panel for each component, and the curve of error against passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from neuromanifold.experiments.error_cost import ErrorCost, EstimatorPoint, draw_error_cost
from neuromanifold.experiments.paper.columns import COLUMNS, Column, curve
from neuromanifold.experiments.paper.folder import Folder
from neuromanifold.experiments.paper.sources import Prepared
from neuromanifold.report.plots import histograms, plot_histograms, save_figure
from neuromanifold.results.naming import paper_components

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_histograms(folder: Folder, prepared: Prepared, exact: Mapping[str, Tensor]) -> None:
    """Plot the entries of the exact diagonal, as sums over the samples."""
    figure = plot_histograms(histograms(exact, groups=paper_components(list(exact))), label="exact diagonal")
    figure.suptitle(prepared.title, fontsize=11)
    _save(figure, folder, prepared, "histograms")


def draw_passes(folder: Folder, prepared: Prepared) -> None:
    """Plot the errors of all parameters but embeddings against backward passes."""
    from matplotlib.figure import Figure

    figure, network = Figure(figsize=(8.6, 4.4), layout="constrained"), errors_against_passes(folder, prepared)
    axes = figure.subplots()
    draw_error_cost(axes, network)
    sizes = f"C = {network.classes}, {network.samples:,} samples, B = {network.batch_size}"
    axes.set_title(f"{prepared.title}\n{sizes}", fontsize=9)
    axes.set_ylabel("RelMAE, all but embeddings")
    figure.legend(loc="outside right upper", fontsize=7.5, frameon=False)
    _save(figure, folder, prepared, "passes")


def errors_against_passes(folder: Folder, prepared: Prepared) -> ErrorCost:
    """The columns as points, and probes = 1, 2, 4, ... C - 1 as a curve; embeddings are left out of the errors."""

    def points(columns: list[Column]) -> tuple[EstimatorPoint, ...]:
        found = ((column, folder.numbers(prepared.name, column.key)) for column in columns)
        return tuple(
            EstimatorPoint(
                numbers["estimator"],
                column.per == "sample",
                numbers["target"] in ("unbiased", "exact"),
                float(numbers["passes"]),
                float(numbers["errors"].get("rest", numbers["errors"]["all"])["relmae"]),
            )
            for column, numbers in found
            if numbers is not None
        )

    data, along = prepared.data, curve(prepared.classes)
    alone = points([column for column in COLUMNS if column not in along])
    return ErrorCost(prepared.task.row, prepared.classes, data.samples, data.batch_size, alone, points(along))


def _save(figure: Figure, folder: Folder, prepared: Prepared, name: str) -> None:
    for suffix in ("png", "pdf"):
        save_figure(figure, folder.file(prepared.name, f"{name}.{suffix}"))
