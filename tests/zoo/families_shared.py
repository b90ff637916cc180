"""Modules and parameters that are used several times: in several layouts, transposed, inside and outside of modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}
LAYOUTS = ("[B, d]", "[B*T, d]", "[T*B, d]", "[B, T, d]", "[T, B, d]", "[1, B, d]", "[B, 1, d]", "[T, d] of a table")


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def in_layout(layer: Any, x: Tensor, layout: str, table: Tensor | None = None) -> Tensor:
    """A layer on x [B, T, d], called in a layout; [B, d] comes out."""
    size, steps = x.shape[:2]
    if layout == "[B, d]":
        return layer(x.mean(1))
    if layout == "[B*T, d]":
        return layer(x.reshape(size * steps, -1)).view(size, steps, -1).mean(1)
    if layout == "[T*B, d]":
        return layer(x.transpose(0, 1).reshape(size * steps, -1)).view(steps, size, -1).square().mean(0)
    if layout == "[B, T, d]":
        return layer(x)[:, -1]
    if layout == "[T, B, d]":
        return layer(x.transpose(0, 1))[0]
    if layout == "[1, B, d]":
        return layer(x[None, :, 0])[0]
    if layout == "[B, 1, d]":
        return layer(x[:, :1])[:, 0]
    assert table is not None
    return (layer(table[:steps]) * x).sum(1)


def shared_layer(m: Maker) -> nn.Module:
    return m.pick(
        "layer",
        nn.Linear(m.d, m.d),
        nn.Linear(m.d, m.d, bias=False),
        nn.LayerNorm(m.d),
        nn.RMSNorm(m.d),
        nn.Sequential(nn.Linear(m.d, m.d), nn.Tanh(), nn.Linear(m.d, m.d)),
    )


@kind
def called_in_two_layouts(m: Maker) -> Case:
    first, second = m.pick("first", *LAYOUTS), m.pick("second", *reversed(LAYOUTS))

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(in_layout(n.a, x, first, n.table))
        return n.h(z + in_layout(n.a, x + z[:, None], second, n.table))

    parts = {"a": shared_layer(m), "h": m.head(), "table": nn.Buffer(m.randn(5, m.d))}
    return m.case(run, m.inputs(m.t, m.d), parts)


@kind
def called_in_another_layout_later(m: Maker) -> Case:
    """The layout depends on the batch."""
    first, second = m.pick("first", *LAYOUTS), m.pick("second", *LAYOUTS[1:])

    def run(n: Any, x: Tensor, flag: Tensor) -> Tensor:
        return n.h(torch.tanh(in_layout(n.a, x, second if flag else first, n.table)))

    inputs = [(x, torch.tensor(i > 0)) for i, x in enumerate(m.inputs(m.t, m.d))]
    return m.case(run, inputs, {"a": shared_layer(m), "h": m.head(), "table": nn.Buffer(m.randn(5, m.d))})


@kind
def called_as_often_as_the_data_say(m: Maker) -> Case:
    def run(n: Any, x: Tensor, times: Tensor) -> Tensor:
        for _ in range(int(times)):
            x = torch.tanh(n.a(x))
        return n.h(x)

    inputs = [(x, times) for x, times in zip(m.inputs(m.d), m.randint(4, len(m.spec.sizes)), strict=True)]
    return m.case(run, inputs, {"a": shared_layer(m), "h": m.head()})


@kind
def tied_to_an_embedding(m: Maker) -> Case:
    """Logits by the transposed table; the decoder is a module with the same parameter, or a function."""
    how = m.pick("how", "module", "function", "matmul", "embedding of all")

    def run(n: Any, ids: Tensor) -> Tensor:
        z = torch.tanh(n.a(n.e(ids))).mean(1)
        if how == "module":
            return n.out(z)
        if how == "function":
            return functional.linear(z, n.e.weight)
        return z @ (n.e.weight.T if how == "matmul" else n.e(torch.arange(n.e.num_embeddings)).T)

    parts = {"e": nn.Embedding(m.c, m.d), "a": nn.Linear(m.d, m.d)}
    if how == "module":
        parts["out"] = nn.Linear(m.d, m.c, bias=False)
        parts["out"].weight = parts["e"].weight
    return m.case(run, [m.randint(m.c, size, m.t) for size in m.spec.sizes], parts)


@kind
def tied_between_layers(m: Maker) -> Case:
    """The weight of one layer is that of another, as it is or as its own transpose (an autoencoder)."""
    how = m.pick("how", "same", "transposed", "both biases", "convolution")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        if how == "transposed":
            return n.h(functional.linear(z, n.a.weight.T))
        if how == "convolution":
            return n.h(torch.tanh(functional.conv1d(z[..., None], n.a.weight[..., None])[..., 0]))
        return n.h(torch.tanh(n.b(z)))

    parts = {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "h": m.head()}
    if how in ("same", "both biases"):
        parts["b"].weight = parts["a"].weight
    if how == "both biases":
        parts["b"].bias = parts["a"].bias
    return m.case(run, m.inputs(m.d), parts)


@kind
def used_inside_and_outside(m: Maker) -> Case:
    """A module's parameter also as a scale, a penalty on weights, or a constant added to logits."""
    how = m.pick("how", "scale", "norm", "row", "sum", "attention")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        if how == "scale":
            z = z * n.a.bias
        elif how == "norm":
            z = z / n.a.weight.norm()
        elif how == "row":
            z = z + n.a.weight[0]
        elif how == "sum":
            z = z + n.a.weight.sum() * x
        else:
            z = (z @ n.a.weight.T).softmax(-1) @ n.a.weight
        return n.h(z)

    return m.case(run, m.inputs(m.d), {"a": nn.Linear(m.d, m.d), "h": m.head()})


