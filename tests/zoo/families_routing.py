"""Routing by data: experts, masks, gathers, sorted and permuted samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def expert(m: Maker) -> nn.Module:
    return nn.Sequential(nn.Linear(m.d, m.d), nn.Tanh(), nn.Linear(m.d, m.d))


def _dense_router(n: Any, x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    weights, chosen = n.gate(x).softmax(-1).topk(top, -1)
    return weights, chosen


@kind
def experts_on_samples(m: Maker) -> Case:
    """Each sample goes to its top-k experts; rows are picked by an index and added back."""
    top, how = m.pick("top", 1, 2), m.pick("how", "index_add", "index_put", "masked", "where", "accumulate")

    def run(n: Any, x: Tensor) -> Tensor:
        weights, chosen = _dense_router(n, x, top)
        out = torch.zeros_like(x)
        for e, layer in enumerate(n.experts):
            rows, k = (chosen == e).nonzero(as_tuple=True)
            if how == "where":
                share = ((chosen == e) * weights).sum(-1, keepdim=True)
                out = out + torch.where(share > 0, layer(x) * share, 0.0)
                continue
            if not len(rows):
                continue
            z = layer(x[rows]) * weights[rows, k, None]
            if how == "index_add":
                out = out.index_add(0, rows, z)
            elif how == "masked":
                out = out + torch.zeros_like(out).masked_scatter((chosen == e).any(1)[:, None], z)
            elif how == "index_put":
                out[rows] += z
            else:
                out = out.index_put((rows,), z, accumulate=True)
        return n.h(out + x)

    parts = {"gate": nn.Linear(m.d, 3), "experts": nn.ModuleList(expert(m) for _ in range(3)), "h": m.head()}
    return m.case(run, m.inputs(m.d), parts)


@kind
def experts_on_tokens(m: Maker) -> Case:
    """Tokens of all samples, flattened, sorted by expert, split, and put back."""
    how = m.pick("how", "sorted", "nonzero", "batched products", "capacity of one row for each")

    def run(n: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = _dense_router(n, flat, 1)
        weights, chosen = weights[:, 0], chosen[:, 0]
        if how == "sorted":
            order = chosen.argsort(stable=True)
            parts = flat[order].split(torch.bincount(chosen, minlength=3).tolist())
            z = torch.cat([layer(part) for layer, part in zip(n.experts, parts, strict=True)])[order.argsort()]
        elif how == "batched products":
            z = torch.einsum("ni,nio->no", flat, n.w[chosen])
        else:
            z = torch.zeros_like(flat)
            for e, layer in enumerate(n.experts):
                rows = (chosen == e).nonzero()[:, 0]
                z = z.index_copy(0, rows, layer(flat[rows]))
        return n.h((z * weights[:, None]).view_as(x).mean(1))

    parts = {"gate": nn.Linear(m.d, 3), "experts": nn.ModuleList(expert(m) for _ in range(3)), "h": m.head()}
    return m.case(run, m.inputs(m.t, m.d), {**parts, "w": m.parameter(3, m.d, m.d)})


@kind
def sorted_samples(m: Maker) -> Case:
    """Samples are sorted (by length, say) or reversed, and put back in order; sorted already in the first batch."""
    how = m.pick("how", "argsort", "flip", "roll", "permutation of the batch", "sort of the labels")
    back = m.pick("back", "argsort", "scatter", "index_copy")
    first = m.pick("first batch sorted", True, False)

    def run(n: Any, x: Tensor) -> Tensor:
        size = len(x)
        order = {
            "argsort": lambda: x[:, 0].argsort(),
            "flip": lambda: torch.arange(size).flip(0),
            "roll": lambda: torch.arange(size).roll(int(x[0, 0] > 0)),
            "permutation of the batch": lambda: (x.sum(1) * 100).long().remainder(97).argsort(stable=True),
            "sort of the labels": lambda: (x[:, 0] > 0).long().argsort(stable=True),
        }[how]()
        z = torch.tanh(n.a(x[order]))
        if back == "argsort":
            z = z[order.argsort()]
        elif back == "scatter":
            z = torch.zeros_like(z).scatter(0, order[:, None].expand_as(z), z)
        else:
            z = torch.zeros_like(z).index_copy(0, order, z)
        return n.h(n.a(z))

    inputs = m.inputs(m.d)
    if first:
        inputs[0] = inputs[0][inputs[0][:, 0].argsort()]
    return m.case(run, inputs, {"a": nn.Linear(m.d, m.d), "h": m.head()})


@kind
def flipped_and_rolled(m: Maker) -> Case:
    """Operations that move rows without an index: flip, roll, chunks in another order."""
    how = m.pick("how", "flip", "roll", "chunks", "rot90", "cat")
    back = m.pick("back", True, False)  # not back: the logits of sample n come from row B - 1 - n, undone at the end

    def move(x: Tensor, sign: int) -> Tensor:
        if how == "flip" or how == "rot90":
            return x.flip(0)
        if how == "roll":
            return x.roll(sign, 0)
        return torch.cat([x[sign:], x[:sign]]) if how == "cat" else torch.cat(x.split([1] * len(x))[::-1])

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(move(x, 1) if len(x) > 1 or how != "cat" else x)
        z = move(z, -1) if back and (len(x) > 1 or how != "cat") else z
        z = n.h(n.a(torch.tanh(z)))
        return z if back or (len(x) == 1 and how == "cat") else move(z, -1)

    return m.case(run, m.inputs(m.d), {"a": nn.Linear(m.d, m.d), "h": m.head()})


@kind
def early_exit(m: Maker) -> Case:
    """Samples that are sure leave; the others go on; later batches have other numbers of each."""
    by = m.pick("by", "mask", "index", "where")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        stay = z[:, 0] > (-9.0 if bool(x[0, -1] > 0) else 0.0)
        if by == "where":
            return n.h(torch.where(stay[:, None], torch.tanh(n.b(z)), z))
        rows = stay if by == "mask" else stay.nonzero()[:, 0]
        z = z.index_put((rows,), torch.tanh(n.b(z[rows])))
        return n.h(z)

    layers = {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "h": m.head()}
    return m.case(run, m.inputs(m.d), layers, may_warn=True)


@kind
def read_by_gather(m: Maker) -> Case:
    """One position of each sample is read: by gather, take_along_dim, an index, or a mask."""
    how = m.pick("how", "index", "gather", "take_along_dim", "mask", "argmax", "flat index")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        at = x[..., 0].argmax(1)
        if how == "gather":
            z = z.gather(1, at[:, None, None].expand(-1, 1, z.shape[2]))[:, 0]
        elif how == "take_along_dim":
            z = torch.take_along_dim(z, at[:, None, None], 1)[:, 0]
        elif how == "mask":
            z = z[nn.functional.one_hot(at, x.shape[1]).bool()]
        elif how == "argmax":
            z = z.amax(1)
        elif how == "flat index":
            z = z.flatten(0, 1)[at + torch.arange(len(x)) * x.shape[1]]
        else:
            z = z[torch.arange(len(x)), at]
        return n.h(z)

    return m.case(run, m.inputs(m.t, m.d), {"a": nn.Linear(m.d, m.d), "h": m.head()})


@kind
def layers_chosen_for_each_sample(m: Maker) -> Case:
    """Tables of weights and biases indexed by a type that comes with the sample."""
    how = m.pick("how", "weights", "embedding", "one-hot", "loop")

    def run(n: Any, x: Tensor, which: Tensor) -> Tensor:
        if how == "weights":
            return n.h(torch.tanh(torch.einsum("ni,noi->no", x, n.w[which]) + n.b[which]))
        if how == "embedding":
            return n.h(torch.tanh(x * n.e(which) + n.b[which]))
        if how == "one-hot":
            return n.h(torch.tanh(x + nn.functional.one_hot(which, 3).to(x) @ n.b))
        return n.h(torch.tanh(torch.stack([n.experts[int(k)](row) for row, k in zip(x, which, strict=True)])))

    parts = {"w": m.parameter(3, m.d, m.d), "b": m.parameter(3, m.d), "e": nn.Embedding(3, m.d), "h": m.head()}
    parts["experts"] = nn.ModuleList(nn.Linear(m.d, m.d) for _ in range(3))
    inputs = [(x, m.randint(3, len(x))) for x in m.inputs(m.d)]
    return m.case(run, inputs, parts)


@kind
def tokens_pruned(m: Maker) -> Case:
    """The k best tokens of each sample are kept (their order depends on the data), then attended to."""
    keep = m.pick("keep", 1, 2)

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        k = min(keep, x.shape[1])
        best = z[..., 0].topk(k, 1).indices
        z = z.gather(1, best[..., None].expand(-1, -1, z.shape[-1]))
        return n.h(torch.tanh(n.b(z.flatten(0, 1))).view(len(x), k, -1).mean(1))

    return m.case(run, m.inputs(m.t, m.d), {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "h": m.head()})


@kind
def duplicates_done_once(m: Maker) -> Case:
    """unique: equal inputs are computed once, so one row serves several samples (in later batches only)."""

    def run(n: Any, ids: Tensor) -> Tensor:
        values, where = ids.unique(return_inverse=True)
        return n.h(torch.tanh(n.a(n.e(values)))[where])

    inputs = [m.randint(3, size) for size in m.spec.sizes]
    inputs[0] = torch.arange(len(inputs[0]))
    return m.case(run, inputs, {"e": nn.Embedding(5, m.d), "a": nn.Linear(m.d, m.d), "h": m.head()})
