"""Where a rule must be right besides a plain call: small networks, what the driver gets, and what must not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.persample.accumulate import Pass
from neuromanifold.persample.checking.inputs import Inputs
from neuromanifold.persample.gradients import Form


class Network(nn.Module):
    """A module inside another."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Inputs], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, given: Inputs) -> Tensor:
        """Call it as this situation does."""
        return self.call(self.layer, given)


def twice(layer: nn.Module, given: Inputs) -> Tensor:
    """Once on the samples in their order, once in the opposite one."""
    turned = given.sliced(lambda t: t.flip(0))
    outputs = [layer(*each.args, **each.options) for each in (given, turned)]
    return torch.cat([output.flatten(1) for output in outputs], 1)


def rows(layer: nn.Module, given: Inputs) -> Tensor:
    """Samples that take two rows each of the first dimension, as patches or frames do."""
    x = given.args[0]
    output: Tensor = layer(torch.stack([x, x.flip(0)], 1).flatten(0, 1))
    return output.view(len(x), -1)


def shared(layer: nn.Module, given: Inputs) -> Tensor:
    """One input for all, which meets the samples later, as positions do."""
    x = given.args[0]
    output: Tensor = layer(x[:1])
    weights = torch.linspace(-1, 2, len(x), dtype=output.dtype, device=output.device)
    return (output * weights.view(-1, *[1] * (output.ndim - 1))).flatten(1)


class Kept:
    """Keeps what the driver would square."""

    waits = False

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor] = {}
        self.squares: dict[int, Tensor] = {}

    def add(self, gradients: object, made_by: Pass) -> None:
        """Gradients of whole batches are no matter of rules."""

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Keep."""
        del made_by
        with torch.no_grad():
            g = form.gradients(0, form.samples, torch.float64)
        self.gradients[i] = self.gradients[i] + g if i in self.gradients else g
        self.squares[i] = self.squares.get(i, torch.zeros_like(g[0])) + g.square().sum(0)

    def end_pass(self) -> None:
        """Nothing to do."""

    def end_batch(self) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Nothing to do."""


def state(module: nn.Module) -> list[Any]:
    """Everything that a module holds: its attributes, and copies of the values of its tensors."""
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
    """Whether two states are the same: identical, or equal values."""

    def equal(a: Any, b: Any) -> bool:
        if a is b:
            return True
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and torch.equal(a, b)
        return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b

    return len(before) == len(after) and all(equal(a, b) for a, b in zip(before, after, strict=True))
