"""One self-contained HTML page for one or several results: no network, no library, a script only for comfort."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from neuromanifold._version import __version__
from neuromanifold.core.checks import message
from neuromanifold.report.depth import depth
from neuromanifold.report.formats import brief
from neuromanifold.report.panels import panels
from neuromanifold.report.reading import comparison_sentence, reading
from neuromanifold.report.render import render
from neuromanifold.report.tables import component_table, numbers, overview, parameter_table, provenance_facts
from neuromanifold.report.treemap import treemap
from neuromanifold.results import Comparison, DiagonalFisher
from neuromanifold.results.comparison import compare
from neuromanifold.results.files import save_text
from neuromanifold.results.naming import short_names
from neuromanifold.results.summary import Summary, summarize

_MOST = 6  # results on a page, each with a colour of its own
_COMPONENTS = 60  # that a page has room for


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
    views = [replace(one, reduction=results[0].reduction) for one in results]
    summaries = [summarize(one, title, _COMPONENTS) for one, title in zip(views, named, strict=True)]
    comparisons = [None, *(shared_comparison(one, views[0]) for one in views[1:])]
    drawn = panels(summaries)
    models = list(dict.fromkeys(s.result.provenance.model or "A network" for s in summaries))
    compared = zip(named[1:], comparisons[1:], strict=True)
    return render(
        "page.html",
        version=__version__,
        heading=models[0] if len(models) == 1 else f"{len(models)} networks",
        summaries=summaries,
        overview=overview(summaries, comparisons),
        compared=[comparison_sentence(title, named[0], found) for title, found in compared],
        readings=[reading(s, beside=s is not summaries[0]) for s in summaries],
        depth=depth(summaries),
        panels=drawn,
        maps=[(s.title, treemap(s)) for s in summaries if s.everything.total],
        short=_short(summaries),
        components=component_table(summaries),
        parameters=parameter_table(summaries),
        facts=[(s.title, provenance_facts(s), json.dumps(asdict(s.result.provenance), indent=1)) for s in summaries],
        data=numbers(summaries, comparisons, drawn),
    )


def notebook(result: DiagonalFisher) -> str:
    """What a notebook shows of a result, as HTML: the reading and the table of components."""
    summary = summarize(result, "", _COMPONENTS)
    title = f"{type(result).__name__} ({result.unit})"
    return render("notebook.html", title=title, reading=reading(summary), components=component_table([summary]))


def shared_comparison(result: DiagonalFisher, first: DiagonalFisher) -> Comparison | None:
    """Compare two results over the parameters that both have, in the same shape; None if there are none."""
    shared = [name for name in result if name in first.sums and first.sums[name].shape == result.sums[name].shape]
    mine, theirs = ({name: one[name] for name in shared} for one in (result, first))
    return compare(mine, theirs, epsilon=0.0) if shared else None


def _titles(results: list[DiagonalFisher], titles: Sequence[str] | None) -> list[str]:
    if titles is not None and (isinstance(titles, str) or len(titles) != len(results)):
        raise ValueError(message("titles", f"{len(results)} names, one for each result", repr(titles)))
    wanted = [brief(one.provenance.estimator) for one in results] if titles is None else [str(one) for one in titles]
    return [t if wanted.count(t) == 1 else f"{t} ({wanted[: i + 1].count(t)})" for i, t in enumerate(wanted)]


def _short(summaries: list[Summary]) -> dict[str, str]:
    """Short names of all components."""
    names = dict.fromkeys(one.name for s in summaries for one in s.components)
    return dict(short_names(names, [layer.name for s in summaries for layer in s.layers]))
