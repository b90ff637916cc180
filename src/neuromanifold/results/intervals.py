"""Confidence intervals for single entries, which may have only a few contributing samples.

An estimate is a sum of squares of nearly normal numbers, so it is taken for F times a χ²_ν/ν with as much relative
variance, 2/ν = Var(F̂)/F².  What is known is v with E[v] >= Var(F̂), and F̂² - v stands for F²:

    ν = 2 (F̂² - v)/v,        [ν F̂/χ²_{ν, 1-α/2}, ν F̂/χ²_{ν, α/2}].

A single sample with a single random probe has v = (2/3) F̂², hence ν = 1, and an interval that holds for the square of a
normal number, where F̂ ± 2 standard errors would cover F in 54 of 100 cases.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import torch
from torch import Tensor

from neuromanifold.core.checks import finite_number, message

_SMALLEST, _LARGEST, _POINTS = 1e-2, 1e9, 1025  # degrees of freedom of the table
_EXACT = 1e3  # degrees of freedom up to which quantiles are found by bisection; then Wilson's and Hilferty's


def check_level(level: float) -> float:
    """Refuse what is no probability, or 95 instead of 0.95."""
    finite_number(level, "level", positive=True, advice="0.95 for intervals of 95 %.")
    if not level < 1:
        raise ValueError(message("level", "between 0 and 1", repr(level), "0.95 for intervals of 95 %."))
    return float(level)


def interval(values: Tensor, stderr: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Lower and upper ends for estimates with these standard errors; where there is no noise both are the estimate."""
    squares = (values.double() / stderr.double()).square().nan_to_num(1.0, math.inf)  # inf: nothing is random
    nu = (2 * squares - 2).clamp(_SMALLEST, _LARGEST).log()
    grid, *tables = _factors(level)
    place = (nu - grid[0]) / (grid[1] - grid[0])
    left = place.floor().clamp(0, len(grid) - 2).long()
    share = place - left
    ends = (
        values.double() * (t[left] + share * (t[left + 1] - t[left])).exp() for t in (t.to(nu.device) for t in tables)
    )
    lower, upper = (torch.where(stderr > 0, end.to(values.dtype), values) for end in ends)
    return lower, upper


@functools.lru_cache(maxsize=8)
def _factors(level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms: a grid of degrees of freedom ν, and ν/χ² for the two quantiles."""
    grid = torch.linspace(math.log(_SMALLEST), math.log(_LARGEST), _POINTS, dtype=torch.float64)
    lower, upper = (grid - _log_quantiles(grid.exp(), (1 + sign * level) / 2) for sign in (1, -1))
    return grid, lower, upper


def _log_quantiles(nu: Tensor, probability: float) -> Tensor:
    """Logarithms of the quantiles of χ²_ν."""
    few, many = nu[nu <= _EXACT], nu[nu > _EXACT]
    low, high = torch.full_like(few, -1e4), few.log() + 20
    for _ in range(200):
        middle = (low + high) / 2
        too_high = torch.special.gammainc(few / 2, middle.exp() / 2) > probability
        # x^a/Γ(a + 1), where x itself underflows
        tiny = few / 2 * (middle - math.log(2)) - torch.lgamma(few / 2 + 1) > math.log(probability)
        too_high = torch.where(middle < -600, tiny, too_high)
        low, high = torch.where(too_high, low, middle), torch.where(too_high, middle, high)
    z, c = NormalDist().inv_cdf(probability), 2 / (9 * many)
    return torch.cat([low, many.log() + 3 * (1 - c + z * c.sqrt()).log()])
