"""Loaded data: batches in a fixed order, collated when they are iterated, as often as they are iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from neuromanifold.core.checks import integer_in_range

Batch = dict[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class LoadedData:
    """A re-iterable of batches; the same batches in the same order each time."""

    rows: tuple[int, ...]
    batch_size: int
    collate: Callable[[list[int]], Batch]
    about: str  # the data in one line, for provenance
    dtype: torch.dtype = torch.float32  # of inputs that are not integers

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches; a thread collates one batch ahead."""
        parts = [list(self.rows[i : i + self.batch_size]) for i in range(0, len(self.rows), self.batch_size)]
        with ThreadPoolExecutor(1, "batches") as thread:
            ahead = thread.submit(self._batch, parts[0])
            for part in parts[1:]:
                batch, ahead = ahead.result(), thread.submit(self._batch, part)
                yield batch
            yield ahead.result()

    @property
    def samples(self) -> int:
        """How many rows all batches together have."""
        return len(self.rows)

    def with_batch_size(self, batch_size: int) -> LoadedData:
        """Return the same rows in batches of another size."""
        return replace(self, batch_size=integer_in_range(batch_size, "batch_size", 1, 10**9, "samples in a batch"))

    def cached(self, max_bytes: int) -> LoadedData:
        """Return the same data, which keeps collated batches in memory for later passes, up to `max_bytes`."""
        return replace(self, collate=_cached(self.collate, max_bytes))

    def _batch(self, rows: list[int]) -> Batch:
        batch = self.collate(rows)
        if isinstance(batch, dict):
            return {name: value if name == "labels" else self._cast(value) for name, value in batch.items()}
        return (self._cast(batch[0]), *batch[1:])

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def _cached(collate: Callable[[list[int]], Batch], max_bytes: int) -> Callable[[list[int]], Batch]:
    cache: dict[tuple[int, ...], Batch] = {}
    free = max_bytes

    def collate_once(rows: list[int]) -> Batch:
        nonlocal free
        key = tuple(rows)
        if key in cache:
            return cache[key]
        batch = collate(rows)
        size = sum(value.nbytes for value in (batch.values() if isinstance(batch, dict) else batch))
        if size <= free:
            cache[key], free = batch, free - size
        return batch

    return collate_once


@dataclass(frozen=True)
class FunctionData:
    """Batches that the user's function returns, at most `batches` of them."""

    function: Callable[[], Iterable[object]]
    about: str
    batches: int | None = None

    def __iter__(self) -> Iterator[object]:
        return islice(iter(self.function()), self.batches)

    def __len__(self) -> int:
        found = self.function()
        if not isinstance(found, Sized):
            raise TypeError("a generator has no length")  # as a DataLoader of an iterable data set raises
        return len(found) if self.batches is None else min(len(found), self.batches)
