"""Per-sample gradients of scales and shifts, Σ_t g_t∘x̂_t and Σ_t g_t, from one read of input and gradient."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.launch import ceil_div, power_of_two

_LARGEST = 8192  # features of a row that is normalised at once


@triton.jit
def _features(
    x, g, sums, T, D, x_n, x_t, g_n, g_t, each, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Sum over some positions of one sample; x̂ is normalised over the features of a position."""
    n, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    d, t = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    scale, shift = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    end = tl.minimum((part + 1) * each, T)
    for first in range(part * each, end, ROWS):
        mask = (first + t < end)[:, None] & (d < D)[None, :]
        a = tl.load(x + n * x_n + (first + t).to(tl.int64)[:, None] * x_t + d[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        b = tl.load(g + n * g_n + (first + t).to(tl.int64)[:, None] * g_t + d[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        if CENTRED:
            a = tl.where(mask, a - (tl.sum(a, axis=1) / D)[:, None], 0.0)
        a = a * tl.rsqrt(tl.sum(a * a, axis=1) / D + eps)[:, None]
        scale += tl.sum(a * b, axis=0)
        shift += tl.sum(b, axis=0)
    at = sums + (n * parts + part) * 2 * D + d
    tl.store(at, scale, mask=d < D)
    tl.store(at + D, shift, mask=d < D)


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


def launch_feature_norm(x: Tensor, g: Tensor, eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """Return (Σ_t g∘x̂, Σ_t g) [n, d] for x, g [n, t, d]: LayerNorm (centred) or RMSNorm over the last dimension."""
    n, t, d = g.shape
    columns = power_of_two(d)
    rows = max(1, min(16, 4096 // columns))
    each = max(rows, ceil_div(t, max(1, 264 // max(1, n)))) if t else 1
    parts = max(1, ceil_div(t, each))
    sums = torch.empty((n, parts, 2, d), dtype=torch.float32, device=g.device)
    if sums.numel():
        _features[(n, parts)](
            x, g, sums, t, d, x.stride(0), x.stride(1), g.stride(0), g.stride(1), each, eps,
            ROWS=rows, COLUMNS=columns, CENTRED=centred, num_warps=4 if rows * columns <= 4096 else 8,
        )  # fmt: skip
    total = sums[:, 0] if parts == 1 else sums.sum(1)
    return total[:, 0], total[:, 1]


def fits_feature_norm(x: Tensor, g: Tensor) -> bool:
    """Whether `launch_feature_norm` takes these tensors: features contiguous, and not too many."""
    return x.shape[-1] <= _LARGEST and x.stride(-1) == 1 and g.stride(-1) == 1


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
