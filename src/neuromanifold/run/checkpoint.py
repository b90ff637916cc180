"""Keeping the state of a run in files, so that the run can be taken up again with the same numbers, bit for bit.

    saved.resume(...)               what the files say, if they are of the same run; else an error names what differs
    for number, batch in data:
        saved.compare(...)          the batches must be what they were
        if saved.was_done(number): continue
        ...
        saved.note_done(...)
        if saved.is_due: write()    aside and renamed: the old file is there until the new one is complete
    saved.write()                   at the end, and when Ctrl-C or the data end the run

What there is to save between two batches: the sums, counts, what has been found out about the model, and which batches
these are of.  The noise of a batch depends on the seed and the batch's number alone (`batch_seed`).

Each process of a run has a file of its own, PATH for rank 0 and PATH.rank1, ... for the others, which holds sums over
a set of batches.  So any number of processes can take the run up: each takes the sums of some of the files, and the
batches that are in no file are dealt as ever.  A file whose batches are all in another one is obsolete: its sums have
been added to those of the other.
"""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from neuromanifold._version import __version__
from neuromanifold.core.checks import message, warn
from neuromanifold.persample.accumulate import GradientSums, SharedSums
from neuromanifold.persample.engine import merged_findings
from neuromanifold.problem.fingerprint import fingerprint
from neuromanifold.results.files import FileError, load_tensors, remove_unfinished, save_tensors
from neuromanifold.run.counts import Counts
from neuromanifold.run.methods import Method
from neuromanifold.run.processes import Processes
from neuromanifold.run.settings import Checkpoint

_SECONDS, _SHARE = 30.0, 1 / 20  # between two writes; of the time that may be spent on writing
_FORMAT = 3  # of the state in a file


class _Part(NamedTuple):
    """Which batches the sums in a file are of."""

    done: int  # the set of its batches: bit n stands for batch n
    last: int  # the last one of them
    chain: str  # the fingerprint of all batches up to the last one
    first: str  # that of the first batch of the data


