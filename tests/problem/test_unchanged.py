"""Nothing of the model changes: after success, after an error, after Ctrl-C."""

import copy
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm


class Nosy(nn.Module):
    """A model that is hard to leave alone: mixed training flags, buffers written in forward, random numbers in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
            nn.Linear(6, 3),
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("missing", None)
        self.register_buffer("view", self.calls.expand(3))
        self.mode = "train"
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm.eval()  # as people freeze it
        self.fail_at = 10**9

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        self.norm.running_mean.data.add_(1)  # unseen by version counters
        self.missing = torch.ones(1)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(1))
        if self.calls > self.fail_at:
            raise KeyboardInterrupt
        torch.rand(3)
        np.random.rand()  # noqa: NPY002
        random.random()
        return self.last(self.drop(self.norm(self.first(x)))) * self.frozen

    def train(self, mode: bool = True) -> "Nosy":
        self.mode = "train" if mode else "eval"  # some layers merge their weights here
        return super().train(mode)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": copy.deepcopy(model.state_dict()),
        "versions": [parameter._version for parameter in model.parameters()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "buffers": [id(buffer) for buffer in model.buffers()],
        "buffer names": [list(module._buffers) for module in model.modules()],
        "mode": model.mode,
        "random": [torch.random.get_rng_state(), random.getstate(), str(np.random.get_state())],  # noqa: NPY002
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def model() -> Nosy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Nosy()
        made(torch.randn(8, 4)).sum().backward()  # so that there are gradients to leave alone
        del made._buffers["late"]
        made.missing = None
    return made


def failing_data() -> Iterator[Tensor]:
    yield torch.ones(4, 4)
    raise RuntimeError("the disk is on fire")


RUNS = {
    "hutchinson": lambda m: nm.fisher_diagonal(m, [torch.ones(4, 4)] * 3, nm.Hutchinson(2, deflate=0)),
    "trace": lambda m: nm.fisher_trace(m, [torch.ones(4, 4)] * 3),
    "exact": lambda m: nm.fisher_diagonal(m, [torch.ones(2, 4)], nm.Exact()),
    "empirical": lambda m: nm.fisher_diagonal(m, [(torch.ones(2, 4), torch.zeros(2).long())], nm.Empirical()),
    "error in the data": lambda m: nm.fisher_diagonal(m, failing_data()),
    "error in a batch": lambda m: nm.fisher_diagonal(m, [torch.ones(4, 4), torch.full((4, 4), float("nan"))]),
    "Ctrl-C in the model": lambda m: (setattr(m, "fail_at", 2), nm.fisher_diagonal(m, [torch.ones(4, 4)] * 5)),
}


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("name", RUNS)
def test_nothing_changes(name: str) -> None:
    m = model()
    before = snapshot(m)
    expected = {
        "error in the data": RuntimeError,
        "error in a batch": ValueError,
        "Ctrl-C in the model": KeyboardInterrupt,
    }
    if name in expected:
        with pytest.raises(expected[name]):
            RUNS[name](m)
    else:
        RUNS[name](m)
    after = snapshot(m)
    for key in before:
        assert same(before[key], after[key]), key


def test_a_change_would_be_seen() -> None:
    m = model()
    before = snapshot(m)
    m(torch.ones(4, 4))
    assert not same(before, snapshot(m))


def test_dropout_is_off_during_a_run() -> None:
    m = model()
    results = [nm.fisher_diagonal(m, [torch.ones(4, 4)], seed=0) for _ in range(2)]
    assert torch.equal(results[0]["first.weight"], results[1]["first.weight"])


class Settings(torch.nn.Module):
    """Remembers what cuDNN was told while it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log = torch.nn.Linear(3, 2), SimpleNamespace(seen=set())  # attributes are restored

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cudnn = torch.backends.cudnn
        self.log.seen.add((cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic))
        return self.layer(x)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("benchmark", [True, False])
def test_cudnn_works_as_it_was_told_to(tf32: bool, benchmark: bool) -> None:
    model = Settings()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32, benchmark=benchmark, deterministic=True):
        nm.fisher_diagonal(model, [torch.randn(4, 3)])
        assert (torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32) == (True, tf32)
    assert model.log.seen == {(tf32, benchmark, True)}
