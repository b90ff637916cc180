"""Probes that are orthogonal to each other in the factor's inner space, so that together they tend to the exact metric.

A probe is u = S ξ with S Sᵀ = M.  S has a null direction n (√p for a categorical core, none for a diagonal one), and
its leading singular pairs (√λ_i, w_i) may get passes of their own.  On the d dimensions that are left, with an isometry
B of R^d onto the complement of n and the w_i, and orthonormal h_1, ..., h_m in R^d,

    u_j = √(d/m) S B h_j,        E[h_j h_jᵀ] = I/d   =>   E[Σ_j u_j u_jᵀ] = S B Bᵀ Sᵀ = M - Σ_i λ_i v_i v_iᵀ,

and all d of them give that matrix without any error.  The h_j are columns of a random orthogonal matrix, of which two
are offered: `hartley_column` (random signs, like Rademacher noise) and `haar_columns` (a uniformly random frame).  No
d×d matrix is ever made.

Axis letters: c class, q direction that is left out, d dimension that is left, m probe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import message
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.core.sums import divide, euclidean_norm, square_root
from neuromanifold.estimators.parts import Mixer


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
        x = torch.where(classes < i, 0.0, x)  # done with by the reflections before
        x = divide(x, euclidean_norm(x)[..., None])
        sign = torch.where(x[..., i : i + 1] < 0, -1.0, 1.0)
        y = x + sign * (classes == i)
        mirrors.append(y / torch.linalg.vector_norm(y, dim=-1, keepdim=True))  # of length at least 1
    return Isometry(torch.stack(mirrors, dim=-2) if mirrors else directions)


def leading_columns(core: Core, k: int) -> Tensor:
    """√λ_i v_i of the k leading eigenpairs, [..., k, C]; k may be 0.  O(kC)."""
    if not k:
        return torch.zeros((*core.batch_shape, 0, core.dim), dtype=core.dtype, device=core.device)
    values, vectors = core.spectrum(k)
    return square_root(values)[..., None] * vectors


def remainder(core: Core, scaled: Tensor) -> Mixer:
    """h [..., d] to S B h: the metric without its leading k eigenpairs, given as √λ_i v_i [..., k, C].

    The inner singular vectors are w_i = Sᵀ v_i/√λ_i.  M v = λ v makes them √λ_i v_i/√ζ, ζ the upper envelope: for
    M = diag(p) - ppᵀ because √p∘(v - pᵀv) = (M v)/√p, and for a diagonal M because v is a unit vector.  Nothing is
    subtracted, and 0/0 is 0: an impossible class has no part in an eigenvector.
    """
    if not isinstance(core, (Categorical, DiagonalCore)):
        advice = "The inner space of its factor is not known; use orthogonal=False."
        raise TypeError(message("core", "a nm.Categorical, nm.Bernoulli or nm.Gaussian", type(core).__name__, advice))
    roots = square_root(core.upper_envelope())[..., None, :]  # [..., 1, c]
    directions = divide(scaled, roots)  # [..., k, c]
    if isinstance(core, Categorical):
        directions = torch.cat([roots, directions], dim=-2)
    basis = complement(directions)
    return Mixer(core.dim - directions.shape[-2], lambda h: core.factor(basis(h)))


def orthonormal_noise(
    core: Core, noise_dim: int, count: int, noise: str, generator: torch.Generator
) -> Iterator[Tensor]:
    """h_1, ..., h_count [..., d], orthonormal, for each distribution on its own; count <= d = noise_dim."""
    if noise == "gaussian":
        yield from haar_columns(core, noise_dim, count, generator)
        return
    signs = random_signs(core, noise_dim, generator)
    keys = torch.rand((*core.batch_shape, noise_dim), generator=generator, dtype=torch.float64, device=core.device)
    chosen = keys.topk(count, dim=-1).indices  # [..., m]  without replacement, every order as likely as every other
    for j in range(count):
        yield hartley_column(signs, chosen[..., j])


def hartley_column(signs: Tensor, j: Tensor) -> Tensor:
    """Signs ε [..., d] times column j [...] of Hartley's matrix: ε_i cas(2πij/d)/√d with cas = cos + sin.  O(d).

    The matrix is symmetric and orthogonal for every d, so the columns add to Σ_j h_j h_jᵀ = I.  A column drawn at
    random has E[h hᵀ] = I/d, over the columns alone.  ij is reduced modulo d as an integer, hence no digits are lost.
    """
    d = signs.shape[-1]
    i = torch.arange(d, device=signs.device)
    angles = i.double() * (2 * math.pi / d)
    table = ((angles.cos() + angles.sin()) / math.sqrt(d)).to(signs.dtype)  # [d]
    return signs * table[(j[..., None] * i) % d]


def haar_columns(core: Core, noise_dim: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The first columns of a uniformly random orthogonal matrix, apart from their signs: QR of Gaussian noise.  O(dm²).

    LAPACK chooses the signs by what it finds in the first rows, so the columns are *not* centred before they are given
    random signs.
    """
    shape = (*core.batch_shape, noise_dim, count)
    gaussian = torch.randn(shape, generator=generator, dtype=core.dtype, device=core.device)
    return iter(torch.linalg.qr(gaussian).Q.unbind(-1))


def random_signs(core: Core, size: int, generator: torch.Generator) -> Tensor:
    """±1 with even odds, [..., size]."""
    shape = (*core.batch_shape, size)
    bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=core.device)
    return (2 * bits - 1).to(core.dtype)


def _reflect(x: Tensor, mirror: Tensor) -> Tensor:
    return x - 2 * (mirror * x).sum(-1, keepdim=True) * mirror
