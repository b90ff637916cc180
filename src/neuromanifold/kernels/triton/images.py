"""How images lie in memory for the convolutions' kernels: channels last and padded, in one copy if they do not yet.

    values [n, c, *space]  →  [n, *positions, c],   position p from  p·stride - padding,  zeros from outside

The dtype may change in the copy, or float32 becomes float16 with a scale for each channel of each sample.  Float16 has
the significand of TensorFloat32; scaled by the power of two that brings a channel's largest magnitude into [2¹³, 2¹⁴),
it keeps 11 bits of everything down to 2⁻²⁷ of it.  Infinities and NaNs remain.

Letters: n sample, c channel, p position, k kernel position.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.launch import ceil_div, power_of_two
from neuromanifold.kernels.values import flat_positions, source_positions

TABLE = 256  # tables of positions are filled up to a multiple of this: the largest block of positions


class ImageFormat(NamedTuple):
    """The properties of a tensor [n, c, *space] that kernels differ by."""

    shape: torch.Size
    dtype: torch.dtype
    last: bool  # channels last in memory; else contiguous


def readable(values: Tensor) -> tuple[Tensor, ImageFormat]:
    """Return a tensor as contiguous or channels last, without a copy if it is one of them, and its format."""
    last = values.movedim(1, -1).is_contiguous()
    if not last:
        values = values.contiguous()
    return values, ImageFormat(values.shape, values.dtype, last)


class Arrangement(NamedTuple):
    """Everything about the copy of an image that does not depend on its values."""

    shape: tuple[int, ...]  # [n, *positions, c]
    dtype: torch.dtype
    scaled: bool
    programs: tuple[int]
    table: Tensor | None  # where each position comes from, -1 from outside
    sizes: tuple[int, int, int]
    options: dict[str, Any]

    def __call__(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the copy, and scales [n, c] by which it is to be multiplied."""
        to = torch.empty(self.shape, dtype=self.dtype, device=values.device)
        scales = None
        if self.scaled:
            scales = torch.empty((self.shape[0], self.shape[-1]), dtype=torch.float32, device=values.device)
        if self.programs[0]:
            _arrange[self.programs](values, to, scales, kept(self.table), *self.sizes, **self.options)
        return to, scales


