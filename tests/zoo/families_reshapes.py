"""Reshapes: rows, windows, patches, tables, and dimensions that are as large as the batch by chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def layer(m: Maker) -> nn.Module:
    return m.pick("layer", nn.Linear(m.d, m.d), nn.LayerNorm(m.d), nn.Linear(m.d, m.d, bias=False))


@kind
def one_order_after_the_other(m: Maker) -> Case:
    """[B*T, d], then [T*B, d], then [T, B, d], with layers between."""
    read = m.pick("read", "mean", "first", "last")

    def run(n: Any, x: Tensor) -> Tensor:
        size, steps, width = x.shape
        z = torch.tanh(n.a(x.reshape(-1, width)))
        z = z.view(size, steps, width).transpose(0, 1).reshape(-1, width)
        z = torch.tanh(n.b(z)).view(steps, size, width)
        z = n.a(z)
        return n.h({"mean": z.mean(0), "first": z[0], "last": z[-1]}[read])

    return m.case(run, m.inputs(m.t, m.d), {"a": layer(m), "b": nn.Linear(m.d, m.d), "h": m.head()})


@kind
def as_many_positions_as_samples(m: Maker) -> Case:
    """T = B in the first batch; positions first, read at one of them."""
    steps = m.spec.sizes[0]
    at = m.pick("read at", 0, -1, "mean")
    order = m.pick("order", "positions first", "samples first", "features first")

    def run(n: Any, x: Tensor) -> Tensor:
        if order == "positions first":
            z = torch.tanh(n.a(x.transpose(0, 1)))
            return n.h(z.mean(0) if at == "mean" else z[at])
        if order == "samples first":
            z = torch.tanh(n.a(x))
            return n.h(z.mean(1) if at == "mean" else z[:, at])
        z = torch.tanh(n.mix(x.transpose(1, 2)))  # [B, d, T]
        return n.h(z.mean(2) if at == "mean" else z[..., at])

    parts = {"a": layer(m), "mix": nn.Linear(steps, steps), "h": m.head()}
    return m.case(run, m.inputs(steps, m.d), parts)


@kind
def windows(m: Maker) -> Case:
    """Swin-like: partitions of an image into windows [B*nW, w*w, d], and back."""
    shift = m.pick("shift", 0, 1)

    def run(n: Any, x: Tensor) -> Tensor:
        size, height, width, d = x.shape
        z = x.roll((-shift, -shift), (1, 2)).view(size, height // 2, 2, width // 2, 2, d)
        z = z.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
        z = torch.tanh(n.a(z)) + n.table
        z = n.b(z).view(size, height // 2, width // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        return n.h(z.roll((shift, shift), (1, 2)).mean((1, 2)))

    parts = {"a": layer(m), "b": nn.Linear(m.d, m.d), "table": m.parameter(4, m.d), "h": m.head()}
    return m.case(run, m.inputs(4, 2 * m.pick("columns", 1, 2), m.d), parts)


@kind
def window_bias(m: Maker) -> Case:
    """A relative-position bias looked up by an index, added to attention logits of windows [B*nW, heads, w, w]."""

    def run(n: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)  # [B*T, S, d]
        q, k = n.a(rows), n.b(rows)
        bias = n.table[n.index]
        weights = (q @ k.mT + bias).softmax(-1)
        return n.h((weights @ rows).mean(1).view(len(x), -1, rows.shape[-1]).mean(1))

    index = (torch.arange(3)[:, None] - torch.arange(3)[None] + 2).long()
    parts = {"a": layer(m), "b": nn.Linear(m.d, m.d), "table": m.parameter(5), "h": m.head(), "index": nn.Buffer(index)}
    return m.case(run, m.inputs(m.t, 3, m.d), parts)


@kind
def unfolded_patches(m: Maker) -> Case:
    """F.unfold and a linear layer, by columns or by rows; fold back."""
    how = m.pick("how", "columns", "rows", "tensor.unfold", "fold")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "tensor.unfold":
            z = x.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).flatten(3)
            return n.h(torch.tanh(n.a(z)).mean((1, 2)))
        z = functional.unfold(x, 2)  # [B, C*4, L]
        if how == "rows":
            z = torch.tanh(n.a(z.transpose(1, 2).flatten(0, 1))).view(len(x), z.shape[2], -1).mean(1)
        elif how == "fold":
            z = functional.fold(torch.tanh(n.w @ z), x.shape[2:], 2).flatten(2).mean(2)
            return n.g(z)
        else:
            z = torch.tanh(n.w[: n.a.out_features] @ z).mean(2)
        return n.h(z)

    parts = {"a": nn.Linear(m.d * 4, m.d), "w": m.parameter(m.d * 4, m.d * 4), "h": m.head(), "g": m.head()}
    return m.case(run, m.inputs(m.d, 3, 3), parts)


@kind
def shuffled_pixels(m: Maker) -> Case:
    how = m.pick("how", "shuffle", "unshuffle", "channels")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "shuffle":
            z = functional.pixel_shuffle(n.up(x), 2)
        elif how == "unshuffle":
            z = n.down(functional.pixel_unshuffle(x, 2))
        else:
            z = functional.channel_shuffle(n.up(x), 2)[:, : x.shape[1]]
        return n.h(torch.tanh(z).mean((2, 3)))

    parts = {"up": nn.Conv2d(m.d, 4 * m.d, 1), "down": nn.Conv2d(4 * m.d, m.d, 1), "h": m.head()}
    return m.case(run, m.inputs(m.d, 2, 4), parts)


@kind
def class_tokens(m: Maker) -> Case:
    """A learned token before the others, read at the end; positions first or samples first."""
    order, how = m.pick("order", "samples", "positions"), m.pick("how", "expand", "repeat", "cat of one", "prompt")

    def run(n: Any, x: Tensor) -> Tensor:
        size = len(x)
        token = n.prompt if how == "prompt" else n.token  # [k, d]
        token = token.repeat(size, 1, 1) if how == "repeat" else token[None].expand(size, -1, -1)
        z = torch.cat([token, n.a(x)], 1)
        z = z.transpose(0, 1) if order == "positions" else z
        dim = 0 if order == "positions" else 1
        z = torch.tanh(n.b(z)) * z.mean(dim, keepdim=True)
        return n.h(z[0] if order == "positions" else z[:, 0])

    parts = {"token": m.parameter(1, m.d), "prompt": m.parameter(3, m.d), "a": layer(m), "b": nn.Linear(m.d, m.d)}
    return m.case(run, m.inputs(m.t, m.d), {**parts, "h": m.head()})


@kind
def position_tables(m: Maker) -> Case:
    """Looked up with arange(T), [1, T] or [B, T] ids, by a module, a slice or an index; B may divide T."""
    how = m.pick("how", "arange", "[1, T]", "[B, T]", "slice", "index", "added in rows", "layer on the table")

    def run(n: Any, x: Tensor) -> Tensor:
        size, steps, width = x.shape
        ids = torch.arange(steps)
        if how == "added in rows":
            z = n.a((x + n.e(ids)).reshape(-1, width)).view_as(x) + n.e(ids.repeat(size)).view_as(x)
        else:
            table = {
                "arange": lambda: n.e(ids),
                "[1, T]": lambda: n.e(ids[None]),
                "[B, T]": lambda: n.e(ids[None].expand(size, -1)),
                "slice": lambda: n.e.weight[:steps],
                "index": lambda: n.e.weight[ids],
                "layer on the table": lambda: n.a(n.e(ids)),
            }[how]()
            z = n.a(x) + table
        at = {"first": z[:, 0], "mean": torch.tanh(z).mean(1), "max": z.amax(1)}[read]
        return n.h(at)

    read = m.pick("read", "mean", "first", "max")
    steps = m.pick("T", m.t, m.spec.sizes[0], 2 * m.spec.sizes[0])
    parts = {"e": nn.Embedding(max(steps, 1) + 1, m.d), "a": layer(m), "h": m.head()}
    return m.case(run, m.inputs(steps, m.d), parts)


@kind
def small_parameters(m: Maker) -> Case:
    """Scalars, shape [1], shape [1, 1, d], [B, d]-like by chance; added, multiplied, as exponents."""
    shape = m.pick("shape", (), (1,), (1, 1), (m.d,), (1, m.d), (m.spec.sizes[0], 1), (m.t, 1), (m.t, m.d))
    how = m.pick("how", "add", "mul", "exp", "power", "div", "temperature", "where", "lerp")

    def run(n: Any, x: Tensor) -> Tensor:
        z, s = n.a(x), n.s
        if len(shape) == 2 and shape[0] > 1 and shape[0] != x.shape[1]:
            s = s.mean(0)  # as many rows as the first batch has samples: not to be broadcast over positions
        z = {
            "add": lambda: z + s,
            "mul": lambda: z * s,
            "exp": lambda: z * s.exp(),
            "power": lambda: z.abs() ** s.sigmoid(),
            "div": lambda: z / (1 + s.square()),
            "temperature": lambda: (z * s).softmax(-1),
            "where": lambda: torch.where(z > 0, z, z * s),
            "lerp": lambda: torch.lerp(x, z, s.expand_as(z)),
        }[how]()
        return n.h(torch.tanh(z).mean(1)) * (n.s if len(shape) < 2 and n.s.numel() == 1 else 1)

    return m.case(run, m.inputs(m.t, m.d), {"a": layer(m), "s": m.parameter(*shape), "h": m.head()})


@kind
def one_output_layers(m: Maker) -> Case:
    """Biases of shape [1]: attention pooling by a layer with one output, one channel, one group."""
    how = m.pick("how", "pool", "gate", "convolution", "frames", "bilinear")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "pool":
            z = (n.one(x).softmax(1) * x).sum(1)
        elif how == "gate":
            z = (n.one(x.flatten(0, 1)).sigmoid().view(*x.shape[:2], 1) * x).mean(1)
        elif how == "convolution":
            z = x.mean(1) * n.conv(x.mT).mean(2)
        elif how == "frames":
            z = x.mean(1) * n.frame(x.flatten(0, 1)[:, None]).view(len(x), -1).mean(1, keepdim=True)
        else:
            z = x.mean(1) * n.bi(x[:, 0], x[:, -1])
        return n.h(z)

    parts = {"one": nn.Linear(m.d, 1), "conv": nn.Conv1d(m.d, 1, 1), "frame": nn.Conv1d(1, 1, 1)}
    return m.case(run, m.inputs(m.t, m.d), {**parts, "bi": nn.Bilinear(m.d, m.d, 1), "h": m.head()})


@kind
def norm_over_several_dimensions(m: Maker) -> Case:
    """LayerNorm((S, d)) on [B*T, S, d] with S as large as the first batch; GroupNorm and InstanceNorm on frames."""
    inner = m.pick("S", m.spec.sizes[0], 2, m.t)
    how = m.pick("norm", "layer", "group", "instance", "batch")

    def run(n: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1) if order == "samples" else x.transpose(0, 1).flatten(0, 1)
        z = torch.tanh(n.norm(n.a(rows)))
        z = z.unflatten(0, (len(x), -1)).mean(1) if order == "samples" else z.unflatten(0, (-1, len(x))).mean(0)
        return n.h(z.mean(1))

    order = m.pick("order", "samples", "positions")
    norm = {
        "layer": lambda: nn.LayerNorm((inner, m.d)),
        "group": lambda: nn.GroupNorm(1, inner),
        "instance": lambda: nn.InstanceNorm1d(inner, affine=True),
        "batch": lambda: nn.BatchNorm1d(inner),
    }[how]()
    d = m.d
    return m.case(run, m.inputs(m.t, inner, d), {"a": nn.Linear(d, d), "norm": norm, "h": m.head()})


@kind
def convolutions_on_frames(m: Maker) -> Case:
    """Videos [B, T, C, H, W] as [B*T, ...] or [T*B, ...], pooled over time; C may be one."""
    channels = m.pick("channels", 1, 2, m.spec.sizes[0])
    conv = m.pick("conv", nn.Conv2d(channels, 2, 2), nn.Conv2d(channels, 2 * channels, 1, groups=channels))
    order = m.pick("order", "samples", "positions")

    def run(n: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1) if order == "samples" else x.transpose(0, 1).flatten(0, 1)
        z = torch.tanh(n.conv(rows)).mean((2, 3))
        z = z.unflatten(0, (len(x), -1)).mean(1) if order == "samples" else z.unflatten(0, (-1, len(x))).mean(0)
        return n.h(z)

    return m.case(run, m.inputs(m.t, channels, 2, 3), {"conv": conv, "h": m.head(conv.out_channels)})


@kind
def complex_features(m: Maker) -> Case:
    """Spectra: real parameters on complex features, FFT layers, a complex product with real and imaginary weights."""
    how = m.pick("how", "filter", "linear on both", "real weight", "polar")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.fft.fft(n.a(x), dim=1)  # [B, T, d] complex
        if how == "filter":
            z = z * torch.complex(n.re, n.im)
        elif how == "linear on both":
            z = torch.complex(n.b(z.real), n.b(z.imag))
        elif how == "real weight":
            z = z @ n.w.to(z.dtype)
        else:
            z = z * torch.polar(n.re.exp(), n.im)
        return n.h(torch.fft.ifft(z, dim=1).real.tanh().mean(1))

    extra = {"re": m.parameter(m.d), "im": m.parameter(m.d), "w": m.parameter(m.d, m.d), "b": nn.Linear(m.d, m.d)}
    return m.case(run, m.inputs(m.t, m.d), {"a": nn.Linear(m.d, m.d), **extra, "h": m.head()})


@kind
def logits_at_positions(m: Maker) -> Case:
    """Logits [B, T, C], made of rows in some order; T may be the number of samples."""
    order = m.pick("order", "samples", "rows", "positions", "positions in rows")

    def run(n: Any, x: Tensor) -> Tensor:
        size, steps, width = x.shape
        if order == "samples":
            return n.h(torch.tanh(n.a(x)))
        if order == "rows":
            return n.h(torch.tanh(n.a(x.reshape(-1, width)))).view(size, steps, -1)
        z = x.transpose(0, 1)
        if order == "positions in rows":
            return n.h(torch.tanh(n.a(z.reshape(-1, width)))).view(steps, size, -1).transpose(0, 1)
        return n.h(torch.tanh(n.a(z))).transpose(0, 1)

    steps = m.pick("T", m.t, m.spec.sizes[0])
    return m.case(run, m.inputs(steps, m.d), {"a": layer(m), "h": m.head()}, positions=steps)


@kind
def attention(m: Maker) -> Case:
    """nn.MultiheadAttention and encoder layers, batch first or not, with a shared query or memory tokens."""
    first, how = m.pick("batch_first", True, False), m.pick("how", "self", "shared query", "memory", "encoder")
    width = 2 * m.d

    def run(n: Any, x: Tensor) -> Tensor:
        z = x if first else x.transpose(0, 1)
        if how == "encoder":
            z = n.encoder(z)
        else:
            shared = n.tokens[None].expand(len(x), -1, -1)
            shared = shared if first else shared.transpose(0, 1)
            query, key = (shared, z) if how == "shared query" else (z, z)
            key = torch.cat([key, shared], 1 if first else 0) if how == "memory" else key
            z = n.mha(query, key, key, need_weights=m_weights)[0]
        return n.h(torch.tanh(z).mean(1 if first else 0))

    m_weights = m.pick("need_weights", False, True)
    encoder = nn.TransformerEncoderLayer(width, 2, 2 * m.d, dropout=0.0, batch_first=first)
    mha = nn.MultiheadAttention(width, 2, batch_first=first)
    parts = {"mha": mha, "encoder": encoder, "tokens": m.parameter(2, width), "h": m.head(width)}
    return m.case(run, m.inputs(m.t, width), parts)
