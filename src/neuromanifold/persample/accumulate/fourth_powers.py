"""Fourth powers of gradients, for error bars: if Var(g²) <= c E[g⁴], then Var(Σ g²) <= E[Σ c g⁴].

Or, for error bars of rows, one number for each row of a weight: Σ c R², with R = Σ_k g_k² over a row's entries.  If
Var(g²) <= c E[g⁴] for each entry, then (1 - c) E[g⁴] <= E[g²]², and

    (1 - c) E[R²] = (1 - c) Σ_kl E[g_k² g_l²] <= (Σ_k √((1 - c) E[g_k⁴]))² <= (Σ_k E[g_k²])² = E[R]²

by Cauchy's inequality.  So Var R <= c E[R²]: the row's sum has the standard error √(c Σ R²), with its entries' own c.

FourthPowers    those of one parameter: the sum and its unit
Units           keep them in float32's range
Thinning        decides of which batches they are taken
Tally           of how many samples they are taken
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.accumulate.base import Reducer, power_of_two_near, read_back, zero_sums

_LEAST_AFTER_ONE = 2.0**-20  # the smallest unit that follows after 1
_LARGEST = {torch.float32: 40, torch.float64: 200}  # exponents of units, whose squares and inverses are numbers, too
_GROWN = 16  # a unit stays unless gradients are so many times as large: then fourth powers could overflow
_EARLY = 8  # batches in which gradients may become much larger than before
_SINGLE = math.sqrt(2 / 3)  # √(Var(g²)/E[g⁴]) of a probe
_ALL_OF, _ONE_IN = 128, 4  # fourth powers of the first 128 samples are all taken, then those of one batch in four
_EVEN = 0.5  # if a smaller share of the samples contributes to F, all fourth powers are taken
# An entry to which few samples contribute ("rare") has n v/F̂² > UNLIKE. Where a larger share of a parameter's entries
# than _MANY is rare, all of its fourth powers are taken.
UNLIKE, _MANY = 4.0, 0.2


class Tally(NamedTuple):
    """Numbers of samples, for each parameter: those with random gradients, and those with fourth powers taken."""

    seen: list[int]
    taken: list[int]

    def since(self, before: Tally) -> Tally:
        """Return the counts that came after `before`."""
        return Tally(*([b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, self, strict=True)))

    def plus(self, more: Tally) -> Tally:
        """Return these counts and those of a further batch together."""
        return Tally(*([a + b for a, b in zip(*pair, strict=True)] for pair in zip(self, more, strict=True)))


class FourthPowers:
    """Σ c g⁴ of one parameter over all samples seen, from those of some of them.

    Fourth powers of small numbers underflow in float32, so they are kept in a unit, until `standard_error`:

        sums = Σ c (g/unit)⁴ over the samples taken,        Σ c g⁴ ≈ seen/taken · unit⁴ · sums.
    """

    def __init__(self, parameter: Tensor, by_row: bool) -> None:
        """`by_row`: one number for each row of the parameter, Σ c R²."""
        self._parameter, self.by_row = parameter, by_row
        self.sums: Tensor | None = None  # allocated when first needed, as .grad is
        # a power of two near the root mean square of the first gradients; 0: not known yet, sums are in units of 1
        self.unit = 0.0
        self.seen = self.taken = 0  # samples with random gradients; those of them whose fourth powers have been taken

    @property
    def shape(self) -> torch.Size:
        """The shape of the sums."""
        return self._parameter.shape[:1] if self.by_row else self._parameter.shape

    def with_squares(self, squares: Tensor, scale: float, noise_factor: float) -> PowerSums:
        """Return where a pass adds its squares and fourth powers."""
        sums = self._allocated()
        fourths, rows = (None, sums) if self.by_row else (sums, None)
        return PowerSums(squares, fourths, self.unit or 1.0, noise_factor, scale, rows)

    def fit_unit(self, size: float) -> None:
        """Take a unit near the size of gradients, if there is none or they have grown much.

        Fourth powers captured before there was a unit are in units of 1, and must stay in float32's range.
        """
        unit = power_of_two_near(size, _LARGEST[promoted(self._parameter.dtype)])
        if unit and not self.unit and self.sums is not None:
            unit = max(unit, _LEAST_AFTER_ONE)
        if unit > _GROWN * self.unit:
            self.convert(unit)

    def convert(self, unit: float) -> None:
        """Express the sums in another unit."""
        if self.sums is not None and unit != self.unit:
            self.sums.mul_(((self.unit or 1.0) / (unit or 1.0)) ** 4)
        self.unit = unit

    def merge(self, other: FourthPowers) -> None:
        """Add those of other samples."""
        self.convert(max(self.unit, other.unit))
        other.convert(self.unit)
        if other.sums is not None:
            self._allocated().add_(other.sums)
        self.seen, self.taken = self.seen + other.seen, self.taken + other.taken

    def reduce(self, processes: Reducer) -> None:
        """Add up the sums of all processes, which have the same unit."""
        processes.add(self._allocated())

    def share_of_rare(self, squares: Tensor, samples: int, limit: float) -> Tensor | None:
        """Return the share of entries with n v/F̂² > limit, v = Σ c g⁴, for n samples of which all were taken.

        For n samples that contribute alike to an entry, n v/F̂² is about 2 after one pass, with v = (2/3) Σ g⁴; it is
        twice that if half of them contribute, as after a ReLU.
        """
        if self.sums is None or not self.unit:
            return None
        scaled = self.of_rows(squares) / self.unit**2
        return (samples * self.sums > limit * scaled.square()).sum() / (self.sums > 0).sum().clamp(min=1)

    def standard_error(self, squares: Tensor | None, *, in_place: bool = False) -> Tensor | None:
        """Return √(Σ c g⁴), the standard error of each Σ g² (or of each row's); None if nothing is random.

        An entry may have no fourth power at all, because only batches contribute to it whose fourth powers were not
        taken.  Then it gets the standard error √(2/3) Σ g² that it would have if Σ g² were a single square.  So do all
        entries of a parameter of which no fourth power was taken.

        `squares`: Σ g² of the random gradients.  `in_place`: overwrite the sums.
        """
        squares = None if squares is None else self.of_rows(squares)
        if self.sums is None:
            return squares * _SINGLE if self.seen and squares is not None else None
        stands_for = self.seen / self.taken if self.taken else 1.0
        root = self.sums.sqrt_() if in_place else self.sums.sqrt()
        root.mul_(math.sqrt(stands_for) * (self.unit or 1.0) ** 2)
        if stands_for > 1 and squares is not None and bool(root.any()):
            root.add_((root == 0) * squares, alpha=_SINGLE)
        return root

    def of_rows(self, squares: Tensor) -> Tensor:
        """Return the squares that the error bars belong to: summed over rows, or as they are."""
        return squares.flatten(1).sum(1) if self.by_row else squares

    def _allocated(self) -> Tensor:
        if self.sums is None:
            self.sums = zero_sums(self._parameter.flatten(1)[:, 0] if self.by_row else self._parameter)
        return self.sums


class Units:
    """Keeps the unit of each parameter's fourth powers near the size of its gradients.

    Gradients are measured in the first batches, in which they may grow much, and in number 16, 32, ...  Reading a value
    back waits for a GPU: there all of them are read together, after the batch.
    """

    def __init__(self, fourths: Sequence[FourthPowers]) -> None:
        self._fourths = fourths
        self.batches = 0
        self._later: dict[int, Tensor] = {}  # sizes, read back between batches
        self._may_synchronize = True

    @contextmanager
    def without_synchronization(self) -> Iterator[None]:
        """Measure nothing inside, where a CUDA graph may be captured: values cannot be read."""
        self._may_synchronize = False
        try:
            yield
        finally:
            self._may_synchronize = True

    def measure(
        self, numbers: Sequence[int], sizes: Callable[[], list[Tensor]], scale: float, device: torch.device
    ) -> None:
        """Compare units with the root mean squares of some parameters' gradients/scale, if that is due.

        A unit that is not known yet is needed at once.
        """
        if not self._may_synchronize:
            return
        due = self.batches < _EARLY or self.batches & (self.batches + 1) == 0
        if not all(self._fourths[i].unit for i in numbers) or (due and device.type != "cuda"):
            for i, size in zip(numbers, read_back(sizes()), strict=True):
                self._fourths[i].fit_unit(size / scale)
        elif due:
            self._later.update((i, size / scale) for i, size in zip(numbers, sizes(), strict=True))

    def end_batch(self) -> None:
        """Read back what was measured in the batch."""
        for device in {size.device for size in self._later.values()}:
            there = {i: size for i, size in self._later.items() if size.device == device}
            for i, size in zip(there, read_back(list(there.values())), strict=True):
                self._fourths[i].fit_unit(size)
        self.discard()
        self.batches += 1

    def discard(self) -> None:
        """Forget what was measured in a batch that does not count."""
        self._later = {}


class Thinning:
    """Decides of which batches fourth powers are taken, where these cost as much as the squares.

    An error bar need not be as exact as the estimate: they are taken of the first samples, and then of one of every
    four batches, chosen at random so that it does not correlate with the order of the data.  But of all batches where
    most of an entry's variance may be in one that would be left out, so that its error bar would be much too small:

        if few samples contribute to F                  as for confident predictions (`note_traces`)
        if few samples contribute to an entry of F      for parameters with many such entries (`note_rare`)

    That follows from a batch's number and size, so that processes which share a run take those that one process would;
    but where few samples contribute, each process takes all of its own from then on.
    """

    def __init__(self, parameters: int, similar_batches: bool) -> None:
        """`parameters`: how many.  `similar_batches`: all have about the same variance, so that some are enough."""
        self._similar_batches = similar_batches
        self._takes = True  # whether fourth powers of this batch are taken
        self._begins_late = False  # the first fourth powers of the run are taken in another process or shard
        self._samples = self._of_batch = 0  # in the batches before; in this one
        self._traces = [0.0, 0.0, 0.0]  # Σ t, Σ t² and number of some samples, t = tr M
        self._rare = [False] * parameters  # parameters with many entries to which few samples contribute

    def begin_batch(self, index: int, samples: int) -> None:
        """Decide for a batch before which `index` batches come."""
        group, place = divmod(index, _ONE_IN)
        first = index * samples < _ALL_OF
        self._takes = not self._similar_batches or self._is_uneven or first or place == _chosen(group)
        self._begins_late = index > 0 and not self._samples
        self._of_batch = samples

    def takes(self, i: int, first: bool) -> bool:
        """Whether fourth powers of a parameter are taken of this batch; `first`: it had no gradients before."""
        return self._takes or self._rare[i] or (first and not self._begins_late)

    def end_batch(self) -> int:
        """Count the batch; return the number of samples once so many have come that `note_rare` can say something."""
        before, self._samples = self._samples, self._samples + self._of_batch
        return self._samples if self._similar_batches and before < _ALL_OF <= self._samples else 0

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
