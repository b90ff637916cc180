"""Files of results: safetensors for tensors, JSON for numbers; written whole or not at all, read by `load`.

save_tensors, save_json     write beside the target, then rename it: a crash leaves the old file as it was
@reads("diagonal")          registers the function that makes a result from a file's tensors and header
load(path)                  finds the kind in the header and calls that function

Tensors are mapped into memory: they are read from the disk when they are used.  Those of large results are in several
files with an index (`sharded.py`), and what is computed from them waits until it is asked for (`LazyTensors`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

FORMAT = "neuromanifold"
VERSION = 1
INDEX, PART = ".index.json", "part"  # what the name of an index ends with; the kind of the files that it names

Reader = TypeVar("Reader", bound=Callable[[Any, dict[str, Any]], object])

_readers: dict[str, Callable[[Any, dict[str, Any]], object]] = {}
_AGAIN = "Make it again."
_ESTIMATE = "nm.fisher_diagonal, or `neuromanifold estimate`, makes a result of a model and its data."
_CHECKPOINT = (
    "is the checkpoint of a run that has not ended, not a result. Repeat the call or the command that wrote it: "
    "it resumes there and returns the result."
)


class FileError(ValueError):
    """A file that cannot be read as a result: damaged, foreign, or written by a later version.

    The message says which of these, and what to do.
    """


def reads(kind: str) -> Callable[[Reader], Reader]:
    """Register a function from tensors and header to a result as the reader of files of this kind."""

    def register(reader: Reader) -> Reader:
        _readers[kind] = reader
        return reader

    return register


def load(path: str | Path) -> Any:
    """Read a result of any kind from its file: a diagonal, a trace, factors, blocks, a matrix, bounds or a penalty.

    The kind is in the file, so its name does not matter, and nothing in a file is ever run (there are no pickles).

    Args:
        path: what `save` of a result wrote.

    Returns:
        The result, on the CPU.

    Raises:
        FileError: the file is no result, is damaged, or was written by a later version.
        FileNotFoundError, IsADirectoryError: there is no such file.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/fisher.safetensors"
        >>> nm.fisher_diagonal(model, data).save(path)
        >>> nm.load(path).count
        32
    """
    tensors: Mapping[str, Tensor] = {}
    if not in_several_files(path) and _beginning(path).startswith(b"{"):
        head = load_json(path)
    else:
        tensors, head = load_tensors(path)
    kind = str(head.get("kind", ""))
    if kind == "checkpoint":
        raise FileError(f"{path} {_CHECKPOINT}")
    if kind == PART:
        raise FileError(f"{path} has a part of a result's tensors. Read {Path(path).parent / head['index']}.")
    if kind not in _readers:
        raise FileError(f"{path} holds {kind or 'nothing'!r}, not a result: expected one of {', '.join(_readers)}.")
    try:
        return _readers[kind](tensors, head)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is damaged: its {kind} cannot be read ({error!r}). {_AGAIN}") from error


def without_nan(value: Any) -> Any:
    """The same numbers, dicts and lists with None for what is not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are computed whenever one of them is asked for, such as sums of results that memory cannot hold."""

    def __init__(self, function: Callable[..., Tensor], *sources: Mapping[str, Any]) -> None:
        self._function, self._sources = function, sources

    def __getitem__(self, name: str) -> Tensor:
        return self._function(*(source[name] for source in self._sources))

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources[0])

    def __len__(self) -> int:
        return len(self._sources[0])

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._sources[0]


def mapped(function: Callable[..., Tensor], *sources: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Apply a function to the tensors of a name, for each name of the first source; later if any of them waits."""
    if any(isinstance(source, LazyTensors) for source in sources):
        return LazyTensors(function, *sources)
    return {name: function(*(source[name] for source in sources)) for name in sources[0]}


