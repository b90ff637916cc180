"""Arguments and results of kernels, and tables of positions that backends share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BOUND = 2.0**60
"""Largest square, in the unit of the fourth powers: the sum of their squares would overflow otherwise."""


class PowerSums(NamedTuple):
    """The sums that squares and fourth powers of one parameter's gradients are added to.

        squares      += Σ_n (g_n/scale)²
        fourths      += weight Σ_n (g_n/(scale·unit))⁴                  of entries, or
        row_fourths  += weight Σ_n ‖row r of g_n/(scale·unit)‖⁴         of rows r along the first dimension

    Fourth powers of small numbers underflow in float32, so they are in units of a power of two near the gradients'
    size: a gradient is multiplied by `factor`, squared, and its square multiplied by `unit`².
    """

    squares: Tensor
    fourths: Tensor | None = None
    unit: float = 1.0
    weight: float = 1.0
    scale: float = 1.0  # the gradients are so many times too large
    row_fourths: Tensor | None = None  # [rows] in place of fourths

    @property
    def factor(self) -> float:
        """Factor for gradients before they are squared."""
        return 1 / (self.scale * self.unit)

    @property
    def kernel_factors(self) -> tuple[float, float, float]:
        """Factors for squares, for fourth powers, and for gradients before they are squared."""
        return self.unit**2, self.weight, self.factor

    def narrow(self, start: int, stop: int) -> PowerSums:
        """Return views of the rows `start` to `stop - 1` of the parameter."""
        fourths, rows = (None if sums is None else sums[start:stop] for sums in (self.fourths, self.row_fourths))
        return self._replace(squares=self.squares[start:stop], fourths=fourths, row_fourths=rows)

    def view(self, *shape: int) -> PowerSums:
        """Return the same memory in another shape."""
        if self.squares.shape == shape:
            return self
        fourths = None if self.fourths is None else self.fourths.view(shape)
        return self._replace(squares=self.squares.view(shape), fourths=fourths)

    def add(self, gradients: Tensor) -> None:
        """Add gradients [n, *shape] that have been multiplied by `factor`; they are overwritten."""
        if len(gradients) == 1:
            one = gradients[0]
            self.squares.addcmul_(one, one, value=self.unit**2)
            if self.row_fourths is not None:
                self.add_row_norms(one.mul_(one).flatten(1).sum(1)[None])
            if self.fourths is not None:
                one.mul_(one).clamp_(max=BOUND)
                self.fourths.addcmul_(one, one, value=self.weight)
            return
        squares = gradients.mul_(gradients)
        self.squares.add_(squares.sum(0), alpha=self.unit**2)
        if self.row_fourths is not None:
            self.add_row_norms(squares.flatten(2).sum(2))
        if self.fourths is not None:
            self.fourths.add_(squares.clamp_(max=BOUND).square_().sum(0), alpha=self.weight)

    def add_to_rows(self, rows: Tensor, squares: Tensor) -> None:
        """Add squares [n, d] of gradients that have been multiplied by `factor` to rows [n]; they are overwritten."""
        self.squares.index_add_(0, rows, squares, alpha=self.unit**2)
        if self.row_fourths is not None:
            self.row_fourths.index_add_(0, rows, squares.sum(1).clamp_(max=BOUND).square_(), alpha=self.weight)
        if self.fourths is not None:
            self.fourths.index_add_(0, rows, squares.clamp_(max=BOUND).square_(), alpha=self.weight)

    def add_row_norms(self, norms: Tensor) -> None:
        """Add squared norms [n, m] of the gradients' rows, or of equal parts of rows; they are overwritten."""
        assert self.row_fourths is not None
        if norms.shape[1] != len(self.row_fourths):
            norms = norms.view(len(norms), len(self.row_fourths), -1).sum(2)
        self.row_fourths.add_(norms.clamp_(max=BOUND).square_().sum(0), alpha=self.weight)

    def takes_rows(self, count: int) -> bool:
        """Whether `count` rows of the parameter, seen as a matrix, are its rows or equal parts of them."""
        return self.row_fourths is None or (len(self.row_fourths) > 0 and count % len(self.row_fourths) == 0)


class Probe(NamedTuple):
    """A cotangent for every row of logits, and which rows could be evaluated."""

    cotangent: Tensor  # [..., C]
    finite: Tensor  # [...] bool  False: NaN, +inf, or no possible class


class Deflated(NamedTuple):
    """A deflated probe for each distribution, but for those that are left to torch: tied at the top, or not finite."""

    cotangent: Tensor  # [..., C]
    left_out: Tensor | None  # [...] bool; None: there are none


class Windows(NamedTuple):
    """Geometry of a convolution: one number for each dimension of space, and the groups of channels."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def flat_positions(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Σ_d position_d · stride_d for all positions of a shape, flat, int64."""
    total = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        total = total[..., None] + torch.arange(size) * stride
    return total.flatten()


def source_positions(
    space: Sequence[int], counts: Sequence[int], steps: Sequence[int], padding: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Where positions p·step - padding, p < counts, lie in an image with these strides: flat, int64, -1 outside."""
    total, outside = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.bool)
    for size, count, step, amount, stride in zip(space, counts, steps, padding, strides, strict=True):
        at = torch.arange(count) * step - amount
        total = total[..., None] + at * stride
        outside = outside[..., None] | (at < 0) | (at >= size)
    return total.masked_fill(outside, -1).flatten()
