"""An orthonormal basis of what is left when a few directions are taken away, without ever making a matrix.

Axis letters: c class, q direction that is left out, d = C - q dimension that is left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.sums import divide, euclidean_norm


class Isometry(NamedTuple):
    """B = H_1 ··· H_q [0; I]: R^d → R^C with Bᵀ B = I, as reflections H_i = I - 2 y_i y_iᵀ.  O(qC) each time."""

    mirrors: Tensor  # [..., q, C]  the unit vectors y_i

    def __call__(self, h: Tensor) -> Tensor:
        """B h [..., C] for h [..., d], d = C - q."""
        q = self.mirrors.shape[-2]
        x = torch.nn.functional.pad(h, (q, 0))  # [..., c]
        for i in reversed(range(q)):
            x = _reflect(x, self.mirrors[..., i, :])
        return x


def complement(directions: Tensor) -> Isometry:
    """The isometry onto the orthogonal complement of directions [..., q, C], orthogonal to each other.  O(q²C).

    It is Householder's: H_i maps what is left of direction i, after H_1, ..., H_{i-1}, to ∓e_i, with the sign that does
    not cancel.  A direction that is zero (an eigenvalue λ_i = 0 has no w_i) takes away whatever axis is next; that
    does no harm, since λ_i = 0 means that S vanishes on all that is left.
    """
    classes = torch.arange(directions.shape[-1], device=directions.device)
    mirrors: list[Tensor] = []
    for i, x in enumerate(directions.unbind(-2)):
        for mirror in mirrors:
            x = _reflect(x, mirror)
        x = torch.where(classes < i, 0.0, x)  # zero after the reflections before, apart from rounding
        x = divide(x, euclidean_norm(x)[..., None])
        sign = torch.where(x[..., i : i + 1] < 0, -1.0, 1.0)
        y = x + sign * (classes == i)
        mirrors.append(y / torch.linalg.vector_norm(y, dim=-1, keepdim=True))  # of length at least 1
    return Isometry(torch.stack(mirrors, dim=-2) if mirrors else directions)


def _reflect(x: Tensor, mirror: Tensor) -> Tensor:
    return x - 2 * (mirror * x).sum(-1, keepdim=True) * mirror
