"""A diagonal as a small table, a row for each component of the network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_ROWS = 24  # as deep into the names as so many rows allow
_SAMPLED = 1_000_000  # quantiles are taken over at most so many entries, evenly spaced
_HEADER = ("component", "parameters", "zero", "mean", "median > 0", "p95", "rel. s.e.")


def summary(values: Mapping[str, Tensor], stderr: Mapping[str, Tensor], title: str, footer: str) -> str:
    """Parameters, share of zeros, mean, median and 95 % quantile, and relative standard error of each component."""
    rows = [_row(name, group, values, stderr) for name, group in components(list(values)).items()]
    if len(rows) > 1:
        rows.append(_row("all", list(values), values, stderr))
    table = [_HEADER, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(_HEADER))]
    lines = [_line(row, widths) for row in table]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([title, *lines, footer])


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


def _row(name: str, group: list[str], values: Mapping[str, Tensor], stderr: Mapping[str, Tensor]) -> tuple[str, ...]:
    flat = torch.cat([values[n].detach().flatten() for n in group]).double().cpu()
    if not flat.numel():
        return (name, "0", *["-"] * 5)
    total, noise = float(flat.sum()), sum(float(stderr[n].double().sum()) for n in group)
    few = flat[:: max(1, flat.numel() // _SAMPLED)]
    positive = few[few > 0]
    numbers = (
        f"{flat.mean():.3g}",
        f"{positive.median():.3g}" if positive.numel() else "-",
        f"{few.quantile(0.95):.3g}",
        f"{100 * noise / total:.2g} %" if total else "-",
    )
    return (name, f"{flat.numel():,}", f"{100 * float((flat == 0).double().mean()):.1f} %", *numbers)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]  # noqa: B905
    return "  ".join(cells)