@kind
def the_same_module_under_two_names(m: Maker) -> Case:
    layer = shared_layer(m)

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(torch.tanh(n.b(torch.tanh(n.a(x)))))

    return m.case(run, m.inputs(m.t, m.d)[:0] or m.inputs(m.d), {"a": layer, "b": layer, "h": m.head()})


@kind
def siamese(m: Maker) -> Case:
    """Two inputs through one module: one after the other, below each other, or beside each other."""
    how = m.pick("how", "one by one", "cat", "stack", "stack last", "interleaved")

    def run(n: Any, x: Tensor) -> Tensor:
        a, b = x[:, 0], x[:, 1]
        if how == "one by one":
            u, v = n.a(a), n.a(b)
        elif how == "cat":
            u, v = n.a(torch.cat([a, b])).chunk(2)
        elif how == "stack":
            u, v = n.a(torch.stack([a, b]))
        elif how == "stack last":
            u, v = n.a(torch.stack([a, b], 1)).unbind(1)
        else:
            both = n.a(torch.stack([a, b], 1).flatten(0, 1))
            u, v = both[::2], both[1::2]
        return n.h((u - v).square())

    return m.case(run, m.inputs(2, m.d), {"a": shared_layer(m), "h": m.head()})


@kind
def convolution_in_several_sizes(m: Maker) -> Case:
    """One convolution on images of several sizes, on frames and on patches."""

    def run(n: Any, x: Tensor) -> Tensor:
        full = torch.tanh(n.conv(x)).mean((2, 3))
        half = torch.tanh(n.conv(x[..., ::2, ::2])).mean((2, 3))
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        small = torch.tanh(n.conv(patches)).mean((2, 3)).view(len(x), -1, full.shape[1]).mean(1)
        return n.h(full + half * small)

    inputs = m.inputs(m.d, 4, 4)
    return m.case(run, inputs, {"conv": nn.Conv2d(m.d, 2, m.pick("size", 1, 3), padding="same"), "h": m.head(2)})


@kind
def prelu_and_biases_shared(m: Maker) -> Case:
    """One activation with a parameter after several layers, and one bias in two layers."""

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.act(n.a(x))
        z = n.act(n.b(z.transpose(0, 1))).transpose(0, 1) if x.ndim > 2 else n.act(n.b(z))
        return n.h(z.mean(1) if z.ndim > 2 else z)

    parts = {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "act": nn.PReLU(), "h": m.head()}
    if m.pick("shared bias", False, True):
        parts["b"].bias = parts["a"].bias
    return m.case(run, m.inputs(m.d) if m.pick("shape", 1, 2) == 1 else m.inputs(m.t, m.d), parts)
