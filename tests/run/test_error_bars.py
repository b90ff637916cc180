"""Error bars from some of the fourth powers are those from all of them, and finite whatever the data do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.accumulate import fourth_powers


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def variance(fim: nm.DiagonalFisher) -> float:
    return sum(float(fim.stderr[name].double().square().sum()) for name in fim if name.endswith("weight"))


def thinned_over_full(
    monkeypatch: pytest.MonkeyPatch, data: list[Tensor], estimator: nm.Estimator, **options: Any
) -> float:
    """The estimated variance, over that from all fourth powers of the same gradients."""
    found = nm.fisher_diagonal(network(), data, estimator, **options)
    with monkeypatch.context() as patch:
        patch.setattr(fourth_powers, "_ALL_OF", 10**9)
        full = nm.fisher_diagonal(network(), data[: found.provenance.batches], estimator)
    return variance(found) / variance(full)


@pytest.mark.parametrize(
    "estimator",
    [nm.Hutchinson(probes=3, deflate=0), nm.Hutchinson(probes=3, deflate=0, orthogonal=False), nm.MonteCarlo(4)],
    ids=repr,
)
def test_error_bars_of_several_probes_count_thinned_batches_fully(estimator, monkeypatch):
    """SquaredProduct.add_squares drops the weight 4 of a batch that stands for four: the variance is a quarter."""
    data = list(inputs(40, 64, 6))
    assert thinned_over_full(monkeypatch, data, estimator) == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize(("size", "batches"), [(64, 3), (128, 2), (256, 2), (256, 3), (1000, 3)])
def test_error_bars_of_a_few_large_batches_are_not_too_small(size, batches, monkeypatch):
    """The first batch counts once, for itself; the second and the third not at all, and nothing for them."""
    data = list(inputs(batches, size, 6))
    assert 0.8 < thinned_over_full(monkeypatch, data, nm.Hutchinson(deflate=0)) < 1.5


def test_a_run_does_not_stop_because_a_batch_was_left_out_of_the_error(monkeypatch):
    data = list(inputs(16, 256, 6))
    first = nm.fisher_diagonal(network(), data[:1], nm.Hutchinson(deflate=0), parameters="*.weight").relative_error
    wanted = {"rtol": first / 2.2, "parameters": "*.weight"}  # some five batches
    assert thinned_over_full(monkeypatch, data, nm.Hutchinson(deflate=0), **wanted) > 0.7


@pytest.mark.parametrize("granularity", ["auto", "batch"])
@pytest.mark.parametrize("first", [2, 5])
def test_error_bars_stay_finite_if_the_first_batches_are_saturated(granularity, first):
    """Units are those of their tiny gradients; fourth powers of the next ones overflow unless it is a rare batch."""
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.zero_()[0, 0] = 1.0
        model.bias.zero_()
    sure, unsure = inputs(4, 6), inputs(4, 6, seed=1)
    sure[:, 0], unsure[:, 0] = 60.0, 0.0
    found = nm.fisher_diagonal(model, [sure] * first + [unsure] * 4, nm.Hutchinson(deflate=0), granularity=granularity)
    assert all(bool(value.isfinite().all()) for value in found.stderr.values())


@pytest.mark.parametrize("steps", [0, 300])
def test_the_relative_error_of_deflated_probes_has_the_right_size(steps: int) -> None:
    """After training one eigenvalue dominates, and standard errors are wide bounds: that twin does not pass."""
    model, data = network(), inputs(4, 64, 6)
    labels = data.flatten(0, 1)[:, :5].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.flatten(0, 1)), labels).backward()
        optimizer.step()
    exact = nm.fisher_diagonal(model, list(data), nm.Exact())
    runs = [nm.fisher_diagonal(model, list(data), nm.Hutchinson(), seed=seed) for seed in range(100)]
    total = sum(float(value.sum()) for value in exact.values())
    errors = {name: torch.stack([run[name] - exact[name] for run in runs]) for name in exact}
    true = sum(float(error.square().mean(0).sqrt().sum()) for error in errors.values()) / total
    found = sum(run.relative_error for run in runs) / len(runs)
    bound = sum(run.trace.stderr / run.trace.value for run in runs) / len(runs)
    assert 0.75 < found / true < 1.3
    assert not steps or bound / true > 1.3


@pytest.mark.parametrize("why", ["few samples carry F", "few samples contribute to an entry"])
def test_all_fourth_powers_are_taken_where_some_would_not_do(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error bars are those from all of them, to the bit; without this rule, as in a twin, they are not."""
    x = inputs(20, 32, 6)
    if why == "few samples carry F":
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False))
        x[:, 1:] *= 100  # but for one sample of each batch, predictions are certain
        monkeypatch.setattr(fourth_powers, "_MANY", 2.0)  # the other rule
        rule, off = "_EVEN", 0.0
    else:
        model = nn.Linear(6, 5, bias=False)
        x *= torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.05
        rule, off = "_MANY", 2.0

    def noise() -> Tensor:
        found = nm.fisher_diagonal(model, list(x), nm.Hutchinson(deflate=0))
        return torch.cat([found.noise[name].flatten() for name in found])

    found = noise()
    with monkeypatch.context() as patch:
        patch.setattr(fourth_powers, rule, off)
        twin = noise()
    monkeypatch.setattr(fourth_powers, "_ALL_OF", 10**9)
    full = noise()
    assert torch.equal(found, full)
    assert not torch.allclose(twin, full, rtol=0.05)