def arrangement(
    layout: ImageFormat,
    device: torch.device,
    dtype: torch.dtype,
    positions: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    *,
    scaled: bool = False,
    multiple: int = 1,
) -> Arrangement:
    """Return how to copy an image: with `padding` zeros on both sides, or at given `positions`.

    Channels are padded with zeros to a multiple of `multiple`.
    """
    samples, channels, *rest = layout.shape
    space, padding, stride = tuple(rest), tuple(padding or (0,) * len(rest)), tuple(stride or (1,) * len(rest))
    if positions is None:
        positions = [size + 2 * amount for size, amount in zip(space, padding, strict=True)]
    positions = tuple(positions)
    same = positions == space and not any(padding) and set(stride) <= {1}
    stored = ceil_div(channels, multiple) * multiple
    block_c = min(64, power_of_two(stored))
    if scaled:  # a program has all positions: more programs if samples and channels are few
        block_c = min(block_c, max((b for b in (16, 32, 64) if samples * channels >= 264 * b), default=16))
    block_p = min(4096 // block_c, power_of_two(prod(positions)))
    parts = 1 if scaled else ceil_div(prod(positions), block_p)
    c_align = alignment(channels, min(layout.dtype, dtype, key=lambda dtype: dtype.itemsize))
    p_align = alignment(prod(space), layout.dtype)
    empty = not samples * channels * prod(positions)
    return Arrangement(
        shape=(samples, *positions, stored),
        dtype=dtype,
        scaled=scaled,
        programs=(0 if empty else samples * ceil_div(stored, block_c) * parts,),
        table=None if same else _sources(space, positions, padding, stride, device),
        sizes=(channels // c_align, prod(space) // p_align, prod(positions)),
        options={
            "BLOCK_C": block_c,
            "BLOCK_P": block_p,
            "C_ALIGN": c_align,
            "P_ALIGN": p_align,
            "MULTIPLE": multiple,
            "LAST": layout.last,
            "TABLE": not same,
            "SCALED": scaled,
            "num_warps": 4 if block_c * block_p <= 2048 else 8,
        },
    )


def alignment(count: int, dtype: torch.dtype) -> int:
    """Return the largest power of two that divides a row's length, up to the widest loads: 16 bytes."""
    return max(1, min(16 // dtype.itemsize, count & -count))


@triton.jit
def _load_positions(values, table, p, c, channels, length, positions, LAST: tl.constexpr, TABLE: tl.constexpr):
    """Load [positions, channels] of one sample; zero outside."""
    source = p
    inside = p < positions
    if TABLE:
        source = tl.load(table + p, mask=inside, other=-1)
        inside = source >= 0
    at = source[:, None] * channels + c[None, :] if LAST else source[:, None] + c[None, :] * length
    return tl.load(values + at, mask=inside[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit(do_not_specialize=["channels", "length", "positions"])
def _arrange(
    values,
    to,
    scales,
    table,
    channels,  # in units of C_ALIGN
    length,  # of the image, in units of P_ALIGN
    positions,  # of the copy
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    C_ALIGN: tl.constexpr,  # lets the compiler see that rows begin at multiples of it
    P_ALIGN: tl.constexpr,
    MULTIPLE: tl.constexpr,  # to which channels are filled up
    LAST: tl.constexpr,  # values have channels last
    TABLE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Copy a tile of one sample; if scaled, all positions of a few channels, read twice: once from the cache."""
    channels = channels * C_ALIGN
    length = length * P_ALIGN
    if not TABLE:
        positions = length
    stored = channels
    if MULTIPLE > 1:
        stored = tl.cdiv(channels, MULTIPLE) * MULTIPLE
    c_tiles = tl.cdiv(stored, BLOCK_C)
    tile = tl.program_id(0)
    first = 0
    if not SCALED:
        p_tiles = tl.cdiv(positions, BLOCK_P)
        first = tile % p_tiles * BLOCK_P
        tile = tile // p_tiles
    n = (tile // c_tiles).to(tl.int64)
    c = tile % c_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.arange(0, BLOCK_P)
    values += n * channels * length
    to += n * stored * positions
    if SCALED:
        largest = tl.zeros([BLOCK_P, BLOCK_C], tl.int32)
        for start in range(0, positions, BLOCK_P):
            value = _load_positions(values, table, start + p, c, channels, length, positions, LAST, TABLE)
            largest = tl.maximum(largest, tl.abs(value).to(tl.int32, bitcast=True))  # ordered as positive floats are
        most = tl.max(largest, axis=0)
        exponent = tl.where(most == 0, 140, tl.maximum(most >> 23, 14))  # scales and their inverses: normal numbers
        up = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
        down = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
        tl.store(scales + n * stored + c, down, mask=c < stored)
        for start in range(0, positions, BLOCK_P):
            value = _load_positions(values, table, start + p, c, channels, length, positions, LAST, TABLE) * up[None, :]
            mask = (start + p < positions)[:, None] & (c < stored)[None, :]
            tl.store(to + (start + p)[:, None] * stored + c[None, :], value.to(to.dtype.element_ty), mask=mask)
    else:
        p += first
        value = _load_positions(values, table, p, c, channels, length, positions, LAST, TABLE)
        mask = (p < positions)[:, None] & (c < stored)[None, :]
        tl.store(to + p[:, None] * stored + c[None, :], value.to(to.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=256)
def offsets(
    space: tuple[int, ...],
    kernel: tuple[int, ...],
    out: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return offsets of the kernel's positions in an image, then those of the windows: int32 [k + t], then zeros."""
    steps = _steps(space)
    taps = flat_positions(kernel, [step * d for step, d in zip(steps, dilation, strict=True)])
    windows = flat_positions(out, [step * s for step, s in zip(steps, stride, strict=True)])
    return _move(torch.cat([taps, torch.nn.functional.pad(windows, (0, -len(windows) % TABLE))]), device)


def check_windows(
    space: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    block: int,
) -> None:
    """Raise a ValueError for windows that leave the image, and for blocks that read beyond the end of a table."""
    fits = tuple(
        (s - d * (k - 1) - 1) // step + 1 for s, k, step, d in zip(space, kernel, stride, dilation, strict=True)
    )
    if any(have > can for have, can in zip(out, fits, strict=True)):
        raise ValueError(f"g has positions {tuple(out)}; x, with its padding, has windows for {fits}.")
    if TABLE % block:
        raise ValueError(f"block_t is {block}; it must be a power of two up to {TABLE}.")


@functools.lru_cache(maxsize=256)
def _sources(
    space: tuple[int, ...],
    positions: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return where each position comes from in the image: int32, -1 from outside."""
    return _move(source_positions(space, positions, stride, padding, _steps(space)), device)


_captured: dict[int, Tensor] = {}


def kept(table: Tensor | None) -> Tensor | None:
    """Return the table, kept alive once it is part of a CUDA graph: a replay reads it after caches have dropped it."""
    if table is not None and table.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[id(table)] = table
    return table


def _move(table: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Tables cannot be made while a CUDA graph is captured; run the same shapes eagerly once before."
        )
    return table.to(device, torch.int32)


def _steps(space: Sequence[int]) -> list[int]:
    """Return the strides of contiguous space, in elements."""
    return list(accumulate(reversed(space[1:]), int.__mul__, initial=1))[::-1]
