"""The core space by definition: sums over labels, dense matrices, library eigensolvers."""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.core import Spectrum


def fisher_by_definition(logits: Tensor) -> Tensor:
    """Σ_y p(y) ∇log p(y) ∇log p(y)ᵀ for logits [..., C], with gradients by autograd and a loop over labels.  O(C³)."""
    z = logits.detach().double().requires_grad_()
    log_p = z.log_softmax(-1)
    fisher = torch.zeros(*z.shape, z.shape[-1], dtype=z.dtype, device=z.device)
    for y in range(z.shape[-1]):
        (score,) = torch.autograd.grad(log_p[..., y].sum(), z, retain_graph=True)
        fisher += log_p[..., y, None, None].exp().detach() * score[..., :, None] * score[..., None, :]
    return fisher


def spectrum_by_eigh(fisher: Tensor, k: int) -> Spectrum:
    """The top k eigenpairs of dense matrices [..., C, C] by the library's symmetric eigensolver.  O(C³)."""
    values, vectors = torch.linalg.eigh(fisher)
    return Spectrum(values.flip(-1)[..., :k], vectors.flip(-1).mT[..., :k, :])


def spectrum_by_power_iteration(
    probs: Tensor, k: int, iterations: int = 30, generator: torch.Generator | None = None
) -> Spectrum:
    """The top k eigenpairs of diag(p) - p pᵀ as the paper's experiments find them: power iteration with deflation.

    O(iterations·k·C), and the error depends on the spectral gap: near a uniform p it is several per cent.
    """
    values: list[Tensor] = []
    vectors: list[Tensor] = []
    for _ in range(k):
        v = torch.randn(probs.shape, generator=generator, dtype=probs.dtype, device=probs.device)
        for _ in range(iterations):
            product = probs * (v - (probs * v).sum(-1, keepdim=True))
            for value, u in zip(values, vectors, strict=True):
                product = product - value * u * (u * v).sum(-1, keepdim=True)
            length = torch.linalg.vector_norm(product, dim=-1, keepdim=True)
            v = product / length
        values.append(length)
        vectors.append(v)
    return Spectrum(torch.cat(values, dim=-1), torch.stack(vectors, dim=-2))
