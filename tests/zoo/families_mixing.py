"""Samples that influence each other: what is computed for one sample is then not a function of that sample alone.

The logits of a sample depend on the others' inputs through parameters, so the library has to say what its number means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def parts(m: Maker) -> dict[str, Any]:
    return {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "h": m.head()}


def mixing(m: Maker, run: Any, more: dict[str, Any] | None = None, inputs: list[Any] | None = None) -> Case:
    return m.case(run, m.inputs(m.d) if inputs is None else inputs, {**parts(m), **(more or {})}, mixes=True)


class HandmadeBatchNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt() + self.bias


@kind
def normalised_over_the_batch(m: Maker) -> Case:
    how = m.pick("how", "by hand", "no running statistics", "functional", "centred", "standard deviation")
    norm = {"no running statistics": nn.BatchNorm1d(m.d, track_running_stats=False)}.get(how) or HandmadeBatchNorm(m.d)

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        if how == "functional":
            z = nn.functional.batch_norm(z, None, None, n.norm.weight, n.norm.bias, training=True)
        elif how == "centred":
            z = z - z.mean(0)
        elif how == "standard deviation":
            z = torch.cat([z, z.std(0).mean().expand(len(z), 1)], 1)[:, : z.shape[1]] * z.std(0).mean()
        else:
            z = n.norm(z)
        return n.h(torch.tanh(z))

    return mixing(m, run, {"norm": norm})


@kind
def attention_over_the_batch(m: Maker) -> Case:
    how = m.pick("how", "softmax", "landmarks", "module", "linear attention")

    def run(n: Any, x: Tensor) -> Tensor:
        q, k = n.a(x), n.b(x)
        if how == "softmax":
            z = (q @ k.T).softmax(-1) @ x
        elif how == "landmarks":
            mean = k.mean(0, keepdim=True)
            z = (q @ mean.T).sigmoid() * mean + k
        elif how == "module":
            z = n.mha(q[None], k[None], k[None], need_weights=False)[0][0]
        else:
            z = q @ (k.T @ x)
        return n.h(torch.tanh(z))

    return mixing(m, run, {"mha": nn.MultiheadAttention(m.d, 1, batch_first=True)})


@kind
def similarity_matrices(m: Maker) -> Case:
    """Contrastive logits: as many classes as samples."""
    how = m.pick("how", "dot", "cosine", "distance")

    def run(n: Any, x: Tensor) -> Tensor:
        u, v = n.a(x), n.b(x)
        if how == "cosine":
            u, v = nn.functional.normalize(u, dim=-1), nn.functional.normalize(v, dim=-1)
        return -torch.cdist(u, v) if how == "distance" else u @ v.T

    case = mixing(m, run)
    case.labels = [torch.arange(len(x)) for x in case.inputs]
    return case


@kind
def sorted_over_the_batch(m: Maker) -> Case:
    """Ranks, cumulative sums, maxima over samples."""
    how = m.pick("how", "sort", "cumsum", "max", "median", "quantile", "roll")

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        z = {
            "sort": lambda: z.sort(0).values,
            "cumsum": lambda: z.cumsum(0),
            "max": lambda: z - z.amax(0),
            "median": lambda: z - z.median(0).values,
            "quantile": lambda: z / (1 + z.square().mean()),
            "roll": lambda: z + z.roll(1, 0),
        }[how]()
        return n.h(torch.tanh(z))

    return mixing(m, run)


@kind
def mixed_later(m: Maker) -> Case:
    """The first batches leave samples alone."""

    def run(n: Any, x: Tensor, flag: Tensor) -> Tensor:
        z = n.a(x)
        return n.h(torch.tanh(z - z.mean(0) if flag else z))

    return mixing(m, run, inputs=[(x, torch.tensor(i == len(m.spec.sizes) - 1)) for i, x in enumerate(m.inputs(m.d))])


@kind
def only_the_head_mixes(m: Maker) -> Case:
    how = m.pick("how", "centred logits", "pairwise", "softmax over samples")

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.h(torch.tanh(n.a(x)))
        if how == "centred logits":
            return z - z.mean(0)
        return z + z.flip(0) * 0.5 if how == "pairwise" else z.softmax(0) * z

    return mixing(m, run)
