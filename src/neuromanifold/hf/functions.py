"""`package.module:function`: models and data that are functions of the user's own."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LoadError

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_function_name(source: str) -> bool:
    """Whether `source` is written as module:function and no such file exists."""
    return _NAME.fullmatch(source) is not None and not Path(source).exists()


def find_function(source: str, argument: str) -> object:
    """Import the module of `module:name` and return the object; the current folder is searched as well."""
    module_name, _, path = source.partition(":")
    with _current_folder_importable():
        try:
            found: object = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # a module that the user's module imports
            advice = "Run from the folder it lies in, or install it."
            raise LoadError(message(argument, "module:function", f"no module {error.name!r}", advice)) from None
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if callable(getattr(found, name)) and not name.startswith("_")]
            got = f"{source!r}, but {module_name} has no {part!r}"
            raise LoadError(message(argument, "module:function", got, f"It has {', '.join(public[:12]) or 'none'}."))
        found = getattr(found, part)
    return found


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Put the current folder on sys.path, as `python -m` does and an installed command does not."""
    before, here = list(sys.path), str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path[:] = before
