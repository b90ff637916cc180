"""One sum that must not cancel."""

from __future__ import annotations

from torch import Tensor


def sum_of_others(x: Tensor) -> Tensor:
    """Σ_{j≠i} x_j for x >= 0 [..., C], each accurate relatively.  O(C).

    Subtracting x_i from the total is accurate for all but the largest entry, which may be nearly all of the total; that
    one is summed without it.  For probabilities this is 1 - p, right down to the smallest: 1 - 0.99… has lost digits.
    """
    largest = x.argmax(-1, keepdim=True)
    rest = x.scatter(-1, largest, 0.0).sum(-1, keepdim=True)
    return (x.sum(-1, keepdim=True) - x).scatter(-1, largest, rest)
