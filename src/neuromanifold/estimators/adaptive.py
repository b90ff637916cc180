"""Passes where the noise is: which samples are worth several of them, and which can be left out at times.

A sample's output distributions say, before any backward pass, how large its part of F is and how noisy an estimate of
it would be.  On average over directions of J, and up to one factor for all samples, with t = tr M and q = ‖M‖²,

    F² = t² + 2q        and the variance of m passes is 2 S²_m,        S²_1 = t² - q        (`remaining_noise`).

A sample that is kept with probability π gets the weight 1/π, which is unbiased since π and m depend on outputs alone.
Its estimate has the variance V = 2 S²_m/π + (1/π - 1)(t² + 2q), and costs π(1 + 2m) forward passes.  The smallest
Σ V at a given cost, but for some percent, has one number μ for all samples:

    π = min(1, t/√μ)        m = argmin S²_m + μm, which is 1 wherever π < 1.

Proof.  For m = 1 the variance is 3t²/π - (t² + 2q), so ∂/∂π of variance + 3μπ is zero at π = t/√μ.  With π = 1 the
choice of m minimises 2 S²_m + 2μm.  Several passes cannot pay for t² < μ, since S²_1 <= t².  (For t² a little above μ,
several passes with π < 1 can be better than one or two with π = 1, by less than a hundredth of variance + μ cost.)

Or everyone is kept: each sample has the pass of its batch, in which noisy ones send their leading eigenvector alone.
These are then regrouped for the m - 1 passes that are left to them.  The outputs that scores are made of are those that
the first pass goes back from, so this costs 3 forward passes for a sample and 1 + 2(m - 1) more for a noisy one, and

    m = argmin S²_m + μ(m - 1/2) [m >= 2],        where the first of m >= 2 passes is the leading eigenvector's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import finite_number, integer_in_range
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.estimators.base import Estimator
from neuromanifold.estimators.hutchinson import Hutchinson
from neuromanifold.estimators.orthogonal import leading, peeled, random_signs, remaining_noise

_EIGENPAIRS = 8  # of a sample, at most, that may have passes of their own
_FEWER = 0.9  # of the variance of equal passes is worth looking at the outputs first
_GAP = 1e-3  # between the two largest eigenvalues, at least, for an eigenvector that is computed again later
_LEFT_OUT = 0.25  # of the variance with everyone kept is worth leaving samples out, unless that is small:
_SMALL = 0.125  # of (mean t)², for a sample on average: then entries that need the samples left out would be worse


@dataclass(frozen=True)
class Adaptive(Estimator):
    """Unbiased like `Hutchinson`, at a given cost, with passes for the samples whose estimates would be noisy.

    The outputs of `window` batches are computed first.  Samples that contribute little are left out at random and
    weighted where they are kept; those with much noise get passes for their leading eigenvectors.  Batches are
    regrouped accordingly.  On trained classifiers few samples carry most of F and of its noise, so that this is several
    times more accurate.  Where all samples are alike, as with near-uniform predictions, looking at outputs first does
    not pay: then all get the same number of passes, and nothing is computed twice.  This is decided for each window by
    its first batch.

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
        """What to do with a batch if all samples are alike: of 1.75 passes, two for three of four batches."""
        return several(math.floor((batch + 1) * self.mean_passes) - math.floor(batch * self.mean_passes))

    def allocation(self, samples: int) -> Allocation:
        """The same for all samples: fewer passes than one leave some of them out."""
        equal = several_passes(samples, self.mean_passes)
        return equal._replace(keep=equal.keep * min(1.0, self.cost))


def several(passes: int) -> Hutchinson:
    """So many passes, of which leading eigenvectors may have all but one."""
    return Hutchinson(passes, deflate=_EIGENPAIRS if passes > 1 else 1)


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
        drawn = peeled(core, _EIGENPAIRS, self.passes(core) + 1, generator, least=1)
        return (one * random_signs(core, 1, generator) for one in islice(drawn, 1, None))

    def pass_noise(self, core: Core, alone: bool) -> list[float]:
        """As `Hutchinson.pass_noise`."""
        passes = self.passes(core)
        if not alone:
            return [self.noise_factor] * passes
        found = leading(core, min(_EIGENPAIRS, core.rank), passes + 1, least=1)
        m, d = passes + 1 - found.own, core.rank - found.own
        left = (d - m) / max(1, d - 1)
        return [found.relative_variance] * (found.own - 1) + [self.noise_factor * left] * m


