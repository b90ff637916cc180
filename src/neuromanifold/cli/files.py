"""Checks of output files and folders, made before a model is loaded or anything is computed."""

from __future__ import annotations

from pathlib import Path

from neuromanifold.core.checks import message
from neuromanifold.results.files import check_destination


def check_output(path: Path, *inputs: Path | str | None) -> None:
    """Raise an error if the file cannot be written, or is one that the command reads or keeps for later."""
    check_destination(path)
    if any(path.resolve() == Path(other).resolve() for other in inputs if other is not None):
        raise ValueError(message("output", "a file of its own", f"{path}, which is given for something else as well"))


def check_creatable(path: Path) -> None:
    """Raise an error if the file cannot be written, even with the folders created that it is to be in."""
    first = path.absolute()
    while not first.parent.exists():
        first = first.parent
    if not first.parent.is_dir():
        raise NotADirectoryError(f"{first.parent} is a file; name a folder to write to.")
    check_destination(first)
