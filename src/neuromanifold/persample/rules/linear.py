"""Linear layers: torch's, on any number of leading dimensions, and the transposed one of GPT-2."""

from __future__ import annotations

from torch import Tensor, nn

from neuromanifold.persample.gradients import Dense, Form, Product
from neuromanifold.persample.rules.registry import Call, rule, rule_where


@rule(nn.Linear, extra_dims=True)
def linear(call: Call) -> dict[str, Form]:
    """y_t = W a_t + b, so ∂/∂W = Σ_t g_t a_tᵀ and ∂/∂b = Σ_t g_t."""
    g = positions(call.g)  # [n, t, o]
    found: dict[str, Form] = {}
    if "weight" in call.wanted:
        found["weight"] = Product(g, positions(call.x))  # [o, i]
    if "bias" in call.wanted:
        found["bias"] = Dense.summed(g, (1,))
    return found


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


@rule_where(_is_conv1d, parameters=("weight", "bias"), extra_dims=True)
def hugging_face_conv1d(call: Call) -> dict[str, Form]:
    """y_t = Wᵀ a_t + b with W stored as [i, o]."""
    g = positions(call.g)
    found: dict[str, Form] = {}
    if "weight" in call.wanted:
        found["weight"] = Product(positions(call.x), g, turned=True)  # [i, o]
    if "bias" in call.wanted:
        found["bias"] = Dense.summed(g, (1,))
    return found


def positions(values: Tensor) -> Tensor:
    """Return [n, ..., d] as [n, t, d]; a tensor [n, d] has one position."""
    return values.unsqueeze(1) if values.ndim == 2 else values.flatten(1, -2)
