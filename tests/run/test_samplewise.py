"""What the sample-wise pullback does to the model (nothing), to memory (little), and where it is the same as others."""

import gc
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import neuromanifold as nm
from neuromanifold.pullback import forms
from neuromanifold.pullback.forms import Dense, Form
from neuromanifold.pullback.rules import Call, registry, rule
from tests.run.networks import Net
from tests.run.test_contract import MODEL, X, Y, batches, network


def assert_same(a: nm.DiagonalFisher, b: nm.DiagonalFisher, rtol: float = 1e-12) -> None:
    assert (a.count, set(a)) == (b.count, set(b))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * float(b[name].abs().max()))


# ---------------------------------------------------------------------------------------------- nothing is changed


class Scale(nn.Module):
    """A layer with a rule of its own, which may fail."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Interrupted(nn.Module):
    """Raises in forward, or in backward, at a given call."""

    def __init__(self, error: type[BaseException] | None = None, at: int = 1, backward: bool = False) -> None:
        super().__init__()
        self.error, self.at, self.backward, self.calls = error, at, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.error is None:
            return x
        y = x * 1
        if self.backward:
            y.register_hook(lambda _: self._count())
        else:
            self._count()
        return y

    def _count(self) -> None:
        self.calls += 1
        if self.calls >= self.at:
            raise self.error("as planned")  # type: ignore[misc]


@contextmanager
def scale_rule(function: Callable[[Call], dict[str, Form]]) -> Iterator[None]:
    rule(Scale, parameters=("weight",), extra_dims=True)(function)
    try:
        yield
    finally:
        del registry._RULES[Scale]


def right(call: Call) -> dict[str, Form]:
    return {"weight": Dense((call.g * call.x).flatten(1, -2).sum(1) if call.g.ndim > 2 else call.g * call.x)}


def watched(*middle: nn.Module) -> nn.Module:
    """A model with user hooks, a frozen parameter, gradients, and mixed training flags."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.LayerNorm(8), Scale(8), nn.Linear(8, 3)).double()
    model[0].bias.requires_grad_(False)
    model[0].register_forward_hook(lambda _, __, y: y * 1.5)
    model[-1].register_forward_pre_hook(lambda _, x: (x[0] + 1,))
    model[-1].register_full_backward_hook(lambda *_: None)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    model[-1].eval()
    return model


def snapshot(model: nn.Module) -> list[Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    hooks += ("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    return [
        (
            [(name, id(parameter)) for name, parameter in module._parameters.items()],
            [list(getattr(module, name).items()) for name in hooks],
            [(p.requires_grad, id(p.grad), p._version) for p in module._parameters.values() if p is not None],
            [p.grad.sum().item() for p in module._parameters.values() if p is not None and p.grad is not None],
            module.training,
            sorted(vars(module)),
        )
        for module in model.modules()
    ]


def broken(_: Call) -> dict[str, Form]:
    raise ZeroDivisionError("in a rule")


FAILURES: dict[str, tuple[Callable[[], nn.Module], type[BaseException] | None]] = {
    "success": (watched, None),
    "error in forward": (lambda: watched(Interrupted(ValueError)), ValueError),
    "error in a later forward": (lambda: watched(Interrupted(ValueError, at=3)), ValueError),
    "Ctrl-C in forward": (lambda: watched(Interrupted(KeyboardInterrupt, at=2)), KeyboardInterrupt),
    "error in backward": (lambda: watched(Interrupted(ValueError, backward=True)), ValueError),
    "Ctrl-C in backward": (lambda: watched(Interrupted(KeyboardInterrupt, at=3, backward=True)), KeyboardInterrupt),
    "wrong shapes": (lambda: watched(nn.Linear(9, 8)), RuntimeError),
}


@pytest.mark.parametrize("estimator", [nm.Hutchinson(2), nm.Exact(), nm.Empirical()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", FAILURES)
def test_nothing_changes(name: str, estimator: nm.Estimator) -> None:
    make, error = FAILURES[name]
    model = make()
    before = snapshot(model)
    with scale_rule(right):
        if error is None:
            nm.fisher_diagonal(model, batches(16), estimator)
        else:
            with pytest.raises(error):
                nm.fisher_diagonal(model, batches(16), estimator)
    assert snapshot(model) == before


@pytest.mark.parametrize("when", [1, 2, 5])
def test_nothing_changes_after_an_error_in_a_rule(when: int) -> None:
    calls = []

    def sometimes(call: Call) -> dict[str, Form]:
        calls.append(1)
        return broken(call) if len(calls) >= when else right(call)

    model = watched()
    before = snapshot(model)
    with scale_rule(sometimes), pytest.raises(ZeroDivisionError):
        nm.fisher_diagonal(model, batches(16), nm.Exact())
    assert snapshot(model) == before


def test_the_next_run_after_a_failure_is_right() -> None:
    model = watched(Interrupted(KeyboardInterrupt, at=2))
    with scale_rule(right):
        with pytest.raises(KeyboardInterrupt):
            nm.fisher_diagonal(model, batches(16), nm.Exact())
        model[1].error = None
        again = nm.fisher_diagonal(model, batches(16), nm.Exact())
        fresh = nm.fisher_diagonal(watched(Interrupted()), batches(16), nm.Exact())
    assert_same(again, fresh)


# ---------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return output


class TiedLM(nn.Module):
    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(vocabulary, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.table(ids))))


def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(32, 64, 3, stride=2), nn.GroupNorm(4, 64)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))


