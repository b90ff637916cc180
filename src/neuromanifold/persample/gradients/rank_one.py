"""Squares of gradients of rank one, (l ⊗ r)² = l² ⊗ r²: those of many samples or tokens are a product of matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuromanifold.kernels.values import BOUND, PowerSums

_BOUND = 2.0**50  # of l² in the unit: l⁴ is in float32's range, and so is its product with r⁴


def add_squares_of_rank_one(left: Tensor, right: Tensor, to: PowerSums, numbers: int) -> None:
    """Add Σ_n (l_n ⊗ r_n)² [o, i], and fourth powers, for l [n, o] and r [n, i]; about `numbers` numbers at a time.

    On a GPU, squares of bfloat16 stay in it, as products of an ordinary backward pass do: rounding them adds as much to
    the error as rounding l and r has made.  Elsewhere all is done in the precision of the sums.

    Fourth powers of small inputs r would underflow, and those of l in the gradients' unit overflow.  So r is taken in a
    unit of its own size, and l in the rest of that of the gradients.
    """
    (outs, ins), dtype = to.squares.shape, left.dtype if _stays(left, right) else to.squares.dtype
    unit = 1.0 if to.fourths is None else _power_of_two_near(right)
    factor, right = to.factor * unit, right.to(dtype)
    right2 = right.square() if to.fourths is None else (right / unit).square_()
    step = max(1, numbers // max(1, len(left), ins)) if to.row_fourths is None or len(to.row_fourths) == outs else outs
    for start in range(0, outs, step):
        part = left[:, start : start + step].to(dtype)
        left2 = part.square() if isinstance(factor, float) and factor == 1.0 else (part * factor).square_()
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
        left4 = left2.clamp(max=_BOUND).square() if left4 is None else left4
        _add_product(left4, right2.square(), to.fourths, to.weight)


def _power_of_two_near(values: Tensor) -> float | Tensor:
    """Return a power of two near the root mean square, 1 if that is zero; a number where reading it costs nothing."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    size = torch.linalg.vector_norm(values, dtype=dtype) / math.sqrt(max(1, values.numel()))
    if values.device.type == "cpu" and not torch._C._len_torch_dispatch_stack():
        number = float(size)
        return 2.0 ** round(math.log2(number)) if 0 < number < math.inf else 1.0
    power = torch.exp2(torch.log2(size).round())
    return torch.where((power > 0) & power.isfinite(), power, 1.0)


def _stays(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cuda"


def _add_product(left: Tensor, right: Tensor, to: Tensor, factor: float) -> None:
    """Add leftᵀ right times a factor, in the precision of the product."""
    if left.dtype == to.dtype:
        to.addmm_(left.T, right, alpha=factor)
    else:
        to.add_(left.T @ right, alpha=factor)
