"""Single samples' weight gradients of a depthwise convolution on a GPU, and of one with few channels in a group.

    G[n, o, (c, k)] = Σ_t g[n, o, t] · x[n, c of o's group, koff(k) + toff(t)]

There is nothing to multiply matrices for: a program reads a row g[n, o] once and, for all kernel positions at a time,
the shifted rows of x, which after the first of them are in the nearest cache.  What comes out is small and is squared
elsewhere.

Letters: n sample, t position, o out feature, i = (c, k): c channel of the group, k kernel position.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.pullback.kernels.convolution import check_block, offsets

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Config(NamedTuple):
    """How one program cuts the work: `by_taps` gives each thread a kernel position, else each has positions t."""

    block_t: int
    block_i: int
    by_taps: bool
    warps: int


def gradients(
    x: Tensor,  # [n, c, *space], padded, contiguous
    g: Tensor,  # [n, o, *out], contiguous
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    config: Config | None = None,
) -> Tensor:
    """G [n, o, c/groups · k] in float32; always the same numbers for the same input."""
    if x.dtype not in DTYPES or g.dtype not in DTYPES or not (x.is_contiguous() and g.is_contiguous()):
        raise ValueError(
            f"x and g must be contiguous, of one of {DTYPES}; got x {x.dtype}, strides {x.stride()}, "
            f"and g {g.dtype}, strides {g.stride()}."
        )
    samples, channels, outs = x.shape[0], x.shape[1] // groups, g.shape[1] // groups
    taps, size, positions = prod(kernel), x.shape[2:].numel(), g.shape[2:].numel()
    width = channels * taps
    found = torch.zeros(samples, groups * outs, width, device=x.device)
    if not found.numel() or not positions:
        return found
    if channels * size >= 2**31:
        raise ValueError(f"One group of x has {channels * size} numbers; there must be fewer than 2³¹.")
    config = config or choose(width, positions)
    check_block(config.block_t)
    x_table, t_table = offsets(x.shape[2:], tuple(kernel), g.shape[2:], tuple(stride), tuple(dilation), x.device)
    blocks = triton.cdiv(width, config.block_i)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _gradients[(samples * groups * outs * blocks,)](
            x,
            g,
            found,
            x_table,
            t_table,
            outs,
            channels,
            taps,
            positions,
            size,
            BLOCK_T=config.block_t,
            BLOCK_I=config.block_i,
            BY_TAPS=config.by_taps,
            num_warps=config.warps,
        )
    return found


def choose(width: int, positions: int) -> Config:
    """Few positions: a thread for each kernel position, nothing to add up across threads.  Many: threads along rows."""
    block_i = triton.next_power_of_2(min(32, width))
    if positions <= 64 and block_i >= 16:
        return Config(16, block_i, True, 1)
    block_i = triton.cdiv(width, triton.cdiv(width, 32))
    warps = 1 if positions < 1024 else 4
    return Config(32 * warps, block_i, False, warps)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["outs", "channels", "taps", "positions", "size"]
)
def _gradients(  # type: ignore[no-untyped-def]
    x,
    g,
    found,
    x_table,  # koff [k]
    t_table,  # toff [t]
    outs,  # of a group
    channels,  # of a group
    taps,  # kernel positions
    positions,
    size,  # positions of x
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BY_TAPS: tl.constexpr,
):
    """One row n, o; a block of i."""
    width = channels * taps
    blocks = tl.cdiv(width, BLOCK_I)
    row = tl.program_id(0) // blocks  # n, o
    group = row // outs  # n, group
    first = tl.program_id(0) % blocks * BLOCK_I
    t = tl.arange(0, BLOCK_T)
    g_row = g + row.to(tl.int64) * positions
    x_row = x + group.to(tl.int64) * (channels * size)
    to = found + row.to(tl.int64) * width
    if BY_TAPS:  # neighbouring threads have neighbouring i: the compiler gives them to a tile's first axis
        i = first + tl.arange(0, BLOCK_I)
        shifts = i // taps * size + tl.load(x_table + i % taps)
        sums = tl.zeros([BLOCK_I, BLOCK_T], tl.float32)
        for start in range(0, positions, BLOCK_T):
            left = tl.load(g_row + start + t, mask=start + t < positions, other=0.0).to(tl.float32)
            at = shifts[:, None] + tl.load(t_table + start + t)[None, :]
            sums += left[None, :] * tl.load(x_row + at, mask=i[:, None] < width, other=0.0).to(tl.float32)
        tl.store(to + i, tl.sum(sums, axis=1), mask=i < width)
    else:  # neighbouring threads have neighbouring t; for each i a row of its own, without masks
        rows = ()
        many = ()
        for k in tl.static_range(BLOCK_I):
            i = tl.minimum(first + k, width - 1)
            rows = rows + (x_row + i // taps * size + tl.load(x_table + i % taps),)  # type: ignore[assignment]  # noqa: RUF005
            many = many + (tl.zeros([BLOCK_T], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for start in range(0, positions, BLOCK_T):
            left = tl.load(g_row + start + t, mask=start + t < positions, other=0.0).to(tl.float32)
            at = tl.load(t_table + start + t)
            more = ()
            for k in tl.static_range(BLOCK_I):
                more = more + (many[k] + left * tl.load(rows[k] + at).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            many = more
        for k in tl.static_range(BLOCK_I):
            tl.store(to + first + k, tl.sum(many[k], axis=0), mask=first + k < width)