class Scores(NamedTuple):
    """What the outputs say about samples, float64 on the CPU."""

    trace: Tensor  # [n] t, over all positions of a sample
    squared_norm: Tensor  # [n] q
    noise: Tensor  # [n, j] S²_m for the j-th of `passes`
    passes: Tensor  # [j] numbers of passes to choose from

    @property
    def fisher(self) -> Tensor:
        """F² on average over directions of J, [n]."""
        return self.trace.square() + 2 * self.squared_norm

    def of(self, rows: Tensor) -> Scores:
        """The scores of some of the samples."""
        return Scores(self.trace[rows], self.squared_norm[rows], self.noise[rows], self.passes)

    @staticmethod
    def joined(parts: list[Scores]) -> Scores:
        """The scores of several batches, which have the same numbers of passes to choose from."""
        trace, squared_norm, noise, passes = zip(*parts, strict=True)
        return Scores(torch.cat(trace), torch.cat(squared_norm), torch.cat(noise), passes[0])

    def at(self, passes: Tensor) -> Tensor:
        """S²_m for m passes, [n]; numbers of passes in between are interpolated."""
        j = torch.searchsorted(self.passes, passes).clamp(1, max(1, len(self.passes) - 1))
        if len(self.passes) == 1:
            return self.noise[:, 0]
        below, above = self.passes[j - 1], self.passes[j]
        share = ((passes - below) / (above - below)).clamp(0, 1)
        low, high = (self.noise.gather(-1, k[:, None])[:, 0] for k in (j - 1, j))
        return low + share * (high - low)


class Allocation(NamedTuple):
    """How often each sample is kept, and with how many passes."""

    keep: Tensor  # [n] π
    passes: Tensor  # [n] m
    price: float  # μ

    def variance(self, scores: Scores) -> float:
        """Predict Σ V, in units of `Scores`."""
        kept = self.keep > 0
        pi, noise, fisher = self.keep[kept], scores.at(self.passes)[kept], scores.fisher[kept]
        return float((2 * noise / pi + (1 / pi - 1) * fisher).sum())

    @property
    def cost(self) -> float:
        """The expected number of forward passes of a sample, where a backward pass counts two."""
        return float((self.keep * (1 + 2 * self.passes)).sum())

    @property
    def extra_cost(self) -> float:
        """The number of forward passes besides those of all batches, where everyone is kept."""
        return float(_extra(self.passes).sum())


def several_passes(samples: int, passes: float) -> Allocation:
    """All samples kept, with so many passes each."""
    ones = torch.ones(samples, dtype=torch.float64)
    return Allocation(ones, ones * passes, 0.0)


def score(
    trace: Tensor, squared_norm: Tensor, rank: int, core_of: Callable[[Tensor], Core] | None, budget: float
) -> Scores:
    """Scores of samples that so many forward passes may be spent on.

    `core_of` gives the output distributions of some of the samples, if each has a single one.  Their eigenvalues are
    computed only where several passes may pay: the price μ of one pass for each sample is a lower bound.
    """
    t, q = trace.double().cpu(), squared_norm.double().cpu()
    one = (t.square() - q).clamp(min=0)
    choices = torch.tensor(_choices(rank if core_of is not None else 2**30), dtype=torch.float64)
    noise = one[:, None] / choices
    if core_of is not None and rank > 1:
        noisy = (one > _price_of_one_pass(t, budget)).nonzero()[:, 0]
        table = _table(core_of, noisy, t, q, rank, choices, least=0)
        noise[noisy] = noise[noisy] if table is None else table
    return Scores(t, q, noise, choices)


def score_everyone(
    trace: Tensor, squared_norm: Tensor, rank: int, core_of: Callable[[Tensor], Core] | None, budget: float
) -> Scores:
    """Scores where everyone is kept: several passes for those samples that have the most noise in one, if for any.

    The others are given no less noise for more passes.  So many forward passes may be spent on further passes: of four
    times as many samples as could have two passes, eigenvalues are computed.
    """
    t, q = trace.double().cpu(), squared_norm.double().cpu()
    one = (t.square() - q).clamp(min=0)
    choices = torch.tensor(_choices(rank if core_of is not None else 1), dtype=torch.float64)
    noise = one[:, None].repeat(1, len(choices))
    most = min(len(t), math.ceil(4 * budget / 3) + 16 if budget > 0 else 0)
    if core_of is not None and rank > 1 and most:
        noisy = one.topk(most).indices.sort().values
        table = _table(core_of, noisy[one[noisy] > 0], t, q, rank, choices, least=1)
        if table is not None:
            noise[noisy[one[noisy] > 0]] = table
    return Scores(t, q, noise, choices)