def renamed(source: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Return some of the tensors under other names (new: old); they go on to wait if they do."""
    if isinstance(source, LazyTensors):
        if missing := [old for old in names.values() if old not in source]:
            raise KeyError(missing[0])
        return LazyTensors(source.__getitem__, names)
    return {name: source[old] for name, old in names.items()}


def index_of(path: str | Path) -> Path:
    """Return where the index of a result of this name is if it is in several files: beside it, or it is the index."""
    path = Path(path)
    return path if path.name.endswith(INDEX) else path.with_name(path.name + INDEX)


def in_several_files(path: str | Path) -> bool:
    """Whether the name stands for an index: where both are there, a whole file is the older one or the newer one."""
    path = Path(path)
    return path.name.endswith(INDEX) or (not path.exists() and index_of(path).is_file())


def load_tensors(path: str | Path, only: Container[str] | None = None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote: the tensors (or `only` some of them), and the header with its "kind".

    The tensors of several files are `LazyTensors`.
    """
    if in_several_files(path):
        head, where = load_index(path)
        found: dict[str, Tensor] = {}
        for file in sorted(set(where.values())):
            wanted = [name for name, other in where.items() if other == file and (only is None or name in only)]
            found |= _part(file, wanted, head, path)
        return LazyTensors(lambda value: value, found), head
    start = _beginning(path)
    try:
        with safe_open(path, framework="pt") as file:
            head, names = dict(file.metadata() or {}), list(file.keys())
            holds = f"It holds {len(names)} tensors such as {names[0]!r}: the weights of a model? " if names else ""
            _check_head(path, head, holds + _ESTIMATE)
            return {name: file.get_tensor(name) for name in names if only is None or name in only}, head
    except SafetensorError as error:
        what = "is truncated or damaged" if start[8:9] == b"{" else "is not a safetensors file, or is damaged"
        raise FileError(f"{path} {what} ({error}). {_AGAIN}") from error


def load_index(path: str | Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the header of a result in several files, and in which of them each tensor is."""
    index = index_of(path)
    _beginning(index)
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
        head, where = dict(values["metadata"]), {name: str(file) for name, file in values["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{index} is not the index of a result, or is damaged ({error!r}). {_AGAIN}") from error
    _check_head(index, head, f"It is the index of a model's weights? {_ESTIMATE}")
    return head, {name: index.parent / Path(file).name for name, file in where.items()}


def files_of(path: str | Path) -> list[Path]:
    """Return the safetensors files of a result."""
    return sorted(set(load_index(path)[1].values())) if in_several_files(path) else [Path(path)]


def _part(file: Path, names: list[str], head: dict[str, Any], path: str | Path) -> dict[str, Tensor]:
    """Return tensors of one of the files of an index, which must be of the same result."""
    if not file.is_file():
        raise FileError(
            f"{index_of(path)} names {file.name}, which is not there: all files of a result belong together."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get("result") != head["result"]:
                raise FileError(f"{file} is a part of another result than {index_of(path)}. {_AGAIN}")
            return {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise FileError(f"{file} is truncated or damaged ({error}). {_AGAIN}") from error


def load_json(path: str | Path) -> dict[str, Any]:
    """Read the values that `save_json` wrote; an error for any other file."""
    _beginning(path)
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is not a JSON file, or is truncated or damaged ({error}). {_AGAIN}") from error
    head = values if isinstance(values, dict) else {}
    config = "It is the configuration of a model. " if {"model_type", "architectures"} & head.keys() else ""
    _check_head(path, {key: str(head.get(key, "")) for key in ("format", "version")}, config + _ESTIMATE)
    return head


def _beginning(path: str | Path) -> bytes:
    """The first bytes of a file that may be a result; an error for whatever is recognisably none."""
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            raise IsADirectoryError(f"{path} is the folder of a model, not a result. {_ESTIMATE}")
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".safetensors", ".json"))
        some = f", such as {' or '.join(inside[:2])}" if inside else ""
        raise IsADirectoryError(f"{path} is a folder, not a result. Name a file{some}.")
    if not path.is_file():
        others = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, others, 1)
        raise FileNotFoundError(f"No file {path}." + (f" Did you mean {near[0]}?" if near else ""))
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise FileError(f"{path} is empty: it was never written to the end. {_AGAIN}")
    if start.startswith(b"PK\x03\x04") or (start.startswith(b"\x80") and start[8:9] not in (b"{", b"")):
        advice = "A pickle can run any code, so none is read; fim.save(path) writes a file that nm.load reads."
        raise FileError(f"{path} is a pickle or an archive (torch.save), not a result. {advice}")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise FileError(f"{path} is a page, not a result. Give the .safetensors file that the page was made from.")
    return start


def _check_head(path: str | Path, head: dict[str, str], otherwise: str) -> None:
    if head.get("format") != FORMAT or not head.get("version", "").isdigit():
        raise FileError(f"{path} was not written by neuromanifold. {otherwise}")
    if int(head["version"]) > VERSION:
        got = f"{path} has version {head['version']}, this library reads up to {VERSION}"
        raise FileError(f"{got}: install a later neuromanifold.")


# ---------------------------------------------------------------------------------------------------------- writing


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], kind: str, metadata: dict[str, str]) -> None:
    """Write tensors and text to a safetensors file, all or nothing."""
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head = {"format": FORMAT, "version": str(VERSION), "kind": kind, **metadata}

    def write(aside: Path) -> None:
        save_file(contents, aside, metadata=head)
        _sort_metadata(aside)

    _write_aside(Path(path), write)


def _sort_metadata(path: Path) -> None:
    """Sort the header, whose length stays: safetensors has a random order, and equal results should be equal files."""
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
    save_text(path, json.dumps({"format": FORMAT, "version": VERSION, "kind": kind, **values}, indent=2) + "\n")


def save_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, all or nothing."""
    _write_aside(Path(path), lambda aside: aside.write_text(text, encoding="utf-8"))


def check_destination(path: str | Path, size: int = 0) -> None:
    """Raise an OSError that says why if a file of `size` bytes cannot be written there."""
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file to write to.")
    if path.exists() and not path.is_file():  # it would be replaced
        raise FileExistsError(f"{path} is a device or a pipe; name a file to write to.")
    if not folder.is_dir():
        raise FileNotFoundError(f"No folder {folder} to write {path.name} to; make it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"The folder {folder} cannot be written to: it is read-only. Write {path.name} elsewhere."
        )
    free = shutil.disk_usage(folder).free if size else 0
    if size > free:
        text = f"{path.name} takes {byte_size(size)}, and {byte_size(free)} are free in {folder}"
        raise OSError(errno.ENOSPC, f"{text}. Make room, or write elsewhere")


def _write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Write in a folder beside the target, and rename once it is on the disk: a power cut may come in between.

    On any error the old file is still there.  The folder is there because safetensors has names of its own for what it
    has not finished: all of that is in one place if the process is killed.
    """
    path = path.resolve() if path.is_symlink() else path
    check_destination(path)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as folder:
        aside = Path(folder) / path.name
        try:
            write(aside)
        except SafetensorError as error:
            if code := re.search(r"os error (\d+)", str(error)):  # a full disk is no matter of the format
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
            raise
        aside.chmod(0o644)
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)


def remove_unfinished(path: Path) -> None:
    """Remove the folder that a process left which was killed while it wrote `path`, and nothing else."""
    named = re.compile(re.escape(f".{path.name}.") + "[a-z0-9_]{8}")  # as tempfile does
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        if named.fullmatch(entry.name) and entry.is_dir():
            inside = [one.name for one in entry.iterdir()]
            if all(name == path.name or name.startswith(".tmp") for name in inside):
                shutil.rmtree(entry, ignore_errors=True)


def byte_size(count: float) -> str:
    """A number of bytes with its unit, such as "3.2 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
