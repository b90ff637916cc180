"""What a result's `plot`, `report` and `_repr_html_` call: functions of a later stage, named by the package itself.

`neuromanifold/__init__.py`, which knows every stage, calls `draw_with` once; this stage imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_functions: dict[str, Callable[..., Any]] = {}


def draw_with(**functions: Callable[..., Any]) -> None:
    """Set the functions that draw results: `plot`, `report` and `html`."""
    _functions.update(functions)


def drawing(name: str) -> Callable[..., Any]:
    """The function that was set for `plot`, `report` or `html`."""
    return _functions[name]
