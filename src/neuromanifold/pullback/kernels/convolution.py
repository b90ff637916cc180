"""Squares of single samples' weight gradients of a convolution on a GPU, which are never written out.

    for each tile of the weight [o, i], i = (c, k), and each share of the samples, in a program of its own:
        for each sample n, for each tile of positions t:      one flat loop: loads run ahead from sample to sample
            acc += g[n, o, t] · x[n, c, koff(k) + toff(t)]    the windows of x are addressed, not copied
            at the last t:  sums += (acc · factor)²,  acc = 0
        squares += unit² · sums

Offsets of kernel positions and of output positions add up, so that two small tables describe every convolution, of
any number of dimensions, stride and dilation.  Operands lie in memory as torch has them: [n, c, *space], which float32
matrix units need (the contracted axis is contiguous), or channels last, [n, *space, c], for 16 bits, where shifted rows
of [n, c, *space] could not be loaded in large pieces.

Float16 has the significand of TensorFloat32: `pack` scales each channel of each sample into its range, and the product
at twice the speed is as precise.

Letters: n sample, t position, o/i out/in features, c channel, k kernel position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.pullback.kernels.launch import multiprocessors, split_samples

Precision = Literal["ieee", "tf32", "half"]
HALF = (torch.float16, torch.bfloat16)
TABLE = 256  # tables of positions are filled up to a multiple of this: the largest block_t


class Config(NamedTuple):
    """How one program cuts the work, and how the compiler arranges it."""

    block_o: int
    block_i: int
    block_t: int
    warps: int
    stages: int

    def registers(self, fourths: bool) -> int:
        """What a thread needs for its sums: product, squares, fourth powers."""
        return (3 if fourths else 2) * self.block_o * self.block_i // (32 * self.warps)


CONFIGS: dict[Precision, tuple[Config, ...]] = {
    "half": (
        Config(128, 128, 64, 8, 3),
        Config(128, 128, 64, 8, 4),
        Config(128, 128, 32, 8, 4),
        Config(128, 64, 64, 8, 4),
        Config(128, 64, 64, 4, 3),
        Config(128, 64, 32, 4, 4),
        Config(64, 128, 64, 4, 3),
        Config(64, 128, 32, 4, 4),
        Config(64, 64, 64, 4, 3),
        Config(64, 64, 128, 4, 3),
        Config(64, 64, 32, 4, 4),
        Config(64, 32, 64, 4, 4),
        Config(64, 16, 64, 4, 4),
    ),
    "tf32": (
        Config(128, 128, 32, 8, 3),
        Config(128, 128, 32, 8, 4),
        Config(128, 64, 32, 8, 4),
        Config(128, 64, 32, 4, 3),
        Config(64, 128, 32, 4, 3),
        Config(64, 128, 32, 4, 4),
        Config(64, 64, 32, 4, 3),
        Config(64, 64, 32, 4, 4),
        Config(64, 32, 32, 4, 4),
        Config(64, 16, 32, 4, 4),
    ),
    "ieee": (
        Config(128, 128, 16, 8, 3),
        Config(64, 64, 16, 8, 3),
        Config(64, 64, 16, 4, 3),
        Config(128, 64, 16, 8, 3),
        Config(64, 32, 32, 4, 3),
        Config(32, 32, 32, 4, 3),
    ),
}
"""Candidates; `choose` takes one of them."""

LIMIT = 128  # registers a thread for sums: with more, nothing is left for addresses
EDGE = 64  # a program that makes a tile of (o, i) loads as if the tile had cost 1 + EDGE (1/o + 1/i)


def add_squares(
    x: Tensor,  # [n, c, *space], padded
    g: Tensor,  # [n, o, *out]
    squares: Tensor,  # [o, c/groups · k], float32
    fourths: Tensor | None = None,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    square_weight: float = 1.0,
    fourth_weight: float = 1.0,
    factor: float = 1.0,
    precision: Precision = "ieee",
    x_scale: Tensor | None = None,  # [n, c], float32
    g_scale: Tensor | None = None,  # [n, o]
    deterministic: bool = False,
    split: int | None = None,
    config: Config | None = None,
) -> None:
    """squares += square_weight · Σ_n (G_n·factor)², fourths += fourth_weight · Σ_n (G_n·factor)⁴.

    G_n[o, (c, k)] = Σ_t g[n, o, t] x[n, c, k·dilation + t·stride], times g_scale[n, o] x_scale[n, c].

    x and g are contiguous or channels last; 16 bits are made channels last unless they can be loaded in pieces of 4
    bytes or more.  Samples are divided into `split` shares, whose sums are added atomically unless `deterministic`.
    """
    samples, outs, channels = x.shape[0], g.shape[1], x.shape[1]
    space, taps, positions = g.shape[2:], prod(kernel), g.shape[2:].numel()
    _check(x, g, squares, fourths, kernel, stride, dilation, groups, precision)
    width = channels // groups * taps
    if not samples or not positions or not squares.numel():
        return
    config = config or choose(outs // groups, width, positions, samples, groups, precision, fourths is not None)
    check_block(config.block_t)
    tiles = triton.cdiv(outs // groups, config.block_o) * triton.cdiv(width, config.block_i) * groups
    steps = triton.cdiv(positions, config.block_t)
    split = min(split or split_samples(tiles, samples, steps, _places(x.device, config)), samples)
    share = triton.cdiv(samples, split)
    split = triton.cdiv(samples, share)
    apart = deterministic and split > 1
    sums = [squares] if fourths is None else [squares, fourths]
    into = [torch.empty(split, *total.shape, device=x.device) for total in sums] if apart else sums

    pointwise = x.shape[2:] == space and set(kernel) == {1} and set(stride) == {1}
    if precision == "half" and (not pointwise or positions % 2):
        x, g = _last(x), _last(g)
    scaled = x_scale is not None or g_scale is not None
    x_scale, g_scale = _scale(x_scale, samples, channels, x), _scale(g_scale, samples, outs, x)
    x_last, g_last = _channels_last(x), _channels_last(g)
    x_table, t_table = (
        (None, None)
        if pointwise
        else offsets(x.shape[2:], tuple(kernel), space, tuple(stride), tuple(dilation), x.device)
    )
    x_align = _alignment(channels // groups if x_last else x.shape[2:].numel() if pointwise else 1, x)
    g_align = _alignment(outs // groups if g_last else positions, g)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _squares[(tiles, split)](
            x,
            g,
            into[0],
            into[-1],
            x_scale,
            g_scale,
            x_table,
            t_table,
            samples,
            share,
            groups,
            outs // groups // (g_align if g_last else 1),
            channels // groups // (x_align if x_last else 1),
            taps,
            positions // (1 if g_last else g_align),
            x.shape[2:].numel() // (1 if x_last else x_align),
            steps,
            float(square_weight),
            float(fourth_weight),
            float(factor),
            BLOCK_O=config.block_o,
            BLOCK_I=config.block_i,
            BLOCK_T=config.block_t,
            G_LAST=g_last,
            X_LAST=x_last,
            G_ALIGN=g_align,
            X_ALIGN=x_align,
            POINTWISE=pointwise,
            FACTOR=factor != 1,
            SCALED=scaled,
            FOURTHS=fourths is not None,
            APART=apart,
            PRECISION="tf32" if precision == "half" else precision,  # 16 bits know no other
            num_warps=config.warps,
            num_stages=config.stages,
        )
    if apart:
        for total, parts in zip(sums, into, strict=True):
            total += parts.sum(0)


def choose(
    outs: int, width: int, positions: int, samples: int, groups: int, precision: Precision, fourths: bool
) -> Config:
    """The candidate with the least work, what is cut off at edges and left idle counted in."""

    def cost(config: Config) -> float:
        blocks = triton.cdiv(outs, config.block_o), triton.cdiv(width, config.block_i)
        steps = triton.cdiv(positions, config.block_t) * config.block_t
        done: float = blocks[0] * config.block_o * blocks[1] * config.block_i * steps
        busy: float = min(1.0, prod(blocks) * groups * samples / 132)
        return done * (1 + EDGE / config.block_o + EDGE / config.block_i) / busy

    return min((c for c in CONFIGS[precision] if c.registers(fourths) <= LIMIT), key=cost)


def pack(
    values: Tensor,  # [n, c, *space], float32
    padding: Sequence[int] = (),
    *,
    channels_last: bool = True,
) -> tuple[Tensor, Tensor]:
    """Values as float16 [n, c, *padded], and the scales [n, c] by which they are to be multiplied.

    Each channel of each sample is multiplied by the power of two that brings its largest magnitude into [2¹³, 2¹⁴), and
    so keeps 11 bits of everything down to 2⁻²⁷ of it.  Infinities and NaNs remain.  `padding`: zeros on both sides.
    """
    if values.dtype != torch.float32 or not values.is_contiguous():
        raise ValueError(f"pack takes contiguous float32 values; got {values.dtype}, strides {values.stride()}.")
    samples, channels, space = values.shape[0], values.shape[1], values.shape[2:]
    padding = tuple(padding) or (0,) * len(space)
    padded = torch.Size(size + 2 * amount for size, amount in zip(space, padding, strict=True))
    make = torch.zeros if any(padding) else torch.empty
    shape = (samples, *padded, channels) if channels_last else (samples, channels, *padded)
    packed = make(shape, dtype=torch.float16, device=values.device)
    scales = torch.ones(samples, channels, device=values.device)
    if values.numel():
        block_c, block_l = _pack_blocks(samples, channels, space.numel(), channels_last)
        with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
            _pack[(samples * triton.cdiv(channels, block_c),)](
                values,
                packed,
                scales,
                _inner(padded, space, padding, values.device) if any(padding) else None,
                channels,
                space.numel(),
                padded.numel(),
                BLOCK_C=block_c,
                BLOCK_L=block_l,
                LAST=channels_last,
                PADDED=any(padding),
                num_warps=4 if block_c * block_l <= 2048 else 8,
            )
    return (packed.movedim(-1, 1) if channels_last else packed), scales


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["samples", "share", "groups", "outs", "ins", "taps", "positions", "size", "tiles"]
)
def _squares(  # type: ignore[no-untyped-def]
    x,
    g,
    squares,
    fourths,
    x_scales,
    g_scales,
    x_table,  # koff [k]
    t_table,  # toff [t]
    samples,
    share,  # samples of a program
    groups,
    outs,  # of a group, in units of G_ALIGN if G_LAST
    ins,  # channels of a group, in units of X_ALIGN if X_LAST
    taps,  # kernel positions
    positions,  # in units of G_ALIGN unless G_LAST
    size,  # positions of x, in units of X_ALIGN unless X_LAST
    tiles,  # of positions
    square_weight,
    fourth_weight,
    factor,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    G_LAST: tl.constexpr,  # channels last
    X_LAST: tl.constexpr,
    G_ALIGN: tl.constexpr,  # lets the compiler see that rows begin at multiples of it
    X_ALIGN: tl.constexpr,
    POINTWISE: tl.constexpr,  # positions of x and g are the same
    FACTOR: tl.constexpr,
    SCALED: tl.constexpr,
    FOURTHS: tl.constexpr,
    APART: tl.constexpr,  # each share writes sums of its own
    PRECISION: tl.constexpr,
):
    """One tile of the weight, one share of the samples."""
    if G_LAST:
        outs = outs * G_ALIGN
    else:
        positions = positions * G_ALIGN
    if X_LAST:
        ins = ins * X_ALIGN
    else:
        size = size * X_ALIGN
    all_outs, all_ins, width = groups * outs, groups * ins, ins * taps
    o_tiles, i_tiles = tl.cdiv(outs, BLOCK_O), tl.cdiv(width, BLOCK_I)
    tile = tl.program_id(0)
    group = tile // (o_tiles * i_tiles)
    o = tile % o_tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tile // o_tiles % i_tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    t = tl.arange(0, BLOCK_T)
    if X_LAST:  # i = (k, c), so that neighbours are neighbours in memory
        c, k = i % ins, i // ins
    else:
        c, k = i // taps, i % taps

    # Rows and columns beyond the edge are read again where neighbours are not neighbours in memory, masked where they
    # are; never used.  Positions beyond the end are zero in g, and in x positions that the sample has anyway.
    g_base = group * outs + o if G_LAST else (group * outs + tl.minimum(o, outs - 1)) * positions
    if X_LAST:
        x_base = group * ins + c
        if not POINTWISE:
            x_base += tl.load(x_table + tl.minimum(k, taps - 1)) * all_ins
    else:
        x_base = (group * ins + tl.minimum(c, ins - 1)) * size
        if not POINTWISE:
            x_base += tl.load(x_table + k)

    acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    sums = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    sums4 = tl.zeros([BLOCK_O, BLOCK_I] if FOURTHS else [1, 1], tl.float32)
    n = tl.program_id(1) * share
    steps = tl.minimum(share, samples - n) * tiles
    j = 0
    g_n = g + n.to(tl.int64) * (all_outs * positions)
    x_n = x + n.to(tl.int64) * (all_ins * size)
    if not POINTWISE:
        shift = tl.load(t_table + t)
    for _ in range(steps):
        p = j * BLOCK_T + t
        if G_LAST:
            g_mask = (p[:, None] < positions) & (o[None, :] < outs)
            left = tl.load(g_n + p[:, None] * all_outs + g_base[None, :], mask=g_mask, other=0.0).T
        else:
            left = tl.load(g_n + g_base[:, None] + p[None, :], mask=p[None, :] < positions, other=0.0)
        if POINTWISE and X_LAST:
            rows = tl.minimum(p, positions - 1)[:, None] * all_ins
            right = tl.load(x_n + rows + x_base[None, :], mask=i[None, :] < width, other=0.0)
        elif POINTWISE:
            right = tl.load(x_n + p[:, None] + x_base[None, :], mask=p[:, None] < positions, other=0.0)
        elif X_LAST:
            right = tl.load(x_n + shift[:, None] * all_ins + x_base[None, :], mask=i[None, :] < width, other=0.0)
        else:
            right = tl.load(x_n + shift[:, None] + x_base[None, :])
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        last = j == tiles - 1
        if last:  # nothing here that addresses depend on: loads are to run ahead
            value = acc
            if SCALED:
                g_scale = tl.load(g_scales + n * all_outs + group * outs + o, mask=o < outs, other=0.0)
                x_scale = tl.load(x_scales + n * all_ins + group * ins + c, mask=i < width, other=0.0)
                value = value * (g_scale * factor)[:, None] * x_scale[None, :]
            elif FACTOR:
                value = value * factor
            value = value * value
            sums += value
            if FOURTHS:
                sums4 += value * value
            acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        j = tl.where(last, 0, j + 1)
        n += last.to(tl.int32)
        g_n += tl.where(last, all_outs * positions, 0)
        x_n += tl.where(last, all_ins * size, 0)
        if not POINTWISE:  # one step ahead
            shift = tl.load(t_table + j * BLOCK_T + t)

    cells = (group * outs + o)[:, None] * width + (c * taps + k)[None, :]
    inside = (o[:, None] < outs) & (i[None, :] < width)
    if APART:
        start = tl.program_id(1).to(tl.int64) * (all_outs * width)
        tl.store(squares + start + cells, square_weight * sums, mask=inside)
        if FOURTHS:
            tl.store(fourths + start + cells, fourth_weight * sums4, mask=inside)
    else:  # with one share, one addition: its order does not matter
        tl.atomic_add(squares + cells, square_weight * sums, mask=inside, sem="relaxed")
        if FOURTHS:
            tl.atomic_add(fourths + cells, fourth_weight * sums4, mask=inside, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    values,
    packed,
    scales,
    table,  # where each position goes
    channels,
    length,
    padded,
    BLOCK_C: tl.constexpr,
    BLOCK_L: tl.constexpr,
    LAST: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A few channels of one sample, read twice; the second time from the cache."""
    tiles = tl.cdiv(channels, BLOCK_C)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    l = tl.arange(0, BLOCK_L)  # noqa: E741
    rows = values + n * channels * length + c[:, None] * length
    largest = tl.zeros([BLOCK_C, BLOCK_L], tl.int32)
    for start in range(0, length, BLOCK_L):
        mask = (c[:, None] < channels) & (start + l[None, :] < length)
        value = tl.load(rows + start + l[None, :], mask=mask, other=0.0)
        largest = tl.maximum(
            largest, tl.abs(value).to(tl.int32, bitcast=True)
        )  # of positive floats the order is the same
    most = tl.max(largest, axis=1)
    exponent = tl.where(most == 0, 140, tl.maximum(most >> 23, 14))  # scales and their inverses must be normal numbers
    up = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + n * channels + c, down, mask=c < channels)
    for start in range(0, length, BLOCK_L):
        mask = (c[:, None] < channels) & (start + l[None, :] < length)
        value = tl.load(rows + start + l[None, :], mask=mask, other=0.0) * up[:, None]
        place = start + l
        if PADDED:
            place = tl.load(table + place, mask=place < length, other=0)
        if LAST:
            to = packed + n * channels * padded + place[None, :] * channels + c[:, None]
        else:
            to = packed + n * channels * padded + c[:, None] * padded + place[None, :]
        tl.store(to, value.to(tl.float16), mask=mask)


