"""A layer and its rule, to copy and change.  `python docs/skeletons/rule.py` checks it and prints a table."""

import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.gradients import Dense, Form, Product
from neuromanifold.persample.rules import Call
from neuromanifold.persample.rules.linear import positions


class MyLayer(nn.Module):
    """y_t = gain∘(W x_t), for any number of dimensions between samples and features."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outs, ins) / ins**0.5)
        self.gain = nn.Parameter(torch.ones(outs))

    def forward(self, x: Tensor) -> Tensor:
        """[n, ..., i] to [n, ..., o]."""
        return self.gain * (x @ self.weight.T)


# `parameters`: the names of all that the layer may have.  `extra_dims`: whether inputs may have any number of
# dimensions between the samples and what the layer sees; leave it out if the layer takes a fixed number.
@nm.rule(MyLayer, parameters=("weight", "gain"), extra_dims=True)
def my_layer(call: Call) -> dict[str, Form]:
    """∂/∂W = Σ_t (gain∘g_t) x_tᵀ and ∂/∂gain = Σ_t g_t∘(W x_t), for each sample."""
    layer = call.module
    x, g = positions(call.x), positions(call.g)  # [n, t, i], [n, t, o]
    found: dict[str, Form] = {}
    if "weight" in call.wanted:
        found["weight"] = Product(g * layer.gain, x)  # [o, i]
    if "gain" in call.wanted:
        found["gain"] = Dense((g * (x @ layer.weight.T)).sum(1))  # [n, o]
    return found


if __name__ == "__main__":
    # Odd and different sizes; more dimensions than two if the layer takes them.
    print(nm.check_rule(MyLayer(5, 3), torch.randn(4, 2, 5)))
