"""The tables of a page, and its numbers as plain data for programs that read it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import zip_longest

from neuromanifold.report.markup import Markup, dotted, element, joined, number
from neuromanifold.report.reading import brief, counted, percent
from neuromanifold.report.summary import Agreement, Statistics, Summary

Column = tuple[str, Callable[[Statistics], float], Callable[[float], str]]

_COLUMNS: list[Column] = [
    ("entries", lambda one: one.entries, lambda value: f"{value:,.0f}"),
    ("zero", lambda one: one.zero_share, percent),
    ("mean", lambda one: one.mean, number),
    ("median > 0", lambda one: one.median, number),
    ("p95 > 0", lambda one: one.p95, number),
    ("largest", lambda one: one.largest, number),
    ("of trace", lambda one: one.share, percent),
    ("rel. s.e.", lambda one: one.relative_error, lambda value: _error(value)),
]
_SIDE_BY_SIDE = {"entries", "zero", "mean", "of trace"}  # what a component shows of the first result beside others


def overview_tiles(summary: Summary) -> Markup:
    """The few numbers that matter, with their error bars."""
    s, result = summary.everything, summary.result
    per = "per sample" if result.reduction == "mean" else "summed over samples"
    positions = f"{result.positions:,} positions, " if result.positions != result.count else ""
    bar = element("small", f" ± {number(s.noise, 2)}") if s.noise else Markup()
    tiles = [
        ("trace", [number(s.total, 4), bar], f"{per}; ± is an upper bound of its standard error" if s.noise else per),
        ("an entry is known to", [f"± {percent(s.relative_error)}" if s.noise else "no noise"], "Σ s.e. / Σ F"),
        ("exactly zero", [percent(s.zero_share)], f"{s.zeros:,} of {s.entries:,} entries"),
        ("half of the trace in", [percent(s.halves)], "of the entries, the largest ones"),
        ("samples", [f"{result.count:,}"], f"{positions}{counted(result.provenance.passes, 'backward pass')}"),
    ]
    made = [element("div", element("dt", t), element("dd", *v), element("p", note)) for t, v, note in tiles]
    return element("dl", *made, cls="tiles")


def overview_table(summaries: Sequence[Summary], agreements: Sequence[Agreement]) -> Markup:
    """The results side by side; the last columns against the first one."""
    heads = ["result", "estimator", "right for F", "samples", "trace ± s.e. at most", "rel. s.e.", "zero"]
    heads += ["trace over first", "mean difference", "cosine"]
    rows = []
    for r, (summary, against) in enumerate(zip(summaries, [None, *agreements], strict=True)):
        s, p = summary.everything, summary.result.provenance
        bar = f" ± {number(s.noise, 2)}" if s.noise else ""
        cells = [brief(p.estimator), p.target.partition(" (")[0], f"{summary.result.count:,}", number(s.total, 4) + bar]
        cells += [_error(s.relative_error), percent(s.zero_share)]
        if against is not None and against.parameters:
            cells += [number(against.ratio), percent(against.difference), f"{against.cosine:.4f}"]
        else:
            cells += ["–"] * 3
        name = element("th", element("span", "■ ", style=f"color:var(--s{r})"), summary.title, scope="row")
        left = [element("td", cell, cls="left" if i < 2 else None) for i, cell in enumerate(cells)]
        rows.append(element("tr", name, *left))
    head = [element("th", text, scope="col", cls="left" if i < 3 else None) for i, text in enumerate(heads)]
    return _scroll(element("table", element("thead", element("tr", *head)), element("tbody", *rows)), "results")


def component_table(summaries: Sequence[Summary]) -> Markup:
    """A row for each component, the sum below; of other results their means and shares."""
    first, others = summaries[0], summaries[1:]
    largest = max((one.share for s in summaries for one in s.components), default=0.0) or 1.0
    columns = [column for column in _COLUMNS if not others or column[0] in _SIDE_BY_SIDE]
    heads = ["component", *(name for name, _, _ in columns)]
    for other in others:
        heads += [f"mean, {other.title}", f"of trace, {other.title}"]
    found = [{one.name: one for one in s.components} for s in others]
    rows = []
    for one in [*first.components, first.everything]:
        total = one is first.everything
        cells = [_cell(one, column, None if total else largest) for column in columns]
        for r, (other, by_name) in enumerate(zip(others, found, strict=True), 1):
            match = other.everything if total else by_name.get(one.name)
            cells.append(element("td", number(match.mean) if match else "–"))
            cells.append(_share(match, None if total else largest, r))
        rows.append(element("tr", element("th", dotted(one.name), scope="row"), *cells, cls="sum" if total else None))
    head = [element("th", text, scope="col", cls=_wrapped(text)) for text in heads]
    return _scroll(element("table", element("thead", element("tr", *head)), element("tbody", *rows)), "components")


def parameter_table(summaries: Sequence[Summary]) -> Markup:
    """A row for each parameter, to be searched and sorted; of other results their means, and these over the first's."""
    first, others = summaries[0], summaries[1:]
    found = [{one.name: one for one in s.parameters} for s in others]
    after = 1 + [name for name, _, _ in _COLUMNS].index("mean")
    heads = [name for name, _, _ in _COLUMNS]
    heads[after:after] = [f"{what}, {other.title}" for other in others for what in ("mean", "ratio")]
    heads = ["parameter", "shape", *heads, "squared by"]
    rows = []
    for i, one in enumerate(first.parameters):
        cells = [_cell(one, column) for column in _COLUMNS]
        matches = [by_name.get(one.name) for by_name in found]
        means = [match.mean if match else math.nan for match in matches]
        ratios = [mean / one.mean if one.mean else math.nan for mean in means]
        cells[after:after] = [_number(value) for pair in zip(means, ratios, strict=True) for value in pair]
        cells.insert(0, element("td", "×".join(map(str, one.shape)) or "1", cls="left"))
        cells.append(element("td", one.way or "–", cls="left"))
        words = f"{one.name} {one.way}".lower()
        rows.append(element("tr", element("th", dotted(one.name), scope="row"), *cells, data_i=i, data_find=words))
    kinds = {"parameter": "left", "shape": "left", "squared by": "left"}
    head = [
        element("th", element("button", text, type="button"), scope="col", cls=kinds.get(text, _wrapped(text)))
        for text in heads
    ]
    table = element("table", element("thead", element("tr", *head)), element("tbody", *rows), id="parameters")
    return _scroll(table, "parameters")


