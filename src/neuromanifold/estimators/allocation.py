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
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.estimators.orthogonal import least_noise

EIGENPAIRS = 8  # of a sample, at most, that may have passes of their own
_GAP = 1e-3  # between the two largest eigenvalues, at least, for an eigenvector that is computed again later


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
    """Return the allocation by which all samples are kept and have the same number of passes."""
    ones = torch.ones(samples, dtype=torch.float64)
    return Allocation(ones, ones * passes, 0.0)


def score(
    trace: Tensor, squared_norm: Tensor, rank: int, core_of: Callable[[Tensor], Core] | None, budget: float
) -> Scores:
    """Return scores of samples on which a budget of forward passes may be spent.

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

    The others are given no less noise for more passes.  `budget`: forward passes that may be spent on further passes.
    Eigenvalues are computed for four times as many samples as could have two passes at this budget.
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
    values = core.spectrum(min(EIGENPAIRS, rank - 1)).values.double().cpu()
    table = least_noise(values, t[rows], q[rows], rank, choices, least)
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
    """Return the allocation with the least Σ V at a budget of forward passes for all samples, by bisection for μ."""
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
    """Return the allocation with the least Σ V in which everyone is kept; `budget`: that for passes but the first.

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


def _choices(rank: int) -> list[int]:
    """Numbers of passes to choose from, up to the rank, from which on nothing is random."""
    dense = list(range(1, EIGENPAIRS + 2))
    sparse = [round(3 * 2 ** (k / 2)) for k in range(4, 40)]  # 12, 17, 24, 34, ...
    return sorted({m for m in (*dense, *sparse) if m < min(rank, 2**12)} | {max(1, min(rank, 2**12))})
