"""The processes of torch.distributed that share a run: what they tell each other, and what ends the run on all of them.

with together(wanted) as processes:            a single process where there is no process group
    processes.check()                          between batches: raises if another process has failed
    processes.gather("place", value)           the values of all; raises if another process has failed, or has died
    processes.add(tensor)                      the sum over all, in place

Small values go through the store of the process group, not through collectives: a collective that one process never
comes to leaves the others waiting until its timeout.  Here a process that fails tells the others why, and one that is
killed falls silent, which its neighbour notices.  Tensors are added by collectives, when all processes are there.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neuromanifold.core.checks import message, warn
from neuromanifold.persample.accumulate import GradientSums, SharedSums

_BEAT, _SILENT = 0.5, 60.0  # seconds between two signs of life; after which a process counts as dead
_PATIENCE, _JOIN = 20.0, 1800.0  # seconds until processes that have not begun the run are named; and given up
_SHORT = 248  # bytes that are gathered at once
_calls = count()


class ProcessError(RuntimeError):
    """Another process of a run has failed or died, which ends the run here as well."""


class Processes:
    """All processes of a run, of which this one has a rank; without a store it is alone."""

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None) -> None:
        self.rank, self.world, self._store = rank, world, store
        self.stopped = ""
        """Why all processes should end the run with what they have."""
        self._failure, self._ended = "", threading.Event()
        self._times = Counter[str]()  # that a name was used

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    def check(self) -> None:
        """Raise a ProcessError if another process has failed or died."""
        if self._failure:
            raise ProcessError(self._failure)

    def stop(self, reason: str) -> None:
        """Ask all processes to end the run with what they have."""
        self.stopped = reason
        if self.several:
            self._store.set("stop", reason)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        found = self.gather_unless_stopped(name, value, stops=False)
        assert found is not None
        return found

    def gather_unless_stopped(
        self, name: str, value: Any, stops: bool = True, patient: bool = True
    ) -> list[Any] | None:
        """Return the values of all processes; None if one of them has asked to stop and does not come here."""
        if not self.several:
            return [value]
        self._times[name] += 1
        keys, pause = [f"{name} {self._times[name]}/{rank}" for rank in range(self.world)], 0.001
        begun, told = time.monotonic(), patient
        with self._reachable():
            self._store.set(keys[self.rank], json.dumps(value))
            while not self._store.check(keys):
                self._read_news()
                self.check()
                if stops and self.stopped:
                    return None
                waited = time.monotonic() - begun
                if not told and waited > _PATIENCE:
                    self._tell_who_is_late(keys)
                    told = True
                if not patient and waited > _JOIN:
                    raise ProcessError(f"{self._late(keys)} not begun this run within {waited:.0f} s.")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            return [json.loads(self._store.get(key)) for key in keys]

    def join(self, value: Any, device: torch.device) -> list[Any]:
        """Wait until all processes have begun the run; return their values."""
        found = self.gather_unless_stopped("join", value, stops=False, patient=False)
        assert found is not None
        self.barrier(device)
        return found

    def barrier(self, device: torch.device) -> None:
        """Wait for all processes, in a collective; refuse a backend that does not know the device."""
        if self.several:
            try:
                self.add(torch.zeros(1, device=device))
            except RuntimeError as error:
                if "backend" not in str(error).lower():
                    raise
                advice = f"Use dist.init_process_group({'gloo' if device.type == 'cpu' else 'nccl'!r})."
                got = f"{dist.get_backend()!r} for a model on {device}"
                raise ValueError(message("backend", f"one that adds tensors on {device.type}", got, advice)) from error

    def reduce(self, sums: GradientSums) -> None:
        """Add up the sums of all processes: all of them then have the whole."""
        if self.several:
            assert isinstance(sums, SharedSums)
            sums.reduce(self)

    def sum_of(self, sums: GradientSums) -> GradientSums:
        """Return the sums of all processes together, and leave those of each as they are."""
        if not self.several:
            return sums
        assert isinstance(sums, SharedSums)
        whole = sums.copy()
        whole.reduce(self)
        return whole

    def add(self, tensor: Tensor) -> None:
        """Overwrite a tensor with its sum over all processes."""
        if self.several:
            self._wait_for(lambda: dist.all_reduce(tensor, async_op=True))

    def _wait_for(self, begin: Callable[[], Any]) -> None:
        """Run a collective; one of a process that has died would be waited for until a timeout."""
        with self.losses_named():
            work, pause = begin(), 0.0
            while work is not None and not work.is_completed():
                self.check()
                time.sleep(pause)
                pause = min(0.02, 1.2 * pause + 1e-5)
            if work is not None:
                work.wait()

    @contextmanager
    def losses_named(self) -> Iterator[None]:
        """Turn the error of a collective whose other process has died into a ProcessError that says so."""
        try:
            yield
        except ProcessError:
            raise
        except RuntimeError as error:
            if not any(text in str(error).lower() for text in ("closed by peer", "reset by peer", "broken pipe")):
                raise
            if self.several:
                with suppress(RuntimeError):
                    self._read_news()  # the other one may have said why
            text = "Another process has died, which ends the run on all processes; with a checkpoint, the same call "
            raise ProcessError(self._failure or f"{text}resumes it ({error}).") from error

    @contextmanager
    def in_step(self) -> Iterator[InStep]:
        """Yield a gatherer of small values for processes that all go in step: it uses collectives, not the store."""
        own = self.several and dist.get_backend() != "gloo"
        gathers = InStep(self, dist.new_group(backend="gloo") if own else None)
        try:
            yield gathers
        finally:
            gathers.end()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Give signs of life, and look for those of the others, while inside; tell them of an error."""
        if not self.several:
            yield
            return
        self._store.add(f"beat/{self.rank}", 1)  # before the others can know that this process is there
        thread = threading.Thread(target=self._watch, name="neuromanifold processes", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, ProcessError):
                self._tell_of(error)
            raise
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        neighbour, last, since = (self.rank + 1) % self.world, 0, time.monotonic()
        store = self._store
        while not self._ended.wait(_BEAT):
            try:
                store.add(f"beat/{self.rank}", 1)
                self._read_news()
                beat = store.add(f"beat/{neighbour}", 0)
            except Exception:
                self._failure = self._failure or _LOST
                return
            now = time.monotonic()
            if beat != last:
                last, since = beat, now
            elif beat and now - since > _SILENT:
                text = f"Rank {neighbour} of {self.world} has not been heard of for {now - since:.0f} s: it has been "
                text += "killed, or its machine cannot be reached. This ends the run on all processes; with a "
                text += "checkpoint, the same call resumes it, with any number of processes."
                with suppress(Exception):
                    store.set("failed", json.dumps([neighbour, text]))
                self._failure = text
                return

    def _read_news(self) -> None:
        """Read from the store whether another process has failed, or has asked to stop."""
        if self._store.check(["failed"]):
            rank, text = json.loads(self._store.get("failed"))
            if rank != self.rank and not self._failure:
                self._failure = text
                self._store.add("acknowledged", 1)
        if not self.stopped and self._store.check(["stop"]):
            self.stopped = self._store.get("stop").decode()

    def _tell_of(self, error: BaseException) -> None:
        """Tell the others of an error, and wait a moment: they may need this process to read it."""
        lines = str(error).strip().splitlines() or [""]
        text = f"Rank {self.rank} of {self.world} has failed, which ends the run on all processes: "
        with suppress(Exception):
            self._store.set("failed", json.dumps([self.rank, f"{text}{type(error).__name__}: {lines[0]}"]))
            until = time.monotonic() + 4 * _BEAT
            while isinstance(error, Exception) and time.monotonic() < until:
                if self._store.add("acknowledged", 0) >= self.world - 1:
                    break
                time.sleep(_BEAT / 10)

    def _late(self, keys: list[str]) -> str:
        late = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        return f"Rank{'s' * (len(late) > 1)} {', '.join(late)} of {self.world} {'have' if len(late) > 1 else 'has'}"

    def _tell_who_is_late(self, keys: list[str]) -> None:
        text = (
            f"{self._late(keys)} not begun this run after {_PATIENCE:.0f} s: all processes of a process group have to "
        )
        text += "make the same call. Give distributed=False for a run of this process alone."
        warn(text)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn an error of the store, which cannot be reached, into a ProcessError that says so."""
        try:
            yield
        except ProcessError:
            raise
        except (RuntimeError, OSError) as error:
            raise ProcessError(self._failure or f"{_LOST} ({error})") from error


class InStep:
    """Gathers small values by collectives, which take a fraction of a millisecond, where all processes go in step."""

    def __init__(self, processes: Processes, group: Any) -> None:
        self.all, self._group = processes, group

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes, which JSON can hold; all must ask for the same one."""
        if not self.all.several:
            return [value]
        text = json.dumps([name, value]).encode()
        found = self._gathered(text, _SHORT)
        longest = max(length for length, _ in found)
        if longest > _SHORT:
            found = self._gathered(text, longest)
        values = [json.loads(one[:length]) for length, one in found]
        if len({asked for asked, _ in values}) > 1:
            got = ", ".join(f"{asked!r} in rank {rank}" for rank, (asked, _) in enumerate(values))
            raise ProcessError(f"The processes have not done the same: {got}.")
        return [one for _, one in values]

    def end(self) -> None:
        """Destroy a group of its own, and with the last reference to it its threads, before the interpreter ends."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _gathered(self, text: bytes, size: int) -> list[tuple[int, bytes]]:
        """Return length and beginning of the texts of all processes."""
        mine = torch.zeros(8 + size, dtype=torch.uint8)
        sent = len(text).to_bytes(8, "little") + text[:size]
        mine[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.all.world)]
        self.all._wait_for(lambda: dist.all_gather(every, mine, group=self._group, async_op=True))
        read = [bytes(one.numpy().data) for one in every]
        return [(int.from_bytes(one[:8], "little"), one[8:]) for one in read]


_LOST = "The store of the process group cannot be reached: the process that keeps it, rank 0, has probably died"


@contextmanager
def together(wanted: bool) -> Iterator[Processes]:
    """Yield the processes of the default process group, or a single one, and keep watch over them."""
    if not (wanted and dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        yield Processes()
        return
    from torch.distributed import distributed_c10d  # which not every build of torch has

    store = distributed_c10d.PrefixStore(f"neuromanifold/{next(_calls)}", distributed_c10d._get_default_store())
    processes = Processes(dist.get_rank(), dist.get_world_size(), store)
    with processes.watched():
        yield processes
