"""Statistics of a Fisher diagonal: of each parameter, layer and component, and of everything.

The one definition for tables, pages and plots: the mean is over all entries; median and 95 % quantile (p95) are over
the positive entries, as in the paper, interpolated as by `numpy.quantile`; the share of zeros stands apart.

    for each parameter:       count its entries by size                        (first reading)
    for each group:           add the counts of its parameters; which bins hold the median and p95?
    for each parameter:       pick the entries of those bins                   (second reading)
    for each group:           select among what was picked

Bins are 1.6 % wide, so that few entries are picked and nothing else is sorted or copied; the quantiles are exact.
Entries are counted where they are, on a GPU or a CPU, a chunk at a time: beside a result, memory holds one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuromanifold.core.checks import message, promoted
from neuromanifold.results.naming import components, grouped, module_of
from neuromanifold.results.table import TOTAL

if TYPE_CHECKING:
    from neuromanifold.results.diagonal import DiagonalFisher

Array = NDArray[Any]  # picked entries
Bins = NDArray[np.int64]

HEADER = ("component", "parameters", "zero", "mean", "median > 0", "p95 > 0", "rel. s.e.")
NOTES: dict[bool | str, str] = {  # by what has error bars
    True: "rel. s.e.: Σ standard errors / Σ entries, of the probes' noise; –: not random",
    "rows": "rel. s.e.: Σ standard errors of rows / Σ rows, of the probes' noise; –: not random",
    False: "rel. s.e.: not known, since the run kept no error bars",
}
_QUANTILES = (0.5, 0.95)
_CHUNK = {"cuda": 1 << 24, "cpu": 1 << 15}  # entries at a time: in a CPU's cache, and without threads
_OCTAVE = (
    64  # bins to a factor of two: positive floats are ordered like their bits, of which six after the exponent count
)
_FIRST = {torch.float32: _OCTAVE * (1023 - 127), torch.float64: 0}  # the bin of the smallest positive numbers
_BINS = {torch.float32: 1 << 14, torch.float64: 1 << 17}  # exponents of 8 and 11 bits
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Statistics:
    """The entries of a parameter or of a group of them, in the result's view (per sample, or summed over samples)."""

    name: str
    entries: int
    zeros: int
    total: float  # its part of the trace
    noise: float  # Σ of its entries' standard errors, as large as they are on average
    largest: float
    median: float  # of positive entries; nan where there are none
    p95: float  # likewise
    halves: float  # the share of entries, the largest ones, that hold half of the total (to the width of a bin)
    share: float = 0.0  # of the trace
    shape: tuple[int, ...] = ()  # of a parameter
    granularity: str = ""  # of a parameter: what was squared, "sample" or "batch"

    @property
    def mean(self) -> float:
        """The mean over all entries, zeros included."""
        return self.total / self.entries if self.entries else 0.0

    @property
    def zero_share(self) -> float:
        """The share of entries that are exactly zero."""
        return self.zeros / self.entries if self.entries else 0.0

    @property
    def relative_error(self) -> float:
        """Σ standard errors over Σ entries; 0 where nothing is random, which says nothing about a bias."""
        return self.noise / self.total if self.total else 0.0

    def cells(self) -> tuple[str, ...]:
        """A row of a text table, below `HEADER`."""
        if not self.entries:
            return (self.name, "0", *["–"] * 5)
        means = (f"{value:.3g}" if value == value else "–" for value in (self.mean, self.median, self.p95))
        error = f"{100 * self.relative_error:.2g} %" if self.noise else "–"
        return (self.name, f"{self.entries:,}", f"{100 * self.zero_share:.1f} %", *means, error)


@dataclass(frozen=True)
class Summary:
    """A result in numbers; every list goes from input to output."""

    title: str
    result: DiagonalFisher
    everything: Statistics
    components: list[Statistics]
    layers: list[Statistics]
    parameters: list[Statistics]
    component_of: dict[str, str]  # of a layer or a parameter

    def rows(self, each: bool = False) -> list[tuple[str, ...]]:
        """Rows of a text table: a row for each component (or parameter), and one for all of several."""
        parts = self.parameters if each else self.components
        return [one.cells() for one in (parts if len(parts) == 1 else [*parts, self.everything])]


