"""What a run has seen so far: samples, positions, batches, passes; and reports of it to an observer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from neuromanifold.problem.fingerprint import fingerprint
from neuromanifold.problem.outputs import Outputs
from neuromanifold.run.methods import Method
from neuromanifold.run.settings import Observer, RunProgress

_KEPT = ("samples", "positions", "batches", "next", "dtype", "unit", "noise_shares", "left_out")
_NOTED = ("passes", "verified", "methods")  # of the method, which has a state of its own in a checkpoint
_METHODS = ("token", "sample", "sample, one by one", "batch")  # from fine to coarse
_SECONDS, _SHARE = 0.5, 1 / 50  # between two calls of an observer, at least; of the time, for these calls, at most


@dataclass
class Counts:
    """What a run has seen, counted by its methods alone; `total` returns what all of its processes have seen."""

    samples: int = 0
    positions: int = 0
    batches: int = 0
    passes: int = 0
    verified: int = 0  # batches whose per-sample gradients were compared with autograd's
    dtype: str = ""
    unit: str = "sample"  # "sequence" where outputs are [B, T, C]
    stopped: str = ""
    methods: list[str] = field(default_factory=list)  # how each parameter was done
    first: str = ""  # a fingerprint of batch 0 of the data, whichever shard this is
    next: int = 0  # the number, in the data, of the batch after the last one
    running_samples: int | Tensor = 0  # those of `samples`, on the device until `synchronize`
    running_positions: int | Tensor = 0
    processes: int = 1  # that have shared the run
    left_out: int = 0  # samples without a pass, of adaptive passes
    noise_shares: tuple[float | Tensor, float | Tensor] | None = None  # `Estimator.noise_shares`, over some batches

    def add(self, outputs: Outputs) -> None:
        """Count the samples of a batch, or of a part of one."""
        self.running_samples = self.running_samples + outputs.samples
        self.running_positions = self.running_positions + outputs.positions
        self.unit = "sequence" if outputs.logits.ndim == 3 else "sample"
        self.dtype = str(outputs.logits.dtype).removeprefix("torch.")

    def end_batch(self, end: int) -> None:
        """Count a batch, all of whose samples have been added; the data have been read up to batch `end`."""
        self.batches += 1
        self.next = max(self.next, end)

    def leave_out(self, samples: int) -> None:
        """Count samples that have no pass; those with passes have larger weights instead."""
        self.left_out += samples

    def note(self, method: Method, more_passes: int = 0) -> None:
        """Note how the batches were done, with how many backward passes besides those of the method."""
        self.passes, self.verified, self.methods = method.passes + more_passes, method.verified, method.methods()

    def add_noise_shares(self, shares: tuple[float | Tensor, float | Tensor] | None) -> None:
        """Add those of one more batch; None: all of the bound is noise."""
        if shares is not None:
            noise, bound = self.noise_shares or (0.0, 0.0)
            self.noise_shares = noise + shares[0], bound + shares[1]

    @property
    def noise_ratio(self) -> float:
        """How large the noise is on average, as a share of the standard errors, which are bounds; waits for a GPU."""
        if self.noise_shares is None or any(method == "batch" for method in self.methods):
            return 1.0
        noise, bound = map(float, self.noise_shares)
        return math.sqrt(max(noise, 0.0) / bound) if bound > 0 else 1.0

    def synchronize(self) -> None:
        """Read back the counts that are still on a GPU."""
        self.samples, self.positions = int(self.running_samples), int(self.running_positions)
        if self.noise_shares is not None:
            self.noise_shares = float(self.noise_shares[0]), float(self.noise_shares[1])

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in _KEPT}

    def merge(self, state: dict[str, Any]) -> None:
        """Add what `state` returned for other batches."""
        if state["batches"]:
            self.dtype, self.unit = state["dtype"], state["unit"]
        for name in ("samples", "positions", "batches", "left_out"):
            setattr(self, name, getattr(self, name) + state[name])
        self.next = max(self.next, state["next"])
        self.add_noise_shares(state["noise_shares"])
        self.running_samples, self.running_positions = self.samples, self.positions

    def shared(self, stopped: str = "", first: str = "") -> dict[str, Any]:
        """Return what other processes need for `total`; waits for a GPU.

        `stopped`: why the run has ended before the data; `first`: the fingerprint of batch 0 of the data.
        """
        self.synchronize()
        return self.state() | {name: getattr(self, name) for name in _NOTED} | {"stopped": stopped, "first": first}

    @classmethod
    def total(cls, of_all: list[dict[str, Any]]) -> Counts:
        """Return the counts of all processes together, from what `shared` returned in each."""
        total = cls()
        for one in of_all:
            total.merge(one)
        total.passes, total.verified = (sum(one[name] for one in of_all) for name in ("passes", "verified"))
        total.methods = coarsest(one["methods"] for one in of_all)
        total.stopped = next((one["stopped"] for one in of_all if one["stopped"]), "")
        if total.stopped.startswith("interrupted"):
            total.stopped = f"interrupted after {total.batches} batches"
        firsts = list(dict.fromkeys(one["first"] for one in of_all if one["first"]))
        total.first = firsts[0] if len(firsts) == 1 else fingerprint(("", firsts)) if firsts else ""
        total.processes = len(of_all)
        total.synchronize()
        return total

    def progress(self, relative_error: float | None) -> RunProgress:
        """Return how far the run has come; waits for a GPU."""
        tokens = int(self.running_positions) if self.unit == "sequence" else 0
        return RunProgress(self.batches, int(self.running_samples), self.next, relative_error, tokens)


def coarsest(methods: Iterable[list[str]]) -> list[str]:
    """Return for each parameter the coarsest of the methods by which several runs have done it."""
    return [max(each, key=_METHODS.index) for each in zip(*filter(None, methods), strict=True)]


class Reporter:
    """Calls an observer at most every half second, and so rarely that this takes at most a fiftieth of the time."""

    def __init__(self, observer: Observer | bool) -> None:
        """A bool, which only asks for a progress bar or for none, means that there is no observer."""
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
