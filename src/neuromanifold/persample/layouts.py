"""Which dimension of a tensor holds the samples."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Which dimension of a tensor holds the samples, and what is major in it if each has several rows.

    `major`: "samples" for [n·t, ...], "positions" for [t·n, ...].  Batches may differ in the number t of rows.
    "rows": the data decide which sample owns each row (`follow.py`), as of tokens that are sent to experts.
    """

    dim: int = 0
    major: Literal["samples", "positions", "rows"] = "samples"
    shared: bool = False  # the tensor has none: `dim` is that of what it is broadcast to

    def samples_first(self, values: Tensor, samples: int) -> Tensor:
        """Return the tensor as [n, ...], or as [n, t, ...] where samples have several rows."""
        values = values.movedim(self.dim, 0) if self.dim else values
        if len(values) == samples or self.major == "rows":
            return values
        if self.major == "samples":
            return values.reshape(samples, -1, *values.shape[1:])
        return values.reshape(-1, samples, *values.shape[1:]).transpose(0, 1)

    def positions_of(self, shape: torch.Size, samples: int) -> tuple[int, int]:
        """Return how many positions `samples_first` finds in a tensor, and their place as `follow` counts it."""
        if shape[self.dim] == samples:
            return shape[1 - self.dim] if len(shape) > 1 else 1, 1 if self.dim else samples
        return shape[self.dim] // samples, samples if self.major == "samples" else 1

    def before(self, shape: torch.Size, samples: int) -> int:
        """Return the place of the samples as `follow` counts it."""
        return shape[: self.dim].numel() * (shape[self.dim] // samples if self.major == "positions" else 1)


ROWS = Layout(major="rows")


def stacked(dim: int, size: int, samples: int) -> list[Layout]:
    """Return the layouts of a dimension that may hold several rows of each sample."""
    if not samples or not size or size % samples:
        return []
    return [Layout(dim)] + ([Layout(dim, "positions")] if size > samples else [])
