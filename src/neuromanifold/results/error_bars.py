"""Which standard errors a diagonal has: of each entry, of each row of a weight, or none.

    error_bars   kept beside the sums                         standard errors of
    True         as many numbers as the sums                  each entry
    "rows"       one for each row of a weight [rows, ...]     the sum of a row, and each entry of a vector
    False        nothing                                      nothing

A row has the index of the first dimension: an output of a linear layer, a channel of a convolution, a token of an
embedding.  Between results of different kinds, the coarser one holds: the standard error of a row's sum is at most the
sum of its entries'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.persample.shards import row_placements
from neuromanifold.results.files import mapped

ErrorBars = bool | Literal["rows"]

_KINDS: tuple[ErrorBars, ...] = (True, "rows", False)  # from fine to coarse


def coarser(a: ErrorBars, b: ErrorBars) -> ErrorBars:
    """Return the kind that both can be converted to."""
    return max(a, b, key=_KINDS.index)


def row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row, [rows]; a vector or a number as it is.  Those of a DTensor are divided like it."""
    if values.ndim < 2 or not hasattr(values, "placements"):
        return values.flatten(1).sum(1) if values.ndim > 1 else values
    sums: Any = values.sum(tuple(range(1, values.ndim)))
    found: Tensor = sums.redistribute(placements=row_placements(values.placements))
    return found


def converted(noise: Mapping[str, Tensor], before: ErrorBars, after: ErrorBars) -> Mapping[str, Tensor]:
    """Return standard errors of a coarser kind: of rows, the sum of those of entries, or none."""
    if before is after or not after:
        return noise if before is after else {}
    return mapped(row_sums, noise)


def entry_noise(noise: Mapping[str, Tensor], sums: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the standard errors of a parameter's single entries; an error where they were not kept."""
    found = noise.get(name)
    if found is not None and found.shape == sums[name].shape:
        return found
    kept = "no error bars" if found is None else "those of its rows (.rows) alone"
    advice = "Run with error_bars=True for single entries, which takes as much memory as the values."
    raise ValueError(message("error_bars", f"True for standard errors of the entries of {name!r}", kept, advice))
