"""The sample-wise pullback leaves the model as it was: hooks, gradients, flags; after success and after any failure."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.gradients import Dense, Form
from neuromanifold.persample.rules import Call, registry, rule
from tests.run.test_contract import batches
from tests.run.test_samplewise import assert_same


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
        self.error, self.at, self.backward, self.calls = error, at, backward, itertools.count(1)

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
        if next(self.calls) >= self.at:
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


@pytest.mark.parametrize(
    "estimator", [nm.Hutchinson(2, deflate=0), nm.Exact(), nm.Empirical()], ids=lambda e: type(e).__name__
)
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


def test_a_rule_that_fails_at_first_is_left_to_autograd() -> None:
    model = watched()
    before = snapshot(model)
    with scale_rule(broken), pytest.warns(nm.SlowPathWarning, match=r"3\.weight"):
        found = nm.fisher_diagonal(model, batches(16), nm.Exact())
    assert snapshot(model) == before
    with scale_rule(right):
        assert_same(found, nm.fisher_diagonal(model, batches(16), nm.Exact()))


@pytest.mark.parametrize("when", [3, 5])
def test_nothing_changes_after_a_later_error_in_a_rule(when: int) -> None:
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
