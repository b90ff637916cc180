"""One self-contained HTML page for one or several results: no network, no library, a script only for comfort."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from string import Template

from neuromanifold._version import __version__
from neuromanifold.core.checks import message
from neuromanifold.report.depth import depth, draw_depth
from neuromanifold.report.markup import Markup, asset, element, joined, prose
from neuromanifold.report.panels import draw_panel, panels
from neuromanifold.report.reading import brief, comparison_sentence, reading
from neuromanifold.report.summary import Agreement, Summary, agreement, in_view_of, short_names, summarize
from neuromanifold.report.tables import (
    component_table,
    numbers,
    overview_table,
    overview_tiles,
    parameter_table,
    provenance,
)
from neuromanifold.report.treemap import draw_treemap, treemap
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.files import save_text

_MOST = 6  # results on a page, each with a colour of its own
_SECTIONS = {"reading": "Reading", "depth": "Depth", "histograms": "Histograms", "map": "Where the trace sits"}
_SECTIONS |= {"components": "Components", "table": "Parameters", "provenance": "Provenance"}


def write_page(path: str | Path, results: Sequence[DiagonalFisher], titles: Sequence[str] | None = None) -> Path:
    """Write a page about the results, all or nothing; several are compared with the first."""
    text = page(results, titles)
    save_text(path, text)
    return Path(path)


def page(results: Sequence[DiagonalFisher], titles: Sequence[str] | None = None) -> str:
    """The page as text.  `titles`: a name for each result; the estimators' if left out."""
    results = list(results)
    for one in results:
        if not isinstance(one, DiagonalFisher):
            got = type(one).__name__
            raise TypeError(message("results", "diagonals (nm.DiagonalFisher)", got, "A trace is a single number."))
    if not 1 <= len(results) <= _MOST:
        raise ValueError(message("results", f"1 to {_MOST} results", f"{len(results)}", "Make several pages."))
    named = _titles(results, titles)
    views = [in_view_of(one, results[0]) for one in results]
    summaries = [summarize(one, title) for one, title in zip(views, named, strict=True)]
    agreements = [agreement(one, views[0]) for one in views[1:]]
    return Template(asset("page.html")).substitute(
        version=__version__,
        title=element("title", _heading(summaries)).removeprefix("<title>").removesuffix("</title>"),
        style=asset("page.css"),
        head=_head(summaries),
        nav=joined([element("a", text, href=f"#{key}") for key, text in _SECTIONS.items()]),
        body=_body(summaries, agreements),
        foot=joined(f"Made by neuromanifold {__version__}. Everything is in this one file; it loads nothing."),
        data=json.dumps(numbers(summaries, agreements)).replace("<", "\\u003c"),
        script=asset("page.js"),
    )


def _titles(results: list[DiagonalFisher], titles: Sequence[str] | None) -> list[str]:
    if titles is not None and (isinstance(titles, str) or len(titles) != len(results)):
        raise ValueError(message("titles", f"{len(results)} names, one for each result", repr(titles)))
    wanted = [brief(one.provenance.estimator) for one in results] if titles is None else [str(one) for one in titles]
    return [t if wanted.count(t) == 1 else f"{t} ({wanted[: i + 1].count(t)})" for i, t in enumerate(wanted)]


def _heading(summaries: list[Summary]) -> str:
    models = list(dict.fromkeys(s.result.provenance.model or "A network" for s in summaries))
    return models[0] if len(models) == 1 else f"{len(models)} networks"


def _head(summaries: list[Summary]) -> Markup:
    first = summaries[0].result
    per = "per sample" if first.reduction == "mean" else "summed over samples"
    what = f"The diagonal of the Fisher information, {per}"
    rest = f": {len(summaries)} results compared" if len(summaries) > 1 else f", by {summaries[0].title}"
    return joined([element("h1", _heading(summaries)), element("p", what + rest + ".", cls="lead")])


