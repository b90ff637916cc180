"""Lemma 3: how far the two envelopes of diag(p) - p pᵀ are from it, in Frobenius norm, for every rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.spectrum import blocks, find_roots
from neuromanifold.core.sums import (
    average_derivatives_over_ties,
    euclidean_norm,
    is_differentiated,
    norm_of_others,
    square_root,
    sum_of_others,
)


class EnvelopeErrors(NamedTuple):
    """‖F - diag(p)‖ and ‖F - F^LR(k)‖ with their bounds, [...] each."""

    upper: Tensor  #: ‖p‖², exact
    upper_floor: Tensor  #: 1/C <= upper
    lower: Tensor  #: (Σ_{i <= C-k} λ_i²)^½, exact
    lower_bound: Tensor  #: min of the two below
    trace_bound: Tensor  #: 1 - ‖p‖² - p_(C-1) - ... - p_(C-k)   >= lower (to rounding, as the next)
    trimmed_bound: Tensor  #: (Σ_{i=2}^{C-k} p_(i)²)^½           >= lower


def envelope_errors(p: Tensor, k: int) -> EnvelopeErrors:
    """Evaluate Lemma 3 for probabilities p [n, c] and rank 1 <= k <= c.

    The paper prints 1 - ‖p‖ - p_(C-1) for the trace bound at k = 1; its proof gives 1 - ‖p‖² - p_(C-1), which is what
    this computes (the printed form is negative at p = (½, ½), where the error is 0).  For rank k the same proof gives
    the sums above, since λ_i >= p_(i-1).  O(kC) for the exact error, and a sort of p for its bounds.
    """
    classes = p.shape[-1]
    k = min(k, classes - 1)  # λ_1 = 0: rank C adds nothing
    upper = p.square().sum(-1)
    floor = torch.full_like(upper, 1 / classes)
    sorted_p = p.sort(dim=-1, descending=True).values
    first, next_k, rest = sorted_p[:, :1], sorted_p[:, 1 : k + 1], sorted_p[:, k + 1 :]
    trace_bound = (next_k * (first - next_k)).sum(-1) + (rest * (first + (1 - rest))).sum(-1)  # nothing cancels
    trimmed_bound = euclidean_norm(sorted_p[:, k:-1])
    lower_bound = torch.minimum(trace_bound, trimmed_bound)
    lower = tail_norm(p, k) if k < classes - 1 else 0 * upper
    return EnvelopeErrors(upper, floor, lower, lower_bound, trace_bound, trimmed_bound)


def tail_norm(p: Tensor, k: int) -> Tensor:
    """(Σ_{i <= C-k} λ_i²)^½ for p [n, c], k < c - 1, without cancellation and without the other eigenvalues.  O(kC).

    ‖F‖² - Σ_top λ² would lose every digit when little is left.  But the eigenvalues that are left interlace the entries
    of p that are left, so they belong to a matrix of the same kind, T = diag(p) - w wᵀ over the tail, whose w follows
    from the top eigenvalues alone (Löwner's formula).  With π_i = w_i²/p_i,

        π_i = p_i Π_{j in top} (p_(j) - p_i)/(λ_j - p_i),    Σ_i π_i = 1,
        T_ii = p_i (1 - π_i),    T_ij = -√(p_i π_i p_j π_j),    (Σ_{i <= C-k} λ_i²)^½ = ‖T‖.
    """
    if is_differentiated(p):
        p = average_derivatives_over_ties(p)
    products: list[Tensor] = []  # [n, c] each
    for block in blocks(p, k):
        roots = find_roots(block)
        high = block.p.gather(1, block.classes[:, block.start : block.stop])
        to_high = (high[..., None] - block.p[:, None, :]) / roots.unit[..., None]  # [n, k, c]
        to_root = -roots.distances(block.p)
        inside = to_root > 0  # elsewhere i belongs to the top, or is tied with λ_j
        factors = torch.where(inside, to_high / torch.where(inside, to_root, 1.0), 1.0)
        product = factors.prod(1)
        if block.start == 0:
            products.append(product)
        else:
            products[-1] = products[-1] * product
    top = p.topk(k, dim=-1)
    tail = torch.ones_like(p).scatter(-1, top.indices, 0.0)
    share = tail * p * torch.cat(products) * _share_of_cut_tie(p, top.values)
    diagonal = tail * p * sum_of_others(share)
    root = square_root(p) * square_root(share)  # T_ij = -root_i root_j
    return euclidean_norm(torch.cat([diagonal, root * norm_of_others(root)], dim=-1))


def _share_of_cut_tie(p: Tensor, top: Tensor) -> Tensor:
    """Where the rank cuts a block of m tied entries, the members left share the weight of all m.  [n, c]"""
    tied = p == top[:, -1:]
    members = tied.sum(-1, keepdim=True).to(p.dtype)
    left = members - (top == top[:, -1:]).sum(-1, keepdim=True)
    return torch.where(tied & (left > 0), members / left.clamp(min=1.0), 1.0)
