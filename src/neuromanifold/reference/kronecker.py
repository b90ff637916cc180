"""Kronecker factors by definition, slow and obvious: one backward pass for each sample and column of M's factor.

For models whose layers are called once; a layer is an nn.Linear or an nn.Conv2d without groups, with its bias as the
weight of an input that is always 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical, Core
from neuromanifold.reference.network import Forward


def kronecker_factors(
    model: nn.Module,
    forward: Forward,
    layer: str,
    sharing: Literal["expand", "reduce"] = "expand",
    likelihood: Callable[[Tensor], Core] = Categorical,
) -> tuple[Tensor, Tensor, int]:
    """Σ g gᵀ [o, o] and Σ a aᵀ [i + 1, i + 1] of one layer, and T with F ≈ Σ g gᵀ ⊗ Σ a aᵀ/T.

    "expand" (Eschenhagen et al. 2023, equation 13): g and a of every position of every sample, T of them.
    "reduce" (equation 19): g summed and a averaged over the positions of a sample, T samples.
    """
    model = copy.deepcopy(model).double().eval()
    seen: list[tuple[Tensor, Tensor]] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del module
        output.retain_grad()
        seen.append((inputs[0].detach(), output))

    handle = model.get_submodule(layer).register_forward_hook(see)
    logits = forward(model)
    handle.remove()
    module = model.get_submodule(layer)
    inputs = torch.cat([_inputs(module, x) for x, _ in seen])  # [N, t, i]
    inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1) if module.bias is not None else inputs
    rows = logits.reshape(-1, logits.shape[-1])
    values, vectors = torch.linalg.eigh(likelihood(rows.detach()).fisher())
    columns = vectors * values.clamp(min=0).sqrt()[:, None]  # S with S Sᵀ = M, [rows, c, k]
    left = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows)):
        for k in range(columns.shape[-1]):
            for _, output in seen:
                output.grad = None
            (rows[row] @ columns[row, :, k]).backward(retain_graph=True)
            for _, output in seen:
                g = torch.zeros_like(output) if output.grad is None else output.grad
                g = _outputs(module, g)  # [n, t, o]
                g = g.sum(1, keepdim=True) if sharing == "reduce" else g
                left = left + torch.einsum("nto,ntp->op", g, g)
    inputs = inputs.mean(1, keepdim=True) if sharing == "reduce" else inputs
    return left, torch.einsum("nti,ntj->ij", inputs, inputs), inputs.shape[0] * inputs.shape[1]


def _inputs(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of a layer as [n, t, i]: of a convolution, the windows of the image."""
    if isinstance(module, nn.Conv2d):
        options = {name: getattr(module, name) for name in ("dilation", "padding", "stride")}
        return nn.functional.unfold(x, module.kernel_size, **options).mT
    return x.reshape(len(x), -1, x.shape[-1])


def _outputs(module: nn.Module, g: Tensor) -> Tensor:
    return g.flatten(2).mT if isinstance(module, nn.Conv2d) else g.reshape(len(g), -1, g.shape[-1])


def corrected_eigenvalues(block: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The diagonal of a dense block of F in the basis U ⊗ V of the factors' eigenvectors, [L, R]."""
    u, v = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
    basis = torch.kron(u, v)  # row-major: the entry (i, j) of a matrix has the index i R + j
    return (basis * (block @ basis)).sum(0).view(len(left), len(right))
