"""What a page says about results, as plain data: statistics of each parameter, layer and component.

    for each parameter:       count its entries by size                        (first reading)
                              add the counts to those of its layer, its component, and everything
    for each parameter:       pick the entries near a median or a p95          (second reading)
    for each group:           sort what was picked

At no time is there a copy of more than a part of one tensor, but for the few entries that are picked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from neuromanifold.report.tally import Array, Tally, bins_of, chunks
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.summary import components

_QUANTILES = (0.5, 0.95)
_MOST = 60  # components that a page has room for


@dataclass(frozen=True)
class Statistics:
    """The entries of a parameter or of a group of them, in the result's view (per sample, or summed over samples)."""

    name: str
    entries: int
    zeros: int
    total: float  # its part of the trace
    noise: float  # Σ of its entries' standard errors
    largest: float
    median: float  # of positive entries, as in the paper; nan where there are none
    p95: float  # likewise
    share: float  # of the trace
    octaves: dict[int, int]  # e: entries in [2^e, 2^(e+1))
    halves: float  # the share of entries, the largest ones, that hold half of the total
    shape: tuple[int, ...] = ()  # of a parameter
    way: str = ""  # how a parameter was squared
    zero_rows: int = 0  # of a parameter: rows that are zero from end to end

    @property
    def mean(self) -> float:
        """Over all entries, zeros included."""
        return self.total / self.entries if self.entries else 0.0

    @property
    def zero_share(self) -> float:
        """The share of entries that are exactly zero."""
        return self.zeros / self.entries if self.entries else 0.0

    @property
    def relative_error(self) -> float:
        """Σ standard errors over Σ entries."""
        return self.noise / self.total if self.total else 0.0


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


@dataclass(frozen=True)
class Agreement:
    """How far a result is from the first one, over the parameters that both have."""

    parameters: int
    ratio: float  # of the traces
    cosine: float
    difference: float  # mean of |a - b|/b over entries with b > 0, b the first result: the paper's RelMAE


@dataclass
class _Group:
    tally: Tally = field(default_factory=Tally)
    noise: float = 0.0
    picked: list[Array] = field(default_factory=list)
    wanted: set[int] = field(default_factory=set)

    def statistics(self, name: str, trace: float, **more: object) -> Statistics:
        t = self.tally
        picked = np.concatenate([np.zeros(0), *self.picked])
        median, p95 = (t.quantile(share, picked) for share in _QUANTILES)
        share = t.total / trace if trace else 0.0
        numbers = (t.entries, t.zeros, t.total, self.noise, t.largest, median, p95, share, t.octaves(), t.holding(0.5))
        return Statistics(name, *numbers, **more)  # type: ignore[arg-type]


def summarize(result: DiagonalFisher, title: str = "") -> Summary:
    """Statistics of everything, of each component, of each layer (a module's own parameters), of each parameter."""
    divisor = float(result.count) if result.reduction == "mean" and result.count else 1.0
    names = list(result)
    component_of = {name: key for key, group in blocks(names).items() for name in group}
    layer_of = {name: name.rpartition(".")[0] or name for name in names}
    keys = {n: (f"p/{n}", f"l/{layer_of[n]}", f"c/{component_of[n]}", "all") for n in names}
    groups = {key: _Group() for name in names for key in keys[name]} | {"all": _Group()}
    for name in names:
        _count(result, name, divisor, [groups[key] for key in keys[name]])
    for group in groups.values():
        group.wanted = group.tally.bins_for(_QUANTILES)
    for name in names:
        _pick(result.sums[name], name, divisor, [groups[key] for key in keys[name]])
    trace = groups["all"].tally.total

    def made(prefix: str, of: Iterable[str]) -> list[Statistics]:
        return [groups[f"{prefix}/{one}"].statistics(one, trace) for one in dict.fromkeys(of)]

    ways = result.provenance.granularity
    parameters = [
        groups[f"p/{n}"].statistics(
            n,
            trace,
            shape=tuple(result.sums[n].shape),
            way=ways.get(n, ""),
            zero_rows=_zero_rows(result.sums[n]) if groups[f"p/{n}"].tally.zeros else 0,
        )
        for n in names
    ]
    everything = groups["all"].statistics("all", trace)
    layers, parts = made("l", layer_of.values()), made("c", component_of.values())
    of_layers = {layer_of[name]: component_of[name] for name in names}
    return Summary(title, result, everything, parts, layers, parameters, {**of_layers, **component_of})


