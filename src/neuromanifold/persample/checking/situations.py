"""Small networks that use a module in several ways, and the state of a module that a rule must not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.persample.checking.inputs import Inputs


class Network(nn.Module):
    """A network whose forward calls one layer in a given way."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Inputs], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, given: Inputs) -> Tensor:
        """Return the output of the situation's call of the layer."""
        return self.call(self.layer, given)


def twice(layer: nn.Module, given: Inputs) -> Tensor:
    """Call the layer on the samples in their order and in the opposite one, and concatenate both outputs."""
    turned = given.sliced(lambda t: t.flip(0))
    outputs = [layer(*each.args, **each.options) for each in (given, turned)]
    return torch.cat([output.flatten(1) for output in outputs], 1)


def rows(layer: nn.Module, given: Inputs) -> Tensor:
    """Call the layer with two rows of the first dimension for each sample, as patches or frames have."""
    x = given.args[0]
    output: Tensor = layer(torch.stack([x, x.flip(0)], 1).flatten(0, 1))
    return output.view(len(x), -1)


def shared(layer: nn.Module, given: Inputs) -> Tensor:
    """Call the layer once for all samples, and broadcast its output over the batch, as position embeddings are."""
    x = given.args[0]
    output: Tensor = layer(x[:1])
    weights = torch.linspace(-1, 2, len(x), dtype=output.dtype, device=output.device)
    return (output * weights.view(-1, *[1] * (output.ndim - 1))).flatten(1)


def state(module: nn.Module) -> list[Any]:
    """Return the attributes of a module and of its submodules, and copies of the values of their tensors."""
    found: list[Any] = []
    for part in module.modules():
        for key, value in vars(part).items():
            found.append(key)
            found.extend([*value, *value.values()] if isinstance(value, dict) else [value])
            found.extend(copy.copy(value) if isinstance(value, (list, set)) else ())
        tensors = (*part._parameters.values(), *part._buffers.values())
        found.extend(tensor.detach().clone() for tensor in tensors if tensor is not None)
    return found


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether two states have the same objects or equal values."""

    def equal(a: Any, b: Any) -> bool:
        if a is b:
            return True
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and torch.equal(a, b)
        return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b

    return len(before) == len(after) and all(equal(a, b) for a, b in zip(before, after, strict=True))