class CheckpointedRun:
    """The state of one process of a run, and its file."""

    def __init__(self, checkpoint: Checkpoint, method: Method, sums: GradientSums, counts: Counts) -> None:
        self._checkpoint, self.path = checkpoint, checkpoint.file(0)
        self._method, self._sums, self._counts = method, sums, counts
        self._identity: dict[str, Any] = {}
        self._own = _Part(0, -1, "", "")  # the batches in this process's sums
        self._written = 0  # the set of batches that the file of this process has, as in `_Part.done`
        self._all, self._expected = 0, dict[int, str]()  # the set of batches in all files; fingerprints up to some
        self._first = ""
        self._obsolete: list[Path] = []  # once a file is written that has their sums
        self._due = math.inf

    def resume(self, processes: Processes, shard: tuple[int, int], own_data: bool) -> None:
        """Take up the run where the files say; without any write the first, which shows whether that is possible.

        A file of a run that has failed in its first batch holds nothing, and is no reason to refuse another run.
        """
        assert isinstance(self._sums, SharedSums)
        self._identity = identity_of(self._method, self._sums, shard)
        self._identity["processes with data of their own"] = processes.world if own_data else None
        self.path = self._checkpoint.file(processes.rank)
        remove_unfinished(self.path)
        found = {}
        for rank, path in self._checkpoint.files().items():
            if rank % processes.world == processes.rank:
                tensors, state = _read(path)
                if state["counts"]["batches"]:
                    compare_identities(self._identity, state["identity"], path)
                    found[rank] = (path, tensors, state, _Part(int(state["done"], 16), *state["part"]))
        mine = {rank: [hex(part.done), *part[1:]] for rank, (*_, part) in found.items()}
        of_all = {int(rank): one for some in processes.gather("checkpoint", mine) for rank, one in some.items()}
        parts = {rank: _Part(int(done, 16), *rest) for rank, (done, *rest) in sorted(of_all.items())}
        if own_data:
            parts = {rank: part for rank, part in parts.items() if rank == processes.rank}
        parts = _without_obsolete(parts, self._checkpoint)
        for part in parts.values():
            self._all |= part.done
            self._expected[part.last], self._first = part.chain, part.first
        states = [found[rank] for rank in parts if rank in found]
        self._obsolete = [path for path, *_ in found.values() if path != self.path]
        for k, (_, tensors, state, part) in enumerate(states):
            if k:
                self._sums.merge(tensors, state["sums"])
            else:
                self._sums.set_state(tensors, state["sums"])
            self._counts.merge(state["counts"])
            self._own = max(self._own, part, key=lambda one: one.last)._replace(done=self._own.done | part.done)
        if states:
            self._method.set_state(merged_methods([state["method"] for _, _, state, _ in states]))
            self._written = self._own.done if len(states) == 1 and states[0][0] == self.path else 0
            self._plan_next(0.0)
        else:
            self._save()

    @property
    def begins_at(self) -> int:
        """The number of the first batch that is in no file."""
        return (~self._all & (self._all + 1)).bit_length() - 1

    @property
    def ends_at(self) -> int:
        """The number of the batch after the last one that is in a file."""
        return self._all.bit_length()

    def was_done(self, number: int) -> bool:
        """Whether the sums of this batch are in one of the files."""
        return bool(self._all >> number & 1)

    def compare(self, number: int, chain: str, is_first: bool) -> None:
        """Refuse batches that are not what they were; the first may show it already."""
        got = f"another batch {number}" if is_first and self._first and chain != self._first else ""
        got = f"others up to batch {number}" if self._expected.get(number, chain) != chain and not got else got
        if got:
            advice = "Do not shuffle, or shuffle with a fixed seed; a generator must be a fresh one."
            batches = self._all.bit_count()
            expected = f"the batches that the run was begun with ({self.path} has {batches} of them)"
            raise ValueError(message("data", expected, got, f"{advice} {afresh(self._checkpoint)}"))
        if is_first:
            self._first = chain

    def check_length(self, batches: int) -> None:
        """The data must not end before the place where the run was taken up."""
        last = max(self._expected, default=-1)
        if batches <= last:
            expected = f"the data that the run was begun with, at least {last + 1} batches"
            raise ValueError(message("data", expected, f"{batches} batches", afresh(self._checkpoint)))

    def note_done(self, numbers: list[int], chain: str) -> None:
        """Take note of batches that have been added to the sums, and of the chain after the last one."""
        done = self._own.done
        for number in numbers:
            done |= 1 << number
        last = max(self._own.last, numbers[-1])
        self._own = _Part(done, last, chain if last == numbers[-1] else self._own.chain, self._first)

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._due

    def write(self) -> None:
        """Between batches.  A run need not die because the disk is full: the file before is still there."""
        if self._own.done == self._written:
            return
        try:
            self._save()
        except (OSError, SafetensorError) as error:
            text = f"The checkpoint {self.path} could not be written ({error}): it is still that of an earlier batch. "
            warn(text + "The run goes on.")
            self._plan_next(0.0)

    def _save(self) -> None:
        start = time.monotonic()
        assert isinstance(self._sums, SharedSums)
        found, values = self._sums.state()
        tensors = {name: value.cpu() for name, value in found.items()}
        known = {"counts": self._counts.state(), "sums": values, "method": self._method.state()}
        done, *part = self._own
        text = json.dumps({"identity": self._identity, **known, "done": hex(done), "part": part})
        head = {"state": text, "fingerprint": fingerprint(("state", text), *sorted(tensors.items()))}
        save_tensors(self.path, tensors, "checkpoint", head)
        self._written = done
        for path in self._obsolete if done else ():
            path.unlink(missing_ok=True)
        self._obsolete = []
        self._plan_next(time.monotonic() - start)

    def _plan_next(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds_until_next(self._checkpoint, seconds)


def seconds_until_next(checkpoint: Checkpoint, seconds: float) -> float:
    """Return when to write again after a write that has taken some seconds."""
    return max(_SECONDS, seconds / _SHARE) if checkpoint.every is None else checkpoint.every


def identity_of(method: Method, sums: GradientSums, shard: tuple[int, int], most: int | None = None) -> dict[str, Any]:
    """Return all that must be the same for a run to be resumed or shared, by the name that an error gives it.

    Of weights with more than `most` numbers only so many are looked at.
    """
    problem, settings = method.problem, method.settings
    model, parameters, likelihood = problem.model, problem.parameters, problem.likelihood
    device = next(iter(parameters.values())).device.type
    modules = [(name, (type(module).__qualname__, module.extra_repr())) for name, module in model.named_modules()]
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "none"
    return {
        "format of the file": _FORMAT,
        "result": type(sums).__name__,
        "error_bars": sums.fourth_powers,
        "neuromanifold": __version__,
        "torch": str(torch.__version__),
        "device": device,
        "autocast": autocast,
        "estimator": _without_addresses(repr(settings.estimator)),
        "likelihood": _without_addresses(getattr(likelihood, "__qualname__", repr(likelihood))),
        "what the likelihood computes": fingerprint(("", likelihood)),
        "granularity": settings.granularity,
        "seed": settings.seed,
        "shard": list(shard),
        "class_dim": problem.class_dim,
        "batch_dim": problem.batch_dim,
        "ignore_index": problem.ignore_index,
        "shift_labels": problem.predicts_next,
        "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in parameters.items()],
        "modules of the model": fingerprint(("", [(name, _without_addresses(str(kind))) for name, kind in modules])),
        "weights of the model": fingerprint(*model.named_parameters(), *model.named_buffers(), most=most),
    }


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise FileError(message("checkpoint", "a file, or the name of one to be made", f"{path}, which is none"))
    try:
        tensors, head = load_tensors(path)
        text = head["state"] if head["kind"] == "checkpoint" else ""
        if (
            head.get("fingerprint", "") != fingerprint(("state", text), *sorted(tensors.items()))
            and "result" not in head
        ):
            raise ValueError("its contents have changed since it was written")
    except (FileError, KeyError, ValueError) as error:
        raise FileError(f"{path} is not a checkpoint, or is damaged ({error}). {afresh(path)}") from error
    return dict(tensors), json.loads(text)


def compare_identities(now: dict[str, Any], before: dict[str, Any], path: Path) -> None:
    """Refuse to resume another run, and say what differs."""
    different = [name for name in now if now[name] != before.get(name)]
    if not different:
        return
    short = {name: f" ({before.get(name)}, now {now[name]})" for name in different if not _is_long(now[name])}
    got = "one that differs in " + ", ".join(name + short.get(name, "") for name in different)
    raise ValueError(message("checkpoint", "one of the same run", got, afresh(path)))


def _is_long(value: object) -> bool:
    return len(str(value)) > 60 or (isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None)


def afresh(path: Path | Checkpoint) -> str:
    """Return what to do if a checkpoint is not the right one."""
    named = path if isinstance(path, Path) else " and ".join(map(str, path.files().values())) or path.path
    return f"Delete {named} to begin afresh, or give another path."


def _without_obsolete(parts: dict[int, _Part], checkpoint: Checkpoint) -> dict[int, _Part]:
    """The files whose batches are not all in another one; no batch may be in two of them."""
    live: dict[int, _Part] = {}
    for rank, part in sorted(parts.items(), key=lambda one: -one[1].done.bit_count()):
        if any(part.done & ~other.done == 0 for other in live.values()):
            continue
        if any(part.done & other.done for other in live.values()):
            path = checkpoint.file(rank)
            raise FileError(f"{path} has some batches that other files of the run have, too. {afresh(checkpoint)}")
        live[rank] = part
    return dict(sorted(live.items()))


def merged_methods(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the states of several processes' methods (`Method.state`) as one: passes add up, findings are joined."""
    first = dict(states[0])
    first["passes"] = sum(state["passes"] for state in states)
    if engines := [state["engine"] for state in states if "engine" in state]:
        first["engine"] = merged_findings(engines)
    return first


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