def provenance(summary: Summary, several: bool) -> Markup:
    """Where a result comes from, for people; the stored JSON below, for repeating it."""
    result, p = summary.result, summary.result.provenance
    ways: dict[str, int] = {}
    for one in summary.parameters:
        ways[one.way or "not recorded"] = ways.get(one.way or "not recorded", 0) + 1
    facts = {
        "model": p.model,
        "data": p.data,
        "estimator": p.estimator,
        "right for F": p.target,
        "likelihood": p.likelihood,
        "samples": f"{result.count:,}"
        + (f" ({result.positions:,} positions)" if result.positions != result.count else ""),
        "batches and passes": f"{counted(p.batches, 'batch')}, {counted(p.passes, 'backward pass')}",
        "squared by": ", ".join(f"{way}: {counted(n, 'parameter')}" for way, n in ways.items()),
        "seeds": ", ".join(map(str, p.seeds)) or "none: nothing is random",
        "precision, device": ", ".join(part for part in (p.dtype, p.device) if part),
        "ended early": p.stopped,
        "runs added": f"{p.parts}" if p.parts > 1 else "",
        "versions": ", ".join(f"{name} {version}" for name, version in p.versions.items()),
    }
    items = [(element("dt", key), element("dd", value)) for key, value in facts.items() if value]
    raw = element("pre", json.dumps(asdict(p), indent=1), tabindex="0")
    title = element("h3", summary.title) if several else Markup()
    return joined([title, element("dl", items, cls="facts"), element("details", element("summary", "As stored"), raw)])


def numbers(summaries: Sequence[Summary], agreements: Sequence[Agreement]) -> list[dict[str, object]]:
    """What the page shows, as JSON: a dict for each result."""
    made: list[dict[str, object]] = []
    for s, against in zip_longest(summaries, [None, *agreements]):
        parts = {"components": s.components, "layers": s.layers, "parameters": s.parameters}
        lists: dict[str, object] = {key: [_plain(one) for one in ones] for key, ones in parts.items()}
        head = {
            "title": s.title,
            "reduction": s.result.reduction,
            "samples": s.result.count,
            "all": _plain(s.everything),
        }
        made.append({**head, **lists, "against_first": _finite(asdict(against)) if against else None})
    return made


def _plain(one: Statistics) -> dict[str, object]:
    more = {"mean": one.mean, "zero_share": one.zero_share, "relative_error": one.relative_error}
    return _finite({**asdict(one), **more})


def _finite(values: dict[str, object]) -> dict[str, object]:
    """JSON has no nan."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _cell(one: Statistics, column: Column, largest: float | None = None) -> Markup:
    name, value, text = column
    if name == "of trace" and largest:
        return _share(one, largest, 0)
    given = value(one)
    return element("td", text(given), data_v=f"{given:.10g}" if math.isfinite(given) else "")


def _wrapped(heading: str) -> str | None:
    """Headings that name a result are long."""
    return "wrap" if ", " in heading else None


def _error(value: float) -> str:
    """A relative standard error, or a dash where nothing is random."""
    return percent(value) if value else "–"


def _number(value: float) -> Markup:
    return element("td", number(value), data_v=f"{value:.10g}" if math.isfinite(value) else "")


def _share(one: Statistics | None, largest: float | None, r: int) -> Markup:
    if one is None:
        return element("td", "–")
    width = element("i", style=f"width:{100 * one.share / largest:.1f}%") if largest else ""
    meter = element("span", width, cls=f"meter s{r}", aria_hidden="true") if largest else Markup()
    return element("td", meter, element("span", percent(one.share), cls="percent"))


def _scroll(table: Markup, name: str) -> Markup:
    """A frame that scrolls sideways on a narrow screen, by keyboard too."""
    return element("div", table, cls="scroll", tabindex="0", role="region", aria_label=f"Table of {name}")
