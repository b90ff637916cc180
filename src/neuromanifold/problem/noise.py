"""The noise of batch b depends on the seed and on b alone, not on what was drawn before.

So a run can be taken up again in the middle, and parts of the data (`shard=(i, n)`) draw what one run would have drawn.
"""

from __future__ import annotations

_WORD, _HALF = 2**64 - 1, 2**32 - 1


def batch_seed(seed: int, batch: int) -> int:
    """A seed of 64 bits for each seed and batch number, mixed so that neighbours have nothing in common.

    torch's generator on a CPU looks at the lower 32 bits only: these differ between any two batches of one seed, since
    XOR and the mixing are one to one; the upper ones are the seed's.
    """
    mixed = _mix_word(seed)
    return (mixed & ~_HALF & _WORD) | _mix_half((mixed ^ batch) & _HALF)


def _mix_word(x: int) -> int:
    """The finaliser of SplitMix64, one to one on 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _mix_half(x: int) -> int:
    """The finaliser of MurmurHash3, one to one on 32 bits."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _HALF
    x = (x ^ x >> 13) * 0xC2B2AE35 & _HALF
    return x ^ x >> 16
