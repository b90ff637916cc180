"""Embeddings: a sample's gradient has only the rows that it looks up."""

from __future__ import annotations

import torch
from torch import nn

from neuromanifold.persample.gradients import Form, Rows
from neuromanifold.persample.rules.linear import positions
from neuromanifold.persample.rules.registry import Call, rule


@rule(nn.Embedding, parameters=("weight",), extra_dims=True)
def embedding(call: Call) -> dict[str, Form]:
    """y_t = W[id_t], so ∂/∂W[r] = Σ of g_t over the positions with id_t = r; the padding row has none."""
    ids, g = call.x.flatten(1) if call.x.ndim > 1 else call.x[:, None], positions(call.g)
    padding: int | None = call.module.padding_idx  # type: ignore[assignment]
    if padding is not None:
        g = torch.where((ids == padding)[..., None], 0.0, g)
    return {"weight": Rows(g, ids.long(), call.module.num_embeddings)}  # type: ignore[arg-type]
