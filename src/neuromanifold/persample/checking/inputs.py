"""The inputs that `check_rule` calls a module with, and small networks that use a module in several ways."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call; tensors whose first dimension is as long as that of the first argument hold samples."""

    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def samples(self) -> int:
        """The number of samples: the length of the first argument."""
        return len(self.args[0])

    @property
    def single(self) -> bool:
        """Whether the call has one positional argument and nothing else."""
        return len(self.args) == 1 and not self.options

    def sliced(self, cut: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with a function applied to all tensors that hold samples."""

        def each(value: Any) -> Any:
            return cut(value) if isinstance(value, Tensor) and value.ndim and len(value) == self.samples else value

        return Inputs(tuple(map(each, self.args)), {key: each(value) for key, value in self.options.items()})

    def first(self, samples: int) -> Inputs:
        """Return the inputs of the first few samples."""
        return self.sliced(lambda t: t[:samples])

    def one(self, n: int) -> Inputs:
        """Return the inputs of sample number n alone."""
        return self.sliced(lambda t: t[n : n + 1])

    def ready(self, module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        """Return copies of the module and of the inputs, in a precision; float64 has the values of float32."""

        def each(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.detach().clone()
            return value.float().to(dtype) if value.is_floating_point() else value

        module = copy.deepcopy(module).float().to(dtype).eval()
        for parameter in own_parameters(module).values():
            parameter.requires_grad_(True)
        return module, Inputs(tuple(map(each, self.args)), {key: each(value) for key, value in self.options.items()})


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters by name, without those of its submodules."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def check_inputs(module: nn.Module, inputs: object, options: Mapping[str, Any] | None, samples: int) -> Inputs:
    """Return the inputs, if the module can be called with them and its samples do not influence each other."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if not args or not isinstance(args[0], Tensor):
        got = (
            f"a tuple that begins with {type(args[0]).__name__}" if isinstance(inputs, tuple) and args else repr(inputs)
        )
        raise TypeError(message("inputs", "a tensor, or a tuple that begins with one", got))
    x = args[0]
    if not x.ndim or len(x) < 2:
        advice = "The first dimension holds the samples."
        raise ValueError(message("inputs", "at least two samples", f"shape {list(x.shape)}", advice))
    given = Inputs(args, dict(options or {})).first(samples)
    copied, ready = given.ready(module, torch.float64)
    with torch.no_grad():
        try:
            output = copied(*ready.args, **ready.options)
            parts = [copied(*ready.one(n).args, **ready.one(n).options) for n in range(ready.samples)]
        except Exception as error:
            expected = f"what a {type(module).__name__} in float64 can be called with"
            raise ValueError(message("inputs", expected, f"{type(error).__name__}: {error}")) from error
    if not isinstance(output, Tensor):
        advice = "A rule gets one output gradient; a module with several outputs cannot have one."
        raise TypeError(message("module", "one that returns a tensor", f"a {type(output).__name__}", advice))
    if not output.ndim or len(output) != given.samples or not output.is_floating_point():
        expected = f"one whose output has the {given.samples} samples as its first dimension"
        raise ValueError(message("module", expected, f"{output.dtype} of shape {list(output.shape)}"))
    if not bool(output.isfinite().all()):
        raise ValueError(message("inputs", "such that the output is finite", "NaN or infinity in it"))
    if not torch.allclose(
        torch.cat(parts), output, rtol=1e-6, atol=1e-9 * float(output.abs().max()) if output.numel() else 0
    ):
        advice = "Samples that influence each other have no gradients of their own, and the module can have no rule."
        raise ValueError(message("module", "one that treats samples apart", "other outputs for single samples", advice))
    return given


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
