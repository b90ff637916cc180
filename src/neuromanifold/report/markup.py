"""HTML and SVG as text that is safe by construction, and numbers as people write them."""

from __future__ import annotations

import html
import math
from importlib.resources import files

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_VOID = {"input", "path", "rect", "line"}


class Markup(str):
    """Text that is already HTML; any other text is escaped where it is put in."""

    __slots__ = ()


def element(name: str, *children: object, **attributes: object) -> Markup:
    """<name attributes>children</name>; `cls` stands for class, `data_tip` for data-tip, None for no attribute."""
    given = {"class" if key == "cls" else key.replace("_", "-"): value for key, value in attributes.items()}
    texts = [f' {key}="{html.escape(str(value))}"' for key, value in given.items() if value is not None]
    opening = f"<{name}{''.join(texts)}>"
    if name in _VOID and not children:
        return Markup(f"{opening[:-1]}/>")
    return Markup(f"{opening}{joined(children)}</{name}>")


def joined(children: object) -> Markup:
    """Several pieces one after the other, escaped where they are not markup."""
    if isinstance(children, Markup):
        return children
    if isinstance(children, (list, tuple)):
        return Markup("".join(joined(child) for child in children))
    return Markup(html.escape(str(children)))


def dotted(name: str) -> Markup:
    """A name that may be broken after its dots."""
    return Markup(".<wbr>".join(joined(part) for part in name.split(".")))


def prose(sentence: str) -> Markup:
    """A sentence whose names stand in `backticks`."""
    parts = sentence.split("`")
    return Markup("".join(element("code", part) if i % 2 else joined(part) for i, part in enumerate(parts)))


def asset(name: str) -> str:
    """The text of a file that comes with the package."""
    return files("neuromanifold.report").joinpath("assets", name).read_text(encoding="utf-8")


def number(value: float, digits: int = 3) -> str:
    """Three digits: 0.0123, 1,072, 1.84×10⁻⁵; a dash for what is not there."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 < exponent < 6:
        rounded = float(f"{value:.{digits - 1}e}")
        return f"{rounded:,.{max(0, digits - 1 - exponent)}f}"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPT)}"


def power_of_ten(exponent: int) -> str:
    """10⁻⁵."""
    return f"10{str(exponent).translate(_SUPERSCRIPT)}"


def coordinate(value: float) -> str:
    """A position in a picture, to two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
