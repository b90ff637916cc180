"""Files: safetensors for tensors, JSON for numbers; written aside and renamed, so that nothing is ever half written."""

from __future__ import annotations

import json
import os
import re
import shutil
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

    def write(aside: Path) -> None:
        save_file(contents, aside, metadata=head)
        _sort_metadata(aside)

    _write_aside(Path(path), write)


def _sort_metadata(path: Path) -> None:
    """In the header, whose length stays: safetensors has a random order, and equal results should be equal files."""
    with path.open("rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def save_json(path: str | Path, kind: str, values: dict[str, object]) -> None:
    """Write numbers and text to a JSON file, all or nothing."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "kind": kind, **values}, indent=2)
    _write_aside(Path(path), lambda aside: aside.write_text(text + "\n"))


def save_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, all or nothing."""
    _write_aside(Path(path), lambda aside: aside.write_text(text, encoding="utf-8"))


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


def kind_of(path: str | Path) -> str:
    """What a file that `save_tensors` wrote holds, without reading it all."""
    _must_exist(Path(path))
    try:
        with safe_open(path, framework="pt") as file:
            head = dict(file.metadata() or {})
    except SafetensorError as error:
        raise FileError(f"{path} is not a safetensors file, or is damaged ({error}). Make it again.") from error
    _check_head(path, head)
    return str(head.get("kind", ""))


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
    """Write in a folder beside the target, and rename once it is on the disk: a power cut may come in between.

    On any error the old file is still there.  The folder is there because safetensors has names of its own for what it
    has not finished: all of that is in one place if the process is killed.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file to write to.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"No folder {path.parent} to write {path.name} to; make it first.")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as folder:
        aside = Path(folder) / path.name
        write(aside)
        aside.chmod(0o644)
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)


def remove_unfinished(path: Path) -> None:
    """The folder that a process which was killed while writing has left; not what others have named like that."""
    named = re.compile(re.escape(f".{path.name}.") + "[a-z0-9_]{8}")  # as tempfile does
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        if named.fullmatch(entry.name) and entry.is_dir():
            inside = [one.name for one in entry.iterdir()]
            if all(name == path.name or name.startswith(".tmp") for name in inside):
                shutil.rmtree(entry, ignore_errors=True)
