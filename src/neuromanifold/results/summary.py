"""A diagonal as a small table, a row for each component of the network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 24  # as deep into the names as so many rows allow
_SAMPLED = 100_000  # quantiles are taken over at most so many entries, evenly spaced
HEADER = ("component", "parameters", "zero", "mean", "median > 0", "p95", "rel. s.e.")


def summary(sums: Mapping[str, Tensor], noise: Mapping[str, Tensor], divisor: float, title: str, footer: str) -> str:
    """The rows as text, between a title and a footer."""
    table = [HEADER, *summarized(sums, noise, divisor).rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    lines = [_line(row, widths) for row in table]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([title, *lines, footer])


class Summarized(NamedTuple):
    """Parameters, share of zeros, mean, median and 95 % quantile, and relative standard error of each component."""

    rows: list[tuple[str, ...]]  # the last one is that of all components, if there are several
    trace: float
    noise: float  # the sum of all standard errors


def summarized(sums: Mapping[str, Tensor], noise: Mapping[str, Tensor], divisor: float) -> Summarized:
    """Every tensor is read once, and none is copied."""
    facts = {name: _Facts.of(value, noise[name]) for name, value in sums.items()}
    rows = [_row(name, group, sums, facts, divisor) for name, group in components(list(sums)).items()]
    if len(rows) > 1:
        rows.append(_row("all", list(sums), sums, facts, divisor))
    every = reduce(_Facts.plus, facts.values(), _Facts())
    return Summarized(rows, every.total / divisor, every.noise / divisor)


class _Facts(NamedTuple):
    """Of one parameter, or of several."""

    entries: int = 0
    zeros: int = 0
    total: float = 0.0
    noise: float = 0.0

    @classmethod
    def of(cls, value: Tensor, noise: Tensor) -> _Facts:
        """Sums in float32, which are pairwise and right to six digits, take a twentieth of the time of float64."""
        zeros = value.numel() - int(value.count_nonzero())
        return cls(value.numel(), zeros, *(float(_sum(tensor)) for tensor in (value, noise)))

    def plus(self, other: _Facts) -> _Facts:
        """Of both."""
        return _Facts(
            self.entries + other.entries,
            self.zeros + other.zeros,
            self.total + other.total,
            self.noise + other.noise,
        )


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def components(names: list[str]) -> dict[str, list[str]]:
    """Group parameter names by their prefix, as deep as stays readable."""
    best: dict[str, list[str]] = {}
    for depth in range(1, 2 + max((name.count(".") for name in names), default=0)):
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(".".join(name.split(".")[:-1][:depth]) or name, []).append(name)
        if best and len(groups) > _ROWS:
            break
        best = groups
    return best


def _row(
    name: str, group: list[str], sums: Mapping[str, Tensor], facts: Mapping[str, _Facts], divisor: float
) -> tuple[str, ...]:
    entries, zeros, total, noise = reduce(_Facts.plus, (facts[n] for n in group))
    if not entries:
        return (name, "0", *["-"] * 5)
    step = max(1, entries // _SAMPLED)
    few = torch.cat([sums[n].detach().flatten()[::step].cpu() for n in group]).double().sort().values / divisor
    positive = few[few > 0]
    numbers = (
        f"{total / entries / divisor:.3g}",
        f"{positive[(len(positive) - 1) // 2]:.3g}" if len(positive) else "-",
        f"{few.quantile(0.95):.3g}",
        f"{100 * noise / total:.2g} %" if total else "-",
    )
    return (name, f"{entries:,}", f"{100 * zeros / entries:.1f} %", *numbers)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]  # noqa: B905
    return "  ".join(cells)
