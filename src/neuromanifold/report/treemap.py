"""Where the trace sits: components as boxes, their parameters as tiles inside, every area a share of the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from neuromanifold.report.formats import coordinate, number, percent
from neuromanifold.results.summary import Statistics, Summary

_ASPECT = 2.2  # width over height, for which the tiles are made as square as can be
_SMALL = 0.001  # of the trace: parameters below share a tile
_TINY = 0.003  # components below share a box


@dataclass(frozen=True)
class Tile:
    """A rectangle in per cent of the box around it, with what it stands for."""

    name: str
    share: float  # of the trace
    heat: float  # 0 to 1, by the mean of its entries on a logarithmic scale
    tip: str
    x: float
    y: float
    width: float
    height: float
    tiles: tuple[Tile, ...] = ()

    @property
    def style(self) -> str:
        """Its place and size in the box around it, as CSS."""
        places = {"left": self.x, "top": self.y, "width": self.width, "height": self.height}
        return ";".join(f"{name}:{coordinate(value)}%" for name, value in places.items())

    def label(self, component: str) -> str:
        """Its name inside the box of its component."""
        return self.name.removeprefix(component).lstrip(".") or self.name

    @property
    def tone(self) -> str:
        """How dark it is, for the text on it."""
        return "strong" if self.heat > 0.66 else "middle" if self.heat > 0.45 else "weak"


def treemap(summary: Summary) -> list[Tile]:
    """The data of the map; what is zero has no area and is left out."""
    means = sorted(math.log10(one.mean) for one in summary.parameters if one.share >= _SMALL)
    low, high = (means[0], means[-1]) if means else (0.0, 1.0)

    def heat(one: Statistics) -> float:
        return min(1.0, max(0.0, (math.log10(one.mean) - low) / (high - low or 1.0))) if one.total else 0.0

    inside: dict[str, list[Statistics]] = {}
    for one in summary.parameters:
        inside.setdefault(summary.component_of[one.name], []).append(one)
    boxes = []
    for (x, y, w, h), component, share, number_of in _placed(summary.components, _TINY, _ASPECT):
        if component is None:
            names = f"{number_of} smaller components"
            boxes.append(Tile(names, share, 0.0, f"{names}\n{percent(share)} of the trace", x, y, w, h))
            continue
        tiles = _tiles(inside[component.name], w * _ASPECT / h, heat)
        boxes.append(Tile(component.name, share, heat(component), _tip(component), x, y, w, h, tiles))
    return boxes


def squarified(shares: Sequence[float], aspect: float) -> list[tuple[float, float, float, float]]:
    """Rectangles (x, y, width, height), in per cent of a box, with areas in proportion to descending shares.

    Bruls, Huizing and van Wijk's squarified treemap: a row takes shares as long as its worst aspect ratio improves.
    """
    total = sum(shares)
    if not total:
        return []
    x, y, width, height = 0.0, 0.0, aspect, 1.0
    areas = [share / total * aspect for share in shares]
    rectangles: list[tuple[float, float, float, float]] = []
    while len(rectangles) < len(areas):
        side, rest = max(min(width, height), 1e-12), areas[len(rectangles) :]  # rounding may leave no side at all
        n = 1
        while n < len(rest) and _worst(rest[: n + 1], side) <= _worst(rest[:n], side):
            n += 1
        thick, along = sum(rest[:n]) / side, 0.0
        for area in rest[:n]:
            length = area / thick
            rectangles.append((x, y + along, thick, length) if height <= width else (x + along, y, length, thick))
            along += length
        if height <= width:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
    return [(100 * a / aspect, 100 * b, 100 * w / aspect, 100 * h) for a, b, w, h in rectangles]


def _tiles(parameters: list[Statistics], aspect: float, heat: Callable[[Statistics], float]) -> tuple[Tile, ...]:
    tiles = []
    for place, one, share, number_of in _placed(parameters, _SMALL, max(0.05, aspect)):
        if one is not None:
            tiles.append(Tile(one.name, share, heat(one), _tip(one), *place))
            continue
        largest = max((other for other in parameters if 0 < other.share < _SMALL), key=lambda other: other.mean)
        tip = f"{number_of} smaller parameters\n{percent(share)} of the trace"
        tiles.append(Tile(f"{number_of} smaller", share, heat(largest), tip, *place))
    return tuple(tiles)


def _placed(
    parts: Sequence[Statistics], smallest: float, aspect: float
) -> Iterator[tuple[tuple[float, float, float, float], Statistics | None, float, int]]:
    """Place, part and share of all parts; several below `smallest` share a place, with None and their number."""
    shown = sorted((one for one in parts if one.share >= smallest), key=lambda one: -one.share)
    rest = [one for one in parts if 0 < one.share < smallest]
    shown, rest = ([*shown, *rest], []) if len(rest) == 1 else (shown, rest)
    shares = [one.share for one in shown] + ([sum(one.share for one in rest)] if rest else [])
    places = squarified(shares, aspect)
    yield from zip(places, [*shown, *([None] if rest else [])], shares, [len(rest)] * len(shares), strict=True)


def _worst(row: Sequence[float], side: float) -> float:
    """The worst aspect ratio of areas laid in a row along a side."""
    total = sum(row)
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * min(row)))


def _tip(one: Statistics) -> str:
    size = "×".join(map(str, one.shape)) or f"{one.entries:,} entries"
    return f"{one.name}\n{percent(one.share)} of the trace, mean {number(one.mean)}\n{size}"
