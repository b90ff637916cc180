"""The moving average inside a training loop."""

import math

import pytest
import torch
from torch import nn

import neuromanifold as nm
from tests.run.test_contract import MODEL, X, Y, exact, network

LOSS = nn.functional.cross_entropy


def test_the_gradients_of_the_loss_are_untouched() -> None:
    plain, watched = network(), network()
    running = nm.RunningFisher(watched)
    LOSS(plain(X), Y).backward()
    logits = watched(X)
    running.step(logits)
    LOSS(logits, Y).backward()
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_it_averages_to_the_fisher_information_where_the_model_stands_still() -> None:
    decay = 0.99
    running = nm.RunningFisher(MODEL, decay)
    for _ in range(800):
        running.step(MODEL(X))
    result, truth = running.diagonal(), exact([(X, Y)])
    expected = math.sqrt(2 * (1 - decay) / (1 + decay))  # √2 for one probe, averaged
    assert result.relative_error < 1.2 * expected
    for name in truth:
        assert ((result[name] - truth[name]).abs() <= 6 * result.stderr[name]).all()
    assert result.compare(truth).relmae < expected


def test_the_first_steps_are_corrected_for_the_start_at_zero() -> None:
    running = nm.RunningFisher(MODEL, decay=0.9, seed=4)
    running.step(MODEL(X))
    once = nm.fisher_diagonal(MODEL, [X], seed=4, granularity="batch")
    torch.testing.assert_close(running.diagonal()["0.weight"], once["0.weight"])
    torch.testing.assert_close(running.diagonal().stderr["0.weight"], once.stderr["0.weight"])


def test_it_follows_training_and_forgets() -> None:
    model = network()
    running = nm.RunningFisher(model, decay=0.5, parameters="2.*")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(200):
        logits = model(X)
        running.step(logits)
        optimizer.zero_grad()
        LOSS(logits, Y).backward()
        optimizer.step()
    result = running.diagonal()
    assert list(result) == ["2.weight", "2.bias"]
    now = nm.fisher_diagonal(model, [X], nm.Hutchinson(500, deflate=0), parameters="2.*")
    assert 0.2 < result.compare(now).mean_ratio < 5
    assert "moving average" in result.provenance.target


def test_bad_calls() -> None:
    running = nm.RunningFisher(MODEL)
    with pytest.raises(ValueError, match="no batch yet"):
        running.diagonal()
    with pytest.raises(ValueError, match=r"`logits`.*graph.*no_grad"):
        running.step(MODEL(X).detach())
    with pytest.raises(ValueError, match="`decay`"):
        nm.RunningFisher(MODEL, decay=1.0)
    with pytest.raises(ValueError, match="not a Fisher"):
        nm.RunningFisher(MODEL, estimator=nm.Exact())
    with pytest.raises(ValueError, match="`labels`"):
        nm.RunningFisher(MODEL, estimator=nm.SquaredBatchGradient()).step(MODEL(X))
