"""Influence against the formula with the dense matrix, and against leaving samples out and training again."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from neuromanifold.reference.layer import sample_gradients
from tests.run.test_contract import MODEL, X, Y, batches

TRAIN, TEST = batches(16, X[:48], Y[:48]), batches(7, X[48:], Y[48:])


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each sample's loss, [n, P]."""
    losses = cross_entropy(model(x), y, reduction="none")
    found = sample_gradients(losses, list(model.parameters()), torch.ones_like(losses))
    return torch.cat([g.flatten(1) for g in found], 1)


@pytest.mark.parametrize("kind", ["kronecker", "matrix"])
def test_it_is_the_formula(kind: str) -> None:
    fisher = nm.fisher_kronecker(MODEL, TRAIN) if kind == "kronecker" else nm.fisher_matrix(MODEL, TRAIN)
    test, train = gradients(MODEL, X[48:], Y[48:]), gradients(MODEL, X[:48], Y[:48])
    damped = fisher.dense() + 0.1 * torch.eye(67, dtype=torch.float64)
    expected = test @ torch.linalg.solve(damped, train.mT) / 48
    for one in (fisher, fisher.sum):
        torch.testing.assert_close(nm.influence(MODEL, TRAIN, TEST, one, 0.1), expected)


def fitted(x: Tensor, y: Tensor, decay: float, samples: int) -> nn.Module:
    """Logistic regression at the minimum of Σ loss/samples + decay/2 ‖θ‖²."""
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters()) * decay / 2
        loss = cross_entropy(model(x), y, reduction="sum") / samples + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def test_it_predicts_what_leaving_a_sample_out_does() -> None:
    x, y, decay = X[:48], Y[:48], 0.01
    model = fitted(x, y, decay, 48)
    fisher = nm.fisher_kronecker(model, TRAIN, nm.Exact())
    found = nm.influence(model, TRAIN, TEST, fisher, decay).sum(0)
    before, actual = cross_entropy(model(X[48:]), Y[48:], reduction="sum"), []
    for n in range(12):
        kept = torch.arange(48) != n
        again = fitted(x[kept], y[kept], decay, 48)
        actual.append((cross_entropy(again(X[48:]), Y[48:], reduction="sum") - before).detach())
    assert float(torch.corrcoef(torch.stack([found[:12], torch.stack(actual)]))[0, 1]) > 0.9


def test_wrong_arguments() -> None:
    fisher = nm.fisher_kronecker(MODEL, TRAIN)
    with pytest.raises(TypeError, match="`fisher` must be a metric"):
        nm.influence(MODEL, TRAIN, TEST, nm.fisher_diagonal(MODEL, TRAIN), 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`fisher` must be a metric of this model's parameters"):
        nm.influence(nn.Sequential(nn.Linear(4, 3)).double(), TRAIN, TEST, fisher, 0.1)
    other = copy.deepcopy(MODEL)
    other[0].weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="`fisher` must be a result at the model's present weights"):
        nm.influence(other, TRAIN, TEST, fisher, 0.1)
    with pytest.raises(ValueError, match=r"`damping` must be a number > 0 for a singular F, got 0, where .* are zero"):
        nm.influence(MODEL, TRAIN, TEST, fisher, 0.0)
    with pytest.raises(ValueError, match="`labels` must be given"):
        nm.influence(MODEL, [X[:4]], TEST, fisher, 0.1)
    with pytest.raises(ValueError, match="`damping` must be a number >= 0"):
        nm.influence(MODEL, TRAIN, TEST, fisher, -1.0)
