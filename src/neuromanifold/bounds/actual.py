"""Norms of sums over all x, the actual values of section 3: exact, or estimated by random products."""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.bounds.network import empirical_spectral_error, pair_products
from neuromanifold.bounds.norms import Norm, frobenius_norm, spectral_norm
from neuromanifold.bounds.result import Actual
from neuromanifold.core import Categorical, Core
from neuromanifold.operators.krylov import Product
from neuromanifold.operators.operator import FisherOperator, Middle
from neuromanifold.problem.problem import Problem

_SKETCH, _PROBES, _LANCZOS = 4, 8, 24  # products with random vectors
_NUMBERS = 2**27  # in blocks of these


def exact_norms(gram: Tensor, core: Categorical, labels: Tensor | None, seed: int) -> Actual:
    """Return norms from the inner products [N·C, N·C] of all ∂z_c(x)/∂θ."""
    upper, lower = pair_products(gram, core)
    errors = {k + 1: Norm(float(squares.sum()) ** 0.5) for k, squares in enumerate(lower)}
    generator = torch.Generator().manual_seed(seed)
    empirical = None if labels is None else Norm(empirical_spectral_error(gram, core, labels, generator))
    start = torch.randn(len(upper), generator=generator, dtype=upper.dtype).to(upper.device)
    spectral = Norm(spectral_norm(lambda u: upper @ u, start).value)
    how = "exact, from inner products between samples"
    return Actual(Norm(float(torch.linalg.matrix_norm(upper))), errors, empirical, how, spectral)


def estimated_norms(problem: Problem, seed: int, rank: int, classes: int, has_labels: bool) -> tuple[Actual, int]:
    """Return norms from products with random vectors, each a pass over the data, and how many there were."""
    size = sum(parameter.numel() for parameter in problem.parameters.values())
    sketch, products = max(1, min(_SKETCH, _NUMBERS // max(1, size))), 0

    def product_of(middle: Middle, number: int) -> tuple[Product, torch.Generator, torch.dtype]:
        operator = FisherOperator(problem, middle, reduction="sum")

        def product(v: Tensor) -> Tensor:
            nonlocal products
            products += v.shape[1] if v.ndim > 1 else 1
            return operator.matvec(v)

        return product, torch.Generator(operator.device).manual_seed(seed + number), operator.precision

    def below(core: Core, labels: Tensor | None, v: Tensor) -> Tensor:
        """Return M v without its leading eigenpairs: the metric between F^LR and F."""
        del labels
        return core.matvec(v) - core.spectrum(rank).matvec(v)

    found = [Norm(0.0), Norm(0.0)]  # of rank C - 1, F^LR is F
    for number, middle in enumerate((_above, below) if rank < classes - 1 else (_above,)):
        product, generator, dtype = product_of(middle, number)
        like = torch.zeros(size, 1, dtype=dtype, device=generator.device)
        found[number] = frobenius_norm(product, like, sketch, _PROBES, generator)
    spectral = []
    for middle in (_above, _off_label) if has_labels else (_above,):
        product, generator, dtype = product_of(middle, 0)
        start = torch.randn(size, generator=generator, dtype=dtype, device=generator.device)
        spectral.append(spectral_norm(product, start, _LANCZOS, rtol=1e-3))
    how = f"estimated from {products} products with random vectors, spectral ones by Lanczos (from below)"
    return Actual(found[0], {rank: found[1]}, spectral[1] if has_labels else None, how, spectral[0]), products


def _above(core: Core, labels: Tensor | None, v: Tensor) -> Tensor:
    """Return p pᵀ v: the metric between F and F^DG."""
    del labels
    assert isinstance(core, Categorical)
    return core.probs * (core.probs * v).sum(-1, keepdim=True)


def _off_label(core: Core, labels: Tensor | None, v: Tensor) -> Tensor:
    """Return (M - R(y)) v: the metric between F and the empirical Fisher."""
    assert labels is not None
    score = core.score(labels)
    return core.matvec(v) - score * (score * v).sum(-1, keepdim=True)
