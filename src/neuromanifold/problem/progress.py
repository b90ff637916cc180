"""A progress bar on standard error: rich's where it is installed, a plain line otherwise; or an observer's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_SECONDS, _SHARE = 0.5, 1 / 50  # between two looks; of the time that may be spent on looking


class RunProgress(NamedTuple):
    """How far a run has come."""

    batches: int  # done, before a checkpoint was taken up as well
    samples: int
    place: int  # in the data, of the next batch: those of other shards count
    relative_error: float | None  # Σ stderr / Σ F so far; None: nothing is random
    tokens: int = 0  # of sequences; 0: the samples are none


Observer = Callable[[RunProgress], None]
"""Called now and then in a run."""


class Reporter:
    """Calls an observer as often as is useful, and as rarely as looking takes a fiftieth of the time."""

    def __init__(self, observer: Observer | bool) -> None:
        """A bool stands for none: that of a bar is another thing."""
        self._observer, self._due = observer, 0.0

    def batch_done(self, progress: Callable[[], RunProgress]) -> None:
        """Call the observer if it is time to."""
        if not callable(self._observer):
            return
        start = time.monotonic()
        if start < self._due:
            return
        self._observer(progress())
        end = time.monotonic()
        self._due = end + max(_SECONDS, (end - start) / _SHARE)


def number_of_batches(data: object) -> int | None:
    """Return the length of the data; None where it is not known before the end, as of a generator."""
    with suppress(TypeError):  # a DataLoader of an iterable data set has a __len__ that fails
        return len(data) if isinstance(data, Sized) else None
    return None


def tracked(data: Iterable[T], what: str) -> Iterator[T]:
    """Iterate over the data, and show how far it has come."""
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
