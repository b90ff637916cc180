"""Rows where the noise is: which samples are worth several of them, and what can be left out at times.

A row is a sample in a batch: a forward and a backward pass of it, with a cotangent of its own.  A sample has m rows for
the first of its columns, M = Σ_k u_k u_kᵀ (`choices.py`), in which nothing is random but the signs ±u_k, and one for a
probe of all that is left, M_m = Σ_{k>m} u_k u_kᵀ.  All rows cost the same, so that any of them can be together in a
full batch.  The row with the probe may be left out: it is kept with probability π, and has the weight 1/π then.  That
is unbiased, since π and m depend on outputs alone.

A sample's output distribution says, before any backward pass, how large its part of F is and how noisy an estimate of
it would be.  Let R = tr M_m and Q = ‖M_m‖², and S²_m as in `Choices.left`.  On average over directions of J, and up to
one factor for all samples, the part f of F that is left for the probe, and the variance of the sample, are

    f² = R² + 2Q,        V = 2S²/π + (1/π - 1) f² = 2S² + A (1/π - 1),        A = 2S² + f².

Where all probes are kept, what a row takes from V falls with m, so that the best rows are those that take most
(`best_rows`).  Where probes may be left out, the least Σ V for a number of rows (`allocate`) has one price μ of a row
for all samples, in units of variance, and for each sample

    π = min(1, √(A/μ)),       m the number with the least V + μ (π + m).

Proof.  For each m, ∂/∂π of A/π + μπ is zero there.  An allocation with no more rows and less Σ V would have less
Σ V + μ rows, of which that is the least.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.estimators.orthogonal import least_noise


class Scores(NamedTuple):
    """What the outputs say about samples, in float64."""

    rest: Tensor  # [n, k + 1] R = tr M_m of what is left without the first m columns
    norms: Tensor  # [n, k + 1] Q = ‖M_m‖²
    noise: Tensor  # [n, k + 1] S²_m of a probe of that with signs along columns
    rank: int

    @property
    def trace(self) -> Tensor:
        """tr M of each sample, over all of its positions, [n]."""
        return self.rest[:, 0]

    @staticmethod
    def joined(parts: list[Scores]) -> Scores:
        """Those of several batches on the CPU, without columns where some batches have others."""
        columns = None if len({part.rest.shape[1] for part in parts}) == 1 else 1
        return Scores(
            torch.cat([part.rest[:, :columns] for part in parts]).cpu(),
            torch.cat([part.norms[:, :columns] for part in parts]).cpu(),
            torch.cat([part.noise[:, :columns] for part in parts]).cpu(),
            parts[0].rank,
        )

    def only(self, rows: Tensor) -> Scores:
        """The scores of some of the samples."""
        return Scores(self.rest[rows], self.norms[rows], self.noise[rows], self.rank)

    @property
    def gains(self) -> Tensor:
        """How much of the variance a row for each column takes, [n, k], falling from left to right."""
        return 2 * (self.noise[:, :-1] - self.noise[:, 1:]).clamp(min=0)

    @property
    def variances(self) -> Tensor:
        """2S²_m, [n, k + 1]; of a whole probe 2 (R² - Q), since it is deflated by the leading eigenvector."""
        whole = (self.rest[:, :1].square() - self.norms[:, :1]).clamp(min=0)
        return 2 * torch.cat([whole, self.noise[:, 1:]], 1)

    @property
    def fourths(self) -> Tensor:
        """E[g⁴] = f² + 2S²_m of a probe's derivative, [n, k + 1]."""
        return self.rest.square() + 2 * self.norms + self.variances

    def with_passes(self, passes: float) -> Tensor:
        """S² of the same number of passes for all, [n]; between two numbers of passes it is interpolated.

        Their signs are along eigenvectors, S²_m = R² - Q, for which columns stand.
        """
        low, share = math.floor(passes), passes - math.floor(passes)
        noise = least_noise(
            (self.rest.square() - self.norms).clamp(min=0),
            self.rank,
            torch.tensor([min(m, self.rank) for m in (low, low + 1)]),
        )
        return noise[:, 0] + share * (noise[:, 1] - noise[:, 0])


