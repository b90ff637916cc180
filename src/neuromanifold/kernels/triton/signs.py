"""Random signs inside kernels, from Philox's generator."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_words(key, counter, program, stream):
    """32 random bits for each counter."""
    zero = counter * 0
    word, _, _, _ = tl.philox(key, counter, zero + program, zero + stream, zero)
    return word


@triton.jit
def sign(word, bit):
    """±1 from a bit of a word."""
    return 1.0 - 2.0 * ((word >> bit) & 1).to(tl.float32)
