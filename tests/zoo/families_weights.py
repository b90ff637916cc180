"""Weights that are replaced, computed, quantised, clipped, detached or used by functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def quantised(w: Tensor) -> Tensor:
    return (w.detach() * 4).round() / 4


def mlp(m: Maker) -> dict[str, Any]:
    return {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "h": m.head()}


def through(n: Any, x: Tensor) -> Tensor:
    return n.h(torch.tanh(n.b(torch.tanh(n.a(x)))))


def _new_weight(how: str, w: Tensor) -> Tensor:
    return quantised(w) if how == "quantised" else w.detach().clamp(-0.5, 0.5)


@kind
def data_replaced_in_forward(m: Maker) -> Case:
    """`weight.data = ...` before the module is called: the model is a function of what is replaced."""
    how, which = m.pick("how", "quantised", "clipped"), m.pick("which", "b", "a", "h", "all")
    inputs = m.inputs(m.d) if m.pick("rows", False, True) else m.inputs(m.t, m.d)

    def run(n: Any, x: Tensor) -> Tensor:
        for layer in (n.a, n.b, n.h) if which == "all" else (getattr(n, which),):
            layer.weight.data = _new_weight(how, layer.weight)
        z = through(n, x)
        return z.mean(1) if z.ndim > 2 else z

    return m.case(run, inputs, mlp(m), changes_itself=True)


@kind
def data_replaced_later(m: Maker) -> Case:
    """From the second batch on, weights are multiplied by what the batch says."""

    def run(n: Any, x: Tensor, scale: Tensor) -> Tensor:
        n.b.weight.data = n.original * scale
        return through(n, x)

    inputs = [(x, torch.tensor(1.0 + i).double()) for i, x in enumerate(m.inputs(m.d))]
    case = m.case(run, inputs, {**mlp(m), "original": nn.Buffer(m.randn(m.d, m.d))}, changes_itself=True)
    case.model.b.weight.data = case.model.original.clone()
    return case


class PreHook:
    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, module: nn.Module, args: Any) -> None:
        del args
        module.weight.data = _new_weight(self.how, module.weight)


@kind
def data_replaced_by_a_hook(m: Maker) -> Case:
    parts = mlp(m)
    parts[m.pick("which", "b", "a", "h")].register_forward_pre_hook(PreHook(m.pick("how", "quantised", "clipped")))
    return m.case(through, m.inputs(m.d), parts, changes_itself=True)


class QuantisedLinear(nn.Linear):
    """Its own forward: data replaced, then the ordinary one."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = quantised(self.weight)
        return super().forward(x)


@kind
def data_replaced_in_a_subclass(m: Maker) -> Case:
    return m.case(through, m.inputs(m.d), {**mlp(m), "b": QuantisedLinear(m.d, m.d)}, changes_itself=True)


@kind
def averages_swapped_in(m: Maker) -> Case:
    """Hooks that run the first layer with averaged weights and put its own back afterwards."""

    def swap(module: nn.Module, *_: Any) -> None:
        module.weight.data, module.average = module.average, module.weight.data

    parts = mlp(m)
    parts["a"].average = m.randn(m.d, m.d)
    parts["a"].register_forward_pre_hook(swap)
    parts["a"].register_forward_hook(swap)

    def run(n: Any, x: Tensor) -> Tensor:
        n.a.average = n.a.average.to(x.dtype)
        return through(n, x)

    return m.case(run, m.inputs(m.d), parts)


@kind
def straight_through(m: Maker) -> Case:
    """w + (q(w) - w).detach(), by a function or inside a module's place."""

    def run(n: Any, x: Tensor) -> Tensor:
        w = n.b.weight
        w = w + (quantised(w) - w).detach()
        return n.h(torch.tanh(functional.linear(torch.tanh(n.a(x)), w, n.b.bias)))

    return m.case(run, m.inputs(m.d), mlp(m))


@kind
def detached(m: Maker) -> Case:
    """A weight used once with a gradient and once without, by the module and by a function."""
    order = m.pick("order", "module first", "function first", "function only")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        stopped = functional.linear(z, n.b.weight.detach(), n.b.bias if order == "function only" else None)
        if order == "function only":
            return n.h(stopped)
        return n.h(
            torch.tanh(n.b(stopped)) if order == "function first" else functional.linear(n.b(z), n.b.weight.detach())
        )

    return m.case(run, m.inputs(m.d), mlp(m))


@kind
def standardised(m: Maker) -> Case:
    """Weight standardisation of convolutions and linear layers, on frames as rows or not."""
    frames = m.pick("frames", False, True)

    def run(n: Any, x: Tensor) -> Tensor:
        w = n.conv.weight
        w = (w - w.mean((1, 2), keepdim=True)) / (w.std((1, 2), keepdim=True) + 1e-5)
        rows = x.flatten(0, 1) if frames else x[:, 0]
        z = torch.tanh(functional.conv1d(rows, w, n.conv.bias)).mean(-1)
        return n.h(z.unflatten(0, (len(x), -1)).mean(1) if frames else z)

    return m.case(run, m.inputs(m.t, m.d, 3), {"conv": nn.Conv1d(m.d, 4, 2), "h": m.head(4)})


class Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return torch.tanh(w) * 2


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


class WithParameters(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d, 1))

    def forward(self, w: Tensor) -> Tensor:
        return w * self.scale


