"""How many batches an accuracy takes, before the run.

An estimate over J batches with m independent probes each is a mean of n = J·m squares, apart from a factor, and

    F̂/F  has mean 1 and standard deviation at most √(2/n)

by the remark on minibatches in section 4 of the paper, *if the batches contribute about equally* to the entry (if not,
`minibatch_variance_bound` says how many equal ones they are worth).  With squares per sample, every
sample counts as a batch.  It holds for Hutchinson's estimate in all its forms; labels drawn from the model have no such
bound.  And it is about one entry at a time: the worst of a million entries is off by more.

`probes` counts independent probes, as they are drawn for squares per batch.  Orthogonal ones, which
`Hutchinson(probes=m, deflate=0)` draws for squares per sample, do better than m independent ones;
with deflate=k (1 by default) count m - k, at least 1: k passes are the eigenvectors'.  `orthogonal_variance` is exact.

`method` says what else is assumed, in order to turn a standard deviation into a confidence::

    "chi2"        each gradient before squaring is normal, so n·F̂/F ~ χ²_n.  Exact for Gaussian noise; very
                  good for Rademacher noise on a batch of many samples.  Right for small n too, where F̂ is skewed.
    "normal"      F̂ itself is normal: good for n above 100 or so, close to "chi2" then.
    "chebyshev"   nothing but the standard deviation, at the price of more batches.
    "cantelli"    nothing either, but one-sided: that F̂ is not *above* (1 + rtol) F (Cantelli, section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Final, Literal

import torch

from neuromanifold.core.checks import finite_number, integer_in_range, message, number_of_passes, one_of

Method = Literal["chi2", "normal", "chebyshev", "cantelli"]

_MOST = 10**15  # float64 counts up to here exactly, with a digit to spare


def batches_needed(rtol: float, confidence: float | None = None, probes: int = 1, method: Method = "chi2") -> int:
    """Return the least number of batches after which an entry's relative error is within `rtol`.

    Without `confidence`, its standard error is: √(2/(batches·probes)) <= rtol (Theorem 11).  With `confidence`, the
    error itself is with at least this probability, under what `method` assumes.  For squares per batch; squares per
    sample need fewer.

    Args:
        rtol: the relative error that is asked for, such as 0.05.
        confidence: a probability, or None.
        probes: backward passes for each batch.
        method: what is assumed: "chi2" (a gradient is normal), "normal" (the estimate is), "chebyshev" (nothing), or
            "cantelli" (nothing, and only that the estimate is not above (1 + rtol) F).

    Returns:
        A number of batches.

    Raises:
        TypeError, ValueError: an argument is out of range.

    Example:
        >>> nm.batches_needed(0.1), nm.batches_needed(0.1, confidence=0.95)
        (200, 768)
    """
    finite_number(rtol, "rtol", positive=True, advice="0.05 asks for 5 %.")
    number_of_passes(probes, "probes")
    miss = _miss(method)
    if confidence is None:
        batches = 2 / rtol / rtol / probes
        _check_reach(batches, rtol)
        return max(1, math.ceil(batches * (1 - 1e-12)))  # 2/0.1² is 200, not 201
    if isinstance(confidence, bool) or not isinstance(confidence, (int, float)) or not 0 < confidence < 1:
        raise ValueError(message("confidence", "None or between 0 and 1, both excluded", repr(confidence)))

    def enough(batches: int) -> bool:
        return miss(batches * probes, rtol) <= (1 - confidence) * (1 + 1e-12)

    most = 1
    while not enough(most):
        most *= 2
        _check_reach(most * probes, rtol)
    least = most // 2  # not enough, or 0
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most


def expected_rtol(batches: int, probes: int = 1) -> float:
    """√(2/(batches·probes)): the relative standard error that so many batches lead to, at most.

    The inverse of `batches_needed`, by the remark on minibatches and its assumption of batches that contribute equally.
    """
    return math.sqrt(2 / _number_of_squares(batches, probes))


def expected_confidence(batches: int, rtol: float, probes: int = 1, method: Method = "chi2") -> float:
    """The probability that an entry's relative error is within `rtol` after so many batches.

    Under what `method` assumes (see the head of this module); a lower bound of it for "chebyshev" and "cantelli".
    """
    n = _number_of_squares(batches, probes)
    finite_number(rtol, "rtol", positive=True, advice="0.05 asks for 5 %.")
    return 1 - _miss(method)(n, rtol)


def _chi2_miss(n: int, rtol: float) -> float:
    """P(|χ²_n/n - 1| > rtol) by incomplete gamma functions, each tail on its own so that nothing cancels."""
    half = torch.tensor(n / 2, dtype=torch.float64)
    below = torch.special.gammainc(half, half * max(0.0, 1 - rtol))
    above = torch.special.gammaincc(half, half * (1 + rtol))
    return float(below + above)


def _normal_miss(n: int, rtol: float) -> float:
    return 2 * NormalDist().cdf(-rtol / math.sqrt(2 / n))


def _chebyshev_miss(n: int, rtol: float) -> float:
    return min(1.0, 2 / n / rtol / rtol)


def _cantelli_miss(n: int, rtol: float) -> float:
    return 1 / (1 + rtol * rtol * n / 2)  # cantelli(1 + rtol, √(2/n)), without the rounding of 1 + rtol


_METHODS: Final[dict[str, Callable[[int, float], float]]] = {
    "chi2": _chi2_miss,
    "normal": _normal_miss,
    "chebyshev": _chebyshev_miss,
    "cantelli": _cantelli_miss,
}


def _miss(method: str) -> Callable[[int, float], float]:
    return _METHODS[one_of(method, "method", *_METHODS)]


def _number_of_squares(batches: int, probes: int) -> int:
    integer_in_range(batches, "batches", 1, _MOST, "count them")
    return batches * number_of_passes(probes, "probes")


def _check_reach(squares: float, rtol: float) -> None:
    if squares > _MOST:
        raise ValueError(message("rtol", "within reach of random probes", repr(rtol), "Use nm.Exact() instead."))
