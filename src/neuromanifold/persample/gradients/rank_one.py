"""Squares of gradients of rank one, (l ⊗ r)² = l² ⊗ r²: those of many samples or tokens are a product of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.kernels.values import BOUND, Accumulators


def add_product_of_squares(left2: Tensor, left4: Tensor | None, right: Tensor, to: Accumulators) -> None:
    """Add (left²)ᵀ(right²) [o, i], and fourth powers; left² and left⁴ [n, o] may be sums over cotangents."""
    right2 = right.square()
    to.squares.addmm_(left2.T, right2, alpha=to.unit**2)
    if to.rows is not None and left4 is None:
        to.add_row_norms(left2 * right2.sum(1, keepdim=True))
    elif to.rows is not None and left4 is not None:
        powers = left4.T @ right2.sum(1).clamp_(max=BOUND**0.5).square_()
        parts = len(powers) // len(to.rows)  # (Σ_k a_k)² <= K Σ_k a_k²
        to.rows.add_(powers.view(len(to.rows), parts).sum(1), alpha=parts * to.weight)
    if to.fourths is not None:
        left4 = left2.clamp(max=BOUND**0.5).square() if left4 is None else left4
        to.fourths.addmm_(left4.T, right2.square_(), alpha=to.weight)


def add_rounded_squares(left: Tensor, right: Tensor, to: Accumulators, numbers: int) -> None:
    """Add Σ_n (l_n ⊗ r_n)² [o, i] for l [n, o] and r [n, i] in bfloat16: squares are rounded to it, sums are not.

    Rounding squares adds half of the error that rounding l and r has made; tensor cores take the products, and next to
    the sums there are `numbers` numbers at a time, not l in float32.
    """
    (outs, ins), dtype = to.squares.shape, to.squares.dtype
    right2 = right.square()
    norms2 = right2.sum(1, keepdim=True, dtype=dtype)
    step = max(1, numbers // max(1, len(left), ins)) if to.rows is None or len(to.rows) == outs else outs
    for start in range(0, outs, step):
        part, left2 = to.narrow(start, start + step), (left[:, start : start + step] * to.factor).square_()
        part.squares.add_(wide_product(left2, right2, dtype), alpha=to.unit**2)
        if part.rows is not None:
            part.add_row_norms(left2 * norms2)
        if part.fourths is not None:
            left4 = left2.clamp_(max=BOUND**0.5).square_()
            part.fourths.add_(wide_product(left4, right2.square(), dtype), alpha=to.weight)


def sums_wider(left: Tensor, right: Tensor) -> bool:
    """Return whether products of such factors can be summed in float32: those of bfloat16 on CUDA, since torch 2.8."""
    half = left.dtype == right.dtype == torch.bfloat16
    return half and left.device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype")


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return leftᵀ right, summed in `dtype`."""
    if left.device.type == "cuda":
        return torch.ops.aten.mm.dtype(left.T, right, dtype)  # type: ignore[no-any-return]
    return left.T.to(dtype) @ right.to(dtype)