WIDE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # model, input without samples, vocabulary
    "wide MLP": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 3)),
        (64,),
        0,
    ),
    "wide layers on sequences": (
        lambda: Net(lambda m, x: m.b(torch.tanh(m.a(x))).mean(1), a=nn.Linear(64, 256), b=nn.Linear(256, 3)),
        (4, 64),
        0,
    ),
    "convolutions": (convolutions, (3, 8, 8), 0),
    "embeddings": (
        lambda: Net(lambda m, x: m.b(m.a(x).mean(1)), a=nn.Embedding(2000, 16), b=nn.Linear(16, 3)),
        (8,),
        2000,
    ),
    "tied language model": (lambda: TiedLM(256, 32), (4,), 256),
}


@pytest.mark.parametrize("tile", [2**10, 2**14])
@pytest.mark.parametrize("kind", ["Exact", "Hutchinson", "trace"])
@pytest.mark.parametrize("name", WIDE)
def test_no_gradients_of_all_samples_are_ever_held(
    name: str, kind: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is much larger than the largest activation or parameter: far from samples times parameters."""
    if name == "tied language model" and kind == "Exact":
        return  # as many passes as there are words
    monkeypatch.setattr(forms, "CPU_TILE", tile)
    samples = 64
    make, shape, vocabulary = WIDE[name]
    model = make()
    x = torch.randint(0, vocabulary, (samples, *shape)) if vocabulary else torch.randn(samples, *shape)
    sizes = [x.numel(), tile, *(parameter.numel() for parameter in model.parameters())]
    handles = [m.register_forward_hook(lambda _, __, y: sizes.append(y.numel())) for m in model.modules()]
    model(x)
    for handle in handles:
        handle.remove()
    estimator = nm.Exact() if kind == "Exact" else nm.Hutchinson(2)
    run = nm.fisher_trace if kind == "trace" else nm.fisher_diagonal
    with Largest() as largest:
        result = run(model, [x], estimator)
    assert set(result.provenance.granularity.values()) == {"sample"}
    assert largest.numel <= 3 * max(sizes)  # several columns at once
    heaviest = max(parameter.numel() for parameter in model.parameters())
    assert largest.numel < samples * heaviest / 2


def test_gradients_of_all_samples_would_be_seen() -> None:
    model, x = WIDE["wide MLP"][0](), torch.randn(64, 64)
    with Largest() as largest:
        torch.func.vmap(torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).sum()), (None, 0))(
            dict(model.named_parameters()), x
        )
    assert largest.numel >= 64 * 256 * 256


class Remembering(nn.Module):
    """Keeps weak references to what it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.head, self.unused = (nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2))
        self.token, self.table = nn.Parameter(torch.ones(1, 4)), nn.Embedding(3, 4)
        self.kind, self.seen, self.calls = kind, [], 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + self.token)
        self.calls += 1
        if self.kind == "an output that is not used":
            self.unused(h)
        if self.kind == "checkpoint":
            h = checkpoint(lambda h: self.b(torch.tanh(self.b(h))), h, use_reentrant=False)
        if self.kind == "shared by the samples":
            h = h + self.table(torch.arange(1))
        if self.kind == "tied":
            h = self.a(h)
        if self.kind == "no rule":
            h = h @ self.b.weight.square()
        if self.kind == "an error" and self.calls == 3:
            raise ValueError("as planned")
        z = self.head(h)
        self.seen += [weakref.ref(h), weakref.ref(z)]
        return z


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


