"""Squares of per-sample weight gradients of a convolution on a GPU; the gradients are never written out.

    for each tile of the weight [o, i], i = (k, c), and each share of the samples, in a program of its own:
        for each sample n, for each tile of positions t:      one flat loop: loads run ahead from sample to sample
            acc += g[n, t, o] · x[n, koff(k) + toff(t), c]    the windows of x are addressed, not copied
            at the last t:  sums += (acc · factor)²,  acc = 0
        squares += weight · sums

Offsets of kernel positions and of output positions add up, so that one small table describes every convolution, of any
number of dimensions, stride and dilation.  Operands have their channels last, so that neighbours are loaded together
however windows are shifted; `images` brings them there.  Only 1×1 convolutions in 16 bits take them as torch has them.

Letters: n sample, t position, o/i out/in features, c channel, k kernel position.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.images import (
    Arrangement,
    ImageFormat,
    alignment,
    arrangement,
    check_windows,
    kept,
    offsets,
    readable,
)
from neuromanifold.kernels.triton.launch import ceil_div, multiprocessors, split_samples
from neuromanifold.kernels.triton.tiles import HALF, ConvolutionTiles, convolution_tiles
from neuromanifold.kernels.values import Windows


class ConvolutionLaunch(NamedTuple):
    """Everything about a launch that does not depend on the values of the tensors."""

    shape: tuple[int, int]  # of the sums
    x: Arrangement | None  # None: as it is
    g: Arrangement | None
    table: Tensor | None
    grid: tuple[int, int]
    sizes: tuple[int, ...]
    options: dict[str, Any]


def add_squares(
    x: Tensor,  # [n, c, *space]
    g: Tensor,  # [n, o, *out]
    squares: Tensor,  # [o, c/groups · k], float32
    fourths: Tensor | None,
    windows: Windows,
    *,
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0),
    tf32: bool = False,
    deterministic: bool = False,
    split: int | None = None,
    config: ConvolutionTiles | None = None,
) -> None:
    """Add a Σ_n (f G_n)² to squares and b Σ_n (f G_n)⁴ to fourths, for `factors` a, b, f.

    G_n[o, (c, k)] = Σ_t g[n, o, t] x[n, c, k·dilation + t·stride - padding].

    x and g are float32, float16 or bfloat16; of two dtypes the shorter one is used.  `tf32`: 11 bits of float32 are
    enough.  Samples are divided into `split` shares, whose sums are added atomically unless `deterministic`.
    """
    flags = tf32, fourths is not None, deterministic
    (x, x_layout), (g, g_layout) = readable(x), readable(g)
    plan = _convolution_launch(x.device, x_layout, g_layout, windows, flags, split, config)
    for sums in (squares, fourths):
        if sums is not None and (sums.shape != plan.shape or sums.dtype != torch.float32 or not sums.is_contiguous()):
            raise ValueError(f"Sums must be contiguous float32 {plan.shape}; got {sums.dtype} {tuple(sums.shape)}.")
    if not plan.grid[0]:
        return
    x, x_scales = (x, None) if plan.x is None else plan.x(x)
    g, g_scales = (g, None) if plan.g is None else plan.g(g)
    targets = [squares, fourths]
    if plan.options["APART"]:
        parts = (plan.grid[1], *plan.shape)
        targets = [squares.new_empty(parts), None if fourths is None else squares.new_empty(parts)]
    a, b, f = factors
    _square_convolutions[plan.grid](
        x, g, *targets, x_scales, g_scales, kept(plan.table), *plan.sizes,
        a if fourths is not None else a * f * f, b, f, **plan.options,
    )  # fmt: skip
    if plan.options["APART"]:
        for total, apart in zip((squares, fourths), targets, strict=True):
            if total is not None and apart is not None:
                total += apart.sum(0)


@functools.lru_cache(maxsize=1024)
def _convolution_launch(
    device: torch.device,
    x: ImageFormat,
    g: ImageFormat,
    windows: Windows,
    flags: tuple[bool, bool, bool],
    split: int | None,
    config: ConvolutionTiles | None,
) -> ConvolutionLaunch:
    """Return which operands are copied, the grid, and the compile-time options."""
    tf32, fourths, deterministic = flags
    kernel, stride, padding, dilation, groups = windows
    (samples, channels, *space), (_, outs, *out) = x.shape, g.shape
    outs, ins, taps, positions = outs // groups, channels // groups, prod(kernel), prod(out)
    dtype = min(x.dtype, g.dtype, key=lambda dtype: dtype.itemsize)
    scaled = tf32 and dtype == torch.float32
    dtype = torch.float16 if scaled else dtype
    multiple = _multiple(channels, groups)
    config = config or convolution_tiles(
        outs, ceil_div(ins, multiple) * multiple * taps, positions, samples, groups, dtype, fourths, taps == 1
    )
    padded = [size + 2 * amount for size, amount in zip(space, padding, strict=True)]
    check_windows(padded, out, kernel, stride, dilation, config.block_t)
    _check_sizes(x, g, prod(padded) * channels)

    # Either both operands have channels last, or positions and x's are the same as g's.
    x_ready, g_ready = x.dtype == dtype and not any(padding), g.dtype == dtype
    single = set(kernel) <= {1}
    same = single and padded == out and set(stride) <= {1}
    first = x_ready and g_ready and same and not x.last and not g.last
    last = not (first and dtype in HALF and positions % 2 == 0)  # pieces of 4 bytes or more are loaded together
    x_plan = g_plan = None
    if last and not (x_ready and x.last):
        if single:  # of all positions only those that are used
            x_plan = arrangement(x, device, dtype, out, padding, stride, scaled=scaled, multiple=multiple)
        else:
            x_plan = arrangement(x, device, dtype, padded, padding, scaled=scaled, multiple=multiple)
        same = single
    else:
        multiple = 1
    if last and not (g_ready and g.last):
        g_plan = arrangement(g, device, dtype, scaled=scaled)

    width = ceil_div(ins, multiple) * multiple * taps
    tiles = ceil_div(outs, config.block_o) * ceil_div(width, config.block_i) * groups
    steps = ceil_div(positions, config.block_t)
    slots, count = config.at_once(dtype.itemsize, fourths) * multiprocessors(device), max(1, samples)
    split = min(split or split_samples(tiles, count, steps, slots), count)
    share = ceil_div(count, split)
    split = ceil_div(count, share)
    o_align, i_align, t_align = (alignment(size, dtype) for size in (outs, ins, positions))
    if last:
        t_align = 1
    else:
        o_align = i_align = 1
    return ConvolutionLaunch(
        shape=(outs * groups, ins * taps),
        x=x_plan,
        g=g_plan,
        table=None if same else offsets(tuple(padded), kernel, tuple(out), stride, dilation, device),
        grid=(tiles if samples and positions else 0, split),
        sizes=(
            *(samples, share, groups, outs // o_align, ins // i_align, taps, positions // t_align),
            positions if same else prod(padded),
        ),
        options={
            "BLOCK_O": config.block_o,
            "BLOCK_I": config.block_i,
            "BLOCK_T": config.block_t,
            "O_ALIGN": o_align,
            "I_ALIGN": i_align,
            "T_ALIGN": t_align,
            "MULTIPLE": multiple,
            "LAST": last,
            "SAME": same,
            "SCALED": scaled,
            "FOURTHS": fourths,
            "APART": deterministic and split > 1,
            "num_warps": config.warps,
            "num_stages": config.stages,
        },
    )


def _multiple(channels: int, groups: int) -> int:
    """Return the multiple that copied channels are padded to: 3 become 4, which are loaded as one piece."""
    return 4 if groups == 1 and channels % 4 and 3 * ceil_div(channels, 4) <= channels else 1


def _check_sizes(x: ImageFormat, g: ImageFormat, numbers: int) -> None:
    """Raise a ValueError for tensors that the kernel does not take."""
    dtypes = (torch.float32, *HALF)
    if x.dtype not in dtypes or g.dtype not in dtypes:
        raise ValueError(f"x is {x.dtype} and g {g.dtype}; each must be one of {dtypes}.")
    if len(x.shape) != len(g.shape) or x.shape[0] != g.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and g {tuple(g.shape)} must have the same samples and dimensions.")
    if max(numbers, prod(g.shape[1:])) >= 2**31:
        raise ValueError(f"One sample of x {tuple(x.shape)}, padded, or of g {tuple(g.shape)} has 2³¹ numbers or more.")


@triton.jit(do_not_specialize=["samples", "share", "groups", "outs", "ins", "taps", "positions", "size"])
def _square_convolutions(
    x,
    g,
    squares,
    fourths,
    x_scales,
    g_scales,
    table,  # koff [k], toff [t]
    samples,
    share,  # samples of a program
    groups,
    outs,  # of a group, in units of O_ALIGN
    ins,  # channels of a group, in units of I_ALIGN
    taps,  # kernel positions
    positions,  # in units of T_ALIGN
    size,  # positions of x
    square_factor,
    fourth_factor,
    factor,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    O_ALIGN: tl.constexpr,  # lets the compiler see that rows begin at multiples of it
    I_ALIGN: tl.constexpr,
    T_ALIGN: tl.constexpr,
    MULTIPLE: tl.constexpr,  # to which channels of x are filled up
    LAST: tl.constexpr,  # channels last
    SAME: tl.constexpr,  # positions of x and g are the same
    SCALED: tl.constexpr,
    FOURTHS: tl.constexpr,
    APART: tl.constexpr,  # each share writes sums of its own
):
    """Square one tile of the weight for one share of the samples."""
    outs = outs * O_ALIGN
    ins = ins * I_ALIGN
    row = ins * taps  # of the weight
    channels = ins
    if MULTIPLE > 1:
        ins = tl.cdiv(ins, MULTIPLE) * MULTIPLE
    positions = positions * T_ALIGN
    if SAME:
        size = positions
    all_outs, all_ins, width, steps = groups * outs, groups * ins, ins * taps, tl.cdiv(positions, BLOCK_T)
    o_tiles, i_tiles = tl.cdiv(outs, BLOCK_O), tl.cdiv(width, BLOCK_I)
    tile = tl.program_id(0)
    group = tile // (o_tiles * i_tiles)
    o = tile % o_tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tile // o_tiles % i_tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    t = tl.arange(0, BLOCK_T)
    c = i
    if not SAME:  # i = (k, c), so that neighbours are neighbours in memory
        c, k = i % ins, i // ins

    # Rows and columns beyond the edge are masked where neighbours are neighbours in memory, else read again, and never
    # used.  Positions beyond the end are zero in g, and in x positions that the sample has anyway.
    if LAST:
        g_base = group * outs + o
        x_base = group * ins + c
    else:
        g_base = (group * outs + tl.minimum(o, outs - 1)) * positions
        x_base = (group * ins + tl.minimum(i, ins - 1)) * positions
    if not SAME:
        x_base += tl.load(table + tl.minimum(k, taps - 1)) * all_ins
        shift = tl.load(table + taps + t)

    acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    sums = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    sums4 = tl.zeros([BLOCK_O, BLOCK_I] if FOURTHS else [1, 1], tl.float32)
    n = tl.program_id(1) * share
    todo = tl.minimum(share, samples - n) * steps
    j = 0
    g_n = g + n.to(tl.int64) * (all_outs * positions)
    x_n = x + n.to(tl.int64) * (all_ins * size)
    for _ in range(todo):
        p = j * BLOCK_T + t
        if LAST:
            g_mask = (p[:, None] < positions) & (o[None, :] < outs)
            left = tl.load(g_n + (p[:, None] * all_outs + g_base[None, :]), mask=g_mask, other=0.0).T
            rows = tl.minimum(p, positions - 1) if SAME else shift
            right = tl.load(x_n + (rows[:, None] * all_ins + x_base[None, :]), mask=i[None, :] < width, other=0.0)
        else:
            left = tl.load(g_n + (g_base[:, None] + p[None, :]), mask=p[None, :] < positions, other=0.0)
            right = tl.load(x_n + (p[:, None] + x_base[None, :]), mask=p[:, None] < positions, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        last = j == steps - 1
        if last:  # nothing here that addresses depend on: loads are to run ahead
            value = acc
            if SCALED:
                g_scale = tl.load(g_scales + n * all_outs + group * outs + o, mask=o < outs, other=0.0)
                x_scale = tl.load(x_scales + n * all_ins + group * ins + c, mask=i < width, other=0.0)
                if FOURTHS:
                    g_scale = g_scale * factor
                value = value * g_scale[:, None] * x_scale[None, :]
            elif FOURTHS:
                value = value * factor
            value = value * value
            sums += value
            if FOURTHS:
                value = tl.minimum(value, 2.0**60)
                sums4 += value * value
            acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        j = tl.where(last, 0, j + 1)
        n += last.to(tl.int32)
        g_n += tl.where(last, all_outs * positions, 0)
        x_n += tl.where(last, all_ins * size, 0)
        if not SAME:  # one step ahead
            shift = tl.load(table + taps + j * BLOCK_T + t)

    column = c if SAME else c * taps + k
    cells = (group * outs + o)[:, None] * row + column[None, :]
    inside = (o[:, None] < outs) & (i[None, :] < width)
    if MULTIPLE > 1:
        inside = inside & (c[None, :] < channels)
    if APART:
        start = tl.program_id(1).to(tl.int64) * (all_outs * row)
        tl.store(squares + start + cells, square_factor * sums, mask=inside)
        if FOURTHS:
            tl.store(fourths + start + cells, fourth_factor * sums4, mask=inside)
    else:  # with one share, one addition: its order does not matter
        tl.atomic_add(squares + cells, square_factor * sums, mask=inside, sem="relaxed")
        if FOURTHS:
            tl.atomic_add(fourths + cells, fourth_factor * sums4, mask=inside, sem="relaxed")
