"""Counts and sums of entries by size, from which means, shares and exact quantiles follow without sorting or copying.

A positive float64 is ordered like its bits as an integer.  Its first 18 bits are the sign, the exponent and six bits of
the mantissa, so `bits >> 46` is a bin, 64 of them to each factor of two.  Bins of different tensors add.  A quantile is
then exact in two readings: the first counts and tells the bin, the second sorts the few entries of that bin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuromanifold.core.checks import message

Array = NDArray[np.float64]
Bins = NDArray[np.int64]
_CHUNK = 1 << 20  # entries in float64 at a time
_SHIFT = 46  # 64 bins to a factor of two: entries of one bin are within 1.6 % of each other
_OCTAVE = 64
_BIAS = 1023  # of the exponent in a float64


@dataclass
class Tally:
    """How many entries there are of each size, and what they add up to; `first` is the number of the lowest bin."""

    entries: int = 0
    zeros: int = 0
    total: float = 0.0
    largest: float = 0.0
    first: int = 0
    counts: Bins = field(default_factory=lambda: np.zeros(0, np.int64))  # [bins], of positive entries
    sums: Array = field(default_factory=lambda: np.zeros(0))  # [bins]

    def add(self, x: Array) -> None:
        """Count some entries."""
        positive = x[x > 0]
        self.entries += x.size
        self.zeros += x.size - positive.size
        if positive.size:
            bins = bins_of(positive)
            first = int(bins.min())
            counts, sums = np.bincount(bins - first), np.bincount(bins - first, positive)
            self._add(first, counts.astype(np.int64), np.asarray(sums, np.float64), float(positive.max()))

    def merge(self, other: Tally) -> None:
        """Add what another has counted."""
        self.entries += other.entries
        self.zeros += other.zeros
        if other.counts.size:
            self._add(other.first, other.counts, other.sums, other.largest)

    def _add(self, first: int, counts: Bins, sums: Array, largest: float) -> None:
        if not self.counts.size:
            self.first = first
        low, high = min(self.first, first), max(self.first + self.counts.size, first + counts.size)
        wider = ((self.first - low, high - self.first - self.counts.size), (first - low, high - first - counts.size))
        self.counts = np.pad(self.counts, wider[0]) + np.pad(counts, wider[1])
        self.sums = np.pad(self.sums, wider[0]) + np.pad(sums, wider[1])
        self.first, self.total, self.largest = low, self.total + float(sums.sum()), max(self.largest, largest)

    @property
    def positive(self) -> int:
        """How many entries are not zero."""
        return self.entries - self.zeros

    def octaves(self) -> dict[int, int]:
        """How many entries lie in [2^e, 2^(e+1)), for every exponent e between the smallest and the largest entry."""
        if not self.counts.size:
            return {}
        before, after = self.first % _OCTAVE, -(self.first + self.counts.size) % _OCTAVE
        whole = np.pad(self.counts, (before, after)).reshape(-1, _OCTAVE).sum(1)
        return {self.first // _OCTAVE - _BIAS + i: int(n) for i, n in enumerate(whole)}

    def holding(self, share: float) -> float:
        """The share of entries, the largest ones, that hold a share of the total (to the width of a bin, 1.6 %)."""
        if not self.total:
            return 0.0
        sums, counts = self.sums[::-1].cumsum(), self.counts[::-1].cumsum()
        wanted = share * sums[-1]
        i = min(int(np.searchsorted(sums, wanted)), sums.size - 1)
        inside = 1 - (sums[i] - wanted) / self.sums[::-1][i]  # of the last bin, only so much is needed
        return float(counts[i] - (1 - inside) * self.counts[::-1][i]) / self.entries

    def bins_for(self, shares: Iterable[float]) -> set[int]:
        """The bins that hold the order statistics on both sides of these quantiles of the positive entries."""
        below = self.counts.cumsum()
        ranks = {rank for share in shares for rank in _ranks(share, self.positive)}
        return {self.first + int(np.searchsorted(below, rank, side="right")) for rank in ranks}

    def quantile(self, share: float, picked: Array) -> float:
        """A quantile of the positive entries, given all entries of the bins it needs; nan if nothing is positive."""
        if not self.positive:
            return float("nan")
        below, ends = self.counts.cumsum(), []
        for rank in _ranks(share, self.positive):
            i = int(np.searchsorted(below, rank, side="right"))
            inside = picked[bins_of(picked) == self.first + i]
            k = rank - int(below[i] - self.counts[i])
            ends.append(float(np.partition(inside, k)[k]))
        place = share * (self.positive - 1)
        return ends[0] + (place - int(place)) * (ends[-1] - ends[0])


def bins_of(positive: Array) -> Bins:
    """The number of each entry's bin."""
    return positive.view(np.int64) >> _SHIFT


def chunks(tensor: Tensor, divisor: float, name: str) -> Iterator[Array]:
    """The entries over `divisor`, in float64, a part at a time; refuses what no Fisher diagonal holds."""
    for part in torch.split(tensor.detach().reshape(-1), _CHUNK):
        plain = part.float() if part.dtype == torch.bfloat16 else part  # numpy has no bfloat16
        x: Array = plain.cpu().numpy().astype(np.float64) / divisor  # by numpy: no threads that wait for each other
        if x.size and not (x.min() >= 0 and x.max() < np.inf):  # a nan is neither
            expected = "a Fisher diagonal, whose entries are finite and >= 0"
            raise ValueError(message("result", expected, f"{x.min():g} to {x.max():g} in {name!r}"))
        yield x


def _ranks(share: float, n: int) -> tuple[int, ...]:
    """The order statistics, counted from 0, between which a quantile of n entries lies (numpy's default)."""
    if not n:
        return ()
    place = share * (n - 1)
    return tuple({int(place): 0, min(int(place) + 1, n - 1): 0})
