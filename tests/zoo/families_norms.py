"""Norm-like modules as other libraries define them, on frames or positions flattened into the first dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


class _Norm(nn.Module):
    """A weight and a bias of shape [d]; features are last, [..., d]."""

    shape: tuple[int, ...] = ()

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(*self.shape, d)), nn.Parameter(torch.zeros(*self.shape, d))


class GlobalResponseNorm(_Norm):
    """As in ConvNeXt V2, on [N, T, d]: statistics over positions."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(dim=1, keepdim=True)
        return self.weight * (x * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.bias + x


class WideGlobalResponseNorm(GlobalResponseNorm):
    """Parameters of shape [1, 1, d]."""

    shape = (1, 1)


class ChannelsFirstLayerNorm(_Norm):
    """On [N, d, T]: over channels."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
        return self.weight[:, None] * (x - mean) / (var + 1e-6).sqrt() + self.bias[:, None]


class _Scale(nn.Module):
    """A weight of shape [d]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))


class GatedRMSNorm(_Scale):
    """As in Mamba 2: the gate is the second argument."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class OnePlusRMSNorm(GatedRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x, gate) + x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class ClampedRMSNorm(_Scale):
    """Linear in the weight for 0 to 2, and nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.clamp(0, 2) * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class AbsoluteLayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.abs() * nn.functional.layer_norm(x, x.shape[-1:]) + self.bias


class BiasFirstLayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (nn.functional.layer_norm(x, x.shape[-1:]) + self.bias)


class TwiceRMSNorm(_Norm):
    """The weight comes in twice, before and after."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() + self.bias


class ScaleNorm(nn.Module):
    """One number, of shape [1]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.d = d

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)


class StoppedLayerNorm(_Norm):
    """Part of the weight's gradient is stopped."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.layer_norm(x, x.shape[-1:])
        return 0.5 * self.weight * y + 0.5 * self.weight.detach() * y + self.bias


class PositionRMSNorm(_Norm):
    """Over positions, dimension 1 of [N, T, d]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() + self.bias


class FloatRMSNorm(_Scale):
    """Works in float32 if given less, as transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class ConditionalLayerNorm(_Norm):
    """Scale and shift also come from a condition, one row for each row."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return (self.weight + condition) * nn.functional.layer_norm(x, x.shape[-1:]) + self.bias * condition


LAST = (GatedRMSNorm, OnePlusRMSNorm, FloatRMSNorm, ScaleNorm, AbsoluteLayerNorm, BiasFirstLayerNorm, TwiceRMSNorm)
ODD = (ClampedRMSNorm, StoppedLayerNorm)
MIDDLE = (GlobalResponseNorm, WideGlobalResponseNorm, PositionRMSNorm)


ORDERS = ("samples first", "positions first", "apart", "one position", "positions, apart")


def _layout(m: Maker, *orders: str) -> Any:
    """How [B, T, ...] becomes rows, and rows become samples again."""
    order = m.pick("order", *(orders or ORDERS))

    def flatten(x: Tensor) -> Tensor:
        if order == "one position":
            return x[:, 0]
        if order.startswith("positions"):
            x = x.transpose(0, 1)
        return x if order.endswith("apart") else x.flatten(0, 1)

    def pool(z: Tensor, size: int) -> Tensor:
        if order == "one position":
            return z
        if order.endswith("apart"):
            return z.mean(0 if order.startswith("positions") else 1)
        return (
            z.unflatten(0, (-1, size)).mean(0) if order.startswith("positions") else z.unflatten(0, (size, -1)).mean(1)
        )

    return flatten, pool


def _last(norm: type[nn.Module]) -> Kind:
    def make(m: Maker) -> Case:
        flatten, pool = _layout(m)
        gated = norm is GatedRMSNorm and m.pick("gate", False, True)

        def run(n: Any, x: Tensor) -> Tensor:
            z = n.a(flatten(x))
            z = n.norm(z, gate=flatten(x)) if gated else n.norm(z)
            return n.h(pool(torch.tanh(z), len(x)))

        return m.case(run, m.inputs(m.t, m.d), {"a": nn.Linear(m.d, m.d), "norm": norm(m.d), "h": m.head()})

    return make


