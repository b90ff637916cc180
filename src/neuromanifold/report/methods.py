"""What a result's own `plot`, `report` and `_repr_html_` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuromanifold.core.checks import message
from neuromanifold.report.histograms import histograms, plot_histograms
from neuromanifold.report.markup import Markup, asset, element, prose
from neuromanifold.report.page import write_page
from neuromanifold.report.plots import plot_depth
from neuromanifold.report.reading import reading
from neuromanifold.report.summary import summarize
from neuromanifold.report.tables import component_table
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.drawing import draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@draws("plot")
def plot(result: DiagonalFisher, kind: str) -> Figure:
    """A matplotlib figure: "histograms", a panel for each component, or "depth", a mark for each layer."""
    if kind not in ("histograms", "depth"):
        raise ValueError(message("kind", "'histograms' or 'depth'", repr(kind)))
    try:
        if kind == "depth":
            return plot_depth(summarize(result))
        return plot_histograms(histograms(result), label="entries")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        text = "Pictures need matplotlib: pip install 'neuromanifold[plots]'. The page of .report(path) does not."
        raise ModuleNotFoundError(text, name=error.name) from error


@draws("report")
def report(
    result: DiagonalFisher, path: str | Path, others: Sequence[DiagonalFisher], titles: Sequence[str] | None
) -> Path:
    """Write the page."""
    return write_page(path, [result, *others], titles)


@draws("html")
def notebook(result: DiagonalFisher) -> str:
    """What a notebook shows: the reading and the table of components."""
    summary = summarize(result)
    head = element("b", f"{type(result).__name__} ({result.reduction})")
    said = element("ul", *[element("li", prose(one)) for one in reading(summary)])
    style = element("style", Markup(asset("notebook.css")))
    return element("div", style, head, said, component_table([summary]), cls="nm-fisher")