@kind
def parametrized(m: Maker) -> Case:
    parts = mlp(m)
    how = m.pick("how", "scaled", "symmetric", "own parameters", "two", "weight_norm", "spectral_norm", "orthogonal")
    layer = parts["b"]
    if how == "weight_norm":
        parametrizations.weight_norm(layer)
    elif how == "spectral_norm":
        parametrizations.spectral_norm(layer)
    elif how == "orthogonal":
        parametrizations.orthogonal(layer, orthogonal_map="cayley", use_trivialization=False)
    elif how == "two":
        parametrize.register_parametrization(layer, "weight", Scaled())
        parametrize.register_parametrization(layer, "weight", WithParameters(m.d))
    else:
        extra = {"scaled": Scaled(), "symmetric": Symmetric(), "own parameters": WithParameters(m.d)}[how]
        parametrize.register_parametrization(layer, "weight", extra)
    rows = m.pick("rows", False, True)

    def run(n: Any, x: Tensor) -> Tensor:
        z = through(n, x.flatten(0, 1) if rows else x[:, 0])
        return z.unflatten(0, (len(x), -1)).mean(1) if rows else z

    return m.case(run, m.inputs(m.t, m.d), parts)


@kind
def old_reparametrizations(m: Maker) -> Case:
    """torch.nn.utils.weight_norm and spectral_norm with hooks, in eval mode."""
    import warnings

    parts = mlp(m)
    how, which = m.pick("how", "weight_norm", "spectral_norm"), m.pick("which", "b", "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts[which] = getattr(nn.utils, how)(parts[which])
    return m.case(through, m.inputs(m.d), parts)


@kind
def used_by_functions(m: Maker) -> Case:
    """A module's weight in a function, the module itself elsewhere, or never called."""
    how = m.pick("how", "both", "transposed", "function", "einsum", "matmul", "bias alone")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        w = n.b.weight
        extra = {
            "both": lambda: functional.linear(z, w, n.b.bias),
            "transposed": lambda: z @ w,
            "function": lambda: functional.linear(z, w),
            "einsum": lambda: torch.einsum("...i,oi->...o", z, w),
            "matmul": lambda: torch.matmul(w, z[..., None])[..., 0],
            "bias alone": lambda: z * n.b.bias,
        }[how]()
        z = n.h(torch.tanh(extra if how == "function" else extra + n.b(z)))
        return z.mean(1) if z.ndim > 2 else z

    inputs = m.inputs(m.d) if m.pick("shape", "rows", "positions") == "rows" else m.inputs(m.t, m.d)
    return m.case(run, inputs, mlp(m))


@kind
def functional_calls(m: Maker) -> Case:
    how = m.pick("how", "same", "scaled", "detached", "mixed", "whole model")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        names = dict(n.b.named_parameters())
        if how == "scaled":
            names = {name: 2 * p.tanh() for name, p in names.items()}
        elif how == "detached":
            names = {name: p.detach() if name == "weight" else p for name, p in names.items()}
        elif how == "mixed":
            names = {"weight": names["weight"] + names["bias"]}
        z = torch.tanh(torch.func.functional_call(n.b, names, (z,)))
        return n.h(n.b(z) if how == "same" else z)

    return m.case(run, m.inputs(m.d), mlp(m))


@kind
def low_rank_updates(m: Maker) -> Case:
    """LoRA by a function, by a module beside, or merged into the weight, with W frozen or not."""
    how = m.pick("how", "merged", "beside", "one row for each sample")
    frozen = m.pick("frozen", False, True)

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        if how == "merged":
            z = functional.linear(z, n.b.weight + n.up @ n.down, n.b.bias)
        elif how == "beside":
            z = n.b(z) + z @ n.down.T @ n.up.T
        else:
            low = n.down.expand(len(x), -1, -1)  # batched products
            z = n.b(z) + torch.bmm(torch.bmm(z[:, None], low.mT), n.up.T.expand(len(x), -1, -1))[:, 0]
        return n.h(torch.tanh(z))

    case = m.case(run, m.inputs(m.d), {**mlp(m), "up": m.parameter(m.d, 2), "down": m.parameter(2, m.d)})
    case.model.b.weight.requires_grad_(not frozen)
    return case


@kind
def weights_made_by_a_network(m: Maker) -> Case:
    """A hypernetwork: weights for each sample, or for all, from parameters."""
    each = m.pick("for each sample", True, False)

    def run(n: Any, x: Tensor) -> Tensor:
        if each:
            w = n.b(x)[:, :, None] * n.a(x)[:, None]  # [B, d, d]
            return n.h(torch.einsum("noi,ni->no", w, x))
        return n.h(x @ n.b(n.code).view(x.shape[1], -1)[:, :1] + n.a(x))

    return m.case(run, m.inputs(m.d), {**mlp(m), "code": m.parameter(m.d)})


@kind
def swapped_for_another_parameter(m: Maker) -> Case:
    """Two modules exchange their weights as the batch says."""

    def run(n: Any, x: Tensor, flag: Tensor) -> Tensor:
        first, second = (n.b, n.a) if flag else (n.a, n.b)
        return n.h(torch.tanh(second(torch.tanh(first(x)))))

    return m.case(run, [(x, torch.tensor(i > 0)) for i, x in enumerate(m.inputs(m.d))], mlp(m))
