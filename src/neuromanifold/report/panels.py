"""Histograms of components, all on one axis: their data, and the panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neuromanifold.report.charts import box, chart, svg
from neuromanifold.report.markup import Markup, coordinate, element, number, power_of_ten
from neuromanifold.report.reading import percent
from neuromanifold.report.summary import Statistics, Summary

_OCTAVES = 56  # that a panel shows at most
_RARE = 0.002  # of a component's positive entries may lie below the left edge
_ZERO = 12.0  # per cent of the width, for the bar of zeros
_FRAME = (1.0, 6.0)  # left edge and width of that bar


@dataclass(frozen=True)
class Panel:
    """The histograms of one component: shares of entries in [2^e, 2^(e+1)), e from `low` on, for each result."""

    component: str
    low: int
    shares: list[list[float]]  # [results][bins]; the first bin also holds what is smaller
    statistics: list[Statistics | None]  # [results]


def panels(summaries: Sequence[Summary]) -> list[Panel]:
    """The data of the histograms, all on one axis, so that components compare at a glance."""
    found = [{one.name: one for one in s.components} for s in summaries]
    names = list(dict.fromkeys(one.name for s in summaries for one in s.components if one.entries))
    filled = [one for by_name in found for one in by_name.values() if one.octaves]
    high = max((max(one.octaves) for one in filled), default=0)
    low = max(min((_lowest(one) for one in filled), default=0), high - _OCTAVES + 1)
    low = min(low, high - 3)

    def shares(one: Statistics | None) -> list[float]:
        bins = [0.0] * (high + 1 - low)
        for e, n in (one.octaves if one else {}).items():
            assert one is not None
            bins[max(e, low) - low] += n / one.entries
        return bins

    rows = [(name, [by_name.get(name) for by_name in found]) for name in names]
    return [Panel(name, low, [shares(one) for one in ones], ones) for name, ones in rows]


def draw_panel(panel: Panel, label: str, titles: Sequence[str]) -> Markup:
    """One histogram: bars for the first result, outlines for others, zeros in a frame at the left that means 100 %."""
    bins = len(panel.shares[0])
    top = max((max(row) for row in panel.shares), default=0.0) or 1.0
    step = (100 - _ZERO) / bins
    drawn: list[Markup] = [box(*_FRAME, cls="frame")]
    for r, (row, s) in enumerate(zip(panel.shares, panel.statistics, strict=True)):
        if s is None:
            continue
        drawn.append(_zero_bar(r, s.zero_share))
        drawn.append(element("path", d=_steps(row, step, top), cls=f"{'line' if r else 'area'} s{r}"))
    first = panel.statistics[0]
    if first and first.total:
        values = {"mean": first.mean, "median": first.median, "p95": first.p95}
        drawn += [_rule(panel, value, name) for name, value in values.items()]
    tips = [_bin_tip(panel, i, titles) for i in range(bins)]
    hits = [box(_ZERO + step * i, step, cls="hit", data_tip=tip) for i, tip in enumerate(tips) if tip]
    hits.insert(0, box(0, _ZERO - 2, cls="hit", data_tip=_zero_tip(panel, titles)))
    low, high = panel.low * math.log10(2), (panel.low + bins) * math.log10(2)
    every = max(1, math.ceil((high - low) / 5))
    ticks = [d for d in range(math.ceil(low), math.floor(high) + 1) if d % every == 0]
    places = [(_ZERO + (100 - _ZERO) * (d - low) / (high - low), power_of_ten(d)) for d in ticks]
    axis = [element("span", text, style=f"left:{coordinate(x)}%") for x, text in [(4.0, "0"), *places]]
    entries = f"{first.entries:,} entries" if first else "not in the first result"
    given = f"{percent(first.zero_share)} zero · mean {number(first.mean)}" if first else "–"
    text = f"Histogram of {panel.component}: {entries}, {given}. Arrow keys go from bar to bar."
    name = element("b", label, title=panel.component)
    return element(
        "figure",
        element("figcaption", name, element("span", entries), element("span", given)),
        chart("histogram", text, svg(100, [*drawn, *hits])),
        element("div", *axis, cls="axis", aria_hidden="true"),
        cls="panel",
    )


def _steps(shares: list[float], step: float, top: float) -> str:
    """The outline of bars that stand on the axis; empty bins have none."""
    path = ""
    for i, share in enumerate(shares):
        if share and not (i and shares[i - 1]):
            path += f"M{coordinate(_ZERO + step * i)} 100"
        if share:
            path += f"V{coordinate(100 - 96 * share / top)}h{coordinate(step)}"
            path += "" if i + 1 < len(shares) and shares[i + 1] else "V100"
    return path


def _lowest(one: Statistics) -> int:
    """The octave below which only rare entries lie."""
    seen, positive = 0, one.entries - one.zeros
    for e, n in sorted(one.octaves.items()):
        seen += n
        if seen > _RARE * positive:
            return e
    return max(one.octaves)


def _zero_bar(r: int, share: float) -> Markup:
    if not r:
        return box(*_FRAME, share, cls="bar s0")
    left, width = map(coordinate, _FRAME)
    return element("path", d=f"M{left} {coordinate(100 - 100 * share)}h{width}", cls=f"line s{r}")


def _rule(panel: Panel, value: float, name: str) -> Markup:
    place = (math.log2(value) - panel.low) / len(panel.shares[0])
    x = coordinate(_ZERO + (100 - _ZERO) * min(1.0, max(0.0, place)))
    return element("path", d=f"M{x} 0V100", cls=f"rule {name}")


def _bin_tip(panel: Panel, i: int, titles: Sequence[str]) -> str:
    if not any(row[i] for row in panel.shares):
        return ""
    e = panel.low + i
    left = f"{number(2.0**e)} to " if i else "below "
    lines = [f"{left}{number(2.0 ** (e + 1))}"]
    for title, row in zip(titles, panel.shares, strict=True):
        lines.append(f"{percent(row[i])} of entries" + (f" — {title}" if len(titles) > 1 else ""))
    return "\n".join(lines)


def _zero_tip(panel: Panel, titles: Sequence[str]) -> str:
    lines = ["exactly zero"]
    for title, s in zip(titles, panel.statistics, strict=True):
        if s is not None:
            lines.append(f"{percent(s.zero_share)} of entries" + (f" — {title}" if len(titles) > 1 else ""))
    return "\n".join(lines)
