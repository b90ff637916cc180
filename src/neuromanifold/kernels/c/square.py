"""Calls square.c: turns tensors into pointers, strides, and tables of where positions lie.

Letters: n sample, g group, t position, o row of the parameter, c channel, k tap.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.kernels.c import build
from neuromanifold.kernels.values import PowerSums, Windows, flat_positions, source_positions

SOURCE = Path(__file__).with_name("square.c")
_LARGEST = 2**24  # image of a block's channels: each thread copies one
_FILLED, _OF_A_GROUP = 0.25, 16  # least filled share of a tile; least rows of a group, so that packing pays
_COLUMNS, _ROWS, _BLOCK = {True: 256, False: 576}, 128, 2**16 + 2**13  # of a block; the former for one tap


class _SquareJob(ctypes.Structure):
    """The struct of the same fields in square.c: pointers, sizes, strides, blocks and factors."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "right", "squares", "fourths")),
        *((name, ctypes.c_void_p) for name in ("left_at", "right_at", "taps", "source")),
        *((name, ctypes.c_int64) for name in "NGTOCKP"),
        *((name, ctypes.c_int64) for name in ("left_n", "left_g", "left_o", "right_n", "right_g", "right_c")),
        *((name, ctypes.c_int64) for name in ("block_o", "block_c")),
        *((name, ctypes.c_float) for name in ("factor", "square_factor", "fourth_factor")),
        ("next", ctypes.c_int64),
    )


class _Tables(NamedTuple):
    """Offsets in memory: positions of left, windows of right, and their taps; pixels if right is to be copied."""

    left_at: Tensor
    right_at: Tensor
    taps: Tensor
    source: Tensor | None = None


class _Side(NamedTuple):
    """A tensor and its strides."""

    values: Tensor
    n: int
    g: int
    last: int  # of rows or channels

    @property
    def strides(self) -> tuple[int, int, int]:
        """The three strides in the order of the struct."""
        return self.n, self.g, self.last


class _ProductSizes(NamedTuple):
    """Sizes of all dimensions but space; rows and channels of one group."""

    samples: int
    groups: int
    positions: int
    rows: int
    channels: int
    taps: int


def call_product_squares(left: Tensor, right: Tensor, to: PowerSums) -> bool:
    """Run `dispatch.add_squares_of_products` for left and right in float32 with any strides."""
    if not _float32(left, right, to):
        return False
    if left.ndim == 3:
        left, right = left[:, None], right[:, None]
    (samples, groups, positions, rows), channels = left.shape, right.shape[3]
    sizes = _ProductSizes(samples, groups, positions, rows, channels, 1)
    strides = left.stride(2), right.stride(2), right.stride(3)
    one = _Side(left, left.stride(0), left.stride(1), left.stride(3))
    other = _Side(right, right.stride(0), right.stride(1), right.stride(3))
    return _call(one, other, to, sizes, lambda: _product_tables(positions, *strides))


def call_convolution_squares(slid: Tensor, fixed: Tensor, to: PowerSums, windows: Windows) -> bool:
    """Add squares of windows of slid [n, g·c, *space] times fixed [n, g·o, *positions] to sums [g·o, c, *kernel]."""
    if not _float32(slid, fixed, to):
        return False
    kernel, stride, padding, dilation, groups = windows
    positions, rows, channels = tuple(fixed.shape[2:]), fixed.shape[1] // groups, slid.shape[1] // groups
    sizes = _ProductSizes(fixed.shape[0], groups, prod(positions), rows, channels, prod(kernel))
    left = _Side(fixed, fixed.stride(0), rows * fixed.stride(1), fixed.stride(1))
    right = _Side(slid, slid.stride(0), channels * slid.stride(1), slid.stride(1))
    options = (kernel, stride, padding, dilation, slid.stride()[2:], fixed.stride()[2:])
    return _call(left, right, to, sizes, lambda: _convolution_tables(tuple(slid.shape[2:]), positions, *options))


