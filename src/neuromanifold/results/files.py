"""Files: safetensors for tensors, JSON for numbers; written aside and renamed, so that nothing is ever half written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "neuromanifold"
VERSION = 1


class FileError(ValueError):
    """A file that cannot be read as a result: damaged, foreign, or from a later version."""


def save_tensors(path: str | Path, tensors: dict[str, Tensor], kind: str, metadata: dict[str, str]) -> None:
    """Write tensors and text to a safetensors file, all or nothing."""
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head = {"format": FORMAT, "version": str(VERSION), "kind": kind, **metadata}
    _write_aside(Path(path), lambda aside: save_file(contents, aside, metadata=head))


def save_json(path: str | Path, kind: str, values: dict[str, object]) -> None:
    """Write numbers and text to a JSON file, all or nothing."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "kind": kind, **values}, indent=2)
    _write_aside(Path(path), lambda aside: aside.write_text(text + "\n"))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `save_tensors` wrote."""
    _must_exist(Path(path))
    try:
        with safe_open(path, framework="pt") as file:
            head = dict(file.metadata() or {})
            _check_head(path, head)
            return {name: file.get_tensor(name) for name in file.keys()}, head  # noqa: SIM118
    except SafetensorError as error:
        raise FileError(f"{path} is not a safetensors file, or is damaged ({error}). Make it again.") from error


def load_json(path: str | Path) -> dict[str, object]:
    """Read what `save_json` wrote."""
    _must_exist(Path(path))
    try:
        values = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is not a JSON file, or is damaged ({error}). Make it again.") from error
    if not isinstance(values, dict):
        raise FileError(f"{path} is a JSON file, but not one that neuromanifold has written.")
    _check_head(path, {key: str(value) for key, value in values.items() if key in ("format", "version", "kind")})
    return values


def is_json(path: str | Path) -> bool:
    """Whether a file holds JSON, by its beginning; by its name if there is no such file."""
    path = Path(path)
    if not path.is_file():
        return path.suffix == ".json"
    with path.open("rb") as file:
        return file.read(1) == b"{"


def _check_head(path: str | Path, head: dict[str, str]) -> None:
    if head.get("format") != FORMAT or not head.get("version", "").isdigit():
        raise FileError(f"{path} was not written by neuromanifold (no '{FORMAT}' mark in it).")
    if int(head["version"]) > VERSION:
        found = head["version"]
        raise FileError(
            f"{path} has version {found}, this library reads up to {VERSION}: install a later neuromanifold."
        )


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}.")


def _write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a file beside the target and rename it; on any error the old file is still there."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"No folder {path.parent} to write {path.name} to; make it first.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    aside = Path(name)
    try:
        write(aside)
        aside.chmod(0o644)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
