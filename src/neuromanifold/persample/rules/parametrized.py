"""Layers whose weight is computed from other parameters: weight normalisation and all of torch's parametrizations.

With W = f(θ) the gradient of a sample with respect to θ is (∂f/∂θ)ᵀ times the one with respect to W, which the layer's
own rule gives; it is written out for a few samples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList
from typing_extensions import override

from neuromanifold.persample.gradients import Form, root_mean_square
from neuromanifold.persample.rules.registry import Call, NotApplicableError, Rule, Slot, find_rule

_TIMES = 4  # evaluations of a weight, to see whether it is always the same


@dataclass
class Mapped(Form):
    """Gradients with respect to a parameter that a weight is computed from: (∂f/∂θ)ᵀ times those of the weight."""

    inner: Form
    parts: ParametrizationList
    key: str

    def __post_init__(self) -> None:
        self.samples, self.device = self.inner.samples, self.inner.device
        self.shape = self.parts._parameters[self.key].shape  # type: ignore[union-attr]

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return (∂f/∂θ)ᵀ g_n for a few samples, [stop - start, *shape]."""
        return _back(
            self.parts, self.key, self.inner.gradients(start, stop, dtype).view(stop - start, *self.inner.shape)
        )

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return (∂f/∂θ)ᵀ Σ_n c_n g_n: the map is linear."""
        return _back(self.parts, self.key, self.inner.weighted_sum(weights)[None])[0]

    def magnitude(self) -> Tensor:
        """Return the root mean square of the first sample's: the map may scale those of the weight."""
        return root_mean_square(self.gradients(0, min(1, self.samples), torch.float32))

    @override
    def pieces(self) -> Iterator[tuple[int, int]]:
        return self.inner.pieces()


def parametrized_slots(module: nn.Module) -> dict[str, Slot]:
    """Return where the parameters of a layer's parametrizations are held, by their names in the layer."""
    return {
        f"parametrizations.{tensor}.{key}": Slot(parts._parameters, key)
        for tensor, parts in module.parametrizations.items()  # type: ignore[union-attr, operator]
        for key in parts._parameters
    }


def parametrized_rule(module: nn.Module) -> Rule | None:
    """Return the rule of a parametrized layer, from that of the layer itself; None if it has none."""
    parts: dict[str, ParametrizationList] = dict(module.parametrizations.items())  # type: ignore[union-attr, operator]
    base = find_rule(module, frozenset(parts))
    if base is None:
        return None
    names = {name: tuple(name.split(".")[1:]) for name in parametrized_slots(module)}

    def function(call: Call) -> dict[str, Form]:
        tensors = {names[name][0] for name in call.wanted if name in names}
        if call.validating and any(_changes(parts[tensor]) for tensor in tensors):
            raise NotApplicableError(f"The weight of {type(module).__name__} changes each time it is computed.")
        forms = base.function(call._replace(wanted=(call.wanted - names.keys()) | tensors))
        mapped = {
            name: Mapped(forms[tensor], parts[tensor], key)
            for name, (tensor, key) in names.items()
            if name in call.wanted
        }
        return forms | mapped

    return Rule(function, base.parameters | names.keys(), base.extra_dims, base.applies)


@torch.no_grad()
def _changes(part: ParametrizationList) -> bool:
    """Whether the weight differs from evaluation to evaluation: random, or iterated as in spectral norm."""
    if part.training and any(True for _ in part.buffers()):
        return True
    first, *others = (functional_call(part, _values(part, None), ()) for _ in range(_TIMES))
    return not all(torch.equal(first, other) for other in others)


def _values(part: ParametrizationList, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return copies of parameters and buffers, in another precision if one is given."""
    everything = (*part.named_parameters(), *part.named_buffers())
    return {
        name: value.detach().to(dtype if dtype and value.is_floating_point() else value.dtype, copy=True)
        for name, value in everything
    }


def _back(part: ParametrizationList, key: str, g: Tensor) -> Tensor:
    """Return (∂f/∂θ)ᵀ g for g [n, *weight], with θ the parameter `key`."""
    if len(part) == 1 and type(part[0]) is parametrizations._WeightNorm and g.ndim > 2:
        return _through_weight_norm(int(part[0].dim), key, _values(part, g.dtype), g)
    values = _values(part, None)
    with torch.enable_grad():
        theta = values[key].requires_grad_()
        weight = functional_call(part, values, ())
    found = g.new_zeros(len(g), *theta.shape)
    if weight.requires_grad:
        for to, one in zip(found, g, strict=True):
            (own,) = torch.autograd.grad(weight, theta, one.to(weight.dtype), retain_graph=True, allow_unused=True)
            if own is not None:
                to.copy_(own)
    return found


def _through_weight_norm(dim: int, key: str, values: dict[str, Tensor], g: Tensor) -> Tensor:
    """W = m v/‖v‖, norms over all dimensions but one: ∂m = ⟨v, g⟩/‖v‖ and ∂v = (m/‖v‖) (g - v ⟨v, g⟩/‖v‖²)."""
    m, v = values["original0"], values["original1"]
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    norm = v.square().sum(others, keepdim=True).sqrt()
    of_m = (v * g).sum([d + 1 for d in others], keepdim=True) / norm
    return of_m.view(len(g), *m.shape) if key == "original0" else (g - v * (of_m / norm)) * (m / norm)
