"""Adaptive passes as an estimator: the strategy of a window, and the draw of samples that are kept.

Which samples and columns are worth rows is in `allocation.py`; `run/windows.py` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.core.checks import finite_number, integer_in_range
from neuromanifold.estimators.allocation import Allocation, Scores, allocate, best_rows, variance
from neuromanifold.estimators.base import Estimator
from neuromanifold.estimators.hutchinson import Hutchinson

EIGENPAIRS = 8  # of a sample, at most, that have passes of their own where all samples have several

# A strategy is chosen if the variance that it is predicted to have is below a share of another one's:
_FEWER = 0.9  # of that of equal passes, below which outputs are worth computing first
_LEFT_OUT = 0.25  # of the least one with everyone kept, below which samples are left out at a cost of one or more
_SMALL = 0.125  # in units of (mean t)² of a sample: where everyone is kept with less variance, nobody is left out


@dataclass(frozen=True)
class Adaptive(Estimator):
    """Unbiased like `Hutchinson`, at a given cost, with passes for the samples whose estimates would be noisy.

    On trained classifiers few samples carry most of F and of its noise, and outputs say which: the largest columns of
    their metrics get passes of their own, in which nothing is random.  Above a cost of one everyone is kept where that
    is as good: to each batch's own pass, full batches with columns of noisy samples are added.  Else the outputs of
    `window` batches are computed first.  Samples that contribute little, or what is left of a sample without its
    largest columns, are then left out at random, and weighted where they are kept.  Where all samples are alike, as
    with near-uniform predictions, all get the same number of passes, and nothing is computed twice.  Which of these is
    done is decided for each window by its first batch (`strategy`).

    Args:
        cost: in forward + backward passes over the data: 0.7, 1, 1.5, ..., up to where nothing is random any more.
        window: how many batches are looked at together.

    Example:
        >>> fim = nm.fisher_diagonal(model, data, nm.Adaptive(1.5))  # or passes=1.5
        >>> fim.provenance.target
        'unbiased'
    """

    cost: float = 1.0
    window: int = 16

    centred: ClassVar[bool] = True
    target: ClassVar[str] = "unbiased"
    noise_factor: ClassVar[float] = 1.0  #: of samples that are left out most of the time: Var(g²) <= E[g⁴]

    def __post_init__(self) -> None:
        finite_number(self.cost, "passes", positive=True, advice="1 costs as much as forward + backward of all data.")
        integer_in_range(self.window, "window", 1, 10**6, "how many batches are planned together")

    def passes(self, core: Core) -> int:
        """The number of passes that all samples can have at this cost, rounded down."""
        return self.alike(0).passes(core)

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """The same number of passes for all distributions, wherever samples cannot be regrouped."""
        return self.alike(0).cotangents(core, labels, generator)

    def pass_noise(self, core: Core, alone: bool) -> list[float]:
        """The noise factors of equal numbers of passes for all distributions."""
        return self.alike(0).pass_noise(core, alone)

    @property
    def independent_passes(self) -> bool:
        """The passes of a sample depend on each other."""
        return False

    def for_batches(self) -> Estimator:
        """Independent probes at this cost: cross terms between samples are most of the noise there."""
        return self.alike(0).for_batches()

    @property
    def mean_passes(self) -> float:
        """How many backward passes m all samples can have: a sample costs 1 + 2m forward passes."""
        return max(1.0, (3 * self.cost - 1) / 2)

    def alike(self, batch: int) -> Hutchinson:
        """Return the estimator for a batch if all samples are alike: for 1.75 passes, two in three of four batches."""
        return several(math.floor((batch + 1) * self.mean_passes) - math.floor(batch * self.mean_passes))

    def rows(self, samples: int, base: int) -> int:
        """How many rows can be added for so many samples of which all have had `base` passes in their batches."""
        return max(0, math.floor(samples * (self.cost - (1 + 2 * base) / 3) + 1e-9))


def several(passes: int) -> Hutchinson:
    """Return the estimator with so many orthogonal probes; leading eigenvectors may take all passes but one."""
    return Hutchinson(passes, deflate=EIGENPAIRS if passes > 1 else 1)


class Strategy(NamedTuple):
    """How the samples of a window are treated: equal passes, rows for noisy ones, or rows for a choice of them."""

    how: Literal["alike", "everyone", "chosen"]
    base: int = 1  # where everyone is kept, the passes of each batch: columns first, the probe last


def strategy(estimator: Adaptive, scores: Scores) -> Strategy:
    """Return how to treat samples like these.

    At a cost of one or more, samples are left out only where this takes three quarters of the variance, and where what
    everyone has is not small anyway.  For entries to which few samples contribute suffer from it, which the sum of
    variances does not show.
    """
    cost, n, total = estimator.cost, len(scores.trace), float(scores.trace.sum())
    if 3 * cost <= 1 or not total:
        return Strategy("alike")
    passes, fourths = estimator.mean_passes, 3 * scores.trace.square()
    equal = least = variance(2 * scores.with_passes(passes), fourths, min(1.0, cost))
    found, gains, everyone = Strategy("alike"), scores.gains, torch.ones_like(scores.trace)
    for base in range(1, min(math.floor(estimator.mean_passes), gains.shape[1]) + 1) if cost >= 1 else ():
        kept = Allocation(everyone, best_rows(gains, estimator.rows(n, base), base - 1)).variance(scores)
        if kept < min(_FEWER * equal, least):
            found, least = Strategy("everyone", base), kept
    if cost >= 1 and n * least < _SMALL * total**2:
        return found
    limit = least * (_LEFT_OUT if cost >= 1 else _FEWER)
    return Strategy("chosen") if allocate(scores, n * (cost - 1 / 3)).variance(scores) < limit else found


def chosen(keep: Tensor, generator: torch.Generator) -> Tensor:
    """Draw samples that are kept with the given probabilities, by their numbers.

    Systematic sampling: of those with π < 1, in random order, those are kept at which Σ π passes an integer, from a
    random number on.  So their number is ⌊Σ π⌋ or ⌈Σ π⌉.  In the order of the data, every second sample could be
    one of a kind.
    """
    order = torch.randperm(len(keep), generator=generator, device=generator.device).cpu()
    sums = _random(generator) + torch.where(keep < 1, keep, 0)[order].cumsum(0)
    passed = sums.floor() > torch.cat([sums.new_zeros(min(1, len(sums))), sums[:-1]]).floor()
    return order[passed | (keep[order] >= 1)].sort().values


def in_full_groups(keep: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The probabilities, changed such that of the samples with π < 1 a multiple of the groups' size is kept.

    Rounded up or down at random, so that the cost is what it was on average.  Where less than one group is expected of
    them, the probabilities stay as they are: with none of these samples the estimate would be biased.
    """
    expected, start = float(torch.where(keep < 1, keep, 0).sum()), float(_random(generator))
    if expected < size:
        return keep
    wanted = math.floor(expected / size + start) * size
    return torch.where(keep < 1, (keep * (wanted / expected)).clamp(max=1), keep)


def _random(generator: torch.Generator) -> Tensor:
    """A number between 0 and 1."""
    return torch.rand((), generator=generator, dtype=torch.float64, device=generator.device).cpu()
