"""Who draws results.  The stage of reports comes after this one, so it enters its functions here, as layers' rules do.

A result's `plot`, `report` and `_repr_html_` look here for what to call; nothing in this stage knows how it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_drawings: dict[str, Callable[..., Any]] = {}


def draws(name: str) -> Callable[[Function], Function]:
    """Enter a function as the one that does `name` for a result."""

    def enter(function: Function) -> Function:
        _drawings[name] = function
        return function

    return enter


def drawing(name: str) -> Callable[..., Any]:
    """The function that does `name`; `import neuromanifold` has entered all of them."""
    return _drawings[name]
