"""Eigenpairs and linear systems of a symmetric positive semidefinite matrix that is only known by its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""F B for a block B of columns [P, m]."""


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """The largest eigenvalues, descending, their orthonormal vectors as columns, and residuals ‖Fv - λv‖.

    Each interval [λ - residual, λ + residual] holds an eigenvalue of F.
    """

    values: Tensor  #: [k]
    vectors: Tensor  #: [P, k]
    residuals: Tensor  #: [k]
    products: int = 0  #: columns that F was multiplied with

    def __str__(self) -> str:
        lines = [
            f"{i:3d}  {float(v):.6g} ± {float(r):.1g}"
            for i, (v, r) in enumerate(zip(self.values, self.residuals, strict=True))
        ]
        return "\n".join([f"{len(self.values)} largest eigenvalues, {self.products} products", *lines])

    __repr__ = __str__


def times(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own precision: autocast, which is meant for the model, would use half precision."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def top_eigenpairs(product: Product, start: Tensor, k: int, tol: float, maxiter: int) -> Eigenpairs:
    """The k largest eigenpairs by a block Krylov method with restarts, from a block `start` [P, >= k] of columns.

    The space grows by the residuals of the pairs that have not converged (‖Fv - λv‖ > tol λ_1), all at once, so that an
    iteration takes one block product; once it is large it shrinks to its best vectors.  The basis is orthogonalised
    twice, small matrices are float64.  Memory: two blocks [P, max(4k, k + 32)].
    """
    size, most = len(start), max(4 * k, k + 32)
    basis = orthonormal(start)
    images, products = product(basis), basis.shape[1]
    while True:
        small = basis.double().mT @ images.double() if size < 4096 else times(basis.mT, images).double()
        values, turn = torch.linalg.eigh((small + small.mT) / 2)
        values, turn = values.flip(0), turn.flip(1).to(basis.dtype)
        vectors = times(basis, turn[:, :k])
        residual = times(images, turn[:, :k]) - vectors * values[:k].to(basis.dtype)
        lengths = torch.linalg.vector_norm(residual, dim=0, dtype=torch.float64)
        open_pairs = lengths > tol * values[0].clamp(min=torch.finfo(values.dtype).tiny)
        maxiter -= 1
        fresh = orthonormal(residual[:, open_pairs], basis) if bool(open_pairs.any()) and maxiter > 0 else basis[:, :0]
        if not fresh.shape[1] or basis.shape[1] >= size:
            return Eigenpairs(values[:k].to(basis.dtype), vectors, lengths.to(basis.dtype), products)
        if basis.shape[1] + fresh.shape[1] > most:
            keep = turn[:, : min(2 * k, k + 16)]
            basis, images = times(basis, keep), times(images, keep)
        basis, images = torch.cat([basis, fresh], 1), torch.cat([images, product(fresh)], 1)
        products += fresh.shape[1]


def orthonormal(block: Tensor, basis: Tensor | None = None) -> Tensor:
    """Return an orthonormal basis of what a block of columns adds to a basis, without directions of rounding size."""
    if basis is not None and basis.shape[1] >= len(basis):
        return block[:, :0]
    lengths = torch.linalg.vector_norm(block, dim=0, dtype=torch.float64)
    block = block[:, lengths > 0] / lengths[lengths > 0].to(block.dtype)
    for _ in range(2):
        if basis is not None:
            block = block - times(basis, times(basis.mT, block))
        if not block.shape[1]:
            return block
        left, sizes, _ = torch.linalg.svd(block, full_matrices=False)
        most = len(block) - (0 if basis is None else basis.shape[1])
        block = left[:, sizes > 1e3 * torch.finfo(block.dtype).eps][:, :most]
    return block


def conjugate_gradients(
    product: Product, rhs: Tensor, damping: float, tol: float, maxiter: int
) -> tuple[Tensor, Tensor, int]:
    """x [P, m] with (F + damping I) x = rhs, its relative residuals ‖b - Ax‖/‖b‖ [m], and the number of iterations.

    All columns of rhs [P, m] share their products.  A column ends where its direction has no curvature but rounding:
    what is left of rhs is in the kernel then, and one more step could go arbitrarily far.
    """
    sizes = torch.linalg.vector_norm(rhs, dim=0, dtype=torch.float64)
    sizes = torch.where(sizes > 0, sizes, 1.0).to(rhs.dtype)
    x, residual = torch.zeros_like(rhs), rhs / sizes  # so that no square leaves the range of float32
    direction, squares = residual.clone(), residual.square().sum(0)
    largest, iterations = torch.zeros_like(squares), 0
    active = squares > tol**2
    while iterations < maxiter and bool(active.any()):
        image = product(direction) + damping * direction
        curvature, length = (direction * image).sum(0), direction.square().sum(0)
        largest = torch.maximum(largest, curvature / length.clamp(min=torch.finfo(length.dtype).tiny))
        active = active & (curvature > 100 * torch.finfo(rhs.dtype).eps * largest * length)  # else in the kernel
        step = torch.where(active, squares / curvature, 0.0)
        x, residual = x + step * direction, residual - step * image
        before, squares = squares, residual.square().sum(0)
        direction = residual + torch.where(active, squares / before, 0.0) * direction
        active = active & (squares > tol**2)
        iterations += 1
    return x * sizes, squares.sqrt(), iterations