def summarize(result: DiagonalFisher, title: str = "", most: int | None = None) -> Summary:
    """Summarize a diagonal; `most` components at the most, by default as many as a table has room for."""
    names = list(result)
    parts = components(names) if most is None else components(names, most)
    layers = grouped(names, lambda name: module_of(name) or name)
    groups = {f"c/{key}": group for key, group in parts.items()} | {f"l/{key}": group for key, group in layers.items()}
    groups |= {f"p/{name}": [name] for name in names} | {TOTAL: names}
    divisor = result.divisor or 1
    ratio = result.provenance.noise_ratio
    found = {
        key: replace(one, noise=ratio * one.noise)
        for key, one in statistics(result.sums, groups, divisor, result.noise).items()
    }
    trace = found[TOTAL].total

    def made(prefix: str, keys: Sequence[str]) -> list[Statistics]:
        ones = ((key, found[f"{prefix}/{key}"]) for key in keys)
        return [replace(one, name=key, share=one.total / trace if trace else 0.0) for key, one in ones]

    granularity = result.provenance.granularity
    parameters = [
        replace(one, shape=tuple(result.sums[one.name].shape), granularity=granularity.get(one.name, ""))
        for one in made("p", names)
    ]
    component_of = {name: key for key, group in parts.items() for name in group}
    of_layers = {key: component_of[group[0]] for key, group in layers.items()}
    return Summary(
        title=title,
        result=result,
        everything=replace(found[TOTAL], share=1.0 if trace else 0.0),
        components=made("c", list(parts)),
        layers=made("l", list(layers)),
        parameters=parameters,
        component_of={**of_layers, **component_of},
    )


def statistics(
    values: Mapping[str, Tensor],
    groups: Mapping[str, Sequence[str]],
    divisor: float = 1,
    noise: Mapping[str, Tensor] | None = None,
) -> dict[str, Statistics]:
    """Statistics of groups of tensors, whose entries are divided by `divisor`; a tensor may be in several groups."""
    counted = {name: _BinCounts.of(value, name) for name, value in values.items()}
    errors = {name: _sum(tensor, name) for name, tensor in (noise or {}).items()}
    merged = {key: _BinCounts.merged([counted[name] for name in names]) for key, names in groups.items()}
    wanted = {key: counts.bins[counts.places()] for key, counts in merged.items()}
    picked: dict[str, list[Array]] = {key: [np.zeros(0)] for key in groups}
    keys: dict[str, list[str]] = {name: [] for name in values}
    for key, names in groups.items():
        for name in names:
            keys[name].append(key)
    for name, value in values.items():
        _pick(value, counted[name].dtype, {key: wanted[key] for key in keys[name]}, picked)
    made = {}
    for key, counts in merged.items():
        median, p95 = counts.quantiles(np.concatenate(picked[key]))
        error = sum(errors.get(name, 0.0) for name in groups[key])
        made[key] = Statistics(
            name=key,
            entries=counts.entries,
            zeros=counts.zeros,
            total=counts.total / divisor,
            noise=error / divisor,
            largest=counts.largest / divisor,
            median=median / divisor,
            p95=p95 / divisor,
            halves=counts.halves(),
        )
    return made


