"""Confidence intervals for single entries, which may have only a few contributing samples.

An estimate is a sum of squares of nearly normal numbers, so it is taken for F times a χ²_ν/ν with as much relative
variance, 2/ν = Var(F̂)/F².  What is known is v with E[v] >= Var(F̂), and F̂² - v stands for F², so that 2(F̂² - v)/v
stands for ν.  With r = (2/3) F̂²/v, which is (Σg²)²/Σg⁴ for random probes, this is 3r - 2.  It is uncertain itself, by
about √r, and too many degrees of freedom cost coverage where too few cost some width.  So a little less is taken,

    ν = 3r - 2 max(1, √r),        [ν F̂/χ²_{ν, 1-α/2}, ν F̂/χ²_{ν, α/2}].

A single sample with a single random probe has r = 1, hence ν = 1, and an interval that holds for the square of a normal
number, where F̂ ± 2 standard errors would cover F in 54 of 100 cases.

A single sample that was kept with probability π, and has the weight 1/π, has v = (1 - π/3) F̂², hence r < 1.  Its upper
end has less than one degree of freedom, since others may have been left out.  If there are none, F is π times what it
would be for π = 1, so the lower end is that of ν = 1 times π = 3 - 2/r.

All of this is about the part of F̂ that is random.  Where C - 1 passes make some samples exact, their part F̂₀ is
known, v says nothing of it, and the interval is F̂₀ + [...] with F̂ - F̂₀ in place of F̂.  With F̂ itself r would be
large and the interval F̂ ± 2√v, which misses F in 46 of 100 cases if one sample is noisy: where its square is small by
chance, v is as well.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import torch
from torch import Tensor

from neuromanifold.core.checks import finite_number, message

_SMALLEST, _LARGEST, _POINTS = 1e-2, 1e15, 2049  # degrees of freedom of the table
_EXACT = 1e3  # degrees of freedom up to which quantiles are found by bisection; then Wilson's and Hilferty's


def check_level(level: float) -> float:
    """Refuse what is no probability, or 95 instead of 0.95."""
    finite_number(level, "level", positive=True, advice="0.95 for intervals of 95 %.")
    if not level < 1:
        raise ValueError(message("level", "between 0 and 1", repr(level), "0.95 for intervals of 95 %."))
    return float(level)


def interval(values: Tensor, stderr: Tensor, level: float, noiseless: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lower and upper ends for estimates with these standard errors; where there is no noise both are the estimate.

    `noiseless`: the part of the values that is not random.
    """
    if noiseless is not None:
        low, high = interval((values - noiseless).clamp(min=0), stderr, level)
        random = stderr > 0
        return torch.where(random, noiseless + low, values), torch.where(random, noiseless + high, values)
    r = (values.double() / stderr.double()).square().nan_to_num(1.5, math.inf) * (2 / 3)  # inf: nothing is random
    nu = (3 * r - 2 * r.sqrt().clamp(min=1)).nan_to_num(math.inf).clamp(_SMALLEST, _LARGEST)
    kept = (3 - 2 / r).clamp(0, 1)  # 1 wherever ν >= 1
    below, above = (_factor(level, end, one) for end, one in enumerate((nu.clamp(min=1), nu)))
    ends = (values.double() * factor for factor in (kept * below, above))
    lower, upper = (torch.where((stderr > 0) & (values > 0), end.to(values.dtype), values) for end in ends)
    return lower, upper


def _factor(level: float, end: int, nu: Tensor) -> Tensor:
    """ν/χ² for the lower (0) or the upper end (1), by interpolation between logarithms."""
    grid, *tables = (table.to(nu.device) for table in _factors(level))
    place = (nu.log() - grid[0]) / (grid[1] - grid[0])
    left = place.floor().clamp(0, len(grid) - 2).long()
    table, share = tables[end], place - left
    return (table[left] + share * (table[left + 1] - table[left])).exp()


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
