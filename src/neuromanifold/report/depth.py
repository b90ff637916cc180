"""Layers along the depth of the network: the data of the chart, and the chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from neuromanifold.report.charts import box, chart, svg
from neuromanifold.report.markup import Markup, coordinate, element, number, power_of_ten
from neuromanifold.report.reading import percent
from neuromanifold.report.summary import Statistics, Summary, short_names

_DECADES = 12  # that the chart shows below its largest value
_ALONE = 2.2  # times the width of other layers, for a component's only layer, so that its name has room
_NAMES = 30  # components that are named below the chart


@dataclass(frozen=True)
class Depth:
    """Layers from input to output, and what each result has for them."""

    layers: list[str]
    bands: list[tuple[str, int, int]]  # component, its first layer, the one after its last
    edges: list[float]  # [layers + 1], 0 to 1: where each layer begins; a layer alone in its component is wider
    series: list[list[Statistics | None]]  # [results][layers]
    low: int  # the axis reaches from 10^low to 10^high
    high: int


def depth(summaries: Sequence[Summary]) -> Depth:
    """The data of the depth chart; layers that only later results have come last."""
    component = {layer.name: s.component_of[layer.name] for s in reversed(summaries) for layer in s.layers}
    layers = list(dict.fromkeys(layer.name for s in summaries for layer in s.layers if layer.entries))
    bands: list[tuple[str, int, int]] = []
    for i, layer in enumerate(layers):
        if bands and bands[-1][0] == component[layer]:
            bands[-1] = (bands[-1][0], bands[-1][1], i + 1)
        else:
            bands.append((component[layer], i, i + 1))
    widths = [max(1.0, _ALONE / (stop - start)) for _, start, stop in bands for _ in range(start, stop)]
    edges = [edge / (sum(widths) or 1.0) for edge in accumulate(widths, initial=0.0)]
    found = [{layer.name: layer for layer in s.layers} for s in summaries]
    series = [[one.get(name) for name in layers] for one in found]
    values = [v for row in series for s in row if s for v in (s.mean, s.median, s.p95) if v > 0]
    high = math.ceil(math.log10(max(values))) if values else 0
    low = max(math.floor(math.log10(min(values))), high - _DECADES) if values else -1
    return Depth(layers, bands, edges, series, min(low, high - 1), high)


def draw_depth(data: Depth, titles: Sequence[str]) -> Markup:
    """Mean, median to p95, share of the trace and share of zeros of every layer, along the depth of the network."""
    results = len(data.series)
    starts = [1000 * edge for edge in data.edges]
    slots = [b - a for a, b in pairwise(starts)]
    largest = max((s.share for row in data.series for s in row if s), default=0.0) or 1.0
    marks: dict[str, list[Markup]] = {"value": [], "share": [], "zero": []}
    for r, row in enumerate(data.series):
        for i, s in enumerate(row):
            if s is None:
                continue
            x, width = starts[i] + slots[i] * (r + 1) / (results + 1), min(14.0, 0.64 * min(slots) / results)
            marks["value"] += _mark(data, s, x, f"s{r}")
            marks["share"].append(box(x - width / 2, width, s.share / largest, f"bar s{r}"))
            marks["zero"].append(box(x - width / 2, width, s.zero_share, f"bar s{r}"))
    step = max(1, math.ceil((data.high - data.low) / 6))
    labels = [(_height(data, 10.0**d), power_of_ten(d)) for d in range(data.high, data.low - 1, -step)]
    tips = [_tip(data, i, titles) for i in range(len(data.layers))]
    hits = [box(x, w, cls="hit", data_tip=tip) for x, w, tip in zip(starts, slots, tips, strict=False)]
    rows = [
        _strip("value", "mean ●, median to p95 ┃", labels, [*_bands(data), *marks["value"]]),
        _strip("share", "share of trace", [(0, percent(largest)), (100, "0")], [*_bands(data), *marks["share"]]),
        _strip("zero", "exactly zero", [(0, percent(1.0)), (100, "0")], [*_bands(data), *marks["zero"]]),
    ]
    short = short_names([name for name, _, _ in data.bands], data.layers)
    every = max(1, math.ceil(len(data.bands) / _NAMES))
    names = []
    for name, start, stop in data.bands[::every]:
        middle = coordinate((starts[start] + starts[stop]) / 20)
        narrow = "narrow" if starts[stop] - starts[start] < 50 else None
        label = element("span", short[name], title=name)
        names.append(element("span", label, style=f"left:{middle}%", cls=narrow))
    text = f"Fisher information of {len(data.layers)} layers along the depth. Arrow keys go from layer to layer."
    below = element("div", *names, cls="depth-names", aria_hidden="true")
    return chart("depth", text, *rows, svg(1000, hits, "hits"), below)


def _height(data: Depth, value: float) -> float:
    """From the top, in per cent; what is below the axis stands on it."""
    place = (math.log10(value) - data.low) / (data.high - data.low) if value > 0 else 0.0
    return 100 - 100 * min(1.0, max(0.0, place))


def _mark(data: Depth, s: Statistics, x: float, cls: str) -> list[Markup]:
    if not s.total:
        return []
    middle, upper, mean = (coordinate(_height(data, value)) for value in (s.median, s.p95, s.mean))
    whisker = element("path", d=f"M{coordinate(x)} {middle}V{upper}", cls=f"whisker {cls}")
    return [whisker, element("path", d=f"M{coordinate(x)} {mean}h0", cls=f"dot {cls}")]


def _bands(data: Depth) -> list[Markup]:
    spans = [(1000 * data.edges[start], 1000 * data.edges[stop]) for _, start, stop in data.bands[1::2]]
    return [box(a, b - a, cls="band") for a, b in spans]


def _strip(kind: str, label: str, ticks: list[tuple[float, str]], drawn: list[Markup]) -> Markup:
    lines = [element("path", d=f"M0 {coordinate(y)}H1000", cls="grid") for y, _ in ticks]
    texts = [element("span", text, style=f"top:{coordinate(y)}%") for y, text in ticks]
    axis = element("div", *texts, cls="y-axis", aria_hidden="true")
    return element(
        "div", element("div", label, cls="strip-label"), axis, svg(1000, [*lines, *drawn]), cls=f"strip {kind}"
    )


def _tip(data: Depth, i: int, titles: Sequence[str]) -> str:
    lines = [data.layers[i]]
    for title, row in zip(titles, data.series, strict=True):
        if (s := row[i]) is not None:
            lines += [f"— {title}"] if len(titles) > 1 else []
            lines.append(f"mean {number(s.mean)} ± {percent(s.relative_error)}")
            lines.append(f"median {number(s.median)}, p95 {number(s.p95)} (positive entries)")
            lines.append(f"{percent(s.share)} of the trace, {percent(s.zero_share)} zero, {s.entries:,} entries")
    return "\n".join(lines)
