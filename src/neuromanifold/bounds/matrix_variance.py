"""Theorem 11 for every entry of the random matrix, off the diagonal too."""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.bounds.variance import Granularity, Noise, checked_columns
from neuromanifold.core.checks import number_of_passes


def matrix_variance(
    columns: Tensor, noise: Noise = "rademacher", granularity: Granularity = "batch", probes: int = 1
) -> Tensor:
    """The variance [P, P] of each entry of Σ g gᵀ, given the derivatives a [N, r, P] along the columns of any factor.

    For g = Σ_r a_r ξ_r with independent ξ of variance 1 and kurtosis 3 + κ, only products of equal pairs have a mean:

        E[g_i² g_j²] = F_ii F_jj + 2 F_ij² + κ Σ_r a_ri² a_rj²,        F = Σ_r a_r a_rᵀ,
        Var(g_i g_j) = F_ii F_jj + F_ij² + κ Σ_r a_ri² a_rj²,

    with κ = -2 for Rademacher noise and 0 for Gaussian noise.  On the diagonal that is Theorem 11, 2F² - 2Σ a⁴.  Off
    it, Std(F̂_ij) <= √(F_ii F_jj + F_ij²) has no bound in terms of F_ij alone: an entry that is zero is known to
    √(F_ii F_jj).  "batch": the columns of all samples are those of one g, which is the paper's estimate, and the one of
    `nm.fisher_factors(granularity="batch")`.  "sample": each sample has a g of its own; variances add.  O(NrP²).
    """
    a = checked_columns(columns, noise, granularity)
    number_of_passes(probes, "probes")
    if granularity == "batch":
        a = a.reshape(1, -1, a.shape[-1])
    F = a.mT @ a  # [n, p, p]
    diagonal = F.diagonal(dim1=-2, dim2=-1)
    variance = diagonal[:, :, None] * diagonal[:, None, :] + F.square()
    if noise == "rademacher":
        squares = a.square()
        variance = (variance - 2 * squares.mT @ squares).clamp(min=0)
    total: Tensor = torch.sum(variance, 0)
    return total / probes