KINDS = ["plain", "an output that is not used", "checkpoint", "shared by the samples", "tied", "no rule", "an error"]


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Hutchinson(2)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_graphs_are_gone_without_a_garbage_collector(kind: str, estimator: nm.Estimator) -> None:
    """On a GPU, a batch that is kept until the next collection is memory that is missing."""
    model, alive = Remembering(kind), []
    data = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def watch() -> Iterator[Tensor]:
        for x in data:
            alive.append(sum(reference() is not None for reference in model.seen))
            yield x

    with no_garbage_collector():
        if kind == "an error":
            with suppress(ValueError):
                nm.fisher_diagonal(model, watch(), estimator)
        else:
            nm.fisher_diagonal(model, watch(), estimator)
        assert sum(reference() is not None for reference in model.seen) == 0
    assert max(alive) <= 2  # of the batch before: the loop's own variables


def test_the_number_of_tensors_does_not_grow_with_the_data() -> None:
    def count(size: int) -> int:
        nm.fisher_diagonal(MODEL, [X] * size, nm.Hutchinson(2))
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    with no_garbage_collector():
        count(2)
        assert count(3) == count(30)


# ---------------------------------------------------------------------------------------------- the same by other ways


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Empirical(), nm.Exact(nm.Lower(1))], ids=repr)
def test_batches_of_any_size_and_none(estimator: nm.Estimator) -> None:
    whole = nm.fisher_diagonal(MODEL, batches(64), estimator)
    for size in (1, 7, 64):
        assert_same(nm.fisher_diagonal(MODEL, batches(size), estimator), whole)
    empty = (X[:0], Y[:0])
    parts = batches(40)
    assert_same(nm.fisher_diagonal(MODEL, [empty, parts[0], empty, parts[1], empty], estimator), whole)


@pytest.mark.parametrize("estimator", [nm.Hutchinson(2), nm.Hutchinson(deflate=1), nm.MonteCarlo(3)], ids=repr)
def test_sample_and_auto_are_the_same_where_all_have_rules(estimator: nm.Estimator) -> None:
    results = [nm.fisher_diagonal(MODEL, batches(16), estimator, granularity=g) for g in ("sample", "auto")]
    assert_same(*results, rtol=0)
    batchwise = nm.fisher_diagonal(MODEL, batches(16), estimator, granularity="batch")
    assert not torch.allclose(batchwise["0.weight"], results[0]["0.weight"])


def test_batches_of_one_sample_are_the_same_by_batch_and_by_sample() -> None:
    one = [nm.fisher_diagonal(MODEL, batches(1), nm.Hutchinson(), granularity=g) for g in ("batch", "auto")]
    assert_same(*one)
    for name in one[0]:
        torch.testing.assert_close(one[0].stderr[name], one[1].stderr[name])


