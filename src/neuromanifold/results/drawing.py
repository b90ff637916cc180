"""What a result's `plot`, `report` and `_repr_html_` call: functions of a later stage, named by the package itself.

`neuromanifold/__init__.py`, which knows every stage, calls `draw_with` once; this stage imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_functions: dict[str, Callable[..., Any]] = {}


def draw_with(**functions: Callable[..., Any]) -> None:
    """Set the functions that draw results: `plot`, `report` and `html`."""
    _functions.update(functions)


def drawing(name: str) -> Callable[..., Any]:
    """The function that was set for `plot`, `report` or `html`."""
    return _functions[name]


@contextmanager
def needs_matplotlib(advice: str = "") -> Iterator[None]:
    """Turn the error of a missing matplotlib into one that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        text = f"Plots need matplotlib: pip install 'neuromanifold[plots]'.{advice}"
        raise ModuleNotFoundError(text, name=error.name) from error
