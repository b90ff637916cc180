"""Rows where the noise is: which samples are worth several of them, and what can be left out at times.

A row is a sample in a batch: a forward and a backward pass of it, with a cotangent of its own.  A sample has m rows for
its leading eigenvectors, ±√λ_i v_i, in which nothing is random, and one for a probe of all that is left, which is
M - Σ_{i<=m} λ_i v_i v_iᵀ.  All rows cost the same, so that any of them can be together in a full batch.  The row with
the probe may be left out: it is kept with probability π, and has the weight 1/π then.  That is unbiased, since π and m
depend on outputs alone.

A sample's output distribution says, before any backward pass, how large its part of F is and how noisy an estimate of
it would be.  Let R and Q be the sums of λ_i and of λ_i² over i > m.  On average over directions of J, and up to one
factor for all samples, the part f of F that is left for the probe, the probe's variance, and that of the sample are

    f² = R² + 2Q,       2S² = 2 (R² - Q),       V = 2S²/π + (1/π - 1) f² = 2S² + 3R² (1/π - 1).

Where all probes are kept, a row for eigenvector m takes 4 λ_m R_m from V.  That falls with m, so that the best rows are
those that take most (`best_rows`).  Where probes may be left out, the least Σ V for a number of rows (`allocate`) has
one price μ of a row for all samples, in units of variance, and for each sample

    π = min(1, R √(3/μ)),       m the number with the least V + μ (π + m).

Proof.  For each m, ∂/∂π of 3R²/π + μπ is zero there.  An allocation with no more rows and less Σ V would have less
Σ V + μ rows, of which that is the least.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.estimators.orthogonal import least_noise, noise_without, rest_without

EIGENPAIRS = 9  # of a sample, at most, that may have passes or rows of their own: all of them for ten classes


class Scores(NamedTuple):
    """What the outputs say about samples, float64 on the CPU."""

    trace: Tensor  # [n] t, over all positions of a sample
    squared_norm: Tensor  # [n] q
    values: Tensor  # [n, k] the leading eigenvalues, zero where they are not known
    rest: Tensor  # [n, k + 1] R, the trace without the m leading eigenvectors
    noise: Tensor  # [n, k + 1] S² of a probe without them
    rank: int

    @staticmethod
    def of(
        trace: Tensor, squared_norm: Tensor, rank: int, rows: Tensor | None = None, values: Tensor | None = None
    ) -> Scores:
        """Scores of samples, of some of which, `rows` [c], the leading eigenvalues [c, k] are known."""
        t, q, k = trace.double(), squared_norm.double(), 0 if values is None else values.shape[-1]
        known = torch.zeros(len(t), k, dtype=torch.float64)
        rest, noise = (one[:, None].repeat(1, k + 1) for one in (t, (t.square() - q).clamp(min=0)))
        if rows is not None and values is not None:
            known[rows] = torch.where(t[rows, None] > 0, values.double(), 0.0)
            rest[rows] = rest_without(known[rows], t[rows], rank)
            noise[rows] = noise_without(known[rows], t[rows], q[rows], rank)
        return Scores(t, q, known, rest, noise, rank)

    def only(self, rows: Tensor) -> Scores:
        """The scores of some of the samples."""
        trace, squared_norm, values, rest, noise = (one[rows] for one in self[:5])
        return Scores(trace, squared_norm, values, rest, noise, self.rank)

    @property
    def gains(self) -> Tensor:
        """How much of the variance a row for each eigenvector takes, [n, k], falling from left to right."""
        return 4 * self.values * self.rest[:, 1:]

    def with_passes(self, passes: float) -> Tensor:
        """S² of the same number of passes for all, [n], of whom all eigenvalues are known, or none are.

        Between two numbers of passes it is interpolated.
        """
        low, share = math.floor(passes), passes - math.floor(passes)
        choices = torch.tensor([min(m, self.rank) for m in (low, low + 1)], dtype=torch.float64)
        noise = least_noise(self.values, self.trace, self.squared_norm, self.rank, choices)
        return noise[:, 0] + share * (noise[:, 1] - noise[:, 0])


class Allocation(NamedTuple):
    """How often each sample's probe is kept, and how many of its eigenvectors have rows of their own."""

    keep: Tensor  # [n] π
    own: Tensor  # [n] m

    @staticmethod
    def alike(samples: int, keep: float = 1.0) -> Allocation:
        """Return the allocation with a probe for each sample that is kept, all with the same probability."""
        return Allocation(torch.full((samples,), keep, dtype=torch.float64), torch.zeros(samples, dtype=torch.long))

    def only(self, rows: Tensor) -> Allocation:
        """That of some of the samples."""
        return Allocation(self.keep[rows], self.own[rows])

    def noise(self, scores: Scores) -> Tensor:
        """S² of each sample's probe, [n]."""
        return scores.noise.gather(1, self.own[:, None])[:, 0]

    def rest(self, scores: Scores) -> Tensor:
        """R, the trace of what is left for each sample's probe, [n]."""
        return scores.rest.gather(1, self.own[:, None])[:, 0]

    def variance(self, scores: Scores) -> float:
        """Predict Σ V, in units of `Scores`."""
        return variance(self.noise(scores), self.rest(scores), self.keep)

    @property
    def rows(self) -> float:
        """The expected number of rows."""
        return float((self.keep + self.own).sum())


def variance(noise: Tensor, rest: Tensor, keep: Tensor | float = 1.0) -> float:
    """Predict Σ V of probes with these S² [n] and R [n] that are kept with probability π, which is 0 only if R is."""
    missed = 3 * rest.square() * (1 / torch.as_tensor(keep, dtype=torch.float64) - 1)
    return float((2 * noise + torch.where(rest > 0, missed, 0.0)).sum())


def best_rows(gains: Tensor, count: int, least: int = 0) -> Tensor:
    """Return how many eigenvectors of each sample are among the `count` with the largest gains, [n].

    `least`: of as many from the first on, all samples have rows anyway, which are not counted.
    """
    own = torch.full((len(gains),), least, dtype=torch.long)
    found = gains[:, least:].flatten().topk(max(0, min(count, gains[:, least:].numel())))
    samples = found.indices[found.values > 0] // max(1, gains.shape[1] - least)
    return own.index_add_(0, samples, torch.ones_like(samples))


def among_the_best(gains: list[Tensor], count: int) -> int:
    """How many of the last of these gains are among the `count` largest of all."""
    every = torch.cat(gains)
    count = min(count, len(every))
    return int((gains[-1] >= every.topk(count).values[-1]).sum()) if count > 0 else 0


def allocate(scores: Scores, rows: float) -> Allocation:
    """Return the allocation with the least Σ V for a number of rows > 0, by bisection for μ."""
    rest, noise, own = scores.rest, 2 * scores.noise, torch.arange(scores.rest.shape[1])

    def at(price: float) -> Allocation:
        least = max(math.sqrt(price / 3), 1e-300)  # of R, below which the probe is left out at times: π = R/least
        keep = (rest / least).clamp(max=1)
        best = (noise + 3 * rest * (least - rest).clamp(min=0) + price * (keep + own)).argmin(1)
        return Allocation(keep.gather(1, best[:, None])[:, 0], best)

    best = at(0.0)
    if best.rows <= rows:
        return best
    low = high = 3 * max(float(scores.trace.sum()) / rows, 1e-150) ** 2  # the price if all are left out at times
    while at(high).rows > rows:
        low, high = high, 16 * high
    while at(low).rows <= rows and low > 1e-300:
        low, high = low * 2.0**-16, low
    while high > 1.001 * low:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if at(middle).rows <= rows else (middle, high)
    return at(high)
