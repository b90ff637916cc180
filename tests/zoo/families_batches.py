"""What differs from batch to batch behind graphs of the same shapes: a state, the samples' dimension, an order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def numbered(m: Maker) -> list[Any]:
    """Batches [B, T, d] with T = B, and their numbers; the first two are always verified."""
    return [(m.randn(size, size, m.d), torch.tensor(i)) for i, size in enumerate(m.spec.sizes)]


@kind
def state_from_batch_to_batch(m: Maker) -> Case:
    """The logits depend on the batches before: a forward pass that is repeated must not count twice."""
    how = m.pick("how", "hidden state", "counter", "list", "dict", "in place", "buffer", "replaced buffer")

    def factor(n: Any, z: Tensor) -> Tensor:
        if how == "hidden state":
            before, n.state = n.state, z.detach()[0].abs()
            return 1 + before.to(z)
        if how == "counter":
            n.count += 1
            return z.new_tensor(n.count)
        if how == "list":
            n.seen.append(len(z))
            return z.new_tensor(sum(n.seen))
        if how == "dict":
            n.table["calls"] = n.table.get("calls", 0) + 1
            return z.new_tensor(n.table["calls"])
        if how == "in place":
            n.state += 1
            return n.state.to(z)
        if how == "buffer":
            n.calls += 1
        else:
            n.calls = n.calls + 1
        return n.calls.to(z)

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        return n.h(torch.tanh(n.b(z) * factor(n, z).clone() / 3))

    case = m.case(run, m.inputs(m.d), parts(m), may_warn=True)
    case.model.count, case.model.seen, case.model.table = 0, [], {}
    case.model.state = torch.zeros(m.d, dtype=torch.float64)
    case.model.register_buffer("calls", torch.zeros((), dtype=torch.float64))
    return case


def _picked(z: Tensor, dim: int) -> Tensor:
    order = torch.arange(z.shape[dim]).flip(0)
    return (z[:, order] if dim else z[order]).select(dim, 0)


REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "amin": lambda z, dim: z.amin(dim),
    "max": lambda z, dim: z.max(dim).values,
    "median": lambda z, dim: z.median(dim).values,
    "logsumexp": lambda z, dim: z.logsumexp(dim),
    "norm": lambda z, dim: z.norm(dim=dim),
    "var": lambda z, dim: z.var(dim, unbiased=False),
    "std": lambda z, dim: (z + torch.arange(len(z)).to(z)[:, None, None]).std(dim, unbiased=False),
    "prod": lambda z, dim: z.prod(dim),
    "cumsum": lambda z, dim: z.cumsum(dim).square().logsumexp(dim),
    "index": _picked,
}


@kind
def reduced_over_another_dimension(m: Maker) -> Case:
    """With as many positions as samples, later batches [T, B, d] differ from [B, T, d] in an argument only."""
    reduce = REDUCTIONS[m.pick("how", *REDUCTIONS)]

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        late = int(i) > 1
        z = torch.tanh(n.a(x.transpose(0, 1) if late else x))
        return n.h(torch.tanh(n.b(reduce(z, 0 if late else 1))))

    return m.case(run, numbered(m), parts(m), may_warn=True)


class Mul(torch.autograd.Function):
    """Named as an operation of torch: takes rows in an order that the data give, and scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, factor: float) -> Tensor:
        ctx.order, ctx.factor = order, factor
        return x[order] * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return torch.zeros_like(g).index_copy(0, ctx.order, g) * ctx.factor, None, None


@kind
def own_functions_with_names_of_torch(m: Maker) -> Case:
    """Rows of all samples, sorted in later batches; the function that puts them back has the name of a product."""

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort() if int(i) > 1 else torch.arange(len(rows))
        z = Mul.apply(torch.tanh(n.a(rows[order])), order.argsort(), 2.0)
        return n.h(torch.tanh(n.b(z.view(len(x), -1, z.shape[-1]).mean(1))))

    return m.case(run, numbered(m), parts(m))


class Cloud:
    """An input that is an object of a class that nobody knows."""

    def __init__(self, points: Tensor) -> None:
        self.points = points


@kind
def objects_overwritten(m: Maker) -> Case:
    """forward writes into an object or an array that it is given, and must find them as they were when repeated."""
    how = m.pick("how", "replaced", "in place", "array")

    def run(n: Any, given: Any, x: Tensor) -> Tensor:
        if how == "array":
            given *= 2
            return n.h(torch.tanh(n.b(torch.tanh(n.a(torch.from_numpy(given).to(x))))))
        if how == "in place":
            given.points.mul_(2)
            return n.h(torch.tanh(n.b(torch.tanh(n.a(given.points.to(x))))))
        given.points = torch.tanh(n.a(given.points.to(x)))
        return n.h(torch.tanh(n.b(given.points)))

    rows = m.inputs(m.d)
    inputs: list[Any] = [(x.numpy() if how == "array" else Cloud(x.clone()), x.clone()) for x in rows]
    return m.case(run, inputs, parts(m))


@kind
def settings_for_the_time_of_a_call(m: Maker) -> Case:
    """forward changes settings of a layer and puts them back before a rule can read them; in later batches only."""
    how = m.pick("how", "dilation", "eps", "groups", "stride", "circular", "padding_idx", "statistics")
    later = m.pick("later", True, False)

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        with changed(n, (1 if later else 0) < int(i)):
            if how == "padding_idx":
                z = n.layer((x > 0).long()).mean(2)
            elif how in ("eps", "statistics"):
                z = n.layer(n.a(x).flatten(0, 1)).unflatten(0, x.shape[:2])
            else:
                z = n.layer(x.transpose(1, 2))
        return n.h(torch.tanh(z if how in ("eps", "statistics") else z.mT).flatten(1)[:, : m.d])

    @contextmanager
    def changed(n: Any, active: bool) -> Iterator[None]:
        settings = {
            "dilation": {"dilation": (2,), "padding": (2,)},
            "eps": {"eps": 0.5},
            "groups": {"num_groups": 2},
            "stride": {"stride": (2,)},
            "circular": {"_reversed_padding_repeated_twice": [0, 2]},
            "padding_idx": {"padding_idx": None},
            "statistics": {"running_mean": n.mean},
        }[how]
        before = {name: getattr(n.layer, name) for name in settings}
        for name, value in settings.items() if active else ():
            setattr(n.layer, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(n.layer, name, value)

    width, length = 2 * m.d, max(4, m.t)
    layers: dict[str, Callable[[], nn.Module]] = {
        "eps": lambda: nn.LayerNorm(m.d),
        "groups": lambda: nn.GroupNorm(1, width),
        "padding_idx": lambda: nn.Embedding(2, m.d, padding_idx=0),
        "statistics": lambda: nn.BatchNorm1d(m.d),
        "circular": lambda: nn.Conv1d(width, m.d, 3, padding=1, padding_mode="circular"),
    }
    layer = layers.get(how, lambda: nn.Conv1d(width, m.d, 3, padding=1))()
    features = m.d if how in ("eps", "statistics") else width
    inputs = [(x, torch.tensor(i)) for i, x in enumerate(m.inputs(length, features))]
    made = m.case(run, inputs, {"a": nn.Linear(m.d, m.d), "layer": layer, "h": m.head()})
    made.model.register_buffer("mean", m.randn(m.d))
    return made
