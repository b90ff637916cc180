"""Adaptive passes on every network of the tests: exact where the cost allows, unbiased below."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor

import neuromanifold as nm
from neuromanifold.estimators.adaptive import Strategy
from neuromanifold.problem.cotangents import Cotangent
from neuromanifold.run import methods, windows
from tests.problems.architectures import ARCHITECTURES
from tests.problems.networks import PROBLEMS
from tests.problems.problem import Problem
from tests.zscores import worst_z_score

ALL = {**PROBLEMS, **ARCHITECTURES}
SOME = (
    "CNN with BatchNorm",
    "tied embeddings",
    "nested dict inputs",
    "multi-label",
    "DistilBERT",
    "GPT-2 (tokens, tied)",
)
SEEDS, COST = 40, 1.4


def estimate(problem: Problem, estimator: nm.Estimator, seed: int = 0, **options: object) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        found = nm.fisher_diagonal(
            problem.model,
            problem.data,
            estimator,
            problem.likelihood,
            reduction="sum",
            seed=seed,
            **problem.options,
            **options,
        )
    return torch.cat([value.double().flatten() for value in found.values()])


def z_score(problem: Problem) -> float:
    """The worst of eight combinations of entries, to which all samples contribute: close to normal."""
    exact = estimate(problem, nm.Exact())
    weights = torch.rand(len(exact), 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    runs = torch.stack([estimate(problem, nm.Adaptive(COST), seed) @ weights for seed in range(SEEDS)])
    floor = problem.rtol * float(exact.sum())  # where nothing is random
    if bool(((runs - exact @ weights).abs() < 1e3 * floor).all()):
        return 0.0
    return worst_z_score(runs, exact @ weights)


LIMIT = float(student.isf(1e-6 / 8 / 2, SEEDS - 1))


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_unbiased(name: str) -> None:
    """False-alarm rate 1e-6 for each network."""
    assert z_score(ALL[name]) < LIMIT


@pytest.mark.parametrize(
    "name",
    [n if n in ("CNN with BatchNorm", "tied embeddings") else pytest.param(n, marks=pytest.mark.slow) for n in ALL],
)
def test_unbiased_where_everyone_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the samples are like, columns of noisy ones have rows of their own."""
    monkeypatch.setattr(windows, "strategy", lambda *_: Strategy("everyone"))
    assert z_score(ALL[name]) < LIMIT


def test_the_twin_of_several_networks_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cotangents a fifth too small, but for exact values."""
    drawn = methods.cotangents

    def smaller(*given: Any) -> Iterator[Cotangent]:
        size = 1.0 if isinstance(given[1], nm.Exact) else 0.8
        return (one._replace(values=size * one.values) for one in drawn(*given))

    monkeypatch.setattr(methods, "cotangents", smaller)
    assert all(z_score(ALL[name]) > LIMIT for name in ("CNN with BatchNorm", "tied embeddings"))


@pytest.mark.parametrize("name", ALL)
def test_exact_where_the_cost_allows(name: str) -> None:
    """As many passes as the rank, and one output for each sample: nothing is random.  Of tokens, cross terms remain."""
    problem = ALL[name]
    was_training = problem.model.training
    with torch.no_grad():
        logits = problem.forward(problem.model.eval())
    problem.model.train(was_training)
    if logits.ndim != 2 or problem.options:
        pytest.skip("several outputs for each sample")
    exact = estimate(problem, nm.Exact())
    found = estimate(problem, nm.Adaptive(float(logits.shape[-1])), granularity="sample")
    assert float((found - exact).abs().max()) <= 1e2 * problem.rtol * float(exact.max())
    if logits.shape[-1] > 2 and name != "multi-label":  # exact at any number of passes, as two classes are
        once = estimate(problem, nm.Adaptive(1.0), granularity="sample")
        assert float((once - exact).abs().max()) > 1e2 * problem.rtol * float(exact.max())
