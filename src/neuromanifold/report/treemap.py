"""Where the trace sits: components as boxes, their parameters as tiles inside, every area a share of the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neuromanifold.report.charts import chart
from neuromanifold.report.markup import Markup, coordinate, element, number
from neuromanifold.report.reading import percent
from neuromanifold.report.summary import Statistics, Summary, short_names

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


def treemap(summary: Summary) -> list[Tile]:
    """The data of the map; what is zero has no area and is left out."""
    means = sorted(math.log10(one.mean) for one in summary.parameters if one.share >= _SMALL)
    low, high = (means[0], means[-1]) if means else (0.0, 1.0)

    def heat(one: Statistics) -> float:
        return min(1.0, max(0.0, (math.log10(one.mean) - low) / (high - low or 1.0))) if one.total else 0.0

    inside: dict[str, list[Statistics]] = {}
    for one in summary.parameters:
        inside.setdefault(summary.component_of[one.name], []).append(one)
    large = sorted((one for one in summary.components if one.share >= _TINY), key=lambda one: -one.share)
    rest = [one for one in summary.components if 0 < one.share < _TINY]
    shares = [one.share for one in large] + ([sum(one.share for one in rest)] if rest else [])
    made = []
    for i, (x, y, w, h) in enumerate(squarified(shares, _ASPECT)):
        if i == len(large):
            names = f"{len(rest)} smaller components"
            made.append(Tile(names, shares[i], 0.0, f"{names}\n{percent(shares[i])} of the trace", x, y, w, h))
            continue
        tiles = _tiles(inside[large[i].name], w * _ASPECT / h, heat)
        made.append(Tile(large[i].name, large[i].share, heat(large[i]), _tip(large[i]), x, y, w, h, tiles))
    return made


def squarified(shares: Sequence[float], aspect: float) -> list[tuple[float, float, float, float]]:
    """Rectangles (x, y, width, height), in per cent of a box, with areas in proportion to descending shares.

    Bruls, Huizing and van Wijk's squarified treemap: a row takes shares as long as its worst aspect ratio improves.
    """
    total = sum(shares)
    if not total:
        return []
    x, y, width, height = 0.0, 0.0, aspect, 1.0
    areas = [share / total * aspect for share in shares]
    made: list[tuple[float, float, float, float]] = []
    while len(made) < len(areas):
        side, rest = max(min(width, height), 1e-12), areas[len(made) :]  # rounding may leave no side at all
        n = 1
        while n < len(rest) and _worst(rest[: n + 1], side) <= _worst(rest[:n], side):
            n += 1
        thick, along = sum(rest[:n]) / side, 0.0
        for area in rest[:n]:
            length = area / thick
            made.append((x, y + along, thick, length) if height <= width else (x + along, y, length, thick))
            along += length
        if height <= width:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
    return [(100 * a / aspect, 100 * b, 100 * w / aspect, 100 * h) for a, b, w, h in made]


def draw_treemap(tiles: Sequence[Tile], title: str, layers: Sequence[str] = ()) -> Markup:
    """Boxes and tiles placed in per cent; what has no room for its name shows it on hovering."""
    short = short_names([tile.name for tile in tiles], layers)
    boxes = []
    for tile in tiles:
        inner = [_drawn(one, one.name.removeprefix(tile.name).lstrip(".") or one.name, "tile") for one in tile.tiles]
        share = element("span", percent(tile.share))
        head = element("div", element("b", short[tile.name]), " ", share, cls="box-head", title=tile.name)
        body = element("div", *inner, cls="box-body")
        content = [head, body] if inner else [head]
        more = {"data_tip": tile.tip} if not inner else {}
        boxes.append(element("div", *content, cls="box", style=_place(tile), **more))
    text = f"Where the trace of {title} sits: {len(tiles)} components. "
    return chart("treemap", text + "Arrow keys go from tile to tile, Enter finds it in the table.", *boxes)


def _tiles(parameters: list[Statistics], aspect: float, heat: Callable[[Statistics], float]) -> tuple[Tile, ...]:
    shown = sorted((one for one in parameters if one.share >= _SMALL), key=lambda one: -one.share)
    rest = [one for one in parameters if 0 < one.share < _SMALL]
    shares = [one.share for one in shown] + ([sum(one.share for one in rest)] if rest else [])
    made = []
    for i, place in enumerate(squarified(shares, max(0.05, aspect))):
        if i < len(shown):
            made.append(Tile(shown[i].name, shares[i], heat(shown[i]), _tip(shown[i]), *place))
        else:
            name = rest[0].name if len(rest) == 1 else f"{len(rest)} smaller"
            largest = max(rest, key=lambda one: one.mean)
            tip = (
                _tip(rest[0])
                if len(rest) == 1
                else f"{len(rest)} smaller parameters\n{percent(shares[i])} of the trace"
            )
            made.append(Tile(name, shares[i], heat(largest), tip, *place))
    return tuple(made)


def _worst(row: Sequence[float], side: float) -> float:
    """The worst aspect ratio of areas laid in a row along a side."""
    total = sum(row)
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * min(row)))


def _tip(one: Statistics) -> str:
    size = "×".join(map(str, one.shape)) or f"{one.entries:,} entries"
    return f"{one.name}\n{percent(one.share)} of the trace, mean {number(one.mean)}\n{size}"


def _drawn(tile: Tile, label: str, cls: str) -> Markup:
    texts = (element("b", label), element("span", percent(tile.share)))
    warm = f"{cls} {'strong' if tile.heat > 0.66 else 'middle' if tile.heat > 0.45 else 'weak'}"  # for the text on it
    place = f"{_place(tile)};--heat:{coordinate(100 * tile.heat)}%"
    return element("div", *texts, cls=warm, style=place, data_tip=tile.tip, data_name=tile.name)


def _place(tile: Tile) -> str:
    names = ("left", "top", "width", "height")
    values = (tile.x, tile.y, tile.width, tile.height)
    return ";".join(f"{name}:{coordinate(value)}%" for name, value in zip(names, values, strict=True))