def _table(
    core_of: Callable[[Tensor], Core], rows: Tensor, t: Tensor, q: Tensor, rank: int, choices: Tensor, least: int
) -> Tensor | None:
    """S²_m of some samples for each number of passes [k, j]; `least`: how many of several are eigenvectors'."""
    core = core_of(rows) if len(rows) else None
    if not isinstance(core, (Categorical, DiagonalCore)):
        return None
    values = core.spectrum(min(_EIGENPAIRS, rank - 1)).values.double().cpu()
    found = [remaining_noise(values, t[rows], q[rows], rank, m) for m in map(int, choices.tolist())]
    table = torch.stack([noise[:, min(least, noise.shape[1] - 1) :].amin(-1) for noise in found], -1)
    if least:  # the first eigenvector is computed twice, and must be the same one
        second = values[:, 1] if values.shape[1] > 1 else t[rows] - values[:, 0]
        table = torch.where((second > (1 - _GAP) * values[:, 0])[:, None], table[:, :1], table)
    return table


def _price_of_one_pass(trace: Tensor, budget: float) -> float:
    """μ with Σ 3 min(1, t/√μ) = budget, which is what one pass for each sample costs; 0 if all can have one."""
    t = trace[trace > 0].sort().values
    if 3 * len(t) <= budget or not len(t):
        return 0.0
    if budget <= 0:
        return math.inf
    sums, larger = t.cumsum(0), torch.arange(len(t) - 1, -1, -1, dtype=t.dtype)
    last = int((sums / t + larger >= budget / 3).nonzero()[-1])  # of those with t <= √μ
    return float(sums[last] / (budget / 3 - larger[last])) ** 2


def allocate(scores: Scores, budget: float) -> Allocation:
    """The allocation with the least Σ V for so many forward passes altogether, by bisection for μ."""
    best = Allocation((scores.trace > 0).double(), scores.passes[scores.noise.argmin(-1)], 0.0)
    if best.cost <= max(budget, 0.0):
        return best
    lowest = _price_of_one_pass(scores.trace, budget)
    noisy = (scores.noise[:, 0] > lowest).nonzero()[:, 0]  # who else could have several passes
    table, ones = scores.noise[noisy], torch.ones_like(scores.trace)

    def at(price: float) -> Allocation:
        passes = ones.index_copy(0, noisy, scores.passes[(table + price * scores.passes).argmin(-1)])
        keep = (scores.trace / math.sqrt(price)).clamp(max=1)
        return Allocation(torch.where(passes > 1, 1.0, keep), passes, price)

    return _by_bisection(at, lambda price: at(price).cost <= budget, max(lowest, 1e-300), scores)


def allocate_to_everyone(scores: Scores, budget: float, least: int = 0) -> Allocation:
    """The allocation with the least Σ V in which everyone is kept, for so many forward passes besides one pass each.

    `least`: 1 if these samples have at least two passes.
    """
    noise, passes = scores.noise[:, least:], scores.passes[least:]
    costs = _extra(passes)

    def at(price: float) -> Allocation:
        best = (noise + price / 2 * costs).argmin(-1) if price < math.inf else torch.zeros(len(noise), dtype=torch.long)
        return Allocation(torch.ones_like(scores.trace), passes[best], price)

    best = at(0.0)
    if best.extra_cost <= budget or not len(noise):
        return best
    if at(math.inf).extra_cost > budget:
        return at(math.inf)
    return _by_bisection(at, lambda price: at(price).extra_cost <= budget, 1e-300, scores)


def _extra(passes: Tensor) -> Tensor:
    """Forward passes for those that are regrouped: the forward pass again, and all backward passes but the first."""
    return torch.where(passes > 1, 2 * passes - 1, 0.0)


def _by_bisection(
    at: Callable[[float], Allocation], fits: Callable[[float], bool], low: float, scores: Scores
) -> Allocation:
    """The allocation at the least price at which it fits into a budget, to a thousandth."""
    high = max(low, 1e-20 * max(float(scores.trace.amax()), 1e-100) ** 2)
    while not fits(high):
        low, high = high, high * 2.0**16
    while high > 1.001 * low:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return at(high)


Strategy = Literal["alike", "everyone", "chosen"]


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


def _choices(rank: int) -> list[int]:
    """Numbers of passes to choose from, up to the rank, from which on nothing is random."""
    dense = list(range(1, _EIGENPAIRS + 2))
    sparse = [round(3 * 2 ** (k / 2)) for k in range(4, 40)]  # 12, 17, 24, 34, ...
    return sorted({m for m in (*dense, *sparse) if m < min(rank, 2**12)} | {max(1, min(rank, 2**12))})
