"""Histograms of components, all on one axis: the data of the page's panels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neuromanifold.report.formats import coordinate, number, percent, power_of_ten
from neuromanifold.results.summary import Statistics, Summary, chunks

_OCTAVES = 56  # that a panel shows at most
_RARE = 0.002  # of a component's positive entries may lie below the left edge
_ZERO = 12.0  # per cent of the width, for the bar of zeros
_BIAS = 1023  # of the exponent of a float64, which begins at its 52nd bit


@dataclass(frozen=True)
class Panel:
    """The histograms of one component: shares of entries in [2^e, 2^(e+1)), e from `low` on, for each result."""

    titles: list[str]  # of the results
    component: str
    low: int
    shares: list[list[float]]  # [results][bins]; the first bin also holds what is smaller
    statistics: list[Statistics | None]  # [results]

    @property
    def outlines(self) -> list[str]:
        """For each result, the path of its bars, which stand on the axis; empty bins have none."""
        top, step = max(max(row, default=0.0) for row in self.shares) or 1.0, self._step
        paths = []
        for row in self.shares:
            path = ""
            for i, share in enumerate(row):
                if share:
                    path += "" if i and row[i - 1] else f"M{coordinate(_ZERO + step * i)} 100"
                    path += f"V{coordinate(100 - 96 * share / top)}h{coordinate(step)}"
                    path += "" if i + 1 < len(row) and row[i + 1] else "V100"
            paths.append(path)
        return paths

    @property
    def rules(self) -> list[tuple[str, float]]:
        """Where the mean, median and p95 of the first result stand, in per cent; nothing if all is zero."""
        first = self.statistics[0]
        if not first or not first.total:
            return []
        values = {"mean": first.mean, "median": first.median, "p95": first.p95}
        return [(name, self._place(math.log2(value))) for name, value in values.items()]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The labels of the axis, with their places in per cent; the bar of zeros is the first."""
        low, high = self.low * math.log10(2), (self.low + len(self.shares[0])) * math.log10(2)
        every = max(1, math.ceil((high - low) / 5))
        decades = [d for d in range(math.ceil(low), math.floor(high) + 1) if d % every == 0]
        return [(4.0, "0"), *((self._place(d / math.log10(2)), power_of_ten(d)) for d in decades)]

    @property
    def tips(self) -> list[tuple[float, float, str]]:
        """What the panel says of the zeros and of each bin: left edge, width, text."""
        zeros = [s.zero_share if s is not None else None for s in self.statistics]
        found = [(0.0, _ZERO - 2, self._lines("exactly zero", zeros))]
        for i, shares in enumerate(zip(*self.shares, strict=True)):
            left = f"{number(2.0 ** (self.low + i))} to " if i else "below "
            if any(shares):
                text = self._lines(f"{left}{number(2.0 ** (self.low + i + 1))}", shares)
                found.append((_ZERO + self._step * i, self._step, text))
        return found

    @property
    def _step(self) -> float:
        return (100 - _ZERO) / len(self.shares[0])

    def _place(self, octave: float) -> float:
        place = (octave - self.low) / len(self.shares[0])
        return _ZERO + (100 - _ZERO) * min(1.0, max(0.0, place))

    def _lines(self, first: str, shares: Sequence[float | None]) -> str:
        given = [(title, share) for title, share in zip(self.titles, shares, strict=True) if share is not None]
        named = len(self.titles) > 1
        return "\n".join(
            [first, *(f"{percent(s)} of entries" + (f" — {title}" if named else "") for title, s in given)]
        )


def panels(summaries: Sequence[Summary]) -> list[Panel]:
    """The data of the histograms, all on one axis, so that components compare at a glance."""
    found = [{one.name: one for one in s.components} for s in summaries]
    counts = [octaves(s) for s in summaries]
    names = list(dict.fromkeys(one.name for s in summaries for one in s.components if one.entries))
    filled = [counter for one in counts for counter in one.values() if counter]
    high = max((max(counter) for counter in filled), default=0)
    low = max(min((_lowest(counter) for counter in filled), default=0), high - _OCTAVES + 1)
    low = min(low, high - 3)
    titles, made = [s.title for s in summaries], []
    for name in names:
        ones, shares = [by_name.get(name) for by_name in found], []
        for one, counter in zip(ones, (by_name.get(name) for by_name in counts), strict=True):
            row = [0.0] * (high + 1 - low)
            for e, n in (counter or {}).items():
                assert one is not None
                row[max(e, low) - low] += n / one.entries
            shares.append(row)
        made.append(Panel(titles, name, low, shares, ones))
    return made


def octaves(summary: Summary) -> dict[str, Counter[int]]:
    """For each component, how many of its positive entries lie in [2^e, 2^(e+1)), by e."""
    result, found = summary.result, {one.name: Counter[int]() for one in summary.components}
    divisor = result.divisor or 1
    for name, value in result.sums.items():
        for x in chunks(value, torch.float64):
            exponents = torch.bincount((x[x > 0] / divisor).view(torch.int64) >> 52).cpu().numpy()
            filled = exponents.nonzero()[0]
            found[summary.component_of[name]].update(
                dict(zip((filled - _BIAS).tolist(), exponents[filled].tolist(), strict=True))
            )
    return found


def _lowest(counter: Counter[int]) -> int:
    """The octave below which only rare entries lie."""
    seen, positive = 0, counter.total()
    for e, n in sorted(counter.items()):
        seen += n
        if seen > _RARE * positive:
            return e
    return max(counter)
