"""Layers along the depth of the network: the data of the chart, on the page and in matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from neuromanifold.report.formats import error, number, percent, power_of_ten
from neuromanifold.results.naming import short_names
from neuromanifold.results.summary import Statistics, Summary

_DECADES = 12  # that the chart shows below its largest value
_ALONE = 2.2  # times the width of other layers, for a component's only layer, so that its name has room
_NAMES = 30  # components that are named below the chart
_WIDE = 50.0  # thousandths of the width that a name needs on a narrow screen


class Mark(NamedTuple):
    """One layer of one result, in thousandths of the chart's width."""

    series: int
    x: float
    width: float
    layer: Statistics


@dataclass(frozen=True)
class Depth:
    """Layers from input to output, and what each result has for them."""

    titles: list[str]  # of the results
    layers: list[str]
    bands: list[tuple[str, int, int]]  # component, its first layer, the one after its last
    edges: list[float]  # [layers + 1], 0 to 1: where each layer begins; a layer alone in its component is wider
    series: list[list[Statistics | None]]  # [results][layers]
    low: int  # the axis reaches from 10^low to 10^high
    high: int

    @property
    def marks(self) -> list[Mark]:
        """What is drawn: results side by side in the slot of each layer."""
        starts, results = [1000 * edge for edge in self.edges], len(self.series)
        slots = [b - a for a, b in pairwise(starts)]
        width = min([14.0, *(0.64 * slot / results for slot in slots)])
        return [
            Mark(r, starts[i] + slots[i] * (r + 1) / (results + 1), width, layer)
            for r, row in enumerate(self.series)
            for i, layer in enumerate(row)
            if layer is not None
        ]

    @property
    def largest_share(self) -> float:
        """The largest share of the trace that a layer has; 1 if the trace is zero."""
        return max((mark.layer.share for mark in self.marks), default=0.0) or 1.0

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Powers of ten on the axis, at most seven or so: height and label."""
        step = max(1, math.ceil((self.high - self.low) / 6))
        return [(self.height(10.0**d), power_of_ten(d)) for d in range(self.high, self.low - 1, -step)]

    @property
    def names(self) -> list[tuple[str, str, float, bool]]:
        """Below the chart: short name, name, place in per cent, and whether a narrow screen has no room for it."""
        short = short_names([name for name, _, _ in self.bands], self.layers)
        found = []
        for name, start, stop in self.bands[:: max(1, math.ceil(len(self.bands) / _NAMES))]:
            left, right = 1000 * self.edges[start], 1000 * self.edges[stop]
            found.append((short[name], name, (left + right) / 20, right - left < _WIDE))
        return found

    @property
    def tips(self) -> list[tuple[float, float, str]]:
        """What the chart says of each layer: its left edge, its width, the text."""
        places = [(1000 * a, 1000 * (b - a)) for a, b in pairwise(self.edges)]
        return [(*place, self._tip(i)) for i, place in enumerate(places)]

    def height(self, value: float) -> float:
        """The place of a value from the top, in per cent; what is below the axis stands on it."""
        place = (math.log10(value) - self.low) / (self.high - self.low) if value > 0 else 0.0
        return 100 - 100 * min(1.0, max(0.0, place))

    def _tip(self, i: int) -> str:
        lines = [self.layers[i]]
        for title, row in zip(self.titles, self.series, strict=True):
            if (s := row[i]) is not None:
                lines += [f"— {title}"] if len(self.titles) > 1 else []
                lines.append(f"mean {number(s.mean)}, relative standard error {error(s.relative_error)}")
                lines.append(f"median {number(s.median)}, p95 {number(s.p95)} (positive entries)")
                lines.append(f"{percent(s.share)} of the trace, {percent(s.zero_share)} zero, {s.entries:,} entries")
        return "\n".join(lines)


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
    return Depth([s.title for s in summaries], layers, bands, edges, series, min(low, high - 1), high)
