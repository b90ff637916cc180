"""A progress bar on standard error: rich's where it is installed, a plain line otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def number_of_batches(data: object) -> int | None:
    """Return the length of the data; None where it is not known before the end, as of a generator."""
    with suppress(TypeError):  # a DataLoader of an iterable data set has a __len__ that fails
        return len(data) if isinstance(data, Sized) else None
    return None


def tracked(data: Iterable[T], what: str) -> Iterator[T]:
    """Iterate over the data with a progress bar; `what` is shown beside it."""
    total = number_of_batches(data)
    try:
        from rich.console import Console
        from rich.progress import track
    except ModuleNotFoundError:
        yield from _plain(data, total, what)
        return
    yield from track(data, description=what, total=total, console=Console(stderr=True))


def _plain(data: Iterable[T], total: int | None, what: str) -> Iterator[T]:
    of = f"/{total}" if total is not None else ""
    for i, item in enumerate(data):
        print(f"\r{what}: batch {i + 1}{of}", end="", file=sys.stderr, flush=True)
        yield item
    print(file=sys.stderr)
