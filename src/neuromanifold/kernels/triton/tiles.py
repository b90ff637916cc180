"""The choice of tiles of a convolution's weight [o, i], one for each program: see `convolution`."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import torch

from neuromanifold.kernels.triton.launch import ceil_div

HALF = (torch.float16, torch.bfloat16)


class ConvolutionTiles(NamedTuple):
    """Sizes of a tile, and how a program is compiled."""

    block_o: int
    block_i: int
    block_t: int
    warps: int
    stages: int

    def registers(self, fourths: bool) -> int:
        """Return the registers of a thread for its sums: product, squares, fourth powers."""
        return (3 if fourths else 2) * self.block_o * self.block_i // (32 * self.warps)

    def at_once(self, itemsize: int, fourths: bool) -> int:
        """Return about how many programs fit on one multiprocessor, by its registers and its memory."""
        registers = 32 * self.warps * (self.registers(fourths) + 64)
        memory = self.stages * (self.block_o + self.block_i) * self.block_t * itemsize
        return max(1, min(4, 2**16 // registers, 227 * 2**10 // memory))


_SIZES: dict[Literal["ieee", "half"], tuple[tuple[int, int, int, int, int], ...]] = {
    "half": (
        *((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 32, 8, 4)),
        *((128, 64, 64, 8, 4), (128, 64, 64, 4, 3), (128, 64, 32, 4, 4)),
        *((64, 128, 64, 4, 3), (64, 128, 64, 8, 3), (64, 128, 32, 4, 4)),
        *((64, 64, 64, 4, 3), (64, 64, 128, 4, 3), (64, 64, 32, 4, 4), (64, 32, 64, 4, 4), (64, 16, 64, 4, 4)),
    ),
    "ieee": (
        *((64, 64, 32, 4, 3), (64, 64, 16, 4, 3), (64, 64, 16, 4, 4), (64, 64, 32, 4, 2)),
        *((128, 64, 16, 8, 3), (128, 128, 16, 8, 3), (32, 64, 32, 4, 3), (64, 16, 32, 4, 3)),
    ),
}
CONFIGS = {kind: tuple(ConvolutionTiles(*sizes) for sizes in several) for kind, several in _SIZES.items()}
"""Candidates; `convolution_tiles` takes one of them."""

LIMIT = 128  # registers a thread for sums: with more, nothing is left for addresses
EDGE = {"half": 64, "ieee": 32}  # a program that makes a tile of (o, i) loads as if it had cost 1 + EDGE (1/o + 1/i)
WIDE = {"half": 128, "ieee": 64}  # and wider than this nothing is gained


def convolution_tiles(
    outs: int,
    width: int,
    positions: int,
    samples: int,
    groups: int,
    dtype: torch.dtype,
    fourths: bool,
    pointwise: bool = True,
) -> ConvolutionTiles:
    """Return the candidate with the least work, including waste at edges and idle multiprocessors.

    In half precision, windows larger than a point are read so irregularly that small tiles with many positions were
    fastest for almost all layers of a ResNet-50 on an H200.
    """
    kind: Literal["ieee", "half"] = "half" if dtype in HALF else "ieee"
    if kind == "half" and not pointwise:
        return ConvolutionTiles(64, 64, 128 if positions >= 128 else 64, 4, 3)

    def cost(config: ConvolutionTiles) -> float:
        blocks = ceil_div(outs, config.block_o), ceil_div(width, config.block_i)
        steps = ceil_div(positions, config.block_t) * config.block_t
        done: float = blocks[0] * config.block_o * blocks[1] * config.block_i * steps
        busy: float = min(1.0, prod(blocks) * groups * samples / 132)
        edges = EDGE[kind] / min(config.block_o, WIDE[kind]) + EDGE[kind] / min(config.block_i, WIDE[kind])
        return done * (1 + edges) / (busy or 1.0)

    return min((c for c in CONFIGS[kind] if c.registers(fourths) <= LIMIT), key=cost)