def _body(summaries: list[Summary], agreements: list[Agreement]) -> Markup:
    titles = [s.title for s in summaries]
    several = len(summaries) > 1
    legend = [element("li", title, cls=f"s{r}") for r, title in enumerate(titles)]
    colours = element("ul", *legend, cls="legend") if several else Markup()
    drawn = panels(summaries)
    layers = [layer.name for s in summaries for layer in s.layers]
    short = short_names([one.component for one in drawn], layers)
    said = [comparison_sentence(t, titles[0], a) for t, a in zip(titles[1:], agreements, strict=True)]
    maps = [
        joined([element("h3", s.title) if several else "", draw_treemap(treemap(s), s.title, layers)])
        for s in summaries
        if s.everything.total
    ]
    top = overview_table(summaries, agreements) if several else overview_tiles(summaries[0])
    of_first = f" ({titles[0]})" if several else ""
    key = [element("span", text + of_first, cls=cls) for cls, text in _KEY.items()]
    parts: dict[str, list[object]] = {
        "reading": [
            top,
            *_compared(said),
            element("div", *[_sentences(s, several, s is not summaries[0]) for s in summaries], cls="readings"),
        ],
        "depth": [colours, draw_depth(depth(summaries), titles)],
        "histograms": [
            colours,
            element("div", *key, cls="key"),
            element("div", *[draw_panel(one, short[one.component], titles) for one in drawn], cls="panels"),
        ],
        "map": [element("div", *maps, cls="maps several" if several else "maps"), _HEAT]
        if maps
        else [element("p", "The trace is zero: there is nothing to show.", cls="note")],
        "components": [component_table(summaries)],
        "table": [_TOOLS, parameter_table(summaries)],
        "provenance": [provenance(s, several) for s in summaries],
    }
    return joined([_section(key, *contents) for key, contents in parts.items()])


def _section(key: str, *contents: object) -> Markup:
    note = element("p", _NOTES[key], cls="note") if key in _NOTES else Markup()
    return element("section", element("h2", _TITLES.get(key, _SECTIONS[key])), note, *contents, id=key)


def _sentences(summary: Summary, several: bool, beside: bool) -> Markup:
    said = reading(summary, beside)
    items = [element("li", prose(one), cls="first" if not i else None) for i, one in enumerate(said)]
    title = element("h3", summary.title) if several else Markup()
    return element("div", title, element("ul", *items, cls="reading"))


def _compared(said: list[str]) -> list[Markup]:
    items = [element("li", prose(one)) for one in said]
    return [element("h3", "Compared"), element("ul", *items, cls="reading")] if items else []


_TITLES = {"depth": "Fisher by layer, from input to output", "histograms": "Histograms by component"}
_TITLES |= {"table": "Every parameter", "components": "By component"}
_KEY = {"mean": "mean μ, over all entries", "median": "median of F > 0", "p95": "p95 of F > 0"}
_NOTES = {
    "depth": "Each mark is a layer: a module with its own weights and biases. The dot is the mean over all its "
    "entries, the line reaches from the median to the 95 % quantile of its positive entries.",
    "histograms": "All on one logarithmic axis; a bar spans a factor of two, its height is the share of entries. Zeros "
    "have no place on that axis: the bar in the frame at the left is their share, a full frame is 100 %. The leftmost "
    "bar also holds whatever is smaller.",
    "map": "Areas are shares of the trace: boxes are components, tiles their parameters. Choose a tile to find it in "
    "the table.",
    "table": "Click a heading to sort. Mean over all entries, median and p95 over positive ones; rel. s.e. is the sum "
    "of standard errors over the sum of entries.",
}
_HEAT = element("div", "small mean per entry", element("i"), "large (logarithmic)", cls="heat", aria_hidden="true")
_TOOLS = element(
    "div",
    element("input", id="search", type="search", placeholder="Search parameters …", aria_label="Search parameters"),
    element("button", "Save as CSV", id="csv", type="button", cls="quiet"),
    element("output", id="shown", aria_live="polite"),
    cls="tools",
)
