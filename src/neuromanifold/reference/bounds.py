"""Section 3 of the paper by definition: dense matrices [P, P], singular values of J itself, library norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Categorical


class Statement(NamedTuple):
    """lower <= actual <= upper; NaN where the statement has no such bound."""

    lower: float
    actual: float
    upper: float


def dense_matrices(jacobian: Tensor, logits: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """F^LR(k), F and F^DG as sums over samples, [P, P], from ∂z/∂θ [N, C, P] and z [N, C] in float64."""
    p = logits.softmax(-1)
    metric = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    values, vectors = torch.linalg.eigh(metric)  # ascending
    top = vectors[:, :, -rank:] * values[:, None, -rank:].clamp(min=0) @ vectors[:, :, -rank:].mT
    middles = (top, metric, torch.diag_embed(p))
    lower, exact, upper = (torch.einsum("ncp,ncd,ndq->pq", jacobian, middle, jacobian) for middle in middles)
    return lower, exact, upper


def statements(jacobian: Tensor, logits: Tensor, labels: Tensor, rank: int) -> dict[str, Statement]:
    """Every statement as printed, for ∂z/∂θ [N, C, P], z [N, C] and labels [N] in float64.  O(N P²) and more."""
    (samples, classes, size), nan = jacobian.shape, float("nan")
    p = logits.softmax(-1)
    lower, exact, upper = dense_matrices(jacobian, logits, rank)
    sigma = torch.linalg.svdvals(jacobian).flip(-1)  # ascending
    sigma = torch.cat([sigma.new_zeros(samples, max(0, classes - size)), sigma], -1)
    spectrum = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).clamp(min=0)
    trace, above = float(exact.trace()), float(upper.trace())
    omega = torch.einsum("ncp,nc->np", jacobian, p)
    norm2, ascending = p.square().sum(-1), p.sort(-1).values
    kept = range(2, classes - rank + 1)  # the paper's i, from 1
    printed = sum((sigma[:, i + rank - 1] ** 4 * ascending[:, i - 1] ** 2 for i in kept), torch.zeros(samples).double())
    relaxed = sum((ascending[:, i - 1] ** 2 for i in kept), torch.zeros(samples).double())
    scores = torch.einsum("ncp,nc->np", jacobian, Categorical(logits).score(labels))
    tail = float(torch.linalg.matrix_norm(exact - lower))
    second = sum(spectrum[:, i - 1] * sigma[:, classes - i] ** 2 for i in range(2, classes + 1))
    assert isinstance(second, Tensor)
    return {
        f"Prop. 5, rank {rank}": Statement(float(lower.trace()), trace, above),
        "Cor. 6, first": Statement(float((spectrum[:, -1] * sigma[:, 0] ** 2).sum()), trace, above),
        "Cor. 6, second": Statement(float(second.sum()), trace, above),
        "Prop. 7": Statement(
            float((omega.square().sum(-1) ** 2).sum().sqrt()),
            float(torch.linalg.matrix_norm(upper - exact)),
            float((norm2 * sigma[:, -1] ** 2).sum()),
        ),
        "Prop. 7, spectral": Statement(
            float(omega.square().sum(-1).max()),
            float(torch.linalg.matrix_norm(upper - exact, 2)),
            float((norm2 * sigma[:, -1] ** 2).sum()),
        ),
        f"Prop. 8, rank {rank}": Statement(nan, tail, float(printed.sqrt().sum())),
        "  relaxed": Statement(nan, tail, float((relaxed.sqrt() * sigma[:, -1] ** 2).sum())),
        "Prop. 9": Statement(
            nan,
            float(torch.linalg.matrix_norm(exact - scores.T @ scores, 2)),
            float(((1 + norm2) * sigma[:, -1] ** 2).sum()),
        ),
        "Prop. 10": Statement(*_worst_labels(jacobian, logits, sigma[:, 0], spectrum[:, -1]), nan),
    }


def _worst_labels(jacobian: Tensor, logits: Tensor, smallest: Tensor, largest: Tensor) -> tuple[float, float]:
    """Σ_x of the bound, and of the error at the worst label of each x."""
    p = logits.softmax(-1)
    bound = smallest**2 * (1 + p.square().sum(-1) - largest - 2 * p.amin(-1)).abs()
    actual = 0.0
    for J, q in zip(jacobian, p, strict=True):
        metric = torch.diag(q) - q[:, None] * q
        errors = []
        for y in range(len(q)):
            score = -q.clone()
            score[y] += 1
            errors.append(float(torch.linalg.matrix_norm(J.T @ (metric - score[:, None] * score) @ J, 2)))
        actual += max(errors)
    return float(bound.sum()), actual
