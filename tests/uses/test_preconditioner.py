"""Preconditioned gradients are natural gradients, renewed every so many steps."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from tests.run.test_contract import MODEL, X, Y, batches


@pytest.mark.parametrize("clip", [None, 0.1])
def test_gradients_become_damped_natural_gradients(clip: float | None) -> None:
    model = copy.deepcopy(MODEL)
    preconditioner = nm.KroneckerPreconditioner(model, damping=0.1, every=2, clip=clip, estimator=nm.Exact())
    batch, other = batches(32)
    for step, (x, y) in enumerate((batch, other, other)):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        seen = [other if step == 2 else batch]  # of which F is made: in the second step it is still the first one's
        fisher = nm.fisher_kronecker(MODEL, seen, nm.Exact(), eigenvalues="kronecker")
        expected = fisher.natural_gradient(before, 0.1)
        rate = preconditioner.step((x, y))
        assert rate == pytest.approx(sum(float((before[name] * expected[name]).sum()) for name in before))
        factor = 1.0 if clip is None else clip / rate**0.5
        assert factor <= 1
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, factor * expected[name])
    assert preconditioner.steps == 3


def test_it_learns_in_fewer_steps_than_the_gradient() -> None:
    losses = {}
    for preconditioned in (False, True):
        model = copy.deepcopy(MODEL)
        preconditioner = nm.KroneckerPreconditioner(model, damping=1e-2, every=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(25):
            optimizer.zero_grad()
            cross_entropy(model(X), Y).backward()
            if preconditioned:
                preconditioner.step((X, Y))
            optimizer.step()
        losses[preconditioned] = float(cross_entropy(model(X), Y).detach())
    assert losses[True] < 0.9 * losses[False]


def test_wrong_arguments() -> None:
    model = copy.deepcopy(MODEL)
    with pytest.raises(ValueError, match=r"none for '0.weight'. Call loss.backward\(\) first"):
        nm.KroneckerPreconditioner(model).step((X, Y))
    with pytest.raises(ValueError, match="`damping` must be a number > 0"):
        nm.KroneckerPreconditioner(model, damping=0.0)
    with pytest.raises(ValueError, match="`every` must be between"):
        nm.KroneckerPreconditioner(model, every=0)
    with pytest.raises(ValueError, match="`clip` must be a number > 0"):
        nm.KroneckerPreconditioner(model, clip=0.0)
