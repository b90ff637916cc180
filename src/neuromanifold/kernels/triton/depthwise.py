"""Per-sample weight gradients of a convolution with one or a few channels in a group, on a GPU.

    G[n, o, (c, k)] = Σ_t g[n, o, t] · x[n, c of o's group, koff(k) + toff(t)]

The matrices are too small to multiply: a program reads a row g[n, o] once and, for all kernel positions at a time, the
shifted rows of x, which after the first of them are in the nearest cache.  The gradients are small, and are squared by
the caller.

Letters: n sample, t position, o out feature, i = (c, k): c channel of the group, k kernel position.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
from __future__ import annotations

import functools
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.images import check_windows, kept, offsets
from neuromanifold.kernels.triton.launch import ceil_div, power_of_two
from neuromanifold.kernels.values import Windows


class DepthwiseTiles(NamedTuple):
    """Sizes of a program's tile: `by_taps` gives each thread a kernel position, else each has positions t."""

    block_t: int
    block_i: int
    by_taps: bool
    warps: int


def gradients(
    x: Tensor,  # [n, c, *space]
    g: Tensor,  # [n, o, *out]
    windows: Windows,
    config: DepthwiseTiles | None = None,
) -> Tensor:
    """Return G [n, o, c/groups · k] in float32; the result is deterministic."""
    amounts = [amount for size in reversed(windows.padding) for amount in (size, size)]
    x, g = torch.nn.functional.pad(x, amounts).contiguous(), g.contiguous()
    shape, programs, table, sizes, options = _depthwise_launch(x.device, x.shape, g.shape, windows, config)
    found = torch.empty(shape, dtype=torch.float32, device=x.device)
    if programs:
        _gradients[(programs,)](x, g, found, kept(table), *sizes, **options)
    return found


@functools.lru_cache(maxsize=1024)
def _depthwise_launch(
    device: torch.device,
    x: torch.Size,  # with its padding
    g: torch.Size,
    windows: Windows,
    config: DepthwiseTiles | None,
) -> tuple[tuple[int, int, int], int, Tensor, tuple[int, ...], dict[str, Any]]:
    """Return the result's shape, the number of programs, and their table, sizes and options."""
    kernel, stride, _, dilation, groups = windows
    samples, channels, outs, taps, positions = x[0], x[1] // groups, g[1] // groups, prod(kernel), prod(g[2:])
    width, size = channels * taps, prod(x[2:])
    config = config or depthwise_tiles(width, positions)
    check_windows(x[2:], g[2:], kernel, stride, dilation, config.block_t)
    if channels * size >= 2**31:
        raise ValueError(f"One group of x has {channels * size} numbers; there must be fewer than 2³¹.")
    options = {
        "BLOCK_T": config.block_t,
        "BLOCK_I": config.block_i,
        "BY_TAPS": config.by_taps,
        "num_warps": config.warps,
    }
    return (
        (samples, groups * outs, width),
        samples * groups * outs * ceil_div(width, config.block_i),
        offsets(tuple(x[2:]), kernel, tuple(g[2:]), stride, dilation, device),
        (outs, channels, taps, positions, size),
        options,
    )


def depthwise_tiles(width: int, positions: int) -> DepthwiseTiles:
    """Return tiles: for few positions a thread for each kernel position, for many threads along rows."""
    block_i = power_of_two(min(32, width))
    if positions <= 64 and block_i >= 16:
        return DepthwiseTiles(16, block_i, True, 1)
    block_i = ceil_div(width, ceil_div(width, 32)) if width else 1
    warps = 1 if positions < 1024 else 4
    return DepthwiseTiles(32 * warps, block_i, False, warps)


@triton.jit(do_not_specialize=["outs", "channels", "taps", "positions", "size"])
def _gradients(
    x,
    g,
    found,
    table,  # koff [k], toff [t]
    outs,  # of a group
    channels,  # of a group
    taps,  # kernel positions
    positions,
    size,  # positions of x
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BY_TAPS: tl.constexpr,
):
    """Compute a block of i of one row (n, o)."""
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
        shifts = i // taps * size + tl.load(table + i % taps)
        sums = tl.zeros([BLOCK_I, BLOCK_T], tl.float32)
        for start in range(0, positions, BLOCK_T):
            left = tl.load(g_row + start + t, mask=start + t < positions, other=0.0).to(tl.float32)
            at = shifts[:, None] + tl.load(table + taps + start + t)[None, :]
            sums += left[None, :] * tl.load(x_row + at, mask=i[:, None] < width, other=0.0).to(tl.float32)
        tl.store(to + i, tl.sum(sums, axis=1), mask=i < width)
    else:  # neighbouring threads have neighbouring t; for each i a row of its own, without masks
        rows = ()
        many = ()
        for k in tl.static_range(BLOCK_I):
            i = tl.minimum(first + k, width - 1)
            rows = rows + (x_row + i // taps * size + tl.load(table + i % taps),)  # noqa: RUF005
            many = many + (tl.zeros([BLOCK_T], tl.float32),)  # noqa: RUF005
        for start in range(0, positions, BLOCK_T):
            left = tl.load(g_row + start + t, mask=start + t < positions, other=0.0).to(tl.float32)
            at = tl.load(table + taps + start + t)
            more = ()
            for k in tl.static_range(BLOCK_I):
                more = more + (many[k] + left * tl.load(rows[k] + at).to(tl.float32),)  # noqa: RUF005
            many = more
        for k in tl.static_range(BLOCK_I):
            tl.store(to + first + k, tl.sum(many[k], axis=0), mask=first + k < width)
