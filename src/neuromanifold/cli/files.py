"""Reading results for commands."""

from __future__ import annotations

from pathlib import Path

from neuromanifold.bounds.result import NetworkBounds
from neuromanifold.core.checks import message
from neuromanifold.operators import load
from neuromanifold.results import DiagonalFisher, FileError
from neuromanifold.results.files import is_json, kind_of

_ARCHIVE, _PICKLE = b"PK\x03\x04", b"\x80"  # what torch.save's files and plain pickles begin with


def read_diagonal(path: Path) -> DiagonalFisher:
    """A diagonal, and nothing else."""
    result = read_result(path)
    if not isinstance(result, DiagonalFisher):
        expected = "a diagonal (neuromanifold estimate writes one)"
        raise ValueError(message("file", expected, f"{type(result).__name__} in {path}"))
    return result


def read_result(path: Path) -> object:
    """Whatever result a file holds; pickles are named as such."""
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(9)
        if start.startswith(_ARCHIVE) or (
            start.startswith(_PICKLE) and start[8:] != b"{"
        ):  # safetensors has that there
            advice = "A pickle can run any code, so none is read; results are safetensors files."
            raise FileError(f"{path} is a pickle (torch.save), not a result of neuromanifold. {advice}")
        if not is_json(path) and kind_of(path) == "bounds":
            return NetworkBounds.load(path)
        if not is_json(path) and kind_of(path) == "checkpoint":
            advice = "The command that has written it goes on with it, and writes the result."
            raise FileError(f"{path} is the checkpoint of a run that has not ended, not a result. {advice}")
    return load(path)