def blocks(names: list[str]) -> dict[str, list[str]]:
    """Components as the paper draws them: embeddings, each numbered block, the head; those of the table if too many."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module = name.rpartition(".")[0] or name
        numbered = re.match(r"(.*?(?:^|\.)\d+)(\.|$)", module)
        groups.setdefault(numbered[1] if numbered else module, []).append(name)
    return groups if len(groups) <= _MOST else components(names)


def agreement(result: DiagonalFisher, first: DiagonalFisher) -> Agreement:
    """Compare entry by entry in the first one's view, without a copy of either."""
    shared = [name for name in result if name in first.sums and first.sums[name].shape == result.sums[name].shape]
    mean = first.reduction == "mean"
    divisors = [float(one.count) if mean and one.count else 1.0 for one in (result, first)]
    sums = np.zeros(6)  # Σa, Σb, Σab, Σa², Σb², Σ|a-b|/b
    positive = 0
    for name in shared:
        both = [chunks(one.sums[name], d, name) for one, d in zip((result, first), divisors, strict=True)]
        for a, b in zip(*both, strict=True):
            there = b > 0
            positive += int(there.sum())
            relative = np.abs(a[there] - b[there]) / b[there]
            products = (np.einsum("i,i", *pair) for pair in ((a, b), (a, a), (b, b)))
            sums += (a.sum(), b.sum(), *products, relative.sum())
    norms = float(np.sqrt(sums[3]) * np.sqrt(sums[4]))
    return Agreement(
        parameters=len(shared),
        ratio=float(sums[0] / sums[1]) if sums[1] else float("nan"),
        cosine=float(sums[2]) / norms if norms else float("nan"),
        difference=float(sums[5]) / positive if positive else float("nan"),
    )


def in_view_of(result: DiagonalFisher, first: DiagonalFisher) -> DiagonalFisher:
    """The same result per sample or summed, as the first one is."""
    return result.mean if first.reduction == "mean" else result.sum


def short_names(names: Iterable[str], among: Iterable[str] = ()) -> Mapping[str, str]:
    """For each dotted name its shortest end that no other one has, nor any of `among`, not beginning with a number."""
    split = {name: name.split(".") for name in dict.fromkeys([*names, *among])}
    made = {}
    for name in names:
        parts = split[name]
        for n in range(1, len(parts) + 1):
            end = parts[-n:]
            alone = sum(other[-n:] == end for other in split.values()) == 1
            if alone and not (end[0].isdigit() and n < len(parts)):
                break
        made[name] = ".".join(end)
    return made


def _count(result: DiagonalFisher, name: str, divisor: float, groups: list[_Group]) -> None:
    tally = Tally()
    for x in chunks(result.sums[name], divisor, name):
        tally.add(x)
    noise = float(sum(x.sum() for x in chunks(result.noise[name], divisor, name)))
    for group in groups:
        group.tally.merge(tally)
        group.noise += noise


def _pick(sums: Tensor, name: str, divisor: float, groups: list[_Group]) -> None:
    wanted = np.array(sorted(set().union(*(group.wanted for group in groups))), np.int64)
    if not wanted.size:
        return
    table = np.zeros(int(wanted[-1]) + 2, bool)
    table[wanted] = True
    for x in chunks(sums, divisor, name):
        positive = x[x > 0]
        bins = np.minimum(bins_of(positive), table.size - 1)
        near = positive[table[bins]]
        places = bins_of(near)
        for group in groups:
            group.picked.append(near[np.isin(places, list(group.wanted))])


def _zero_rows(value: Tensor) -> int:
    """How many rows of a matrix are zero from end to end."""
    return int((value.detach().flatten(1) == 0).all(1).sum()) if value.ndim > 1 and value.numel() else 0
