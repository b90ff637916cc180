"""Torch's machinery around modules: checkpointing, scripting, tracing, compiling, vmap, nested and sparse inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def body(m: Maker) -> nn.Sequential:
    return m.pick(
        "body",
        nn.Sequential(nn.Linear(m.d, m.d), nn.Tanh()),
        nn.Sequential(nn.Linear(m.d, m.d), nn.LayerNorm(m.d), nn.Tanh(), nn.Linear(m.d, m.d)),
        nn.Sequential(nn.Linear(m.d, m.d), nn.Tanh(), nn.Dropout(0.5), nn.Linear(m.d, m.d)),
    )


def parts(m: Maker) -> dict[str, Any]:
    return {"a": nn.Linear(m.d, m.d), "body": body(m), "h": m.head()}


def _quiet(function: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


@kind
def checkpointed(m: Maker) -> Case:
    twice = m.pick("twice", False, True)

    def run(n: Any, x: Tensor) -> Tensor:
        z = checkpoint(n.body, n.a(x), use_reentrant=False)
        z = checkpoint(n.body, z, use_reentrant=False) if twice else z
        return n.h(z)

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def checkpointed_sequence(m: Maker) -> Case:
    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(checkpoint_sequential(n.body, 2, n.a(x), use_reentrant=False))

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def checkpointed_reentrant(m: Maker) -> Case:
    """`torch.autograd.grad` itself refuses this: a clear message will do (or the loop over ordinary forward passes)."""

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(n.body(n.a(x)) if n.plain else checkpoint(n.body, n.a(x), use_reentrant=True))

    case = m.case(run, m.inputs(m.d), parts(m), may_refuse=True)
    case.model.plain = False
    return case


class Scriptable(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


@kind
def scripted(m: Maker) -> Case:
    whole = m.pick("whole", False, True)
    inner = _quiet(torch.jit.script, Scriptable(m.d))
    if whole:
        model = nn.Sequential(Scriptable(m.d), m.head())
        case = m.case(model, m.inputs(m.d))
        case.model = _quiet(torch.jit.script, case.model)
        return case

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(n.body(n.a(x)))

    return m.case(run, m.inputs(m.d), {**parts(m), "body": inner})


@kind
def traced(m: Maker) -> Case:
    inner = _quiet(torch.jit.trace, Scriptable(m.d), torch.zeros(2, m.d))

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(n.body(n.a(x)))

    return m.case(run, m.inputs(m.d), {**parts(m), "body": inner})


@kind
def compiled(m: Maker) -> Case:
    """A part of the model compiled with a backend that does not need a compiler."""

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(n.compiled(n.a(x)))

    def make(inner: nn.Module) -> Any:
        return torch.compile(inner, backend="eager")

    made = parts(m)
    made["compiled"] = make(made["body"])
    return m.case(run, m.inputs(m.d), made)


@kind
def vectorised(m: Maker) -> Case:
    """vmap over samples, over positions, over an ensemble of weights."""
    how = m.pick("how", "samples", "positions", "ensemble", "function")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "samples":
            return n.h(torch.vmap(n.body)(n.a(x[:, 0])))
        if how == "positions":
            return n.h(torch.vmap(n.body, in_dims=1, out_dims=1)(n.a(x)).mean(1))
        if how == "ensemble":
            return n.h(torch.vmap(lambda w: torch.tanh(x[:, 0] @ w))(n.stack).mean(0))
        return n.h(torch.vmap(lambda row: row.tanh() @ n.stack[0])(n.a(x[:, 0])))

    return m.case(run, m.inputs(m.t, m.d), {**parts(m), "stack": m.parameter(2, m.d, m.d)}, may_refuse=False)


@kind
def nested(m: Maker) -> Case:
    """A nested tensor of rows of different lengths goes through a layer."""
    layout = m.pick("layout", torch.jagged, torch.strided)

    def run(n: Any, *rows: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            z = n.a(torch.nested.as_nested_tensor(list(rows), layout=layout))
            return n.h(torch.stack([torch.tanh(row).mean(0) for row in z.unbind()]))

    inputs = []
    for i, size in enumerate(m.spec.sizes):
        inputs.append(tuple(m.randn(m.t if i == 0 else 1 + int(m.randint(4, 1)), m.d) for _ in range(size)))
    return m.case(run, inputs, parts(m))


@kind
def sparse_inputs(m: Maker) -> Case:
    """Rows of a sparse matrix through a function of a parameter, or through torch.sparse.mm."""
    how = m.pick("how", "mm", "sparse.mm", "to_dense")

    def run(n: Any, x: Tensor) -> Tensor:
        x = x.to(n.w.dtype)
        if how == "to_dense":
            return n.h(torch.tanh(n.a(x.to_dense())))
        return n.h(torch.tanh(torch.sparse.mm(x, n.w) if how == "sparse.mm" else x @ n.w))

    inputs = [x.relu().to_sparse() for x in m.inputs(m.d)]
    return m.case(run, inputs, {**parts(m), "w": m.parameter(m.d, m.d)})


@kind
def sparse_embedding_gradients(m: Maker) -> Case:
    layer = m.pick("layer", nn.Embedding(5, m.d, sparse=True), nn.EmbeddingBag(5, m.d, mode="sum", sparse=True))

    def run(n: Any, ids: Tensor) -> Tensor:
        z = n.e(ids)
        return n.h(torch.tanh(z.mean(1) if z.ndim > 2 else z) + (n.e.weight[:1] if twice else 0))

    twice = m.pick("also dense", False)
    return m.case(run, [m.randint(5, size, m.t) for size in m.spec.sizes], {"e": layer, "h": m.head()})


@kind
def data_parallel_wrappers(m: Maker) -> Case:
    """nn.DataParallel on a CPU calls its module; a wrapper that keeps the model under another name."""

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(n.wrapped(n.a(x)))

    made = parts(m)
    return m.case(run, m.inputs(m.d), {"a": made["a"], "wrapped": nn.DataParallel(made["body"]), "h": made["h"]})


@kind
def autocast_inside(m: Maker) -> Case:
    """A part runs under autocast, switched off or on in float32 (bfloat16 would not be exact)."""

    def run(n: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            z = n.body(n.a(x))
        return n.h(z)

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def gradients_switched_off(m: Maker) -> Case:
    """Parts under no_grad or inference_mode's cousin set_grad_enabled, as the batch says."""

    def run(n: Any, x: Tensor, flag: Tensor) -> Tensor:
        with torch.set_grad_enabled(not bool(flag)):
            z = n.a(x)
        with torch.no_grad():
            scale = n.body(x).sigmoid()
        return n.h(n.body(z) * scale)

    return m.case(run, [(x, torch.tensor(i % 2 == 1)) for i, x in enumerate(m.inputs(m.d))], parts(m))


@kind
def saved_tensors_packed(m: Maker) -> Case:
    """Saved tensors go through hooks (offloading), which copy them."""

    def run(n: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            z = n.body(n.a(x))
        return n.h(z * n.s)

    return m.case(run, m.inputs(m.d), {**parts(m), "s": m.parameter(m.d)})