@lru_cache(maxsize=256)
def offsets(
    space: Sequence[int],
    kernel: Sequence[int],
    out: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Where the kernel's positions, and the windows, lie in an image: int32 [k], and [t] with zeros at its end."""
    steps = list(accumulate(reversed(space[1:]), int.__mul__, initial=1))[::-1]
    taps = _grid(kernel, [step * d for step, d in zip(steps, dilation, strict=True)], device)
    windows = _grid(out, [step * s for step, s in zip(steps, stride, strict=True)], device)
    return taps, torch.nn.functional.pad(windows, (0, -len(windows) % TABLE))


@lru_cache(maxsize=256)
def _inner(padded: Sequence[int], space: Sequence[int], padding: Sequence[int], device: torch.device) -> Tensor:
    """Where the positions of an image lie in the padded one."""
    steps = list(accumulate(reversed(padded[1:]), int.__mul__, initial=1))[::-1]
    first = sum(step * amount for step, amount in zip(steps, padding, strict=True))
    return _grid(space, steps, device) + first


def _grid(shape: Sequence[int], steps: Sequence[int], device: torch.device) -> Tensor:
    """Σ_d position_d · step_d for all positions of a shape, flat."""
    total = torch.zeros((), dtype=torch.int32, device=device)
    for size, step in zip(shape, steps, strict=True):
        total = total[..., None] + torch.arange(size, dtype=torch.int32, device=device) * step
    return total.flatten()


def _pack_blocks(samples: int, channels: int, length: int, last: bool) -> tuple[int, int]:
    """Channels and positions of a program's tile: whole sectors of memory, and programs enough to fill a device."""
    if not last:
        return 1, min(2048, triton.next_power_of_2(length))
    block_c = max((b for b in (16, 32, 64) if samples * channels >= 264 * b), default=16)
    block_c = min(block_c, triton.next_power_of_2(channels))
    return block_c, min(4096 // block_c, triton.next_power_of_2(length))


def _places(device: torch.device, config: Config) -> int:
    """About how many programs run at a time."""
    return multiprocessors(device) * (2 if config.warps * config.registers(False) <= 8 * 64 else 1)


def _alignment(count: int, values: Tensor) -> int:
    """The largest power of two that divides a row's length, up to what the widest loads take: 16 bytes."""
    return min(16 // values.element_size(), count & -count)


def _channels_last(values: Tensor) -> bool:
    return not values.is_contiguous() and values.movedim(1, -1).is_contiguous()


def _last(values: Tensor) -> Tensor:
    """The same, channels last in memory."""
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def check_block(block_t: int) -> None:
    """Raise a ValueError for blocks that would read beyond the end of a table."""
    if TABLE % block_t:
        raise ValueError(f"block_t is {block_t}; it must be a power of two up to {TABLE}.")


def _scale(scale: Tensor | None, samples: int, features: int, like: Tensor) -> Tensor:
    if scale is None:
        return torch.ones(samples, features, device=like.device)
    if scale.shape != (samples, features) or scale.dtype != torch.float32:
        raise ValueError(f"Scales must be float32 {(samples, features)}; got {scale.dtype} {tuple(scale.shape)}.")
    return scale.contiguous()


def _check(
    x: Tensor,
    g: Tensor,
    squares: Tensor,
    fourths: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    precision: str,
) -> None:
    """Raise a ValueError for what the kernel would misread."""
    dtypes = HALF if precision == "half" else (torch.float32,)
    if precision not in CONFIGS or x.dtype not in dtypes or g.dtype != x.dtype:
        raise ValueError(
            f"precision={precision!r} with x {x.dtype} and g {g.dtype}; one of {list(CONFIGS)} is expected."
        )
    for name, values in (("x", x), ("g", g)):
        if not (values.is_contiguous() or _channels_last(values)):
            raise ValueError(f"{name} must be contiguous or channels last; its strides are {values.stride()}.")
        if values[:1].numel() >= 2**31:
            raise ValueError(f"One sample of {name} has {values[:1].numel()} numbers; there must be fewer than 2³¹.")
    fits = [
        (s - d * (k - 1) - 1) // step + 1 for s, k, step, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    ]
    if any(have > can for have, can in zip(g.shape[2:], fits, strict=True)):
        raise ValueError(
            f"g has positions {tuple(g.shape[2:])}; x, padded by the caller, has windows for {tuple(fits)}."
        )
    shape = (g.shape[1], x.shape[1] // groups * prod(kernel))
    for sums in (squares,) if fourths is None else (squares, fourths):
        if sums.shape != shape or sums.dtype != torch.float32 or not sums.is_contiguous():
            raise ValueError(f"Sums must be contiguous float32 {shape}; got {sums.dtype} {tuple(sums.shape)}.")