def _float32(left: Tensor, right: Tensor, to: PowerSums) -> bool:
    """Return whether everything is float32, and the sums contiguous."""
    sums = [to.squares] if to.fourths is None else [to.squares, to.fourths]
    single = {tensor.dtype for tensor in (left, right, *sums)} == {torch.float32}
    return single and all(map(Tensor.is_contiguous, sums))


def _call(left: _Side, right: _Side, to: PowerSums, sizes: _ProductSizes, tables_of: Callable[[], _Tables]) -> bool:
    threads = torch.get_num_threads()
    kernel = build.kernel(SOURCE, "add_squares", threads)
    if kernel is None:
        return False
    tile = (ctypes.c_int64.in_dll(kernel, name).value for name in ("rows_of_a_tile", "width_of_a_tile"))
    block = _blocks(sizes, threads, *tile)
    if block is None:
        return False
    tables = tables_of()
    pixels = 0 if tables.source is None else len(tables.source)
    if pixels * block[1] > _LARGEST:
        return False
    pointers = (_pointer(tensor) for tensor in (left.values, right.values, to.squares, to.fourths, *tables))
    square_factor, fourth_factor, factor = to.kernel_factors
    factors = (factor, square_factor, fourth_factor)
    job = _SquareJob(*pointers, *sizes, pixels, *left.strides, *right.strides, *block, *factors)
    return bool(kernel.add_squares(ctypes.byref(job), build.parallel(), threads))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=1024)
def _blocks(sizes: _ProductSizes, threads: int, tile_rows: int, width: int) -> tuple[int, int] | None:
    """Return rows and channels of a block: few enough for the cache, and so that threads have equally many blocks.

    None where tiles would be filled with little but zeros, or packing would take longer than torch's own convolution:
    groups of few channels.
    """
    _, groups, _, rows, channels, taps = sizes
    stored = _up(rows, tile_rows) * _up(channels * taps, width)
    if rows * channels * taps < _FILLED * stored or (groups > 1 and rows < _OF_A_GROUP):
        return None
    few = max(width, _COLUMNS[taps == 1] // taps // width * width)
    block_c = min(channels, few)
    block_o = min(rows, _ROWS, max(tile_rows, _BLOCK // (block_c * taps) // tile_rows * tile_rows))
    while True:
        count = groups * -(-rows // block_o) * -(-channels // block_c)
        if count % threads == 0 or count >= 4 * threads:
            break
        if block_c > width and block_c * taps >= block_o:
            block_c = _up(-(-block_c // 2), width)
        elif block_o > tile_rows:
            block_o = _up(-(-block_o // 2), tile_rows)
        else:
            break
    return block_o, block_c


@functools.lru_cache(maxsize=1024)
def _product_tables(positions: int, left: int, right: int, channel: int) -> _Tables:
    """Return the tables of a product, whose positions lie a stride apart; right is copied if its channels do, too."""
    at, one = torch.arange(positions), torch.zeros(1, dtype=torch.int64)
    return _Tables(at * left, at * right, one) if channel == 1 else _Tables(at * left, at, one, at * right)


@functools.lru_cache(maxsize=1024)
def _convolution_tables(
    space: tuple[int, ...],
    windows: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    slid: tuple[int, ...],
    fixed: tuple[int, ...],
) -> _Tables:
    """Return the tables of a convolution: the image is copied with its padding; if pointwise, only what is used."""
    padded = tuple(size + 2 * amount for size, amount in zip(space, padding, strict=True))
    step = stride if prod(kernel) == 1 else (1,) * len(space)
    pixels = windows if prod(kernel) == 1 else padded
    source = source_positions(space, pixels, step, padding, slid)
    if prod(kernel) == 1:
        right_at, taps = torch.arange(len(source)), torch.zeros(1, dtype=torch.int64)
    else:
        steps = [prod(padded[d + 1 :]) for d in range(len(padded))]
        right_at = flat_positions(windows, [a * b for a, b in zip(steps, stride, strict=True)])
        taps = flat_positions(kernel, [a * b for a, b in zip(steps, dilation, strict=True)])
    return _Tables(flat_positions(windows, fixed), right_at, taps, source)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
