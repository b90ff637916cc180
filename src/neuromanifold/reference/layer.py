"""Gradients of single samples by definition, slow and obvious: one backward pass for each sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample_gradients(outputs: Tensor, parameters: Sequence[Tensor], cotangent: Tensor) -> list[Tensor]:
    """∂⟨outputs_n, cotangent_n⟩/∂θ for every sample n, the first dimension: `[n, *shape]` for each parameter.

    The graph of `outputs` is kept.  One backward pass for each sample.
    """
    rows: list[list[Tensor]] = [[] for _ in parameters]
    for n in range(len(outputs)):
        found = torch.autograd.grad(outputs[n], parameters, cotangent[n], retain_graph=True, allow_unused=True)
        for row, parameter, g in zip(rows, parameters, found, strict=True):
            row.append(torch.zeros_like(parameter) if g is None else g.to_dense())
    return [torch.stack(row) if row else p.new_zeros(0, *p.shape) for row, p in zip(rows, parameters, strict=True)]
