"""The sample-wise pullback never holds the gradients of all samples, nor a graph for longer than its batch."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import neuromanifold as nm
from neuromanifold.persample import gradients as forms
from tests.problems.problem import Net
from tests.run.test_contract import MODEL, X


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
    monkeypatch.setattr(forms.forms, "CPU_TILE", tile)
    samples = 64
    make, shape, vocabulary = WIDE[name]
    model = make()
    x = torch.randint(0, vocabulary, (samples, *shape)) if vocabulary else torch.randn(samples, *shape)
    sizes = [x.numel(), tile, *(parameter.numel() for parameter in model.parameters())]
    handles = [m.register_forward_hook(lambda _, __, y: sizes.append(y.numel())) for m in model.modules()]
    model(x)
    for handle in handles:
        handle.remove()
    estimator = nm.Exact() if kind == "Exact" else nm.Hutchinson(2, deflate=0)
    run = nm.fisher_trace if kind == "trace" else nm.fisher_diagonal
    with Largest() as largest:
        result = run(model, [x], estimator)
    assert set(result.provenance.granularity.values()) in ({"sample"}, {"token"})
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
        self.kind, self.log = kind, SimpleNamespace(seen=[], calls=0)  # attributes are restored

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + self.token)
        self.log.calls += 1
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
        if self.kind == "an error" and self.log.calls == 3:
            raise ValueError("as planned")
        z = self.head(h)
        self.log.seen += [weakref.ref(h), weakref.ref(z)]
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


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Hutchinson(2, deflate=0)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_graphs_are_gone_without_a_garbage_collector(kind: str, estimator: nm.Estimator) -> None:
    """On a GPU, a batch that is kept until the next collection is memory that is missing."""
    model, alive = Remembering(kind), []
    data = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def watch() -> Iterator[Tensor]:
        for x in data:
            alive.append(sum(reference() is not None for reference in model.log.seen))
            yield x

    with no_garbage_collector():
        if kind == "an error":
            with suppress(ValueError):
                nm.fisher_diagonal(model, watch(), estimator)
        else:
            nm.fisher_diagonal(model, watch(), estimator)
        assert sum(reference() is not None for reference in model.log.seen) == 0
    assert max(alive) <= 2  # of the batch before: the loop's own variables


def test_the_number_of_tensors_does_not_grow_with_the_data() -> None:
    kept: list[Tensor] = []

    def count(size: int, keep: bool = False) -> int:
        data = (X.clone() for _ in range(size))
        watched = (kept.append(x) or x for x in data) if keep else data
        nm.fisher_diagonal(MODEL, watched, nm.Hutchinson(2, deflate=0))
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    with no_garbage_collector():
        count(2)
        few = count(3)
        assert count(30) < few + 27  # one for each batch more
        assert count(30, keep=True) >= few + 27


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Hutchinson(probes=2, deflate=0), nm.MonteCarlo(4)], ids=repr)
def test_activations_of_a_batch_are_gone_before_the_next(estimator):
    """The loop's `outputs` holds the last graph while the next batch goes forward: twice the memory."""

    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    boxes: list[weakref.ref[Box]] = []
    alive: list[int] = []

    def keep(value: Tensor) -> Box:
        box = Box(value)
        boxes.append(weakref.ref(box))
        return box

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(box() is not None for box in boxes))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda box: box.value):
                h = self.first(x)
                squares = h * h
            out: Tensor = self.last(squares)
            return out

    nm.fisher_diagonal(Model(), list(torch.ones(4, 3, 6)), estimator)
    assert boxes
    assert alive == [0] * len(alive)
