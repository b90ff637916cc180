"""Which batches of the data a process does, and whether they are those of the other processes, or of an earlier run.

All processes go through the same data, and of n processes each does every n-th batch: the noise of a batch depends on
its number alone, so the sums are those of one process.  Or each has data of its own, as from a DistributedSampler: then
the batches are numbered as if they had been dealt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from neuromanifold.core.checks import message, warn
from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.problem.fingerprint import OF_A_BATCH, fingerprint
from neuromanifold.problem.problem import sampler_replicas
from neuromanifold.problem.suspicions import SuspiciousInputWarning
from neuromanifold.run.checkpoint import CheckpointedRun, identity_of
from neuromanifold.run.methods import Method
from neuromanifold.run.processes import Processes
from neuromanifold.run.settings import Distributed, LoopOptions

_COMPARED = 1024  # numbers of each parameter that processes compare


@dataclass(frozen=True)
class Dealing:
    """Which windows of batches belong to the shard, and which of them this process does.

    place     of a window: how many windows of the data this process has read before it
    number    of a window or batch: how many come before it in the data of all processes; seeds the noise
    index     of a batch: how many batches of the shard come before it
    turn      of a window: (round, rank), as the processes take the windows of the shard in turns
    """

    shard: tuple[int, int] = (0, 1)
    window: int = 1
    rank: int = 0
    world: int = 1
    own_data: bool = False
    one_replica: bool = False  # all processes do the same batches, as in tensor parallelism

    @property
    def at_once(self) -> int:
        """How many batches all processes do at the same time."""
        return 1 if self.one_replica else self.world

    @property
    def compares(self) -> bool:
        """Whether all processes must have the same batches."""
        return self.world > 1 and not self.own_data

    def number(self, place: int) -> int:
        """The number of a window, from which that of its first batch and its noise follow."""
        return place * self.world + self.rank if self.own_data else place

    def in_shard(self, place: int) -> bool:
        """Whether a window belongs to the shard, which all processes share."""
        return place % self.shard[1] == self.shard[0]

    def is_mine(self, place: int) -> bool:
        """Whether this process does a window of the shard."""
        return self.own_data or self.one_replica or self.turn(place)[1] == self.rank

    def turn(self, place: int) -> tuple[int, int]:
        """The round in which a window of the shard is done, and the rank of the process that does it."""
        place //= self.shard[1]
        return (place, self.rank) if self.own_data else divmod(place, self.world)

    def index(self, number: int) -> int:
        """How many batches of the shard come before batch `number`."""
        window, offset = divmod(number, self.window)
        return window // self.shard[1] * self.window + offset


class Chain:
    """A running fingerprint of all batches so far, and its values after the last ones, by the batch's number."""

    def __init__(self, kept: int) -> None:
        """`kept`: how many of the last values are remembered, to compare with processes that are not as far."""
        self._kept, self._last = kept, dict[int, str]()
        self.value = ""

    @property
    def end(self) -> tuple[int, str]:
        """The number of the last batch, and the fingerprint up to it."""
        return max(self._last, default=-1), self.value

    def extend(self, number: int, item: object) -> str:
        """Take one more batch, before the model does, which may work on it in place."""
        self.value = fingerprint(("before", self.value), ("batch", item), most=OF_A_BATCH)
        self._last[number] = self.value
        if len(self._last) > self._kept:
            del self._last[next(iter(self._last))]
        return self.value

    def compare(self, processes: Processes, ended: bool) -> None:
        """Raise an error if the processes had different batches: up to the last one of each, and at the end of all."""
        of_all = processes.gather("chain", [*self.end, ended])
        wrong = [rank for rank, (at, value, _) in enumerate(of_all) if at in self._last and self._last[at] != value]
        if all(one[2] for one in of_all) and len({one[0] for one in of_all}) > 1:
            wrong = wrong or [rank for rank, one in enumerate(of_all) if one[0] != of_all[0][0]]
        if wrong or any(processes.gather("chain compared", bool(wrong))):
            which = f" on ranks {processes.rank} and {wrong[0]}" if wrong else ""
            raise ValueError(message("data", _SAME, f"different ones{which}", _ADVICE))


class Window(NamedTuple):
    """Batches that are taken together."""

    place: int  # among all windows of the data
    end: int  # the number of the batch after the last one
    items: list[tuple[int, object]]  # with their numbers; without those that were done in an earlier run