@pytest.mark.parametrize("size", [16, 64])
def test_the_trace_is_that_of_the_diagonal(size: int) -> None:
    for estimator in (nm.Exact(), nm.Empirical(), nm.Hutchinson(2), nm.MonteCarlo()):
        diagonal = nm.fisher_diagonal(MODEL, batches(size), estimator)
        trace = nm.fisher_trace(MODEL, batches(size), estimator)
        assert float(trace) == pytest.approx(float(diagonal.trace), rel=1e-12)


def _compiled(kind: str, backend: str) -> nn.Module:
    model = network()
    if kind == "whole":
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    if kind == "in place":
        model.compile(backend=backend)
    else:
        model[0] = torch.compile(model[0], backend=backend)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["whole", "in place", "a part"])
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_models(kind: str, backend: str, warm: bool) -> None:
    """They run as written during an estimate, and compiled before and after."""
    if backend == "inductor" and (warm or shutil.which("g++") is None):
        pytest.skip("a warm inductor takes long" if warm else "no compiler")
    model = _compiled(kind, backend)
    before = model(X) if warm else None
    result = nm.fisher_diagonal(model, batches(32), nm.Exact())
    assert set(result.provenance.granularity.values()) == {"sample"}
    expected = nm.fisher_diagonal(network(), batches(32), nm.Exact())
    for name, value in zip(expected, result.values(), strict=True):
        torch.testing.assert_close(value, expected[name])
    if before is not None:
        assert torch.equal(model(X), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Empirical(), nm.Hutchinson(2)], ids=lambda e: type(e).__name__)
def test_half_precision(estimator: nm.Estimator, autocast: bool, dtype: torch.dtype) -> None:
    """Sums are float32; the error is that of the forward and backward passes in half precision."""

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Net(
                lambda m, x: m.head(m.norm(torch.tanh(m.a(x) + m.position)).mean(1)),
                a=nn.Linear(4, 8),
                norm=nn.LayerNorm(8),
                position=nn.Parameter(torch.randn(1, 4, 8)),
                head=nn.Linear(8, 3),
            )

    x, y = X.view(16, 4, 4).float(), Y[:16]
    reference = nm.fisher_diagonal(make().to(dtype).float(), [(x.to(dtype).float(), y)], estimator)
    if autocast:
        with torch.autocast("cpu", dtype=dtype):
            result = nm.fisher_diagonal(make(), [(x, y)], estimator)
    else:
        result = nm.fisher_diagonal(make().to(dtype), [(x.to(dtype), y)], estimator)
    assert set(result.provenance.granularity.values()) == {"sample"}
    for name in reference:
        assert result[name].dtype == torch.float32
        error = torch.linalg.vector_norm(result[name] - reference[name]) / torch.linalg.vector_norm(reference[name])
        assert error < (0.1 if dtype == torch.bfloat16 else 0.02), name


def test_the_slow_path_is_announced_once_with_its_parameters() -> None:
    model = Net(lambda m, x: m.head(x @ m.odd.square() + m.strange.exp()), odd=nn.Parameter(torch.ones(4, 4)))
    model.strange, model.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)
    model, data = model.double(), batches(16)
    for estimator, granularity in ((nm.Exact(), "auto"), (nm.Empirical(), "sample"), (nm.Hutchinson(), "sample")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = nm.fisher_diagonal(model, data, estimator, granularity=granularity)
        told = [str(w.message) for w in caught if issubclass(w.category, nm.SlowPathWarning)]
        assert len(told) == 1
        for name in ("odd", "strange"):
            assert told[0].count(name) == 1
            assert result.provenance.granularity[name] == "sample, one by one"
        assert "head" not in told[0]
        assert [w.filename for w in caught if issubclass(w.category, nm.SlowPathWarning)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixed = nm.fisher_diagonal(model, data)
        nm.fisher_diagonal(MODEL, batches(16), nm.Exact())
    assert mixed.provenance.granularity["odd"] == "batch"
    assert mixed.provenance.granularity["head.weight"] == "sample"
