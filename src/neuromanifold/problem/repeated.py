"""Several passes over the same data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING

from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.problem.batches import Batch, tensors_in
from neuromanifold.problem.fingerprint import fingerprint

if TYPE_CHECKING:
    from neuromanifold.problem.problem import Problem

_NUMBERS = 1024  # of each tensor that are looked at


class RepeatedBatches:
    """Batches that must be the same in each pass: a fingerprint of each is kept, and compared."""

    def __init__(self, problem: Problem) -> None:
        data = problem.data
        if isinstance(data, Iterator) or (not isinstance(data, Sized) and iter(data) is iter(data)):
            advice = "It is iterated over several times, and a generator only once. Pass list(data)."
            raise TypeError(
                message("data", "a list, a DataLoader or another iterable of batches", "an iterator", advice)
            )
        self._problem = problem
        self._fingerprints: list[str] = []
        self._device_tensors: list[list[tuple[weakref.ref[Tensor], int]]] = []  # with versions, by batch
        self._complete = False

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, *, progress: bool = False, description: str = "Fisher information") -> Iterator[Batch]:
        """One pass, on the model's device; raises a ValueError at a batch that differs from the passes before."""
        for number, item in self._compared(enumerate(self._problem.items(progress=progress, description=description))):
            yield self._problem.read(item, number)

    def items(self) -> Items:
        """The data themselves, as an iterable that compares each pass over it with the ones before."""
        return Items(self._problem.data, self._compared)

    def _compared(self, items: Iterable[tuple[int, object]]) -> Iterator[tuple[int, object]]:
        number = -1
        for number, item in items:
            self._check(number, item)
            yield number, item
        if number + 1 < len(self._fingerprints):
            raise _differ(f"{number + 1} batches after {len(self._fingerprints)}")
        self._complete = True

    def _check(self, number: int, item: object) -> None:
        if number < len(self._fingerprints):
            if not self._is_same_object(number, item) and self._fingerprints[number] != _fingerprint_of(item):
                raise _differ(f"another batch {number}")
            return
        if self._complete:
            raise _differ(f"more than {len(self._fingerprints)} batches")
        self._fingerprints.append(_fingerprint_of(item))
        self._device_tensors.append([(weakref.ref(t), t._version) for t in _device_tensors_of(item)])

    def _is_same_object(self, number: int, item: object) -> bool:
        """Whether these are the very tensors of before, unchanged: spares a GPU being waited for."""
        before = self._device_tensors[number]
        now = tensors_in(item) if before else []
        return len(now) == len(before) > 0 and all(
            t is reference() and t._version == version for t, (reference, version) in zip(now, before, strict=True)
        )


class Items:
    """Data whose items must be the same in each pass; passes are made by the function given."""

    def __init__(
        self, data: Iterable[object], compared: Callable[[Iterable[tuple[int, object]]], Iterator[tuple[int, object]]]
    ) -> None:
        self.dataset = getattr(data, "dataset", data)
        self.sampler, self.batch_sampler = getattr(data, "sampler", None), getattr(data, "batch_sampler", None)
        self._data, self._compared = data, compared

    def __iter__(self) -> Iterator[object]:
        return (item for _, item in self._compared(enumerate(self._data)))

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # a TypeError where the data have none, as theirs


def _device_tensors_of(item: object) -> list[Tensor]:
    """Return the tensors of an item if all are on a device and have version counters; else none."""
    tensors = tensors_in(item)
    return tensors if all(t.device.type != "cpu" and not t.is_inference() for t in tensors) else []


def _fingerprint_of(item: object) -> str:
    return fingerprint(("batch", item), most=_NUMBERS)


def _differ(got: str) -> ValueError:
    advice = "Use shuffle=False, switch off random augmentation, or pass list(loader)."
    return ValueError(message("data", "the same batches in each pass", got, advice))
