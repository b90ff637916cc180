"""What the kernels for probes share: their buffers, random signs, and the step of the secular equation.

Both find λ between two poles by the middle way (`core.spectrum`): with λ at distances x from the pole below and y from
the one above, x + y = gap, the terms of the poles below are modelled by L ≈ a + s/x and those above by H ≈ b + t/y,
matching value and slope.  With w = x/y, H = L is the quadratic equation

    t w² + ((b - a) gap + t - s) w - s = 0,        t, s > 0,

whose positive root never leaves the interval.  `lower` has it divided by t; `probe`, where the pole above is alone and
t = 1/δ, b = 0, has it in v = w/δ, whose numbers float32 can hold.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Buffers(NamedTuple):
    """What kernels for probes read and write."""

    rows: Tensor  # [n, C]  the logits, contiguous along C
    cotangent: Tensor  # [n, C]  to be written, as the next
    finite: Tensor  # [n] bool
    seed: Tensor  # [1] int64


def buffers(logits: Tensor, generator: torch.Generator) -> Buffers:
    """Return rows of logits [..., C] with memory for their cotangents, and a seed; without synchronizing.

    u has the type of the logits, but float32 for float16, in which small entries would underflow before the
    backward pass scales them up.
    """
    rows = logits.detach().reshape(-1, logits.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    return Buffers(
        rows,
        torch.empty(rows.shape, dtype=dtype, device=rows.device),
        torch.empty(len(rows), dtype=torch.bool, device=rows.device),
        torch.empty(1, dtype=torch.int64, device=rows.device).random_(generator=generator),
    )


def row_mask(finite: Tensor, counts: Tensor | None) -> Tensor:
    """Return which rows count, as bytes [n]; without a mask, any tensor that the kernel does not read."""
    return finite if counts is None else counts.reshape(-1).contiguous().view(torch.uint8)


@triton.jit
def random_words(key, counter, program, stream):
    """32 random bits for each counter, from Philox's generator."""
    zero = counter * 0
    word, _, _, _ = tl.philox(key, counter, zero + program, zero + stream, zero)
    return word


@triton.jit
def sign(word, bit):
    """±1 from a bit of a word."""
    return 1.0 - 2.0 * ((word >> bit) & 1).to(tl.float32)


@triton.jit
def positive_root(quadratic, linear, constant):
    """The positive root of quadratic·w² + linear·w - constant = 0, without a difference that cancels."""
    q = tl.sqrt(linear * linear + 4.0 * quadratic * constant)
    return tl.where(linear > 0.0, 2.0 * constant / (linear + q), (q - linear) / (2.0 * quadratic))
