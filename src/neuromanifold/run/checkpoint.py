"""Keeping the state of a run in a file, so that the run can be taken up again with the same numbers, bit for bit.

    saved.resume()                  what the file says, if it is of the same run; else an error that names what differs
    for number, batch in data:
        if saved.was_done(...)      the batches must be what they were
        saved.begin_batch(batch)
        ...
        saved.end_batch()
        if saved.is_due: write()    aside and renamed: the old file is there until the new one is complete
    saved.write()                   at the end, and when Ctrl-C or the data end the run

What there is to save between two batches: the sums, counts, and what has been found out about the model.  The noise of
a batch depends on the seed and the batch's number alone (`batch_seed`).
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from neuromanifold._version import __version__
from neuromanifold.core.checks import message, warn
from neuromanifold.persample.accumulate import StatefulSums
from neuromanifold.problem.fingerprint import OF_A_BATCH, fingerprint
from neuromanifold.problem.problem import Problem
from neuromanifold.results.files import FileError, load_tensors, remove_unfinished, save_tensors
from neuromanifold.run.counts import Counts
from neuromanifold.run.methods import Method
from neuromanifold.run.step import Settings

_SECONDS, _SHARE = 30.0, 1 / 20  # between two writes; of the time that may be spent on writing
_COUNTS = ("samples", "positions", "batches", "next", "dtype", "unit", "noise_shares", "left_out")


@dataclass(frozen=True)
class Checkpoint:
    """Where the state of a run is kept, and how often: after so many seconds, 0 for every batch.

    By default every 30 seconds, or as rarely as writing takes a twentieth of the time.  The file stays when the run has
    ended: a rerun then only goes through the data and gives the same result.  Delete it when the result is saved.
    """

    path: str | Path
    every: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path):
            raise TypeError(message("checkpoint", "a path or an nm.Checkpoint", repr(self.path)))
        number = not isinstance(self.every, bool) and isinstance(self.every, (int, float))
        if self.every is not None and not (number and 0 <= self.every < math.inf):
            raise ValueError(message("every", "a number of seconds >= 0, or None", repr(self.every)))


class CheckpointedRun:
    """The state of one run, and its file."""

    def __init__(
        self, checkpoint: Checkpoint, identity: dict[str, Any], method: Method, sums: StatefulSums, counts: Counts
    ) -> None:
        self.path, self._every = Path(checkpoint.path).resolve(), checkpoint.every  # of a link, what it leads to
        self._identity, self._method, self._sums, self._counts = identity, method, sums, counts
        self._first, self._last = "", ""  # fingerprints of the first batch, and of all batches, in the file
        self._done = ""  # fingerprint of the batches done or passed over
        self._begun: list[str] = []  # with each of those that have begun
        self._resumed = self._written = 0  # counts.next at these times
        self._due = 0.0

    def resume(self) -> None:
        """Take up the run where the file says; without a file write the first, which shows whether that is possible.

        A file of a run that has failed in its first batch holds nothing, and is no reason to refuse another run.
        """
        remove_unfinished(self.path)
        found = _read(self.path) if self.path.exists() else None
        if found is None or not found[1]["counts"]["batches"]:
            self._save()
            return
        tensors, state = found
        _compare(self._identity, state["identity"], self.path)
        self._sums.set_state(tensors, state["sums"])
        self._method.set_state(state["method"])
        for name in _COUNTS:
            setattr(self._counts, name, state["counts"][name])
        self._counts.running_samples, self._counts.running_positions = self._counts.samples, self._counts.positions
        self._first, self._last = state["first"], state["last"]
        self._resumed = self._written = self._counts.next
        self._plan_next(0.0)

    def was_done(self, number: int, item: object) -> bool:
        """Whether this batch was done before; the batches must be what they were, which the first may show already."""
        if number >= self._resumed:
            return False
        is_first, is_last = not self._done, number == self._resumed - 1
        self._done = self._with(item)
        got = f"another batch {number}" if is_first and self._done != self._first else ""
        got = f"others up to batch {number}" if is_last and self._done != self._last and not got else got
        if got:
            advice = "Do not shuffle, or shuffle with a fixed seed; a generator must be a fresh one."
            expected = f"the batches that the run was begun with ({self.path} has {self._counts.batches} of them)"
            raise ValueError(message("data", expected, got, f"{advice} {_afresh(self.path)}"))
        return True

    def check_length(self, batches: int) -> None:
        """The data must not end before the place where the run was taken up."""
        if batches < self._resumed:
            expected = f"the data that the run was begun with, at least {self._resumed} batches"
            raise ValueError(message("data", expected, f"{batches} batches", _afresh(self.path)))

    def begin_batch(self, item: object) -> None:
        """Look at it before the model does, which may work in place; batches of a window begin and end together."""
        self._begun.append(self._with(item))

    def end_batch(self) -> None:
        """All batches that have begun have come to their end."""
        self._first, self._done = self._first or self._begun[0], self._begun[-1]
        self._begun = []

    def _with(self, item: object) -> str:
        """The fingerprint of all batches so far, and of one more."""
        before = self._begun[-1] if self._begun else self._done
        return fingerprint(("before", before), ("batch", item), most=OF_A_BATCH)

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._due

    def write(self) -> None:
        """Between batches.  A run need not die because the disk is full: the file before is still there."""
        if self._counts.next == self._written:
            return
        try:
            self._save()
        except (OSError, SafetensorError) as error:
            text = f"The checkpoint {self.path} could not be written ({error}): it is still that of an earlier batch. "
            warn(text + "The run goes on.")
            self._plan_next(0.0)

    def _save(self) -> None:
        start = time.monotonic()
        found, values = self._sums.state()
        tensors = {name: value.cpu() for name, value in found.items()}
        counts = {name: getattr(self._counts, name) for name in _COUNTS}
        known = {"sums": values, "method": self._method.state()}
        state = {"identity": self._identity, "counts": counts, **known, "first": self._first, "last": self._done}
        text = json.dumps(state)
        head = {"state": text, "fingerprint": fingerprint(("state", text), *sorted(tensors.items()))}
        save_tensors(self.path, tensors, "checkpoint", head)
        self._written = self._counts.next
        self._plan_next(time.monotonic() - start)

    def _plan_next(self, seconds: float) -> None:
        self._due = time.monotonic() + (max(_SECONDS, seconds / _SHARE) if self._every is None else self._every)


def identity_of(problem: Problem, settings: Settings, sums: object, shard: tuple[int, int]) -> dict[str, Any]:
    """Return all that must be the same for a run to be resumed, by the name that an error gives it."""
    model, parameters, likelihood = problem.model, problem.parameters, problem.likelihood
    device = next(iter(parameters.values())).device.type
    modules = [(name, (type(module).__qualname__, module.extra_repr())) for name, module in model.named_modules()]
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "none"
    return {
        "result": type(sums).__name__,
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
        "weights of the model": fingerprint(*model.named_parameters(), *model.named_buffers()),
    }


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise FileError(message("checkpoint", "a file, or the name of one to be made", f"{path}, which is none"))
    try:
        tensors, head = load_tensors(path)
        text = head["state"] if head["kind"] == "checkpoint" else ""
        if head["fingerprint"] != fingerprint(("state", text), *sorted(tensors.items())):
            raise ValueError("its contents have changed since it was written")
    except (FileError, KeyError, ValueError) as error:
        raise FileError(f"{path} is not a checkpoint, or is damaged ({error}). {_afresh(path)}") from error
    return tensors, json.loads(text)


def _compare(now: dict[str, Any], before: dict[str, Any], path: Path) -> None:
    different = [name for name in now if now[name] != before.get(name)]
    if not different:
        return
    short = {name: f" ({before.get(name)}, now {now[name]})" for name in different if not _is_long(now[name])}
    got = "one that differs in " + ", ".join(name + short.get(name, "") for name in different)
    raise ValueError(message("checkpoint", "one of the same run", got, _afresh(path)))


def _is_long(value: object) -> bool:
    return len(str(value)) > 60 or (isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None)


def _afresh(path: Path) -> str:
    return f"Delete {path} to begin afresh, or give another path."


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