def chunks(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The entries in float32 or float64, a chunk at a time, where they are."""
    flat = tensor.detach().reshape(-1)
    for part in torch.split(flat, _CHUNK["cuda" if flat.is_cuda else "cpu"]):
        yield part.to(dtype or promoted(tensor.dtype))


def _sum(tensor: Tensor, name: str) -> float:
    """Return the sum of the entries of a tensor, in float64."""
    return sum(x.double().sum().item() for x in chunks(tensor) if _largest(x, name) >= 0)


def _largest(x: Tensor, name: str) -> float:
    """Return the largest of some entries; an error for what no Fisher diagonal holds."""
    least, most = torch.stack(torch.aminmax(x)).tolist() if x.numel() else (0.0, 0.0)
    if not (least >= 0 and most < math.inf):  # a nan is neither
        expected = "a Fisher diagonal, whose entries are finite and >= 0"
        raise ValueError(message("result", expected, f"{least:g} to {most:g} in {name!r}"))
    return float(most)


@dataclass(frozen=True)
class _BinCounts:
    """How many positive entries lie in each bin."""

    entries: int
    zeros: int
    total: float
    largest: float
    bins: Bins  # ascending, without empty ones
    counts: Bins
    dtype: torch.dtype = torch.float64  # that the entries were binned in

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> _BinCounts:
        """Count the entries of a tensor: in float32 where it is no wider, but for subnormal numbers."""
        for dtype in (torch.float32, torch.float64):
            if dtype is torch.float32 and tensor.dtype == torch.float64:
                continue
            positive, total, largest, found = 0, 0.0, 0.0, torch.zeros(_BINS[dtype], dtype=torch.int64)
            for x in chunks(tensor, dtype):
                largest = max(largest, _largest(x, name))
                found = found.to(x.device).add_(torch.bincount(_bins(x), minlength=_BINS[dtype]))
                positive, total = positive + int(torch.count_nonzero(x)), total + float(x.double().sum())
            counts: Bins = found.cpu().numpy()
            zeros = tensor.numel() - positive
            if counts[:_OCTAVE].sum() == zeros:  # no subnormal number, whose bits count differently
                break
        counts[0] -= zeros
        filled = counts.nonzero()[0]
        return cls(tensor.numel(), zeros, total, largest, filled + _FIRST[dtype], counts[filled], dtype)

    @classmethod
    def merged(cls, parts: Sequence[_BinCounts]) -> _BinCounts:
        """The counts of several tensors together."""
        bins, counts = (np.concatenate([_NONE, *(getattr(part, key) for part in parts)]) for key in ("bins", "counts"))
        first = int(bins.min()) if bins.size else 0
        added = np.bincount(bins - first, counts).astype(np.int64)
        filled = added.nonzero()[0]
        entries, zeros, total = (sum(getattr(part, key) for part in parts) for key in ("entries", "zeros", "total"))
        largest = max((part.largest for part in parts), default=0.0)
        return cls(entries, zeros, total, largest, filled + first, added[filled])

    def places(self) -> Bins:
        """Which bins hold the order statistics on both sides of each quantile."""
        return np.unique(np.searchsorted(self.counts.cumsum(), [r for pair in self._ranks() for r in pair], "right"))

    def quantiles(self, picked: Array) -> list[float]:
        """The quantiles of the positive entries, given all entries of `places`; nan if nothing is positive."""
        if not self.bins.size:
            return [float("nan")] * len(_QUANTILES)
        left_out = self.counts.copy()
        left_out[self.places()] = 0
        left_out, below, ends = left_out.cumsum(), self.counts.cumsum(), np.sort(picked)
        made = []
        for share, ranks in zip(_QUANTILES, self._ranks(), strict=True):
            low, high = (float(ends[rank - left_out[np.searchsorted(below, rank, "right")]]) for rank in ranks)
            made.append(low + (share * (self.entries - self.zeros - 1) - ranks[0]) * (high - low))
        return made

    def halves(self) -> float:
        """The share of entries, the largest ones, that hold half of the total."""
        if not self.total:
            return 0.0
        exponents, steps = np.divmod(self.bins[::-1], _OCTAVE)
        sums = self.counts[::-1] * np.ldexp(1 + (steps + 0.5) / _OCTAVE, exponents - exponents[0])
        held, numbers = sums.cumsum(), self.counts[::-1].cumsum()
        i = int(np.searchsorted(held, held[-1] / 2))
        unneeded = (held[i] - held[-1] / 2) / sums[i]  # of the last bin
        return float(numbers[i] - unneeded * self.counts[::-1][i]) / self.entries

    def _ranks(self) -> list[tuple[int, int]]:
        """The order statistics, counted from 0, between which each quantile of the positive entries lies."""
        last = self.entries - self.zeros - 1
        return [(int(share * last), min(int(share * last) + 1, last)) for share in _QUANTILES] if last >= 0 else []


def _bins(x: Tensor) -> Tensor:
    """The number of each entry's bin, from the first one of its precision: exponent and six bits, as an integer."""
    bits = x.view(torch.int32) >> 17 if x.dtype == torch.float32 else x.view(torch.int64) >> 46
    return bits.bitwise_and_(_BINS[x.dtype] - 1)  # without the sign, for -0.0


def _pick(tensor: Tensor, dtype: torch.dtype, wanted: Mapping[str, Bins], picked: dict[str, list[Array]]) -> None:
    """Add to `picked` the positive entries that lie in a group's wanted bins."""
    table = torch.zeros(_BINS[dtype], dtype=torch.bool)
    every = np.concatenate([_NONE, *wanted.values()]) - _FIRST[dtype]
    table[torch.from_numpy(every[(every >= 0) & (every < len(table))])] = True
    table = table.to(tensor.device)
    near = torch.cat([x[table.index_select(0, _bins(x))].cpu() for x in chunks(tensor, dtype)]).double()
    near = near[near > 0]
    places = _bins(near).numpy()
    for key, bins in wanted.items():
        picked[key].append(near.numpy()[np.isin(places, bins)])
