"""The tables of the page as rows of cells, and its numbers as JSON for programs that read it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from neuromanifold.report.formats import brief, counted, error, number, percent
from neuromanifold.report.panels import Panel
from neuromanifold.results import Comparison
from neuromanifold.results.files import without_nan
from neuromanifold.results.summary import Statistics, Summary

_NAMED = {"parameter", "shape", "squared per", "estimator", "right for F"}  # columns of text, at the left


@dataclass(frozen=True)
class Cell:
    """A text, with the value that the column is sorted by and a bar that shows it."""

    text: str
    value: float | None = None  # nan sorts last
    cls: str = ""
    bar: float | None = None  # per cent of the bar's room
    series: int = 0  # the result whose colour the bar has

    @property
    def sortable(self) -> str:
        """The value as the page's script reads it; empty, which sorts last, where there is none."""
        return f"{self.value:.10g}" if self.value is not None and math.isfinite(self.value) else ""


@dataclass(frozen=True)
class TableRow:
    """The name of a row and the cells behind it."""

    name: str
    cells: list[Cell]
    words: str = ""  # that a search finds it by
    total: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table of the page: its headings and its rows."""

    heads: list[str]
    rows: list[TableRow]

    def cls(self, head: str) -> str:
        """The class of a heading: those of text stand left, long ones with a result's name wrap."""
        return "left" if head in _NAMED else "wrap" if ", " in head else ""


_Column = tuple[str, Callable[[Statistics], float], Callable[[float], str]]
_COLUMNS: list[_Column] = [
    ("entries", lambda one: one.entries, lambda value: f"{value:,.0f}"),
    ("zero", lambda one: one.zero_share, percent),
    ("mean", lambda one: one.mean, number),
    ("median > 0", lambda one: one.median, number),
    ("p95 > 0", lambda one: one.p95, number),
    ("largest", lambda one: one.largest, number),
    ("of trace", lambda one: one.share, percent),
    ("rel. s.e.", lambda one: one.relative_error, error),
]
_SIDE_BY_SIDE = {"entries", "zero", "mean", "of trace"}  # what a component shows of the first result beside others


def overview(summaries: Sequence[Summary], comparisons: Sequence[Comparison | None]) -> PageTable:
    """The results side by side; the last columns compare them with the first one."""
    heads = ["result", "estimator", "right for F", "samples", "trace ± s.e. at most", "rel. s.e.", "zero"]
    heads += ["trace over first", "mean difference", "cosine"]
    rows = []
    for summary, against in zip(summaries, comparisons, strict=True):
        s, p = summary.everything, summary.result.provenance
        bar = f" ± {number(s.noise, 2)}" if s.noise else ""
        texts = [f"{summary.result.count:,}", number(s.total, 4) + bar, error(s.relative_error), percent(s.zero_share)]
        if against is None:
            texts += ["–"] * 3
        else:
            difference = percent(against.relmae_positive) if against.positive else "–"
            texts += [number(against.mean_ratio), difference, f"{against.cosine:.4f}"]
        names = [Cell(brief(p.estimator), cls="left"), Cell(p.target.partition(" (")[0], cls="left")]
        rows.append(TableRow(summary.title, [*names, *map(Cell, texts)]))
    return PageTable(heads, rows)


def component_table(summaries: Sequence[Summary]) -> PageTable:
    """A row for each component, the sum below; of other results their means and shares."""
    first, others = summaries[0], summaries[1:]
    largest = max((one.share for s in summaries for one in s.components), default=0.0) or 1.0
    columns = [column for column in _COLUMNS if not others or column[0] in _SIDE_BY_SIDE]
    heads = ["component", *(name for name, _, _ in columns)]
    heads += [f"{what}, {other.title}" for other in others for what in ("mean", "of trace")]
    found = [{one.name: one for one in s.components} for s in others]

    def share(one: Statistics, series: int) -> Cell:
        return Cell(percent(one.share), bar=100 * one.share / largest, series=series)

    rows = []
    for one in [*first.components, first.everything]:
        total = one is first.everything
        cells = [share(one, 0) if column[0] == "of trace" and not total else _cell(one, column) for column in columns]
        for r, (other, by_name) in enumerate(zip(others, found, strict=True), 1):
            match = other.everything if total else by_name.get(one.name)
            mean, part = (number(match.mean), percent(match.share)) if match else ("–", "–")
            cells += [Cell(mean), share(match, r) if match and not total else Cell(part)]
        rows.append(TableRow(one.name, cells, total=total))
    return PageTable(heads, rows)


