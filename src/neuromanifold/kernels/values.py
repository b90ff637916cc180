"""Arguments and results of kernels, and tables of positions that backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BOUND = 2.0**60
"""Largest square, in the unit of the fourth powers: the sum of their squares would overflow otherwise."""


class Accumulators(NamedTuple):
    """The tensors that one parameter's squares are added to: Σ g², and for error bars weighted Σ g⁴ in units of `unit`.

    Or, for error bars of rows, weighted Σ ‖g_r‖⁴, with g_r the gradient's row r along the first dimension.
    """

    squares: Tensor
    fourths: Tensor | None = None
    unit: float = 1.0
    weight: float = 1.0  # of these fourth powers
    scale: float = 1.0  # the gradients are so many times too large
    rows: Tensor | None = None  # [rows] in place of fourths

    @property
    def factor(self) -> float:
        """Factor for gradients before they are squared."""
        return 1 / (self.scale * self.unit)

    @property
    def kernel_factors(self) -> tuple[float, float, float]:
        """Factors for squares, for fourth powers, and for gradients before they are squared."""
        return self.unit**2, self.weight, self.factor

    def narrow(self, start: int, stop: int) -> Accumulators:
        """Return views of the rows `start` to `stop - 1` of the parameter."""
        narrowed = self._with(lambda tensor: tensor[start:stop])
        return narrowed if self.rows is None else narrowed._replace(rows=self.rows[start:stop])

    def view(self, *shape: int) -> Accumulators:
        """Return the same memory in another shape."""
        return self if self.squares.shape == shape else self._with(lambda tensor: tensor.view(shape))

    def _with(self, change: Callable[[Tensor], Tensor]) -> Accumulators:
        fourths = None if self.fourths is None else change(self.fourths)
        return self._replace(squares=change(self.squares), fourths=fourths)

    def add(self, gradients: Tensor) -> None:
        """Add the squares of gradients [n, *shape], already multiplied by `factor`; they are overwritten."""
        if len(gradients) == 1:
            one = gradients[0]
            self.squares.addcmul_(one, one, value=self.unit**2)
            if self.rows is not None:
                self.add_row_norms(one.mul_(one).flatten(1).sum(1)[None])
            if self.fourths is not None:
                one.mul_(one).clamp_(max=BOUND)
                self.fourths.addcmul_(one, one, value=self.weight)
            return
        squares = gradients.mul_(gradients)
        self.squares.add_(squares.sum(0), alpha=self.unit**2)
        if self.rows is not None:
            self.add_row_norms(squares.flatten(2).sum(2))
        if self.fourths is not None:
            self.fourths.add_(squares.clamp_(max=BOUND).square_().sum(0), alpha=self.weight)

    def add_row_norms(self, norms: Tensor) -> None:
        """Add squared norms [n, m] of the gradients' rows, or of equal parts of rows; they are overwritten."""
        assert self.rows is not None
        if norms.shape[1] != len(self.rows):
            norms = norms.view(len(norms), len(self.rows), -1).sum(2)
        self.rows.add_(norms.clamp_(max=BOUND).square_().sum(0), alpha=self.weight)

    def takes_rows(self, count: int) -> bool:
        """Whether `count` rows of the parameter, seen as a matrix, are its rows or equal parts of them."""
        return self.rows is None or (len(self.rows) > 0 and count % len(self.rows) == 0)


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
