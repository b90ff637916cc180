"""Results in several files, as Hugging Face has large models: whole tensors in each, and an index that says where.

    fim-00001-of-00002.safetensors      some tensors
    fim-00002-of-00002.safetensors      the others
    fim.safetensors.index.json          {"metadata": {kind, provenance, ...}, "weight_map": {tensor: file}}

The index is written last and all at once, and what it replaces is removed after that: whenever the writing ends, there
is the old result or the new one.  Several processes write files of their own, of tensors that are divided among them:
one tensor at a time is whole in all of them, and only the one that writes it keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from glob import escape
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import message
from neuromanifold.problem.fingerprint import fingerprint
from neuromanifold.results.files import (
    FORMAT,
    INDEX,
    PART,
    VERSION,
    check_destination,
    index_of,
    load_index,
    remove_unfinished,
    save_tensors,
    save_text,
)

T = TypeVar("T")
SHARD_SIZE = "5GB"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str | int, argument: str = "shard_size") -> int:
    """Return the bytes of a size such as "5GB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", str(text).strip().upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise ValueError(message(argument, "a size such as 5GB or 500MB", repr(text)))
    return size


def by_size(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide names into groups of at most so many bytes, in their order; a larger tensor is alone."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def save_result(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    kind: str,
    metadata: dict[str, str],
    shard_size: str | int = SHARD_SIZE,
    divided: bool = False,
) -> None:
    """Write tensors and text: to one safetensors file, or to several if they are larger than `shard_size`.

    `divided`: the tensors are DTensors of the processes of `torch.distributed`, all of which make this call.
    """
    path = Path(path)
    path = path.with_name(path.name.removesuffix(INDEX))
    path = path.resolve() if path.is_symlink() else path
    limit, sizes = parse_size(shard_size), {name: _bytes(tensors, name) for name in tensors}
    total, processes = sum(sizes.values()), _Divided() if divided else _Alone()
    groups = [names for names in by_size(sizes, min(limit, -(-total // processes.world))) if names]
    if not divided and len(groups) < 2:
        _refuse_model(path)
        save_tensors(path, tensors, kind, metadata)
        index_of(path).unlink(missing_ok=True)
        remove_parts(path)
        return
    stem = processes.do(lambda: None if processes.rank else _free_stem(path, total))[0]
    files = [path.with_name(f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors") for i in range(len(groups))]
    part = {"index": index_of(path).name, "result": fingerprint(("", json.dumps([kind, metadata, sizes])))}
    try:
        for start in range(0, len(groups), processes.world):
            held: dict[str, Tensor] = {}
            for i in range(start, min(start + processes.world, len(groups))):
                for name in groups[i]:
                    tensor = whole(tensors[name])
                    if i == start + processes.rank:
                        held[name] = tensor.detach().cpu()
                    del tensor
            processes.do(partial(_write_part, files[start + processes.rank :], held, part))
        head = {"format": FORMAT, "version": str(VERSION), "kind": kind, "result": part["result"], **metadata}
        where = {name: files[i].name for i, names in enumerate(groups) for name in names}
        index = {"metadata": {"total_size": total, **head}, "weight_map": where}
        processes.do(lambda: None if processes.rank else _write_index(path, index, files))
    except BaseException:  # Ctrl-C, too
        with suppress(Exception):
            named = load_index(path)[1].values() if index_of(path).is_file() else ()
            for file in set(files[processes.rank :: processes.world]) - set(named):
                file.unlink(missing_ok=True)
        raise
    processes.do(lambda: None if processes.rank else _remove_old(path, files))


def whole(tensor: Any) -> Tensor:
    """Return a tensor that is divided among processes as each of them would have it: all of them call this."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _bytes(tensors: Mapping[str, Tensor], name: str) -> int:
    tensor = tensors[name]
    return tensor.numel() * tensor.element_size()


def _free_stem(path: Path, size: int) -> str:
    """Return a beginning of names that no file has: those of the result that is replaced stay until the end."""
    check_destination(path, size)
    _refuse_model(path)
    name = path.name.removesuffix(".safetensors")
    stems = (name if not i else f"{name}.{i}" for i in count())
    return next(stem for stem in stems if not list(path.parent.glob(f"{escape(stem)}-*-of-*.safetensors")))


def _refuse_model(path: Path) -> None:
    """Raise an error if the index of this name, which would be replaced, is that of a model's weights."""
    head: Any = {"format": FORMAT}
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads(index_of(path).read_text(encoding="utf-8"))
        head = dict(values["metadata"] if values["weight_map"] else head)
    if head.get("format") != FORMAT:
        raise FileExistsError(f"{index_of(path)} is the index of a model's weights; name another file to write to.")


def _write_part(files: list[Path], tensors: dict[str, Tensor], part: dict[str, str]) -> None:
    """Write the first of the files, if there is something to write."""
    if tensors:
        save_tensors(files[0], tensors, PART, part)


def _write_index(path: Path, index: dict[str, Any], files: Sequence[Path]) -> None:
    if missing := [file.name for file in files if not file.is_file()]:
        got = f"a folder in which rank 0 does not see {missing[0]}"
        raise FileNotFoundError(message("path", "in a folder that all processes share", got))
    save_text(index_of(path), json.dumps(index, indent=2) + "\n")


def _remove_old(path: Path, files: Sequence[Path]) -> None:
    """Remove what an index has replaced, and what was left by a process that was killed."""
    path.unlink(missing_ok=True)
    remove_parts(path, files)


def remove_parts(path: Path, keep: Sequence[Path] = ()) -> None:
    """Remove files of tensors of other results of this name, and what a process that was killed has not finished.

    What fim.1.safetensors has in parts looks like what fim.safetensors may have: each part says which index it is of.
    """
    named = re.compile(re.escape(path.name.removesuffix(".safetensors")) + r"(\.\d+)?-\d{5}-of-\d{5}\.safetensors")
    remove_unfinished(path)
    remove_unfinished(index_of(path))
    for file in path.absolute().parent.iterdir():
        if named.fullmatch(file.name.removeprefix(".").rpartition(".")[0]):
            remove_unfinished(file.with_name(file.name[1:-9]))
        if named.fullmatch(file.name) and file.name not in {one.name for one in keep}:
            with suppress(OSError, SafetensorError), safe_open(file, framework="pt") as opened:
                head = opened.metadata() or {}
                if (head.get("format"), head.get("kind"), head.get("index")) == (FORMAT, PART, index_of(path).name):
                    file.unlink()


class _Alone:
    """A single process, which has whole tensors."""

    rank, world = 0, 1

    def do(self, action: Callable[[], T]) -> list[T]:
        """Return what the action returns in each process."""
        return [action()]


class _Divided(_Alone):
    """The processes of torch.distributed, among which tensors are divided."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @override
    def do(self, action: Callable[[], T]) -> list[T]:
        """An error in one of them is an error in all."""
        found: list[Any] = [None] * self.world
        value, raised = None, None
        try:
            value = action()
        except Exception as error:
            raised = error
        dist.all_gather_object(found, (value, None if raised is None else f"{type(raised).__name__}: {raised}"))
        if raised is not None:
            raise raised
        if failed := [(rank, text) for rank, (_, text) in enumerate(found) if text]:
            raise OSError(f"Rank {failed[0][0]} could not write its part of the result ({failed[0][1]}).")
        return [value for value, _ in found]
