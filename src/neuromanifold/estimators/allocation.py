"""Rows where the noise is: which samples are worth several of them, and which can be left out at times.

A row is a sample in a batch: a forward and a backward pass of it, with a cotangent of its own.  Each sample that is
kept has one row with a probe.  The first m of its columns, M = Σ_k u_k u_kᵀ (`choices.py`), may have rows of their own,
±u_k, in which nothing is random; the probe is then one of what is left, M_m = Σ_{k>m} u_k u_kᵀ.  All rows cost the
same, so that any of them can be together in a full batch.

A sample's output distribution says, before any backward pass, how large its part of F is and how noisy an estimate of
it would be.  On average over directions of J, and up to one factor for all samples, with t = tr M and q = ‖M‖²,

    F² = t² + 2q        and the variance is 2 S²_m,        S²_m = (tr M_m)² - ‖M_m‖².

What a row takes from the noise falls with m, so that the best rows are those that take most: a single threshold.

A sample that is kept with probability π gets the weight 1/π, which is unbiased since π and m depend on outputs alone.
Its estimate has the variance V = 2 S²_m/π + (1/π - 1)(t² + 2q).  The smallest Σ V for a number of rows has one price μ
of a row for all samples, in units of variance:

    π = min(1, t √(3/μ))        and a row for each column that takes more than μ.

Proof.  For m = 0, V = 3t²/π - (t² + 2q), so ∂/∂π of V + μπ is zero there.  For π < 1 no column takes as much: it is
3t² < μ, and 2 S²_0 <= 2t².  (For t² a little above μ/3, a column's row and π < 1 can be better, by less than a
hundredth of variance + μ rows.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.estimators.orthogonal import least_noise


class Scores(NamedTuple):
    """What the outputs say about samples, in float64."""

    trace: Tensor  # [n] t, over all positions of a sample
    squared_norm: Tensor  # [n] q
    rest: Tensor  # [n, k + 1] t_m of what is left without the first m columns
    noise: Tensor  # [n, k + 1] S²_m of a probe of that
    rank: int

    @staticmethod
    def joined(parts: list[Scores]) -> Scores:
        """Those of several batches on the CPU, without columns where some batches have others."""
        columns = None if len({part.rest.shape[1] for part in parts}) == 1 else 1
        return Scores(
            torch.cat([part.trace for part in parts]).cpu(),
            torch.cat([part.squared_norm for part in parts]).cpu(),
            torch.cat([part.rest[:, :columns] for part in parts]).cpu(),
            torch.cat([part.noise[:, :columns] for part in parts]).cpu(),
            parts[0].rank,
        )

    def only(self, rows: Tensor) -> Scores:
        """The scores of some of the samples."""
        return Scores(self.trace[rows], self.squared_norm[rows], self.rest[rows], self.noise[rows], self.rank)

    @property
    def fisher(self) -> Tensor:
        """F² on average over directions of J, [n]."""
        return self.trace.square() + 2 * self.squared_norm

    @property
    def gains(self) -> Tensor:
        """How much of the variance a row for each column takes, [n, k], falling from left to right."""
        return 2 * (self.noise[:, :-1] - self.noise[:, 1:]).clamp(min=0)

    def with_passes(self, passes: float) -> Tensor:
        """S² of the same number of passes for all, [n]; between two numbers of passes it is interpolated.

        Columns stand for the eigenvectors that such passes are made of.
        """
        low, share = math.floor(passes), passes - math.floor(passes)
        noise = least_noise(self.noise, self.rank, torch.tensor([min(m, self.rank) for m in (low, low + 1)]))
        return noise[:, 0] + share * (noise[:, 1] - noise[:, 0])


class Allocation(NamedTuple):
    """How often each sample is kept, and how many of its columns have rows of their own."""

    keep: Tensor  # [n] π
    own: Tensor  # [n] m, columns with rows of their own

    @staticmethod
    def alike(samples: int, keep: float = 1.0) -> Allocation:
        """Return the allocation with a probe for each sample that is kept, all with the same probability."""
        return Allocation(torch.full((samples,), keep, dtype=torch.float64), torch.zeros(samples, dtype=torch.long))

    def only(self, rows: Tensor) -> Allocation:
        """That of some of the samples."""
        return Allocation(self.keep[rows], self.own[rows])

    def noise(self, scores: Scores) -> Tensor:
        """S²_m of each sample, [n]."""
        return scores.noise.gather(1, self.own[:, None])[:, 0]

    def rest(self, scores: Scores) -> Tensor:
        """t_m of each sample, [n]."""
        return scores.rest.gather(1, self.own[:, None])[:, 0]

    def variance(self, scores: Scores) -> float:
        """Predict Σ V, in units of `Scores`."""
        return variance(scores, self.noise(scores), self.keep)

    @property
    def rows(self) -> float:
        """The expected number of rows."""
        return float((self.keep + self.own).sum())


def variance(scores: Scores, noise: Tensor, keep: Tensor | float = 1.0) -> float:
    """Predict Σ V of samples with this S² [n] that are kept with probability π."""
    pi = torch.as_tensor(keep, dtype=torch.float64).expand(len(noise))
    kept = pi > 0
    pi = pi[kept]
    return float((2 * noise[kept] / pi + (1 / pi - 1) * scores.fisher[kept]).sum())


def best_rows(gains: Tensor, count: int, least: int = 0) -> Tensor:
    """Return how many columns of each sample are among the `count` with the largest gains, [n].

    `least`: of as many from the first on, all samples have rows anyway, which are not counted.
    """
    own = torch.full((len(gains),), least, dtype=torch.long)
    found = gains[:, least:].flatten().topk(max(0, min(count, gains[:, least:].numel())))
    samples = found.indices[found.values > 0] // max(1, gains.shape[1] - least)
    return own.index_add_(0, samples, torch.ones_like(samples))


def allocate(scores: Scores, rows: float) -> Allocation:
    """Return the allocation with the least Σ V for a number of rows, by bisection for μ."""
    gains = scores.gains

    def at(price: float) -> Allocation:
        keep = (scores.trace * math.sqrt(3 / price)).clamp(max=1) if price else (scores.trace > 0).double()
        return Allocation(keep, ((gains > price) & (keep >= 1)[:, None]).sum(1))

    best = at(0.0)
    if best.rows <= max(rows, 0.0):
        return best
    low = high = 1e-20 * max(float(scores.trace.amax()), 1e-100) ** 2
    while at(high).rows > rows:
        low, high = high, high * 2.0**16
    while high > 1.001 * low:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if at(middle).rows <= rows else (middle, high)
    return at(high)
