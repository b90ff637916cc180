"""float32 as float16 with a scale for each sample and group of columns: the precision of TF32 at the speed of float16.

TF32 keeps 11 significant bits of a float32, as float16 does; what float16 lacks is range.  Scaled by a power of two
such that a group's largest number is near 2¹⁴, numbers down to 2⁻²⁸ of it keep all 11 bits, and smaller ones are off by
at most 2⁻³⁹ of it.  Tensor cores take float16 in either layout, but TF32 only if positions are contiguous in memory,
which they are not.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.launch import ceil_div, power_of_two

GROUP = 128  # columns with a common scale


class Packed(NamedTuple):
    """float32 numbers as float16 values times scales, powers of two."""

    values: Tensor  # [n, t, c]  float16
    scales: Tensor  # [n, groups]  float32 powers of two


@triton.jit
def _pack(values, packed, scales, T, C, v_n, v_t, GROUPS, GROUP: tl.constexpr, POSITIONS: tl.constexpr):
    """Pack one group of columns of one sample: find its largest magnitude, then scale."""
    n, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, t = group * GROUP + tl.arange(0, GROUP), tl.arange(0, POSITIONS)
    inside = (c < C)[None, :]
    largest = tl.zeros((POSITIONS, GROUP), tl.float32)
    for first in range(0, T, POSITIONS):
        mask = (first + t < T)[:, None] & inside
        v = tl.load(values + n * v_n + (first + t).to(tl.int64)[:, None] * v_t + c[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.abs(v))
    size = tl.max(tl.max(largest, axis=0), axis=0)
    exponent = (size.to(tl.int32, bitcast=True) >> 23) - 127  # floor(log2(size))
    exponent = tl.minimum(tl.maximum(exponent, -112), 127)
    up = ((13 - exponent + 127) << 23).to(tl.float32, bitcast=True)  # 2^(13 - exponent), a normal number
    down = ((exponent - 13 + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + n * GROUPS + group, down)
    for first in range(0, T, POSITIONS):
        mask = (first + t < T)[:, None] & inside
        v = tl.load(values + n * v_n + (first + t).to(tl.int64)[:, None] * v_t + c[None, :], mask=mask, other=0.0)
        tl.store(packed + (n * T + first + t)[:, None] * C + c[None, :], (v * up).to(tl.float16), mask=mask)


def pack(values: Tensor) -> Packed:
    """Return float32 numbers [n, t, c], whose last stride is 1, as float16 with scales."""
    n, t, c = values.shape
    groups = ceil_div(c, GROUP)
    packed = torch.empty((n, t, c), dtype=torch.float16, device=values.device)
    scales = torch.empty((n, groups), dtype=torch.float32, device=values.device)
    if values.numel():
        positions = min(64, max(16, power_of_two(t)))
        _pack[(n, groups)](
            values, packed, scales, t, c, values.stride(0), values.stride(1), groups,
            GROUP=GROUP, POSITIONS=positions, num_warps=8,
        )  # fmt: skip
    return Packed(packed, scales)
