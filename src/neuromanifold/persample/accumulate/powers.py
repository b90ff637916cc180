"""Σ g² and Σ c g⁴ of gradients that are summed over a batch, of many parameters by a few operations.

Fourth powers are kept in units of a power of two, since they would leave float32's range.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuromanifold.persample.gradients import BOUND

_CHUNK = 2**18  # numbers that a CPU squares, adds and raises to the fourth at a time: they stay in its cache


def root_mean_squares(values: list[Tensor]) -> list[Tensor]:
    """Return the root mean square of each tensor."""
    norms = torch._foreach_norm(values)
    return [norm / math.sqrt(value.numel()) for norm, value in zip(norms, values, strict=True)]


def as_precise(gradients: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
    """Return gradients in the precision of the sums, converted by one kernel where they have another."""
    if all(g.dtype == square.dtype for g, square in zip(gradients, squares, strict=True)):
        return gradients
    values = [torch.empty_like(square) for square in squares]
    torch._foreach_copy_(values, gradients)
    return values


def power_of_two_near(rms: float) -> float:
    """Return the unit of fourth powers, whose own fourth power is in float32's range; 0 for a gradient of zero."""
    return 2.0 ** min(40, max(-40, round(math.log2(rms)))) if 0 < rms < math.inf else 0.0


def add_at_once(
    values: list[Tensor], squares: list[Tensor], fourths: list[Tensor], factors: list[float], noise: float
) -> None:
    """Add squares and fourth powers of all parameters by a few kernel launches."""
    products = torch._foreach_mul(values, values)
    torch._foreach_add_(squares, products)
    torch._foreach_mul_(products, factors)
    torch._foreach_clamp_max_(products, BOUND)
    torch._foreach_addcmul_(fourths, products, products, value=noise)


def add_in_chunks(
    values: list[Tensor], squares: list[Tensor], fourths: list[Tensor], factors: list[float], noise: float
) -> None:
    """Add them by pieces that stay in a CPU's cache: each number is read from and written to memory once."""
    for i, value in enumerate(values):
        pieces = (value.reshape(-1), squares[i].view(-1), fourths[i].view(-1))
        for g, square, fourth in zip(*(torch.split(piece, _CHUNK) for piece in pieces), strict=True):
            product = g * g
            square.add_(product)
            product.mul_(factors[i]).clamp_(max=BOUND)
            fourth.addcmul_(product, product, value=noise)
