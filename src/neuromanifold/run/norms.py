"""Norms of sums over all x, which bound and actual value of section 3 are compared in: exact, or by random products."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from neuromanifold.bounds.network import empirical_spectral_error, pair_squares
from neuromanifold.bounds.norms import Norm, frobenius_norm, spectral_norm
from neuromanifold.bounds.result import Actual
from neuromanifold.core import Categorical, Core
from neuromanifold.run.operator import metric_operator
from neuromanifold.run.step import Settings

_SKETCH, _PROBES, _LANCZOS = 4, 8, 24  # products with random vectors
_NUMBERS = 2**27  # in blocks of these


def exact_norms(gram: Tensor, core: Categorical, labels: Tensor | None, seed: int) -> Actual:
    """From the inner products [N·C, N·C] of all ∂z_c(x)/∂θ."""
    upper, lower = pair_squares(gram, core)
    errors = {k + 1: Norm(float(squares.sum()) ** 0.5) for k, squares in enumerate(lower)}
    generator = torch.Generator().manual_seed(seed)
    spectral = None if labels is None else Norm(empirical_spectral_error(gram, core, labels, generator))
    return Actual(Norm(float(upper.sum()) ** 0.5), errors, spectral, "exact, from inner products between samples")


def estimated_norms(
    model: nn.Module,
    data: Iterable[object],
    parameters: dict[str, nn.Parameter],
    settings: Settings,
    rank: int,
    has_labels: bool,
) -> Actual:
    """From products with random vectors, each a pass over the data."""
    size = sum(parameter.numel() for parameter in parameters.values())
    sketch = max(1, min(_SKETCH, _NUMBERS // max(1, size)))

    def below(core: Core, labels: Tensor | None, v: Tensor) -> Tensor:
        del labels
        return _below(core, rank, v)

    found: list[Norm] = []
    for middle in (_above, below):
        operator = metric_operator(model, data, parameters, settings, middle, "sum")
        generator = torch.Generator(operator.device).manual_seed(settings.seed + len(found))
        like = torch.zeros(size, 1, dtype=operator.precision, device=operator.device)
        found.append(frobenius_norm(operator.matvec, like, sketch, _PROBES, generator))
    spectral = None
    if has_labels:
        operator = metric_operator(model, data, parameters, settings, _off_label, "sum")
        generator = torch.Generator(operator.device).manual_seed(settings.seed)
        start = torch.randn(size, generator=generator, dtype=operator.precision, device=operator.device)
        spectral = spectral_norm(operator.matvec, start, _LANCZOS, rtol=1e-3)
    how = f"estimated from {2 * (2 * sketch + _PROBES)} products with random vectors"
    how += ", ‖F - F^emp‖_σ by Lanczos (from below)" if spectral else ""
    return Actual(found[0], {rank: found[1]}, spectral, how)


def _above(core: Core, labels: Tensor | None, v: Tensor) -> Tensor:
    """p pᵀ v."""
    del labels
    assert isinstance(core, Categorical)
    return core.probs * (core.probs * v).sum(-1, keepdim=True)


def _below(core: Core, rank: int, v: Tensor) -> Tensor:
    """M v without the leading eigenpairs."""
    values, vectors = core.spectrum(rank)  # [R, k], [R, k, C]
    along = (vectors @ v[..., None]) * values[..., None]  # [R, k, 1]
    return core.matvec(v) - (vectors.mT @ along)[..., 0]


def _off_label(core: Core, labels: Tensor | None, v: Tensor) -> Tensor:
    """(M - R(y)) v."""
    assert labels is not None
    score = core.score(labels)
    return core.matvec(v) - score * (score * v).sum(-1, keepdim=True)