def _middle(norm: type[nn.Module]) -> Kind:
    """On rows [N, S, d], S = 2, 3 or as many as there are samples."""

    def make(m: Maker) -> Case:
        flatten, pool = _layout(m, "samples first", "positions first", "apart", "one position")
        inner = m.pick("inner", 2, 3, m.spec.sizes[0], m.d, 1)

        def run(n: Any, x: Tensor) -> Tensor:
            return n.h(pool(torch.tanh(n.norm(n.a(flatten(x)))), len(x)).mean(1))

        return m.case(run, m.inputs(m.t, inner, m.d), {"a": nn.Linear(m.d, m.d), "norm": norm(m.d), "h": m.head()})

    return make


def _channels_first(m: Maker) -> Case:
    """On rows [N, d, S], or on [N, T, d, S], where it is over positions; on [T, N, d, S] it would mix the samples."""
    flatten, pool = _layout(m, *ORDERS[:-1])
    inner = m.pick("inner", 2, m.d, m.spec.sizes[0], 1)

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(pool(torch.tanh(n.norm(flatten(x))), len(x)).mean(-1))

    return m.case(run, m.inputs(m.t, m.d, inner), {"norm": ChannelsFirstLayerNorm(m.d), "h": m.head()})


def _conditional(m: Maker) -> Case:
    flatten, pool = _layout(m)

    def run(n: Any, x: Tensor) -> Tensor:
        rows = flatten(x)
        return n.h(pool(n.norm(rows, torch.tanh(n.a(rows))), len(x)))

    parts = {"a": nn.Linear(m.d, m.d), "norm": ConditionalLayerNorm(m.d), "h": m.head()}
    return m.case(run, m.inputs(m.t, m.d), parts)


def _called_twice(m: Maker) -> Case:
    """Once on samples, once on rows."""
    norm = m.pick("norm", *LAST, *ODD)(m.d)
    flatten, pool = _layout(m)

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(n.norm(pool(n.norm(flatten(x)), len(x))))

    return m.case(run, m.inputs(m.t, m.d), {"norm": norm, "h": m.head()})


KINDS |= {norm.__name__: _last(norm) for norm in (*LAST, *ODD)}
KINDS |= {norm.__name__: _middle(norm) for norm in MIDDLE}
KINDS |= {
    "ChannelsFirstLayerNorm": _channels_first,
    "ConditionalLayerNorm": _conditional,
    "called twice": _called_twice,
}


_ENTRYWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "1 + w": lambda w: 1 + w,
    "exp": lambda w: -torch.exp(w),
    "softplus": torch.nn.functional.softplus,
    "square": lambda w: w**2,
    "in place": lambda w: w.mul(2).add_(1),
    "view": lambda w: (1 + w)[None],
    "itself twice": lambda w: w * w.sigmoid(),
}


def entrywise_function_of_a_scale(m: Maker) -> Case:
    """As in Gemma and nanoGPT: norms whose scale is a function of each entry, or that call functional.layer_norm."""
    scale = _ENTRYWISE[m.pick("function", *_ENTRYWISE)]
    fused, rows, twice = m.pick("fused", False, True), m.pick("rows", False, True), m.pick("twice", False, True)

    def normed(n: Any, x: Tensor) -> Tensor:
        if fused:
            return torch.nn.functional.layer_norm(x, (m.d,), scale(n.scale).reshape(m.d), n.shift)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale(n.scale) + n.shift

    def run(n: Any, x: Tensor) -> Tensor:
        x = normed(n, torch.tanh(n.a(x)))
        x = normed(n, x) if twice else x
        z = n.h(x)
        return z.mean(1) if z.ndim > 2 else z

    parts = {"a": nn.Linear(m.d, m.d), "scale": m.parameter(m.d), "shift": m.parameter(m.d), "h": m.head()}
    return m.case(run, m.inputs(m.d) if rows else m.inputs(m.t, m.d), parts)


KINDS["entrywise_function_of_a_scale"] = entrywise_function_of_a_scale
