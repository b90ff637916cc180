"""Per-sample gradients of BatchNorm, Σ_l g_l∘x̂_l and Σ_l g_l, from one read of input and gradient."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.launch import ceil_div, power_of_two


@triton.jit
def _channels(
    x, g, mean, variance, sums, ROWS_ALL, C, L, eps, POSITIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum over some channels of samples, [rows, p]; x̂ = (x - mean)/√(variance + eps) by channel."""
    row, p = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, POSITIONS)
    here = row < ROWS_ALL
    m = tl.load(mean + row % C, mask=here, other=0.0).to(tl.float32)[:, None]
    scale, shift = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    start = row.to(tl.int64) * L
    for first in range(0, L, POSITIONS):
        at = start[:, None] + (first + p)[None, :]
        mask = here[:, None] & (first + p < L)[None, :]
        a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        scale += tl.sum((a - m) * b, axis=1)
        shift += tl.sum(b, axis=1)
    spread = tl.load(variance + row % C, mask=here, other=1.0).to(tl.float32) + eps
    tl.store(sums + row, scale * tl.rsqrt(spread), mask=here)
    tl.store(sums + ROWS_ALL + row, shift, mask=here)


def launch_channel_norm(x: Tensor, g: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (Σ_l g∘x̂, Σ_l g) [n, c] for contiguous x, g [n, c, l], with x̂ = (x - mean)/√(variance + eps)."""
    n, c, length = g.shape
    sums = torch.empty((2, n, c), dtype=torch.float32, device=g.device)
    if not g.numel():
        return sums.zero_()[0], sums[1]
    positions = min(1024, max(16, power_of_two(length)))
    rows = max(1, 2048 // positions)
    _channels[(ceil_div(n * c, rows),)](
        x, g, mean, variance, sums, n * c, c, length, eps, POSITIONS=positions, ROWS=rows, num_warps=4
    )
    return sums[0], sums[1]
