"""The Fisher information of a network by definition, slow and obvious: one gradient for each sample and class.

The model is copied to float64 and called with a batch; logits are [B, C] or [B, T, C], every position a distribution.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical, Core

Forward = Callable[[nn.Module], Tensor]
"""Calls a model on the data and gives its logits."""


def jacobian(model: nn.Module, forward: Forward) -> tuple[Tensor, Tensor]:
    """∂z/∂θ as [N, C, P] and z as [N, C], over all positions, all trainable parameters side by side."""
    model = copy.deepcopy(model).double().eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logits = forward(model)
    logits = logits.reshape(-1, logits.shape[-1])
    rows = []
    for output in logits.flatten():
        gradients = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(gradients, parameters, strict=True)
        rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in pairs]))
    return torch.stack(rows).view(*logits.shape, -1), logits.detach()


def reference_matrix(model: nn.Module, forward: Forward, likelihood: Callable[[Tensor], Core] = Categorical) -> Tensor:
    """F = Σ_x Jᵀ M J, dense [P, P], as a sum over samples."""
    rows, logits = jacobian(model, forward)
    return torch.einsum("ncp,ncd,ndq->pq", rows, likelihood(logits).fisher(), rows)


def reference_diagonal(
    model: nn.Module, forward: Forward, likelihood: Callable[[Tensor], Core] = Categorical
) -> dict[str, Tensor]:
    """F_ii = Σ_x (Jᵀ M J)_ii as a sum over samples, by parameter name."""
    rows, logits = jacobian(model, forward)
    return by_name(model, torch.einsum("ncp,ncd,ndp->p", rows, likelihood(logits).fisher(), rows))


def empirical_diagonal(model: nn.Module, forward: Forward, labels: Tensor) -> dict[str, Tensor]:
    """Σ_x (∂ log p(y|x)/∂θ_i)² for given labels [B] or [B, T], as a sum over samples; positions are added first."""
    rows, logits = jacobian(model, forward)
    scores = torch.einsum("ncp,nc->np", rows, Categorical(logits).score(labels.flatten()))
    return by_name(model, scores.view(labels.shape[0], -1, scores.shape[-1]).sum(1).square().sum(0))


def by_name(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Cut a vector over all trainable parameters into one tensor for each, by name."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    pieces = torch.split(flat, [parameter.numel() for parameter in named.values()])
    return {name: piece.view(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)}


def divergence(model: nn.Module, forward: Forward, step: dict[str, Tensor]) -> Tensor:
    """Σ_x KL(p_θ ‖ p_θ+δ): what the Fisher information measures, ½ δᵀFδ for a small step δ."""
    moved = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        before = forward(copy.deepcopy(model).double().eval()).log_softmax(-1)
        for name, parameter in moved.named_parameters():
            if name in step:
                parameter.add_(step[name])
        after = forward(moved).log_softmax(-1)
        return (before.exp() * (before - after)).sum()
