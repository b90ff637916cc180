"""Where a tensor has the samples, and how it is read.

Place     found by following the graph from the logits down (`follow.py`): `before`, the product of all sizes before the
          samples', 1 in [n, t, d], t in [t, n, d] and [t·n, d]; or the sample that owns each row
Layout    by which the per-sample gradients of a use are read: which dimension holds the samples
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

SHARED: Final = -1
"""The tensor has no dimension for the samples: all of them share it."""

UNKNOWN: Final = -2
"""The samples cannot be followed to this tensor."""

Place = int | Tensor
"""`before`, SHARED or UNKNOWN; or the sample of each row of the first dimension, -1 for rows without a gradient."""


def owners(place: Place, shape: torch.Size, samples: int) -> Tensor | None:
    """Return which sample each row of the first dimension belongs to; None if that is not known."""
    if isinstance(place, Tensor):
        return place
    if place < 0:
        return None
    dim, major = locate(shape, place, samples)
    inner = shape[0] // (major * samples)
    return torch.arange(samples).repeat_interleave(inner).repeat(major) if dim == 0 else None


def combined(a: Place, b: Place, shape: torch.Size, samples: int) -> Place:
    """Return the place that a tensor has if two users say where it has the samples."""
    if isinstance(a, int) and isinstance(b, int):
        return a if a == b else UNKNOWN
    if UNKNOWN in (a if isinstance(a, int) else 0, b if isinstance(b, int) else 0):
        return UNKNOWN
    try:
        one, other = owners(a, shape, samples), owners(b, shape, samples)
    except ValueError:
        return UNKNOWN
    if one is None or other is None or len(one) != len(other):
        return UNKNOWN
    one, other = (rows if rows.device == other.device or not rows.is_cuda else rows.cpu() for rows in (one, other))
    if bool(((one != other) & (one >= 0) & (other >= 0)).any()):
        return UNKNOWN
    return a if isinstance(a, int) else b if isinstance(b, int) else torch.maximum(one, other)


def regular(rows: Tensor, samples: int) -> Place:
    """Return the place `before` of rows that belong to the samples in turn, or in blocks; others as they are."""
    positions, rest = divmod(len(rows), samples)
    for before in () if rest or not positions else (1, positions):
        expected = owners(before, rows.shape, samples)
        if expected is not None and bool(((rows == expected.to(rows.device)) | (rows < 0)).all()):
            return before
    return rows


def reshaped(rows: Tensor, shape: torch.Size) -> Place:
    """Return the owners of the rows of a tensor that was reshaped into one with these rows."""
    size = shape[0] if len(shape) else 0
    if not size or (size % len(rows) and len(rows) % size):
        return UNKNOWN
    if size >= len(rows):
        return rows.repeat_interleave(size // len(rows))
    parts = rows.view(size, -1)
    return parts[:, 0] if bool((parts == parts[:, :1]).all()) else UNKNOWN


def locate(shape: torch.Size, before: int, samples: int) -> tuple[int, int]:
    """Return the dimension that holds the samples, and how many positions are counted before them inside of it."""
    counted = 1
    for dim, size in enumerate(shape):
        if before < counted * size:
            major, rest = divmod(before, counted)
            if rest or size % (major * samples):
                break
            return dim, major
        counted *= size
    raise ValueError("The samples are spread over several dimensions.")


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