class Allocation(NamedTuple):
    """How often each sample's probe is kept, and how many of its columns have rows of their own."""

    keep: Tensor  # [n] π
    own: Tensor  # [n] m, columns with rows of their own

    @staticmethod
    def alike(samples: int, keep: float = 1.0) -> Allocation:
        """Return the allocation with a probe for each sample that is kept, all with the same probability."""
        return Allocation(torch.full((samples,), keep, dtype=torch.float64), torch.zeros(samples, dtype=torch.long))

    def only(self, rows: Tensor) -> Allocation:
        """That of some of the samples."""
        return Allocation(self.keep[rows], self.own[rows])

    def of(self, table: Tensor) -> Tensor:
        """The entries of a table [n, k + 1] for each sample's m, [n]."""
        return table.gather(1, self.own[:, None])[:, 0]

    def variance(self, scores: Scores) -> float:
        """Predict Σ V, in units of `Scores`."""
        return variance(self.of(scores.variances), self.of(scores.fourths), self.keep)

    @property
    def rows(self) -> float:
        """The expected number of rows."""
        return float((self.keep + self.own).sum())


def variance(of_probes: Tensor, fourths: Tensor, keep: Tensor | float = 1.0) -> float:
    """Predict Σ V of probes [n] that are kept with probability π, which is 0 only if nothing is left for them."""
    missed = fourths * (1 / torch.as_tensor(keep, dtype=torch.float64) - 1)
    return float((of_probes + torch.where(fourths > 0, missed, 0.0)).sum())


def best_rows(gains: Tensor, count: int, least: int = 0) -> Tensor:
    """Return how many columns of each sample are among the `count` with the largest gains, [n].

    `least`: of as many from the first on, all samples have rows anyway, which are not counted.
    """
    own = torch.full((len(gains),), least, dtype=torch.long)
    found = gains[:, least:].flatten().topk(max(0, min(count, gains[:, least:].numel())))
    samples = found.indices[found.values > 0] // max(1, gains.shape[1] - least)
    return own.index_add_(0, samples, torch.ones_like(samples))


class RowsSoFar:
    """Gives rows to columns of one batch after the other, and reads nothing back from a GPU."""

    def __init__(self) -> None:
        self.samples = 0
        self._gains = list[Tensor]()  # of all batches
        self._rows: Tensor | int = 0

    def best(self, scores: Scores, rows: int, least: int) -> Tensor:
        """How many columns of each sample are sent, [n]: the `least` first ones, and those with rows.

        The latter are among the best `rows` of all batches so far, and no more than are left of these.
        """
        self.samples += len(scores.trace)
        gains = scores.gains[:, least:]
        own = gains.flatten().sort(descending=True).values
        self._gains.append(own)
        every = torch.cat(self._gains)
        limit = every.topk(rows + 1).values[-1] if rows < len(every) else every.new_zeros(())
        left = torch.as_tensor(rows - self._rows, device=own.device).clamp(0, len(own))
        last = torch.cat([own, own.new_zeros(1)]).gather(0, left[None])[0]  # the first one that is too many
        found = (gains > torch.maximum(limit, last)).sum(1)
        self._rows = self._rows + found.sum()
        return torch.where(scores.trace > 0, found + least, 0)


def allocate(scores: Scores, rows: float) -> Allocation:
    """Return the allocation with the least Σ V for a number of rows > 0, by bisection for μ."""
    variances, fourths, own = scores.variances, scores.fourths, torch.arange(scores.rest.shape[1])
    roots = fourths.sqrt()

    def at(price: float) -> Allocation:
        least = max(math.sqrt(price), 1e-160)  # of a root, below which the probe is left out at times: π = root/least
        keep = (roots / least).clamp(max=1)
        best = (variances + roots * (least - roots).clamp(min=0) + price * (keep + own)).argmin(1)
        return Allocation(keep.gather(1, best[:, None])[:, 0], best)

    best = at(0.0)
    if best.rows <= rows:
        return best
    low = high = max(float(roots[:, 0].sum()) / rows, 1e-140) ** 2  # the price if all are left out at times
    while at(high).rows > rows:
        low, high = high, 16 * high
    while at(low).rows <= rows and low > 1e-290:
        low, high = low * 2.0**-16, low
    while high > 1.001 * low:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if at(middle).rows <= rows else (middle, high)
    return at(high)
