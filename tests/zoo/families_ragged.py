"""Ragged rows: bags, graphs, segments, packed sequences.  Lengths are equal at first and differ later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def lengths(m: Maker) -> list[Tensor]:
    """Of each batch: equal in the first; later moved from sample to sample (the same total), or drawn."""
    how = m.pick("lengths", "same total", "drawn", "drawn from the start", "equal")
    found = []
    for i, size in enumerate(m.spec.sizes):
        one = torch.full((size,), m.t)
        if how.startswith("drawn") and (i or how.endswith("start")):
            one = 1 + m.randint(m.t + 1, size)
        elif how == "same total" and i and m.t > 1:
            for _ in range(3):
                a, b = m.randint(size, 2).tolist()
                if a != b and one[a] > 1:
                    one[a], one[b] = one[a] - 1, one[b] + 1
        found.append(one)
    return found


def rows(m: Maker) -> list[tuple[Tensor, Tensor]]:
    """(rows of all samples below each other [N, d], lengths [B])."""
    return [(m.randn(int(one.sum()), m.d), one) for one in lengths(m)]


def owner(count: Tensor) -> Tensor:
    """To which sample each row belongs."""
    return torch.arange(len(count)).repeat_interleave(count)


def row_layer(m: Maker) -> Any:
    """A layer on rows [N, d]."""
    return m.pick("layer", nn.Linear(m.d, m.d), nn.LayerNorm(m.d), nn.Sequential(nn.Linear(m.d, m.d), nn.PReLU()))


Pool = Callable[[Tensor, Tensor], Tensor]


def _index_add(z: Tensor, count: Tensor) -> Tensor:
    return z.new_zeros(len(count), z.shape[1]).index_add(0, owner(count), z)


def _scatter_add(z: Tensor, count: Tensor) -> Tensor:
    return z.new_zeros(len(count), z.shape[1]).scatter_add(0, owner(count)[:, None].expand_as(z), z)


def _scatter_mean(z: Tensor, count: Tensor) -> Tensor:
    where = owner(count)[:, None].expand_as(z)
    return z.new_zeros(len(count), z.shape[1]).scatter_reduce(0, where, z, "mean", include_self=False)


def _scatter_max(z: Tensor, count: Tensor) -> Tensor:
    where = owner(count)[:, None].expand_as(z)
    return z.new_zeros(len(count), z.shape[1]).scatter_reduce(0, where, z, "amax", include_self=False)


def _segments(z: Tensor, count: Tensor) -> Tensor:
    return torch.segment_reduce(z, "sum", lengths=count)


def _matrix(z: Tensor, count: Tensor) -> Tensor:
    return functional.one_hot(owner(count), len(count)).to(z).T @ z


def _einsum(z: Tensor, count: Tensor) -> Tensor:
    return torch.einsum("nb,nd->bd", functional.one_hot(owner(count), len(count)).to(z), z)


def _sparse(z: Tensor, count: Tensor) -> Tensor:
    places = torch.stack([owner(count), torch.arange(len(z))])
    return torch.sparse.mm(
        torch.sparse_coo_tensor(places, z.new_ones(len(z)), (len(count), len(z)), check_invariants=False), z
    )


def _split(z: Tensor, count: Tensor) -> Tensor:
    return torch.stack([part.mean(0) for part in z.split(count.tolist())])


def _cumulative(z: Tensor, count: Tensor) -> Tensor:
    total = functional.pad(z.cumsum(0), (0, 0, 1, 0))
    ends = count.cumsum(0)
    return total[ends] - total[ends - count]


def _padded(z: Tensor, count: Tensor) -> Tensor:
    return rnn.pad_sequence(list(z.split(count.tolist())), batch_first=True).sum(1)


def _last(z: Tensor, count: Tensor) -> Tensor:
    return z[count.cumsum(0) - 1]


def _embedding_gather(z: Tensor, count: Tensor) -> Tensor:
    """Rows of activations looked up as if they were a table."""
    starts = count.cumsum(0) - count
    index = starts[:, None] + torch.minimum(torch.arange(int(count.max()))[None], count[:, None] - 1)
    return functional.embedding(index, z).mean(1)


def _bag(z: Tensor, count: Tensor) -> Tensor:
    """Activations as the table of an embedding bag."""
    return functional.embedding_bag(torch.arange(len(z)), z, count.cumsum(0) - count, mode="sum")


def _masked(z: Tensor, count: Tensor) -> Tensor:
    mask = torch.arange(int(count.max()))[None] < count[:, None]
    full = z.new_zeros(*mask.shape, z.shape[1])
    return full.masked_scatter(mask[..., None], z).sum(1)


def _put(z: Tensor, count: Tensor) -> Tensor:
    mask = torch.arange(int(count.max()))[None] < count[:, None]
    full = z.new_zeros(*mask.shape, z.shape[1])
    full[mask] = z
    return full.sum(1)


def _attention(z: Tensor, count: Tensor) -> Tensor:
    """Attention of rows to rows of the same sample, by a block-diagonal mask."""
    same = owner(count)[:, None] == owner(count)[None]
    weights = (z @ z.T).masked_fill(~same, -torch.inf).softmax(-1)
    return _index_add(weights @ z, count)


POOLS: dict[str, Pool] = {
    function.__name__[1:]: function
    for function in (
        *(_index_add, _scatter_add, _scatter_mean, _scatter_max, _segments, _matrix, _einsum, _sparse, _split),
        *(_cumulative, _padded, _last, _embedding_gather, _bag, _masked, _put, _attention),
    )
}


def _pooled(name: str) -> Kind:
    def make(m: Maker) -> Case:
        def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
            return n.h(POOLS[name](torch.tanh(n.a(x)), count))

        return m.case(run, rows(m), {"a": row_layer(m), "h": m.head()})

    return make


KINDS |= {f"pooled by {name}": _pooled(name) for name in POOLS}


@kind
def messages_along_edges(m: Maker) -> Case:
    """A graph network: neighbours within a sample (a ring), a self weight, pooled at the end."""

    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        starts = (count.cumsum(0) - count)[owner(count)]
        target = starts + (torch.arange(len(x)) - starts + 1) % count[owner(count)]
        z = n.own(x) + torch.zeros_like(x).index_add(0, target, n.a(x))
        return n.h(_index_add(torch.tanh(n.a(z)), count))

    return m.case(run, rows(m), {"a": row_layer(m), "own": nn.Linear(m.d, m.d), "h": m.head()})


@kind
def adjacency_matrix(m: Maker) -> Case:
    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        same = (owner(count)[:, None] == owner(count)[None]).to(x)
        return n.h(_matrix(torch.tanh(same @ n.a(x)) @ n.w, count))

    return m.case(run, rows(m), {"a": row_layer(m), "w": m.parameter(m.d, m.d), "h": m.head()})


@kind
def sample_features_repeated(m: Maker) -> Case:
    """One row for each sample, repeated as often as it has rows, by repeat_interleave or an index."""
    how = m.pick("how", "repeat_interleave", "index", "index_select")

    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        z = n.a(_index_add(x, count))
        z = {
            "repeat_interleave": lambda: z.repeat_interleave(count, 0),
            "index": lambda: z[owner(count)],
            "index_select": lambda: z.index_select(0, owner(count)),
        }[how]()
        return n.h(_index_add(n.b(torch.tanh(z) * x), count))

    return m.case(run, rows(m), {"a": nn.Linear(m.d, m.d), "b": row_layer(m), "h": m.head()})


@kind
def parameters_on_rows(m: Maker) -> Case:
    """No modules at all: a product, a bias, a scale on rows."""

    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        return n.h(POOLS[pool](torch.tanh(x @ n.w + n.b) * n.s, count))

    pool = m.pick("pool", "index_add", "matrix", "split", "cumulative")
    parts = {"w": m.parameter(m.d, m.d), "b": m.parameter(m.d), "s": m.parameter(m.d), "h": m.head()}
    return m.case(run, rows(m), parts)


@kind
def embedding_bag_with_offsets(m: Maker) -> Case:
    mode = m.pick("mode", "sum", "mean", "max")
    weighted = m.pick("weights", False, mode == "sum")

    def run(n: Any, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return n.h(n.bag(ids, offsets, weights if weighted else None))

    inputs = []
    for one in lengths(m):
        total = int(one.sum())
        inputs.append((m.randint(6, total), one.cumsum(0) - one, m.randn(total)))
    return m.case(run, inputs, {"bag": nn.EmbeddingBag(6, m.d, mode=mode), "h": m.head()})


@kind
def embedding_of_rows(m: Maker) -> Case:
    """Tokens of all samples below each other, looked up by a module, pooled."""

    def run(n: Any, ids: Tensor, count: Tensor) -> Tensor:
        return n.h(POOLS[pool](torch.tanh(n.e(ids)), count))

    pool = m.pick("pool", "index_add", "segments", "split", "matrix")
    inputs = [(m.randint(5, int(one.sum())), one) for one in lengths(m)]
    return m.case(run, inputs, {"e": nn.Embedding(5, m.d), "h": m.head()})


@kind
def packed_rows(m: Maker) -> Case:
    """pack_padded_sequence puts rows of one time step together; a layer works on the packed data."""

    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, count, batch_first=True, enforce_sorted=False)
        packed = packed._replace(data=torch.tanh(n.a(packed.data)))
        padded, _ = rnn.pad_packed_sequence(packed, batch_first=True)
        return n.h(padded.sum(1))

    inputs = [(m.randn(len(one), int(one.max()), m.d), one) for one in lengths(m)]
    return m.case(run, inputs, {"a": row_layer(m), "h": m.head()})


@kind
def selected_tokens(m: Maker) -> Case:
    """Tokens picked by a mask from [B, T, d] into rows, and put back."""

    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1])[None] < count[:, None]
        return n.h(torch.zeros_like(x).masked_scatter(mask[..., None], torch.tanh(n.a(x[mask]))).sum(1))

    inputs = [(m.randn(len(one), int(one.max()), m.d), one) for one in lengths(m)]
    return m.case(run, inputs, {"a": row_layer(m), "h": m.head()})


@kind
def pieces_put_together(m: Maker) -> Case:
    """Two groups of rows, all first ones then all others, through one layer with cat and split."""

    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        first = count.cumsum(0) - count
        rest = torch.ones(len(x), dtype=torch.bool)
        rest[first] = False
        a, b = torch.tanh(n.a(torch.cat([x[first], x[rest]]))).split([len(first), int(rest.sum())])
        return n.h(a.index_add(0, owner(count)[rest], b))

    return m.case(run, rows(m), {"a": row_layer(m), "h": m.head()})