def parameter_table(summaries: Sequence[Summary]) -> PageTable:
    """A row for each parameter, to be searched and sorted; of other results their means, and these over the first's."""
    first, others = summaries[0], summaries[1:]
    found = [{one.name: one for one in s.parameters} for s in others]
    heads = [name for name, _, _ in _COLUMNS]
    after = 1 + heads.index("mean")
    heads[after:after] = [f"{what}, {other.title}" for other in others for what in ("mean", "ratio")]
    rows = []
    for one in first.parameters:
        cells = [_cell(one, column) for column in _COLUMNS]
        means = [by_name[one.name].mean if one.name in by_name else math.nan for by_name in found]
        ratios = [mean / one.mean if one.mean else math.nan for mean in means]
        pairs = [value for pair in zip(means, ratios, strict=True) for value in pair]
        cells[after:after] = [Cell(number(value), value) for value in pairs]
        shape = Cell("×".join(map(str, one.shape)) or "1", cls="left")
        squared = Cell(one.granularity or "–", cls="left")
        rows.append(TableRow(one.name, [shape, *cells, squared], f"{one.name} {one.granularity}".lower()))
    return PageTable(["parameter", "shape", *heads, "squared per"], rows)


def provenance_facts(summary: Summary) -> dict[str, str]:
    """Where a result comes from, as headings and texts; what is not known is left out."""
    result, p = summary.result, summary.result.provenance
    squared = Counter(one.granularity or "not recorded" for one in summary.parameters)
    found = {
        "model": p.model,
        "data": p.data,
        "estimator": p.estimator,
        "right for F": p.target,
        "likelihood": p.likelihood,
        "samples": result.seen if result.positions != result.count else f"{result.count:,}",
        "left out": f"{p.left_out:,} of these samples, for which others have larger weights" if p.left_out else "",
        "labels": "shifted by one: position t predicts token t + 1" if p.shift_labels else "",
        "batches": f"{p.batches:,}, {counted(p.passes, 'backward pass')}",
        "squared per": ", ".join(f"{one}: {counted(n, 'parameter')}" for one, n in squared.items()),
        "verified": f"against autograd on {counted(p.verified, 'batch')}" if p.verified else "",
        "multiplied by": f"{p.scale:g}" if p.scale != 1 else "",
        "seeds": ", ".join(map(str, p.seeds)) or "none: nothing is random",
        "precision": ", ".join(part for part in (p.dtype, p.device) if part),
        "runs added": f"{p.parts}" if p.parts > 1 else "",
        "ended": p.stopped,
        "versions": ", ".join(f"{name} {version}" for name, version in p.versions.items()),
    }
    return {name: value for name, value in found.items() if value}


def numbers(
    summaries: Sequence[Summary], comparisons: Sequence[Comparison | None], panels: Sequence[Panel]
) -> list[dict[str, object]]:
    """What the page shows, as JSON can hold it: a dict for each result."""
    made: list[dict[str, object]] = []
    for r, (s, against) in enumerate(zip(summaries, comparisons, strict=True)):
        parts = {"components": s.components, "layers": s.layers, "parameters": s.parameters}
        made.append(
            {
                "title": s.title,
                "reduction": s.result.reduction,
                "samples": s.result.count,
                "all": _as_dict(s.everything),
                **{key: [_as_dict(one) for one in ones] for key, ones in parts.items()},
                "histograms": {one.component: {"low": one.low, "shares": one.shares[r]} for one in panels},
                "against_first": asdict(against) if against else None,
            }
        )
    return [without_nan(one) for one in made]


def _as_dict(one: Statistics) -> dict[str, object]:
    return {**asdict(one), "mean": one.mean, "zero_share": one.zero_share, "relative_error": one.relative_error}


def _cell(one: Statistics, column: _Column) -> Cell:
    _, value, text = column
    return Cell(text(value(one)), value(one))
