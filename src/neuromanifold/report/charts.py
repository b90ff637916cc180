"""What the charts of a page are drawn with: HTML and inline SVG.

A chart is drawn in per cent of its box, with strokes that do not scale and texts beside the SVG, so that it fits a
phone, a screen and a sheet of paper without a script.  The page's script shows what
`data_tip` says, for mouse and keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuromanifold.report.markup import Markup, coordinate, element


def svg(width: int, drawn: Sequence[Markup], cls: str | None = None) -> Markup:
    """A picture `width` wide and 100 high, stretched to the box it stands in."""
    given = {"viewBox": f"0 0 {width} 100", "preserveAspectRatio": "none", "aria_hidden": "true", "focusable": "false"}
    return element("svg", *drawn, cls=cls, **given)


def box(x: float, width: float, share: float = 1.0, cls: str = "", **more: object) -> Markup:
    """A rectangle that stands on the ground and reaches up to a share of the height."""
    places = {"x": x, "y": 100 - 100 * share, "width": width, "height": 100 * share}
    return element("rect", **{key: coordinate(value) for key, value in places.items()}, cls=cls, **more)


def chart(kind: str, text: str, *children: object) -> Markup:
    """A chart that can have the focus; its marks are reached by arrow keys."""
    given = {"tabindex": "0", "role": "group", "aria_roledescription": "chart", "aria_label": text}
    return element("div", *children, cls=f"chart {kind}", **given)
