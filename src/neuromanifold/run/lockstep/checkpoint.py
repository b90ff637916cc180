"""Keeping the state of a run of a model in parts, in files with an index that all processes write together.

    PATH-00001-of-00004.safetensors, ...    sums of whole parameters, so that any number of processes can take them up
    PATH.index.json                         what else there is to know, and which files belong to it; written last

A process that is killed while they are written leaves the files before, and their index (`results/sharded.py`).
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from neuromanifold.core.checks import message
from neuromanifold.persample.accumulate import TraceSums
from neuromanifold.persample.accumulate.sharded import ShardedSums
from neuromanifold.persample.shards import Shards
from neuromanifold.results.files import FileError, in_several_files, load_tensors
from neuromanifold.results.sharded import save_result
from neuromanifold.run.checkpoint import afresh, compare_identities, identity_of, merged_methods, seconds_until_next
from neuromanifold.run.counts import Counts
from neuromanifold.run.methods import Method
from neuromanifold.run.settings import Checkpoint


class ShardedCheckpoint:
    """The state of a run of all processes, and its files; without a `checkpoint` nothing is kept, and nothing done."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        method: Method,
        sums: ShardedSums | TraceSums,
        counts: Counts,
        shards: Shards,
    ) -> None:
        self._checkpoint, self.is_kept = checkpoint or Checkpoint(os.devnull), checkpoint is not None
        self._path = Path(self._checkpoint.path).resolve()
        self._method, self._sums, self._counts = method, sums, counts
        self._shards, self._processes = shards, shards.processes.all
        self._identity: dict[str, Any] = {}
        self.done = 0
        """The set of batches in the sums, those of other processes only as far as they were when the run was begun."""
        self._written = -1
        self._expected: dict[int, str] = {}  # fingerprints of all batches up to some of them
        self._due = math.inf

    def resume(self, shard: tuple[int, int], own_data: bool) -> None:
        """Take up the run where the files say; without any write the first, which shows whether that is possible."""
        if not self.is_kept:
            return
        rank, world = self._processes.rank, self._processes.world
        identity = identity_of(self._method, self._sums, shard)
        weights = {"weights of the model": self._shards.fingerprint}
        self._identity = identity | weights | {"processes with data of their own": world if own_data else None}
        there = self._processes.gather("checkpoint", in_several_files(self._path) or self._path.is_file())
        if not all(there):
            if any(there):
                got = f"{self._path}, which rank {there.index(False)} does not see and rank {there.index(True)} does"
                raise FileError(message("checkpoint", "in a folder that all processes share", got))
            self.write(-1, "")
            return
        tensors, head = load_tensors(self._path)
        if head.get("kind") != "checkpoint" or "state" not in head:
            raise FileError(f"{self._path} is not a checkpoint. {afresh(self._checkpoint)}")
        state = json.loads(head["state"])
        self._plan_next(0.0)
        if not state["counts"]["batches"]:
            return  # of a run that has failed in its first batch, which is no reason to refuse another one
        compare_identities(self._identity, state["identity"], self._path)
        self.done = int(state["done"], 16)
        of_all = state["chains"]
        self._expected = dict([of_all[rank]] if own_data else of_all)
        method = state["method"]
        if isinstance(self._sums, ShardedSums):
            self._sums.set_state(dict(tensors))
        if not rank or self._shards.one_replica:  # the others begin with nothing, and add what they do
            self._counts.merge(state["counts"])
            if isinstance(self._sums, TraceSums):
                self._sums.set_state({}, state["sums"])
        else:
            method = {**method, "passes": 0, "engine": {**method["engine"], "verified": 0}}
        self._method.set_state(method)
        self._written = self.done

    def was_done(self, number: int) -> bool:
        """Whether this batch is in the sums."""
        return bool(self.done >> number & 1)

    def compare(self, number: int, chain: str) -> None:
        """Refuse batches that are not what they were."""
        if self._expected.get(number, chain) != chain:
            advice = "Do not shuffle, or shuffle with a fixed seed; a generator must be a fresh one."
            expected = f"the batches that the run was begun with ({self._path} has {self.done.bit_count()} of them)"
            raise ValueError(message("data", expected, f"others up to batch {number}", advice))

    def check_length(self, batches: int) -> None:
        """The data must not end before the place where the run was taken up."""
        if batches <= (last := max(self._expected, default=-1)):
            expected = f"the data that the run was begun with, at least {last + 1} batches"
            raise ValueError(message("data", expected, f"{batches} batches", afresh(self._checkpoint)))

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._due

    def write(self, last: int, chain: str) -> None:
        """Write the state, in all processes; `chain` is the fingerprint of the batches up to the `last` one."""
        if not self.is_kept:
            return
        self._counts.synchronize()
        mine = [hex(self.done), [last, chain], self._counts.state(), self._method.state()]
        of_all = self._shards.of_replicas(self._processes.gather("state", mine))
        done = 0
        for theirs, *_ in of_all:
            done |= int(theirs, 16)
        if done == self._written:
            return
        start, total = time.monotonic(), Counts()
        for _, _, counts, _ in of_all:
            total.merge(counts)
        state = {
            "identity": self._identity,
            "counts": total.state(),
            "done": hex(done),
            "chains": [one for _, one, *_ in of_all],
            "method": merged_methods([one for *_, one in of_all]),
        }
        if isinstance(self._sums, TraceSums):
            tensors, state["sums"] = self._processes.sum_of(self._sums).state()
        else:
            tensors = self._sums.state()
        save_result(self._path, tensors, "checkpoint", {"state": json.dumps(state)}, divided=True)
        self._written = done
        self._plan_next(time.monotonic() - start)

    def _plan_next(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds_until_next(self._checkpoint, seconds)
