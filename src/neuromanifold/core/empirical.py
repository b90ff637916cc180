"""Lemma 4 and the lemma of appendix A: how far a single label's R(y) = (e_y - p)(e_y - p)ᵀ is from the metric."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.sums import divide, square_root, sum_of_others


class EmpiricalError(NamedTuple):
    """The worst label y for the empirical Fisher, and what ‖R(y) - F‖ is at it, [...] each."""

    label: Tensor  #: argmin p
    actual: Tensor  #: ‖R(y) - F‖ at that label, exact
    bound: Tensor  #: 1 + ‖p‖² - λ_C - 2 p_(1)   <= actual
    simple_bound: Tensor  #: 2‖p‖² - 2 p_(1)     <= bound


class ScoreVariance(NamedTuple):
    """Element-wise variance of a one-label estimate of the metric."""

    variance: Tensor  #: [..., C, C]  Var(R_ij) for R(y) = s(y) s(y)ᵀ
    cv: Tensor  #: [..., C, C]  its coefficient of variation `Std(R_ij)/|F_ij|`, without any bound
    rank_two: Tensor | None = None  #: [..., C]  Var(R'_ii) for R'(y) = e_y e_yᵀ - p pᵀ, whose other entries are fixed


def empirical_error(p: Tensor, y: Tensor) -> Tensor:
    """‖R(y) - F‖ for p [..., C] and labels y [...], exact, and accurate relatively for saturated predictions.  O(C).

    With q = p without its entry y, and d = 1 - 2 p_y, the matrix R(y) - F has the entries

        (1 - p_y) d at (y, y),    -q_i d at (i, y) and (y, i),    q_i (2 q_i - 1) at (i, i),    2 q_i q_j elsewhere.
    """
    p = p.expand(y.shape + p.shape[-1:])
    y = y[..., None]
    rest = sum_of_others(p).gather(-1, y)  # 1 - p_y, the unit of q
    d = (rest - p.gather(-1, y)).square()[..., 0]
    q = p.scatter(-1, y, 0.0)
    squares = divide(q, rest).square()
    corner_and_border = d * (1 + 2 * squares.sum(-1))
    diagonal = (squares * (2 * q - 1).square()).sum(-1)
    inside = 4 * rest[..., 0].square() * (squares * sum_of_others(squares)).sum(-1)
    return rest[..., 0] * square_root(corner_and_border + diagonal + inside)


def worst_label(p: Tensor, largest_eigenvalue: Tensor) -> EmpiricalError:
    """Lemma 4 with the label and the value that it only asserts to exist.  O(C), given λ_C.

    ‖R(y) - F‖² is a convex parabola in p_y alone, 10 p_y² - (6 + 8‖p‖²) p_y + const, so the worst label is the least or
    the most likely one; and since p_min + p_max <= 1 and ‖p‖² >= (p_min + p_max)²/2, it is always the least likely one.
    """
    smallest, label = p.min(-1)
    norm = p.square().sum(-1)
    return EmpiricalError(
        label, empirical_error(p, label), 1 + norm - largest_eigenvalue - 2 * smallest, 2 * norm - 2 * smallest
    )


def categorical_score_variance(p: Tensor) -> ScoreVariance:
    """Var(R_ij) and Var(R'_ii) of the lemma of appendix A for p [..., C].  O(C²).

    Var(R_ii) = p_i(1-p_i)(1-2p_i)² and Var(R_ij) = p_i p_j (p_i + p_j - 4 p_i p_j), all at most 1/16; but divided by
    the entry that it estimates, Std(R_ii)/F_ii = √(1/F_ii - 4) and Std(R_ij)/|F_ij| = √(1/p_i + 1/p_j - 4) grow without
    bound as p_i -> 0, which is why a Monte Carlo estimate can be relatively as bad as one likes.
    """
    others = sum_of_others(p)
    skew = others - p
    a, b = p[..., :, None], p[..., None, :]
    rest = (others[..., :, None] - b).clamp(min=0.0)  # 1 - p_i - p_j
    spread = _with_diagonal((a - b).square() + (a + b) * rest, torch.ones_like(p))  # p_i + p_j - 4 p_i p_j
    deviation = square_root(spread)
    root = square_root(p)
    cv = _with_diagonal(
        _or_infinite(_or_infinite(deviation, root[..., :, None]), root[..., None, :]),
        _or_infinite(_or_infinite(skew.abs(), root), square_root(others)),
    )
    return ScoreVariance(_with_diagonal(a * b * spread, p * others * skew.square()), cv, p * others)


def independent_score_variance(diagonal: Tensor, diagonal_variance: Tensor) -> ScoreVariance:
    """The same for scores with independent entries: Var(R_ij) = F_ii F_jj where i ≠ j, around F_ij = 0.  O(C²)."""
    variance = _with_diagonal(diagonal[..., :, None] * diagonal[..., None, :], diagonal_variance)
    cv = _or_infinite(square_root(diagonal_variance), diagonal)
    return ScoreVariance(variance, _with_diagonal(torch.full_like(variance, torch.inf), cv))


def _or_infinite(x: Tensor, y: Tensor) -> Tensor:
    """x/y, and infinity where y = 0."""
    return torch.where(y > 0, divide(x, y), torch.inf)


def _with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    on_diagonal = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return torch.where(on_diagonal, diagonal[..., None], matrix)
