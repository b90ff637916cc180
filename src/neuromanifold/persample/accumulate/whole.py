"""Squares and fourth powers of gradients that are summed over a batch: large ones in pieces, small ones together.

No copy of a model's size is made: a GPU squares half precision as it reads it, and what has to be written out in
between (fourth powers) is a piece of one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from neuromanifold.kernels.values import BOUND, PowerSums

CPU_PIECE, GPU_PIECE = 2**18, 2**24  # numbers that are worked on at a time: on a CPU they stay in its cache


def add_whole(gradients: Sequence[Tensor], sums: Sequence[PowerSums]) -> None:
    """Add the squares of one gradient for each parameter, and fourth powers where they are kept."""
    together: list[tuple[Tensor, PowerSums]] = []
    for g, to in zip(gradients, sums, strict=True):
        piece = CPU_PIECE if g.device.type == "cpu" else GPU_PIECE
        if to.row_fourths is not None:
            norms = torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=to.squares.dtype).mul_(to.factor)
            to.add_row_norms(norms.square_()[None])
            to = to._replace(row_fourths=None)
        if to.fourths is None and (g.device.type != "cpu" or g.dtype == to.squares.dtype):
            to.squares.addcmul_(g, g, value=to.scale**-2)
        elif g.device.type == "cpu" or g.numel() > piece:
            _add_pieces(g.reshape(-1), to.view(-1), piece)
        else:
            together.append((g, to))
    if together:
        _add_together([g for g, _ in together], [to for _, to in together])


def root_mean_squares(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the root mean square of each tensor, in float32 or better."""
    return [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) / math.sqrt(g.numel())
        for g in gradients
    ]


def _add_pieces(g: Tensor, to: PowerSums, piece: int) -> None:
    for start in range(0, len(g), piece):
        part, values = to.narrow(start, start + piece), g[start : start + piece].to(to.squares.dtype)
        products = values * values
        part.squares.add_(products, alpha=to.scale**-2)
        if part.fourths is not None:
            products.mul_(to.factor**2).clamp_(max=BOUND)
            part.fourths.addcmul_(products, products, value=to.weight)


def _add_together(gradients: list[Tensor], sums: list[PowerSums]) -> None:
    """Add them by a few kernel launches for all parameters; `weight` and `scale` are those of the first."""
    squares, fourths = [to.squares for to in sums], [to.fourths for to in sums if to.fourths is not None]
    if any(g.dtype != square.dtype for g, square in zip(gradients, squares, strict=True)):
        values = [torch.empty_like(square) for square in squares]
        torch._foreach_copy_(values, gradients)
    else:
        values = gradients
    products = torch._foreach_mul(values, values)
    torch._foreach_mul_(products, sums[0].scale ** -2)
    torch._foreach_add_(squares, products)
    torch._foreach_mul_(products, [to.unit**-2 for to in sums])
    torch._foreach_clamp_max_(products, BOUND)
    torch._foreach_addcmul_(fourths, products, products, value=sums[0].weight)
