"""Where a tensor has the samples: a place as a number, or the sample that owns each of its rows."""

from __future__ import annotations

from typing import Final

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


def both(a: Place, b: Place, shape: torch.Size, samples: int) -> Place:
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
