"""Squares of gradients of rank one, (l ⊗ r)² = l² ⊗ r²: those of many samples or tokens are a product of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.kernels.values import BOUND, PowerSums


def add_squares_of_rank_one(left: Tensor, right: Tensor, to: PowerSums, numbers: int) -> None:
    """Add Σ_n (l_n ⊗ r_n)² [o, i], and fourth powers, for l [n, o] and r [n, i]; about `numbers` numbers at a time.

    On a GPU, squares of bfloat16 stay in it, as products of an ordinary backward pass do: rounding them adds as much to
    the error as rounding l and r has made.  Elsewhere all is done in the precision of the sums.
    """
    (outs, ins), dtype = to.squares.shape, left.dtype if _stays(left, right) else to.squares.dtype
    factor, right2 = to.factor, right.to(dtype).square()
    step = max(1, numbers // max(1, len(left), ins)) if to.row_fourths is None or len(to.row_fourths) == outs else outs
    for start in range(0, outs, step):
        part = left[:, start : start + step].to(dtype)
        left2 = part.square() if factor == 1.0 else (part * factor).square_()
        add_product_of_squares(left2, None, right2, to.narrow(start, start + step) if step < outs else to)


def add_product_of_squares(left2: Tensor, left4: Tensor | None, right2: Tensor, to: PowerSums) -> None:
    """Add (l²)ᵀ(r²) [o, i], and fourth powers; l² and l⁴ [n, o] may be sums over cotangents."""
    _add_product(left2, right2, to.squares, to.unit**2)
    if to.row_fourths is not None:
        norms2 = right2.sum(1, keepdim=True, dtype=to.row_fourths.dtype)
        if left4 is None:
            to.add_row_norms(left2 * norms2)
        else:
            powers = left4.T @ norms2[:, 0].clamp_(max=BOUND**0.5).square_()
            parts = len(powers) // len(to.row_fourths)  # (Σ_k a_k)² <= K Σ_k a_k²
            to.row_fourths.add_(powers.view(len(to.row_fourths), parts).sum(1), alpha=parts * to.weight)
    if to.fourths is not None:
        left4 = left2.clamp(max=BOUND**0.5).square() if left4 is None else left4
        _add_product(left4, right2.square(), to.fourths, to.weight)


def _stays(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cuda"


def _add_product(left: Tensor, right: Tensor, to: Tensor, factor: float) -> None:
    """Add leftᵀ right times a factor, in the precision of the product."""
    if left.dtype == to.dtype:
        to.addmm_(left.T, right, alpha=factor)
    else:
        to.add_(left.T @ right, alpha=factor)
