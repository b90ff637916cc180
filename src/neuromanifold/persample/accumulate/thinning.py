"""Which batches have their fourth powers taken, where these cost as much as the squares.

An error bar need not be as exact as the estimate: fourth powers are taken of the first samples, and then of one of
every four batches, chosen at random so that it does not correlate with the order of the data.  But of all batches where
most of an entry's variance may be in one that would be left out, so that its error bar would be much too small:

    if few samples contribute to F                  as for confident predictions (`note_traces`)
    if few samples contribute to an entry of F      for parameters with many such entries (`note_rare`)
"""

from __future__ import annotations

import functools
import random
from typing import Any

from torch import Tensor

from neuromanifold.persample.accumulate.base import read_back

_ALL_OF, _ONE_IN = 128, 4  # samples whose fourth powers are all taken; then those of one batch in so many
_EVEN = 0.5  # of the samples must contribute to F, or all fourth powers are taken
UNLIKE, _MANY = 4.0, 0.2  # where n v/F̂² is larger for so many entries of a parameter, all of its are taken


class Thinning:
    """Decides of which batches fourth powers are taken.

    That follows from a batch's number and size, so that processes which share a run take those that one process would;
    but where few samples contribute, each process takes all of its own from then on.
    """

    def __init__(self, parameters: int, alike: bool) -> None:
        """`alike`: batches have about the same variance, so that the fourth powers of some of them are enough."""
        self._alike = alike
        self._takes = True  # those of this batch
        self._begins_late = False  # the first fourth powers of the run are in another process or shard
        self._samples = self._of_batch = 0  # of the batches before; of this one
        self._traces = [0.0, 0.0, 0.0]  # Σ t, Σ t² and number of some samples, t = tr M
        self._rare = [False] * parameters  # parameters with many entries to which few samples contribute

    def begin_batch(self, index: int, samples: int) -> None:
        """Decide for a batch before which `index` batches come."""
        group, place = divmod(index, _ONE_IN)
        first = index * samples < _ALL_OF
        self._takes = not self._alike or self._is_uneven or first or place == _chosen(group)
        self._begins_late = index > 0 and not self._samples
        self._of_batch = samples

    def takes(self, i: int, first: bool) -> bool:
        """Whether fourth powers of a parameter are taken of this batch; `first`: it had no gradients before."""
        return self._takes or self._rare[i] or (first and not self._begins_late)

    def end_batch(self) -> int:
        """Count the batch; return the number of samples once so many have come that `note_rare` can say something."""
        before, self._samples = self._samples, self._samples + self._of_batch
        return self._samples if self._alike and before < _ALL_OF <= self._samples else 0

    def note_rare(self, shares: list[float]) -> None:
        """Take, for each parameter, the share of entries to which few samples contribute."""
        self._rare = [share > _MANY for share in shares]

    def note_traces(self, traces: Tensor) -> None:
        """Take the traces of some samples' metrics, [n]: which share of the samples contributes to F and its noise."""
        total, squares = read_back([traces.double().sum(), traces.double().square().sum()])
        self._traces = [a + b for a, b in zip(self._traces, (total, squares, len(traces)), strict=True)]
        self._takes = self._takes or self._is_uneven

    @property
    def _is_uneven(self) -> bool:
        """Whether (Σ t)²/Σ t², the number of samples that contribute to F, is a small part of them."""
        total, squares, samples = self._traces
        return total**2 < _EVEN * samples * squares

    @property
    def variant(self) -> tuple[object, ...]:
        """What has been decided for this batch."""
        return self._takes, *self._rare

    def state(self) -> dict[str, Any]:
        """Return what the next decisions depend on."""
        return {"samples": self._samples, "traces": self._traces, "rare": self._rare}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._samples, self._traces, self._rare = state["samples"], state["traces"], state["rare"]

    def merge(self, other: Thinning) -> None:
        """Add what is known from other batches."""
        self._samples += other._samples
        self._traces = [a + b for a, b in zip(self._traces, other._traces, strict=True)]
        self._rare = [a or b for a, b in zip(self._rare, other._rare, strict=True)]


@functools.lru_cache(maxsize=16)
def _chosen(group: int) -> int:
    """Return which batch of a group has its fourth powers taken."""
    return random.Random(group).randrange(_ONE_IN)