class DealtWindows:
    """The windows of this process.  Batches of others are read, too: all have to be what they were."""

    def __init__(
        self, items: Iterator[object], dealing: Dealing, processes: Processes, saved: CheckpointedRun | None
    ) -> None:
        self._items, self._dealing, self._processes, self._saved = items, dealing, processes, saved
        self._chain = Chain(2 * dealing.window * dealing.world)
        self.end = 0
        """The number of the batch after the last one that was read."""
        self.first = ""
        """The fingerprint of batch 0 of the data, whichever shard this is."""

    def __iter__(self) -> Iterator[Window]:
        """Go through the data."""
        size, place, saved = self._dealing.window, 0, self._saved
        chained = saved is not None or self._dealing.compares
        while window := list(islice(self._items, size)):
            if not place:
                self.first = fingerprint(("batch", window[0]), most=OF_A_BATCH)
            numbered = list(enumerate(window, self._dealing.number(place) * size))
            self.end = numbered[-1][0] + 1
            if self._dealing.in_shard(place):
                if chained:
                    self._extend_chain(numbered)
                if self._dealing.is_mine(place):
                    if saved is not None:
                        numbered = [one for one in numbered if not saved.was_done(one[0])]
                    yield Window(place, self.end, numbered)
            place += 1

    def note_done(self, window: Window) -> None:
        """Take note of a window that has been added to the sums."""
        if self._saved is not None:
            self._saved.note_done([number for number, _ in window.items], self._chain.value)

    def compare(self, ended: bool) -> None:
        """Raise an error if the processes had different batches; `ended`: this one has had all of its data."""
        if self._dealing.compares:
            self._chain.compare(self._processes, ended)

    def _extend_chain(self, numbered: list[tuple[int, object]]) -> None:
        for number, item in numbered:
            begins = not self._chain.value
            value = self._chain.extend(number, item)
            if self._saved is not None:
                self._saved.compare(number, value, begins)


_SAME = "the same batches in the same order on all processes"
_ADVICE = "Do not shuffle, or shuffle with the same seed everywhere. If each process has data of its own, none of "
_ADVICE += "which any other has, say so: distributed='own data'."


def deal(
    items: Iterator[object],
    processes: Processes,
    method: Method,
    sums: GradientSums,
    options: LoopOptions,
    one_replica: bool = False,
) -> tuple[Iterator[object], Dealing]:
    """Return the items, and which of them this process does, once all processes have agreed on the same run.

    `one_replica`: all processes do the same batches.
    """
    window, problem = method.settings.estimator.window, method.problem
    dealing = Dealing(options.shard, window, processes.rank, processes.world, one_replica=one_replica)
    if not processes.several:
        return items, dealing
    head = list(islice(items, 1))
    first = fingerprint(("batch", head[0]), most=OF_A_BATCH) if head else ""
    identity = identity_of(method, sums, options.shard, most=_COMPARED)
    identity |= {"checkpoint": options.checkpoint is not None, "on_interrupt": options.on_interrupt}
    own_data = _agree(processes, options.distributed, problem.data, first, identity, problem.device)
    if own_data and one_replica:
        advice = "Leave out the DistributedSampler, or distributed='own data': each process has a part of each layer."
        raise ValueError(message("data", "the same on all processes of a tensor-parallel model", "a part each", advice))
    return chain(head, items), replace(dealing, own_data=own_data)


def _agree(
    processes: Processes, wanted: Distributed, data: object, first: str, identity: dict[str, Any], device: torch.device
) -> bool:
    """Return whether each process has data of its own, after comparing what they are about to do.

    `first` is the fingerprint of this process's first batch, "" if it has none.
    """
    replicas = sampler_replicas(data)
    of_all = processes.join([identity, first, replicas], device)
    for rank, (other, _, _) in enumerate(of_all):
        if different := [name for name in identity if other.get(name) != identity[name]]:
            got = f"different ones on ranks {processes.rank} and {rank}: {', '.join(different)}"
            raise ValueError(message("arguments", "the same on all processes", got))
    firsts = [one[1] for one in of_all if one[1]]
    alike, apart = len(set(firsts)) <= 1, len(set(firsts)) == len(firsts)
    sampled = max(one[2] for one in of_all) > 1
    own = wanted == "own data" or sampled
    if sampled and any(one[2] != processes.world for one in of_all):
        got = f"samplers for {', '.join(str(one[2]) for one in of_all)} processes"
        raise ValueError(message("data", f"with a DistributedSampler for {processes.world} processes on each", got))
    if own and not apart:
        got = f"the same first batch in {len(firsts) - len(set(firsts)) + 1} of them"
        advice = "Samples would be counted several times. Leave out distributed='own data', and give all processes all "
        advice += "the data without a DistributedSampler: the batches are dealt."
        raise ValueError(message("data", "different on each process", got, advice))
    if firsts and not own and not (alike and len(firsts) == processes.world):
        got = "no batch on some of them" if len(firsts) < processes.world else "different first batches"
        raise ValueError(message("data", _SAME, got, _ADVICE))
    if sampled:
        _warn_if_padded(data)
    return own


def _warn_if_padded(data: Any) -> None:
    """Warn if a DistributedSampler has repeated samples to give all processes the same number."""
    sampler = data.sampler
    total, samples = getattr(sampler, "total_size", 0), getattr(sampler, "dataset", ())
    if not getattr(sampler, "drop_last", True) and total > len(samples):
        text = (
            f"The DistributedSampler repeats {total - len(samples)} of {len(samples)} samples, so that all processes "
        )
        text += "have the same number; these count twice. Leave it out: all processes may have all the data."
        warn(text, SuspiciousInputWarning)
