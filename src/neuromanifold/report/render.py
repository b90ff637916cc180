"""The templates of the page, rendered by jinja2 with everything escaped that is not markup itself."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from markupsafe import Markup

from neuromanifold.report import formats

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: object) -> str:
    """The text of a template of this package."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # late: only who makes a page needs it

    loader = PackageLoader(__package__ or "")
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    of_formats = (formats.number, formats.percent, formats.error, formats.counted, formats.brief)
    made.filters |= {one.__name__: one for one in of_formats}
    made.filters |= {"at": formats.coordinate, "dotted": _dotted, "prose": _prose}
    made.globals["asset"] = _asset
    return made


def _dotted(name: str) -> Markup:
    """A name that may be broken after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def _prose(sentence: str) -> Markup:
    """A sentence whose names stand in `backticks`."""
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(part) if i % 2 else part for i, part in enumerate(sentence.split("`")))


def _asset(name: str) -> Markup:
    """The text of a style sheet or script that comes with the package."""
    return Markup(files(__package__ or "").joinpath("assets", name).read_text(encoding="utf-8"))
