"""Loaded data: batches in a fixed order, made when they are asked for, as often as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.hf.errors import LoadError

_READ = 4096  # rows at a time

Made = dict[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Rows:
    """What a kind of data provides: how many rows, and how a batch is made of some of them."""

    count: int
    make: Callable[[list[int]], Made]
    about: str  # which data, in a line
    counts: Callable[[list[int]], list[bool]] | None = None  # which of some rows are not empty


@dataclass(frozen=True)
class LoadedData:
    """A re-iterable of batches; the same ones in the same order each time."""

    rows: tuple[int, ...]
    batch_size: int
    make: Callable[[list[int]], Made]
    about: str
    dtype: torch.dtype = torch.float32  # of inputs that are not integers

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Made]:
        """One batch is made ahead, by a thread, while the last one is worked on."""
        parts = [list(self.rows[i : i + self.batch_size]) for i in range(0, len(self.rows), self.batch_size)]
        with ThreadPoolExecutor(1, "batches") as thread:
            ahead = thread.submit(self._made, parts[0])
            for part in parts[1:]:
                batch, ahead = ahead.result(), thread.submit(self._made, part)
                yield batch
            yield ahead.result()

    @property
    def samples(self) -> int:
        """How many rows."""
        return len(self.rows)

    def of_size(self, batch_size: int) -> LoadedData:
        """The same rows in batches of another size."""
        return replace(self, batch_size=integer_in_range(batch_size, "batch_size", 1, 10**9, "samples in a batch"))

    def remembered(self, most: int) -> LoadedData:
        """The same, but batches that have been made are kept, up to so many bytes, for the next time."""
        return replace(self, make=_remembering(self.make, most))

    def _made(self, rows: list[int]) -> Made:
        made = self.make(rows)
        if isinstance(made, dict):
            return {name: value if name == "labels" else self._cast(value) for name, value in made.items()}
        return (self._cast(made[0]), *made[1:])

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def _remembering(make: Callable[[list[int]], Made], most: int) -> Callable[[list[int]], Made]:
    kept: dict[tuple[int, ...], Made] = {}
    room = most

    def made(rows: list[int]) -> Made:
        nonlocal room
        key = tuple(rows)
        if key in kept:
            return kept[key]
        batch = make(rows)
        size = sum(value.nbytes for value in (batch.values() if isinstance(batch, dict) else batch))
        if size <= room:
            kept[key], room = batch, room - size
        return batch

    return made


def in_batches(rows: Rows, batch_size: int, batches: int | None, seed: int, dtype: torch.dtype) -> LoadedData:
    """A fixed random order; a smaller subset is the beginning of a larger one."""
    integer_in_range(batch_size, "batch_size", 1, 10**9, "samples in a batch")
    if batches is not None:
        integer_in_range(batches, "batches", 1, 10**12, "how many batches")
    order = torch.randperm(rows.count, generator=torch.Generator().manual_seed(seed)).tolist()
    most = rows.count if batches is None else batches * batch_size
    kept, empty = _not_empty(rows, order, most)
    if not kept:
        raise LoadError(message("data", "with at least one row", f"none in {rows.about}"))
    part = "all" if len(kept) + empty == rows.count else f"{len(kept):,} (seed {seed})"
    about = f"{rows.about}, {part} of {rows.count:,} rows" + (f", {empty:,} empty ones left out" if empty else "")
    return LoadedData(tuple(kept), batch_size, rows.make, about, dtype)


def _not_empty(rows: Rows, order: list[int], most: int) -> tuple[list[int], int]:
    """The first rows in this order that are not empty, and how many were; no more is read than is needed."""
    if rows.counts is None:
        return order[:most], 0
    kept: list[int] = []
    empty = 0
    for start in range(0, len(order), _READ):
        part = order[start : start + _READ]
        for row, counts in zip(part, rows.counts(part), strict=True):
            if len(kept) == most:
                return kept, empty
            if counts:
                kept.append(row)
            else:
                empty += 1
    return kept, empty
