"""Theorem 1: bounds of the largest eigenvalue λ_C of diag(p) - p pᵀ, each in O(C)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.sums import sum_of_others


class EigenvalueBounds(NamedTuple):
    """lower <= λ_C <= upper, [...] each."""

    lower: Tensor
    upper: Tensor

    @property
    def gap(self) -> Tensor:
        """upper - lower: how much is left open."""
        return self.upper - self.lower


class EigenvalueBoundTerms(NamedTuple):
    """The six terms of Theorem 1 one by one, [...] each: three lower bounds, then three upper bounds."""

    largest_variance: Tensor  #: max p_i(1 - p_i)        <= λ_C   (a diagonal entry)
    second_probability: Tensor  #: p_(C-1)               <= λ_C   (interlacing)
    mean_eigenvalue: Tensor  #: (1 - ‖p‖²)/(C - 1)       <= λ_C   (the trace over the rank)
    largest_probability: Tensor  #: p_(C)                >= λ_C   (interlacing)
    gershgorin: Tensor  #: 2 max p_i(1 - p_i)            >= λ_C   (the largest disc)
    trace: Tensor  #: 1 - ‖p‖²                           >= λ_C   (the sum that λ_C is part of; never below gershgorin)

    def bounds(self) -> EigenvalueBounds:
        """The largest of the lower bounds and the smallest of the upper ones."""
        return EigenvalueBounds(torch.stack(self[:3]).amax(0), torch.stack(self[3:]).amin(0))

    def gap_bound(self) -> Tensor:
        """min{p_(C) - p_(C-1), max p_i(1 - p_i)}: what the paper states the gap cannot exceed."""
        return torch.minimum(self.largest_probability - self.second_probability, self.largest_variance)


def bound_terms(p: Tensor) -> EigenvalueBoundTerms:
    """Evaluate the terms of Theorem 1 for probabilities p [..., C]."""
    variances = p * sum_of_others(p)
    largest_variance, trace = variances.amax(-1), variances.sum(-1)
    top = p.topk(2, dim=-1).values
    return EigenvalueBoundTerms(
        largest_variance, top[..., 1], trace / (p.shape[-1] - 1), top[..., 0], 2 * largest_variance, trace
    )
