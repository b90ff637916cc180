"""Distances between tasks are what their equations say, and their standard errors cover."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.uses.similarity import METRICS
from tests.cli.commands import good
from tests.uses.models import bert, diagonal, network, tokens


def by_hand(a: nm.DiagonalFisher, b: nm.DiagonalFisher, metric: str) -> float:
    x = [value for name in a for value in a.mean[name].flatten().tolist()]
    y = [value for name in a for value in b.mean[name].flatten().tolist()]
    if metric == "frechet":
        p, q = [v / sum(x) for v in x], [v / sum(y) for v in y]
        return math.sqrt(0.5 * sum((math.sqrt(u) - math.sqrt(v)) ** 2 for u, v in zip(p, q, strict=True)))
    if metric == "task2vec":
        x, y = ([w / (u + v) if u + v else 0.0 for w, u, v in zip(one, x, y, strict=True)] for one in (x, y))
    products = [sum(u * v for u, v in zip(*pair, strict=True)) for pair in ((x, y), (x, x), (y, y))]
    return 1 - products[0] / math.sqrt(products[1] * products[2])


@pytest.mark.parametrize("metric", METRICS)
def test_values_are_those_of_the_loop(metric: str) -> None:
    model = network(5)
    a, b = diagonal(model, 1), diagonal(model, 2)
    a.sums["0.bias"][0] = 0
    found = nm.task_distance(a, b, metric)
    assert found.value == pytest.approx(by_hand(a, b, metric), rel=1e-9)
    assert found.stderr == 0
    assert float(nm.task_distance(a, a, metric)) == pytest.approx(0, abs=1e-7)
    assert nm.task_distance(b, a, metric).value == pytest.approx(found.value, rel=1e-12)
    if metric != "task2vec":
        assert nm.task_distance(7 * a.sum, b, metric).value == pytest.approx(found.value, rel=1e-9)
    assert str(found).startswith(f"{metric} 0.")


def tasks() -> tuple[nn.Module, list[list[Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    scale = torch.linspace(0.2, 2, 6, dtype=torch.float64)
    return model, [[torch.randn(64, 6, dtype=torch.float64) * s for _ in range(2)] for s in (1, scale)]


@pytest.fixture(scope="module")
def runs() -> list[list[nm.DiagonalFisher]]:
    """The exact results of two tasks, then estimates with 20 seeds."""
    model, data = tasks()
    rough = nm.Hutchinson(deflate=0)
    exact = [nm.fisher_diagonal(model, one, nm.Exact()) for one in data]
    seeds = [[nm.fisher_diagonal(model, one, rough, seed=2 * s + i) for i, one in enumerate(data)] for s in range(20)]
    return [exact, *seeds]


@pytest.mark.parametrize("metric", METRICS)
def test_standard_errors_cover_and_noise_is_taken_off(runs: list[list[nm.DiagonalFisher]], metric: str) -> None:
    """Over 20 seeds: the spread is within the stated error, and the mean within a quarter of it (task2vec: all)."""
    true, *found = (nm.task_distance(a, b, metric) for a, b in runs)
    values, stated = (torch.tensor([getattr(one, name) for one in found]) for name in ("value", "stderr"))
    errors = (values - true.value).abs()
    assert float(values.std()) < float(stated.mean())
    assert abs(float(values.mean()) - true.value) < float(stated.mean()) * (1 if metric == "task2vec" else 0.25)
    assert float((errors < 2 * stated).double().mean()) >= 0.95
    assert float((errors < 2 * stated / 30).double().mean()) < 0.95  # a twin whose errors are wrong would be seen


def test_noise_does_not_make_equal_tasks_different() -> None:
    model, (data, _) = tasks()
    a, b = (nm.fisher_diagonal(model, data, nm.Hutchinson(deflate=0), seed=seed) for seed in range(2))
    naive = 1 - torch.cosine_similarity(*(torch.cat([v.flatten() for v in one.values()]) for one in (a, b)), 0)
    assert nm.task_distance(a, b).value < 0.3 * float(naive)


@pytest.fixture(scope="module")
def draws() -> list[list[list[nm.DiagonalFisher]]]:
    """For each of 12 draws of data and each of two tasks, four parts."""
    model, _ = tasks()
    scale, generator = torch.linspace(0.2, 2, 6, dtype=torch.float64), torch.Generator().manual_seed(3)

    def part(s: Tensor | int) -> nm.DiagonalFisher:
        return nm.fisher_diagonal(model, [torch.randn(16, 6, dtype=torch.float64, generator=generator) * s], nm.Exact())

    return [[[part(s) for _ in range(4)] for s in (1, scale)] for _ in range(12)]


@pytest.mark.parametrize("metric", METRICS)
def test_parts_give_errors_against_other_data(draws: list[list[list[nm.DiagonalFisher]]], metric: str) -> None:
    """The jackknife's error is the spread over draws, within a factor of two."""
    found = [nm.task_distance(a, b, metric) for a, b in draws]
    spread = float(torch.tensor([one.value for one in found]).std())
    stated = float(torch.tensor([one.stderr for one in found]).square().mean().sqrt())
    assert spread / 2 < stated < 2 * spread


def test_a_model_of_transformers_and_the_command(tmp_path: Path) -> None:
    model = bert()
    first, second = tokens(2)
    a, b = (nm.fisher_diagonal(model, [one], nm.Exact()) for one in (first, second))
    for name, one in (("a", a), ("b", b)):
        one.save(tmp_path / f"{name}.safetensors")
    text = good("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert f"cosine {nm.task_distance(a, b).value:.4g}, frechet" in text
    for values in a.sums.values():
        values.zero_()
    a.save(tmp_path / "zero.safetensors")
    assert "cosine –, frechet –" in good("compare", tmp_path / "zero.safetensors", tmp_path / "b.safetensors")


def test_bad_input() -> None:
    model = network()
    fim = diagonal(model)
    with pytest.raises(ValueError, match="`metric` must be 'cosine', 'frechet' or 'task2vec', got 'euclid'"):
        nm.task_distance(fim, fim, "euclid")
    with pytest.raises(ValueError, match=r"`b` must be a result of the same parameters.*0\.weight has shape \[4, 3\]"):
        nm.task_distance(diagonal(network(5)), diagonal(network(4)).filter("*"))
    with pytest.raises(ValueError, match=r"same parameters as a, got 0\.bias as well"):
        nm.task_distance(fim.filter("*weight"), fim)
    with pytest.raises(TypeError, match=r"`b` must be an nm\.DiagonalFisher, got list"):
        nm.task_distance(fim, [fim])
    with pytest.raises(ValueError, match="two or more parts each, got 1 and 1"):
        nm.task_distance([fim], [fim])
    zero = diagonal(model)
    for values in zero.sums.values():
        values.zero_()
    with pytest.raises(ValueError, match="results above zero and above their noise"):
        nm.task_distance(fim, zero)
