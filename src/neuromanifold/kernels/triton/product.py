"""Σ_n (Σ_t left[n, t, o] right[n, t, i])² in one kernel: a sample's product stays in registers until it is squared.

    grid     tiles of the parameter × parts of the samples; neighbouring programs share samples, hence the cache
    loop     samples and tiles of positions; at a sample's end its sum is squared and added, then begun anew
    ending   a tile's sums are added to the parameter's, by atomics if several programs have the same tile

Arithmetic is that of the ordinary weight gradient; squares are one multiplication for every T of it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.launch import ceil_div, multiprocessors, power_of_two, split_samples
from neuromanifold.kernels.triton.pack import GROUP, Packed


class ProductTiles(NamedTuple):
    """Sizes of a tile, and how a program is run."""

    outs: int
    ins: int
    positions: int
    warps: int
    stages: int
    at_once: int  # programs that one multiprocessor runs at the same time

    def shared(self, itemsize: int) -> int:
        """Return the bytes of shared memory for tiles that are being loaded."""
        return self.stages * self.positions * (self.outs + self.ins) * itemsize


SHARED = 200 * 2**10  # bytes of shared memory that a program may use


class Choice(NamedTuple):
    """The tiles for at most so many positions and entries of the weight."""

    positions: float
    numbers: float
    config: ProductTiles


# By measured time on an H200 (benchmarks/gpu/shapes.py --tune): the first whose limits are not exceeded.
HALF = (
    Choice(64, math.inf, ProductTiles(64, 128, 64, 4, 3, 2)),
    Choice(128, math.inf, ProductTiles(128, 128, 64, 8, 3, 1)),
    Choice(math.inf, 2**24, ProductTiles(128, 128, 128, 8, 3, 1)),
    Choice(math.inf, math.inf, ProductTiles(64, 128, 64, 4, 3, 2)),
)
SINGLE = (
    Choice(64, math.inf, ProductTiles(64, 64, 64, 4, 2, 4)),
    Choice(256, math.inf, ProductTiles(64, 64, 32, 4, 3, 4)),
    Choice(math.inf, 2**24, ProductTiles(64, 64, 16, 4, 3, 4)),
    Choice(math.inf, math.inf, ProductTiles(64, 64, 64, 4, 2, 4)),
)
# With fourth powers, a third more registers are needed.
HALF_FOURTHS = (
    Choice(128, math.inf, ProductTiles(128, 128, 64, 8, 3, 1)),
    Choice(math.inf, math.inf, ProductTiles(128, 128, 64, 8, 4, 1)),
)
SINGLE_FOURTHS = (Choice(math.inf, math.inf, ProductTiles(64, 64, 32, 4, 3, 3)),)


@triton.jit
def _tile(
    pointer, offset, first, t, columns, T, SIZE, t_stride,
    EVEN_T: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Load [positions, columns] of one sample; zero outside.  FAR: a position times its stride needs 64 bits."""
    position = first + t
    if FAR:
        position = position.to(tl.int64)
    at = pointer + offset + position[:, None] * t_stride + columns[None, :]
    if EVEN_T and EVEN:
        return tl.load(at)
    if EVEN_T:
        return tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)
    if EVEN:
        return tl.load(at, mask=(first + t < T)[:, None], other=0.0)
    return tl.load(at, mask=(first + t < T)[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def _scaled(
    acc, n, o, left_scales, right_scales, skip, OUT, IN, row, column, factor,
    GROUP: tl.constexpr, SCALED: tl.constexpr, SKIP: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Return the sample's gradient in the wanted units; zero in rows that `skip` names."""
    if SCALED:
        left_scale = tl.load(left_scales + n * tl.cdiv(OUT, GROUP) + row)
        acc = acc * (left_scale * tl.load(right_scales + n * tl.cdiv(IN, GROUP) + column))
    if UNITS:
        acc = acc * factor
    if SKIP:
        left_out = tl.load(skip + tl.cast(n, tl.int64) * OUT + o, mask=o < OUT, other=0)
        acc = tl.where((left_out != 0)[:, None], 0.0, acc)
    return acc


@triton.jit
def _square_products(
    left, right, left_scales, right_scales, skip, squares, fourths, norms,
    N, T, OUT, IN, l_n, l_t, r_n, r_t, each, square_factor, fourth_factor, factor,
    OUTS: tl.constexpr, INS: tl.constexpr, POSITIONS: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_O: tl.constexpr, EVEN_I: tl.constexpr, SCALED: tl.constexpr, SKIP: tl.constexpr,
    FOURTHS: tl.constexpr, ROWS: tl.constexpr, ENDING: tl.constexpr, STAGES: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Square one tile of the parameter for some of the samples.  STEPS: tiles of positions if they are few, else 0."""
    tiles_i = tl.cdiv(IN, INS)
    row, column = tl.program_id(0) // tiles_i, tl.program_id(0) % tiles_i
    part = tl.program_id(1)
    begin = part * each
    end = tl.minimum(begin + each, N)
    o, i, t = row * OUTS + tl.arange(0, OUTS), column * INS + tl.arange(0, INS), tl.arange(0, POSITIONS)
    l_group, r_group = row * OUTS // GROUP, column * INS // GROUP
    sums2 = tl.zeros((OUTS, INS), tl.float32)
    sums4 = tl.zeros((OUTS, INS), tl.float32)
    if STEPS > 0:
        for n in tl.range(begin, end, num_stages=STAGES):
            acc = tl.zeros((OUTS, INS), tl.float32)
            for step in tl.static_range(STEPS):
                x = _tile(left, tl.cast(n, tl.int64) * l_n, step * POSITIONS, t, o, T, OUT, l_t, EVEN_T, EVEN_O, FAR)
                y = _tile(right, tl.cast(n, tl.int64) * r_n, step * POSITIONS, t, i, T, IN, r_t, EVEN_T, EVEN_I, FAR)
                acc = tl.dot(tl.trans(x), y, acc, input_precision="ieee")
            acc = _scaled(
                acc, n, o, left_scales, right_scales, skip, OUT, IN, l_group, r_group, factor,
                GROUP, SCALED, SKIP, FOURTHS or ROWS,
            )  # fmt: skip
            acc = acc * acc
            sums2 += acc
            if ROWS:
                tl.atomic_add(norms + tl.cast(n, tl.int64) * OUT + o, tl.sum(acc, 1), mask=o < OUT, sem="relaxed")
            if FOURTHS:
                acc = tl.minimum(acc, 2.0**60)
                sums4 += acc * acc
    else:
        steps = tl.cdiv(T, POSITIONS)
        acc = tl.zeros((OUTS, INS), tl.float32)
        for s in tl.range(begin * steps, end * steps, num_stages=STAGES):
            n = s // steps
            step = s - n * steps
            x = _tile(left, tl.cast(n, tl.int64) * l_n, step * POSITIONS, t, o, T, OUT, l_t, EVEN_T, EVEN_O, FAR)
            y = _tile(right, tl.cast(n, tl.int64) * r_n, step * POSITIONS, t, i, T, IN, r_t, EVEN_T, EVEN_I, FAR)
            acc = tl.dot(tl.trans(x), y, acc, input_precision="ieee")
            if step == steps - 1:
                c = _scaled(
                    acc, n, o, left_scales, right_scales, skip, OUT, IN, l_group, r_group, factor,
                    GROUP, SCALED, SKIP, FOURTHS or ROWS,
                )  # fmt: skip
                c = c * c
                sums2 += c
                if ROWS:
                    tl.atomic_add(norms + tl.cast(n, tl.int64) * OUT + o, tl.sum(c, 1), mask=o < OUT, sem="relaxed")
                if FOURTHS:
                    c = tl.minimum(c, 2.0**60)
                    sums4 += c * c
                acc = tl.zeros((OUTS, INS), tl.float32)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    at = o[:, None].to(tl.int64) * IN + i[None, :]
    _finish(squares, sums2 * square_factor, at, inside, part, OUT, IN, ENDING)
    if FOURTHS:
        _finish(fourths, sums4 * fourth_factor, at, inside, part, OUT, IN, ENDING)


@triton.jit
def _finish(to, sums, at, inside, part, OUT, IN, ENDING: tl.constexpr):
    """Add sums to the target: by a plain store, by atomics, or to a buffer for each part of the samples."""
    if ENDING == "alone":
        tl.store(to + at, tl.load(to + at, mask=inside, other=0.0) + sums, mask=inside)
    elif ENDING == "atomic":
        tl.atomic_add(to + at, sums, mask=inside, sem="relaxed")
    else:
        tl.store(to + part.to(tl.int64) * OUT * IN + at, sums, mask=inside)


def launch_product_squares(
    left: Tensor | Packed,
    right: Tensor | Packed,
    squares: Tensor,
    fourths: Tensor | None = None,
    *,
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0),
    skip: Tensor | None = None,
    norms: Tensor | None = None,
    config: ProductTiles | None = None,
    parts: int | None = None,
    deterministic: bool = False,
) -> None:
    """Add a Σ_n (f G_n)² to squares [o, i] and b Σ_n (f G_n)⁴ to fourths, for G_n = Σ_t left[n, t, :] ⊗ right[n, t, :].

    `factors` are (a, b, f).  left [n, t, o] and right [n, t, i] have one dtype, float32, bfloat16 or float16, and any
    strides but the last, which is 1; or both are packed.  `skip` [n, o]: nonzero where a sample's row does not count.
    `norms` [n, o]: to which the squared norms of the rows of f G_n are added.
    """
    scaled = isinstance(left, Packed)
    x, x_scales = left if isinstance(left, Packed) else (left, None)
    y, y_scales = right if isinstance(right, Packed) else (right, None)
    (n, t, o), i = x.shape, y.shape[2]
    if not x.numel() or not y.numel():
        return
    flags = scaled, skip is not None, fourths is not None, deterministic
    grid, each, options = product_launch(x.device, x.dtype, n, t, o, i, flags, config, parts)
    targets = [squares, fourths]
    if options["ENDING"] == "apart":
        targets = [squares.new_empty((grid[1], o, i)), None if fourths is None else squares.new_empty((grid[1], o, i))]
    a, b, f = factors
    units = fourths is not None or norms is not None
    _square_products[grid](
        x, y, x_scales, y_scales, skip, *targets, norms, n, t, o, i, x.stride(0), x.stride(1), y.stride(0), y.stride(1),
        each, a if units else a * f * f, b, f, ROWS=norms is not None, FAR=t * max(x.stride(1), y.stride(1)) >= 2**31,
        **options,
    )  # fmt: skip
    if options["ENDING"] == "apart":
        for total, apart in ((squares, targets[0]), (fourths, targets[1])):
            if total is not None and apart is not None:
                total += apart.sum(0)


@functools.lru_cache(maxsize=4096)
def product_launch(
    device: torch.device,
    dtype: torch.dtype,
    n: int,
    t: int,
    o: int,
    i: int,
    flags: tuple[bool, bool, bool, bool],
    config: ProductTiles | None,
    parts: int | None,
) -> tuple[tuple[int, int], int, dict[str, Any]]:
    """Return the grid, the samples of a program, and the compile-time options."""
    scaled, skip, fourths, deterministic = flags
    config = config or product_tiles(dtype, t, o, i, fourths)
    tiles, steps = ceil_div(o, config.outs) * ceil_div(i, config.ins), ceil_div(t, config.positions)
    parts = parts or split_samples(tiles, n, steps, config.at_once * multiprocessors(device))
    each = ceil_div(n, parts)
    parts = ceil_div(n, each)
    options = {
        "OUTS": config.outs,
        "INS": config.ins,
        "POSITIONS": config.positions,
        "STEPS": steps if steps <= 2 and steps * config.shared(dtype.itemsize) <= SHARED else 0,
        "GROUP": GROUP,
        "EVEN_T": t % config.positions == 0,
        "EVEN_O": o % config.outs == 0,
        "EVEN_I": i % config.ins == 0,
        "SCALED": scaled,
        "SKIP": skip,
        "FOURTHS": fourths,
        "ENDING": "alone" if parts == 1 else "apart" if deterministic else "atomic",
        "STAGES": config.stages,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    return (tiles, parts), each, options


def product_tiles(dtype: torch.dtype, t: int, o: int, i: int, fourths: bool) -> ProductTiles:
    """Return tiles for a shape, no larger than needed: what lies outside of the parameter is wasted work."""
    single = dtype == torch.float32
    choices = (SINGLE_FOURTHS if single else HALF_FOURTHS) if fourths else (SINGLE if single else HALF)
    best = next(config for positions, numbers, config in choices if t <= positions and o * i <= numbers)
    outs, ins = (max(16, min(size, power_of_two(n))) for size, n in ((best.outs, o), (best.ins, i)))
    positions = max(16, min(best.positions, power_of_two(t)))
    warps = best.warps if outs * ins >= best.outs * best.ins else 4
    return best._replace(outs=outs, ins=ins, positions=positions, warps=warps)
