"""Adaptive passes as an estimator: the strategy of a window, the draw of samples that are kept, and groups of samples.

How many passes each sample is worth is in `allocation.py`; `run/windows.py` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.core.checks import finite_number, integer_in_range
from neuromanifold.estimators.allocation import (
    EIGENPAIRS,
    Allocation,
    Scores,
    allocate,
    allocate_to_everyone,
    several_passes,
)
from neuromanifold.estimators.base import Estimator, random_signs
from neuromanifold.estimators.hutchinson import Hutchinson
from neuromanifold.estimators.orthogonal import leading, peeled

# A strategy is chosen if the variance that it is predicted to have is below a share of another one's:
_FEWER = 0.9  # of that of equal passes, below which outputs are worth computing first
_LEFT_OUT = 0.25  # of the least one with everyone kept, below which samples are left out at a cost of one or more
_SMALL = 0.125  # in units of (mean t)² of a sample: where everyone is kept with less variance, nobody is left out


@dataclass(frozen=True)
class Adaptive(Estimator):
    """Unbiased like `Hutchinson`, at a given cost, with passes for the samples whose estimates would be noisy.

    On trained classifiers few samples carry most of F and of its noise, and outputs say which: they get passes for
    their leading eigenvectors.  Above a cost of one everyone is kept where that is as good: noisy samples send an
    eigenvector in the pass of their batch, and are regrouped for the rest.  Else the outputs of `window` batches are
    computed first; samples that contribute little are left out at random, and weighted where they are kept.  Where all
    samples are alike, as with near-uniform predictions, all get the same number of passes, and nothing is computed
    twice.  Which of these is done is decided for each window by its first batch (`strategy`).

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
        """As many as all samples can have at this cost."""
        return self.alike(0).passes(core)

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """The same number of passes for all distributions, wherever samples cannot be regrouped."""
        return self.alike(0).cotangents(core, labels, generator)

    def pass_noise(self, core: Core, alone: bool) -> list[float]:
        """That of the same number of passes for all distributions."""
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
        """How many backward passes all samples can have at this cost: 1 + 2m forward passes."""
        return max(1.0, (3 * self.cost - 1) / 2)

    def alike(self, batch: int) -> Hutchinson:
        """Return the estimator for a batch if all samples are alike: for 1.75 passes, two in three of four batches."""
        return several(math.floor((batch + 1) * self.mean_passes) - math.floor(batch * self.mean_passes))

    def allocation(self, samples: int) -> Allocation:
        """Return the same allocation for all samples; at a cost below one, each is kept with that probability."""
        equal = several_passes(samples, self.mean_passes)
        return equal._replace(keep=equal.keep * min(1.0, self.cost))


def several(passes: int) -> Hutchinson:
    """Return the estimator with so many orthogonal probes; leading eigenvectors may take all passes but one."""
    return Hutchinson(passes, deflate=EIGENPAIRS if passes > 1 else 1)


@dataclass(frozen=True)
class AfterFirst(Estimator):
    """All of a sample's passes but the first, which its leading eigenvector has had to itself."""

    probes: int  # with the first

    centred: ClassVar[bool] = True
    target: ClassVar[str] = "unbiased, with the first pass"
    noise_factor: ClassVar[float] = Hutchinson.noise_factor

    def passes(self, core: Core) -> int:
        """One less than all passes, of which there are at most as many as the factor has columns."""
        return min(self.probes, core.rank) - 1

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """Further eigenvectors, and what is left."""
        del labels
        drawn = peeled(core, EIGENPAIRS, self.passes(core) + 1, generator, least=1)
        return (one * random_signs(core, 1, generator) for one in islice(drawn, 1, None))

    def pass_noise(self, core: Core, alone: bool) -> list[float]:
        """As `Hutchinson.pass_noise`."""
        passes = self.passes(core)
        if not alone:
            return [self.noise_factor] * passes
        found = leading(core, min(EIGENPAIRS, core.rank), passes + 1, least=1)
        m, d = passes + 1 - found.own, core.rank - found.own
        left = (d - m) / max(1, d - 1)
        return [found.relative_variance] * (found.own - 1) + [self.noise_factor * left] * m


Strategy = Literal["alike", "everyone", "chosen"]
"""Equal passes for all; a pass for every sample and further ones for noisy samples; or passes for chosen samples."""


def strategy(estimator: Adaptive, some: Scores, everyone: Scores) -> Strategy:
    """What to do with samples like these: equal passes, further ones for noisy samples, or a choice of samples.

    `everyone`: their scores by `score_everyone`.  At a cost of one or more, samples are left out only where this takes
    three quarters of the variance, and where what everyone has is not small anyway.  For entries to which few samples
    contribute suffer from it, which the sum of variances does not show.
    """
    cost, n, total = estimator.cost, len(some.trace), float(some.trace.sum())
    if 3 * cost <= 1 or not total:
        return "alike"
    found: Strategy = "alike"
    equal = estimator.allocation(n).variance(some)
    kept = allocate_to_everyone(everyone, 3 * (cost - 1) * n).variance(everyone) if cost >= 1 else math.inf
    if kept < _FEWER * equal:
        found = "everyone"
    limit = min(kept, equal) * (_LEFT_OUT if cost >= 1 else _FEWER)
    if cost >= 1 and n * min(kept, equal) < _SMALL * total**2:
        return found
    return "chosen" if allocate(some, (3 * cost - 1) * n).variance(some) < limit else found


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


def groups(passes: Tensor, size: int) -> list[int]:
    """Sizes of groups that samples in descending order of their numbers of passes [n] are divided into.

    At most `size` of them.  A sixteenth of it with the same number is worth a group of its own, fewer join the next
    ones: with a quarter, a few noisy samples would give many others passes, and cost up to a fifth more than was asked.
    """
    found, open_ = [], 0
    for same in passes.unique_consecutive(return_counts=True)[1].tolist():  # type: ignore[no-untyped-call]
        full, open_ = divmod(open_ + same, size)
        found += [size] * full
        if 16 * open_ >= size:
            found, open_ = [*found, open_], 0
    return [*found, open_] if open_ else found


def _random(generator: torch.Generator) -> Tensor:
    """A number between 0 and 1."""
    return torch.rand((), generator=generator, dtype=torch.float64, device=generator.device).cpu()
