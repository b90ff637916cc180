"""Norms of a large symmetric matrix that is only known by its products, such as the distance of a bound from F."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.operators.krylov import Product
from neuromanifold.operators.stochastic import sign_columns


class Norm(NamedTuple):
    """A norm, and how far off it may be: 0, a standard error (Frobenius) or a residual (spectral)."""

    value: float
    error: float = 0.0


def frobenius_norm(product: Product, like: Tensor, sketch: int, probes: int, generator: torch.Generator) -> Norm:
    """‖A‖_F for A known by its products with blocks of columns [P, m]: the root of an unbiased estimate of ‖A‖_F².

    With Q an orthonormal basis of A S, S a block of random signs, ‖A‖_F² = ‖AQ‖_F² + ‖A(I - QQᵀ)‖_F²: the first is
    exact and has the leading eigenvectors, the second is E‖A(I - QQᵀ)ξ‖² over random signs ξ.  2·sketch + probes
    products, in blocks of `sketch`.
    """
    size = len(like)
    sketched = product(sign_columns(like, min(sketch, size), generator))
    basis, sizes, _ = torch.linalg.svd(sketched, full_matrices=False)
    basis = basis[:, sizes > 1e3 * torch.finfo(like.dtype).eps * sizes[:1]]  # without directions that are rounding
    exact = float(product(basis).double().square().sum()) if basis.shape[1] else 0.0
    squares = torch.cat(
        [
            _squared_norms_outside(product, basis, min(sketch, probes - done), generator)
            for done in range(0, probes, sketch)
        ]
    )  # [probes]
    total = exact + float(squares.mean())
    spread = float(squares.std()) / math.sqrt(probes)
    value = math.sqrt(max(0.0, total))
    return Norm(value, spread / (2 * value) if value else 0.0)


def _squared_norms_outside(product: Product, basis: Tensor, columns: int, generator: torch.Generator) -> Tensor:
    """‖A(I - QQᵀ)ξ‖² for random signs ξ, [columns]; projected twice, so that Q is left out to rounding."""
    signs = sign_columns(basis, columns, generator)
    for _ in range(2):
        signs = signs - basis @ (basis.mT @ signs)
    return product(signs).double().square().sum(0)


def spectral_norm(
    apply: Product, start: Tensor, steps: int = 200, rtol: float = 1e-10, metric: Product | None = None
) -> Norm:
    """The largest |eigenvalue| of an operator that is symmetric for the inner product uᵀ·metric(v).

    Lanczos from a random vector, orthogonalised twice against all before.  What is found is never larger than the norm,
    and an eigenvalue lies within the residual, which is the error given.
    """
    metric = metric or (lambda u: u)
    basis: list[Tensor] = []
    images: list[Tensor] = []  # metric(basis)
    diagonal: list[float] = []
    beside: list[float] = []
    vector, image = start, metric(start)
    best = Norm(0.0)
    for _ in range(min(steps, len(start))):
        length = math.sqrt(max(0.0, float(vector @ image)))
        if length <= 1e-12 * best.value or not length:
            return Norm(best.value)  # the space is used up: exact
        if basis:
            beside.append(length)
        basis.append(vector / length)
        images.append(image / length)
        vector = apply(basis[-1])
        diagonal.append(float(images[-1] @ vector))
        for _ in range(2):
            for old, its in zip(basis, images, strict=True):
                vector = vector - (its @ vector) * old
        image = metric(vector)
        best = _ritz(diagonal, beside, math.sqrt(max(0.0, float(vector @ image))))
        if best.error <= rtol * best.value:
            break
    return best


def _ritz(diagonal: list[float], beside: list[float], after: float) -> Norm:
    """The largest |eigenvalue| of a tridiagonal matrix, and its residual in the space that is `after` it."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, value in enumerate(beside):
        matrix[i, i + 1] = matrix[i + 1, i] = value
    values, vectors = torch.linalg.eigh(matrix)
    place = int(values.abs().argmax())
    return Norm(float(values[place].abs()), after * abs(float(vectors[-1, place])))
