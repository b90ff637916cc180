"""Cores to draw probes for, and what is drawn."""

import math
from typing import Any

import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.core import Core

NOISES = ("rademacher", "gaussian")
GRANULARITIES = ("batch", "sample")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def special(classes: int) -> Tensor:
    """Random, peaked, uniform, one-hot, tied and impossible classes: [6, C]."""
    rows = [normal(classes), 30 * normal(classes, seed=1), torch.zeros(classes), torch.full((classes,), -math.inf)]
    rows += [normal(classes, seed=2).round(), normal(classes, seed=3)]
    rows[3][-1] = 0.0
    rows[5][1 : max(2, classes - 1)] = -math.inf
    return torch.stack([row.double() for row in rows])


CORES: dict[str, Core] = {f"categorical-C{c}": nm.Categorical(special(c)) for c in (2, 3, 4, 7)}
CORES |= {f"bernoulli-C{c}": nm.Bernoulli(3 * normal(4, c)) for c in (1, 3, 5)}
CORES |= {f"gaussian-C{c}": nm.Gaussian(normal(3, c), variance=normal(c, seed=1).exp()) for c in (1, 4)}


def drawn(estimator: nm.Estimator, core: Core, seed: int = 1000) -> Tensor:
    """All cotangents of one run, [m, ..., C]."""
    cotangents = list(estimator.cotangents(core, None, torch.Generator().manual_seed(seed)))
    assert len(cotangents) == estimator.passes(core) == len(estimator.pass_noise(core, True))
    return torch.stack(cotangents)


def outer(u: Tensor) -> Tensor:
    """Σ_j u_j u_jᵀ for u [m, ..., C]."""
    return torch.einsum("m...c,m...d->...cd", u, u)


def target(part: Any, core: Core) -> Tensor:
    if isinstance(part, nm.Upper):
        return torch.diag_embed(core.upper_envelope())
    return core.lower_envelope(part.size(core)).dense() if isinstance(part, nm.Lower) else core.fisher()
