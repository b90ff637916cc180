"""Empirical and Monte Carlo operators, blocks, lists, spectral density and XTrace, against dense matrices."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests.zscores import allowed_z_score, worst_z_score

torch.manual_seed(0)
HEAD = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
X, Y = torch.randn(7, 4).double(), torch.randint(0, 3, (7,))
DATA = list(zip(X.split(3), Y.split(3), strict=True))
TOKENS, LABELS = torch.randn(5, 4, 4).double(), torch.randint(0, 3, (5, 4))
LABELS[1, 2:] = -100
SEQUENCES = list(zip(TOKENS.split(2), LABELS.split(2), strict=True))
IMAGES = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
KINDS: dict[str, tuple[nn.Module, Any]] = {
    "vectors": (HEAD, DATA),
    "sequences, some ignored": (HEAD, SEQUENCES),
    "images, batches of 1": (IMAGES, list(zip(torch.randn(4, 1, 4, 4).double().split(1), Y[:4].split(1), strict=True))),
}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def dense_of(metric: Any) -> Tensor:
    return metric @ torch.eye(metric.shape[0], dtype=torch.float64)


def empirical_by_definition(model: nn.Module, data: Any) -> Tensor:
    """Σ_n g_n g_nᵀ with the gradient of each sample's log-likelihood, one backward pass for each sample."""
    total = torch.zeros(size(model), size(model), dtype=torch.float64)
    for x, y in data:
        for one, label in zip(x, y, strict=True):
            logits = model(one[None]).flatten(0, -2)
            loss = nn.functional.cross_entropy(logits, label.flatten(), reduction="sum")
            g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
            total += g[:, None] * g
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_the_empirical_fisher_is_that_of_the_definition(kind: str) -> None:
    model, data = KINDS[kind]
    found = nm.fisher_operator(model, data, estimator=nm.Empirical())
    torch.testing.assert_close(dense_of(found.sum), empirical_by_definition(model, data), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dense_of(found), dense_of(found.sum) / found.count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", [1, 3])
def test_the_monte_carlo_fisher_has_the_draws_of_the_dense_matrix(kind: str, samples: int) -> None:
    model, data = KINDS[kind]
    found = nm.fisher_operator(model, data, estimator=nm.MonteCarlo(samples), seed=5).sum
    rows = nm.fisher_factors(model, data, nm.MonteCarlo(samples), granularity="sample", seed=5, dtype=torch.float64).sum
    torch.testing.assert_close(dense_of(found), dense_of(rows), rtol=1e-9, atol=1e-12)
    v = torch.randn(size(model), dtype=torch.float64)
    assert torch.equal(found @ v, found @ v)
    other = nm.fisher_operator(model, data, estimator=nm.MonteCarlo(samples), seed=6).sum
    assert not torch.allclose(found @ v, other @ v)


def test_many_drawn_labels_are_near_the_fisher() -> None:
    exact = dense_of(nm.fisher_operator(HEAD, DATA))
    errors = [
        float((dense_of(nm.fisher_operator(HEAD, DATA, estimator=nm.MonteCarlo(k))) - exact).norm()) for k in (1, 100)
    ]
    assert errors[1] < 0.25 * errors[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"estimator": nm.Exact()}, "nm.Empirical"),
        ({"estimator": nm.SquaredBatchGradient()}, "nm.Empirical"),
        ({"estimator": nm.MonteCarlo(), "envelope": nm.Upper()}, "envelope"),
    ],
)
def test_other_estimators_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        nm.fisher_operator(HEAD, DATA, **options)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("0", ["0.weight", "0.bias"]),
        ("*.bias", ["0.bias", "2.bias"]),
        (["2.bias", "0"], ["2.bias", "0.weight", "0.bias"]),
    ],
)
@pytest.mark.parametrize("estimator", [None, nm.Empirical(), nm.MonteCarlo()], ids=repr)
def test_blocks_are_those_of_the_dense_matrix_in_the_order_asked_for(
    asked: Any, names: list[str], estimator: Any
) -> None:
    whole = nm.fisher_operator(HEAD, DATA, estimator=estimator)
    places = whole.layout.slices
    where = torch.cat([torch.arange(places[name].start, places[name].stop) for name in names])
    block = whole.block(asked)
    assert list(block.layout.shapes) == names
    torch.testing.assert_close(dense_of(block), dense_of(whole)[where][:, where])


def test_blocks_that_match_nothing_are_refused() -> None:
    operator = nm.fisher_operator(HEAD, DATA)
    for wrong in ("1", "encoder.*", []):
        with pytest.raises(ValueError, match="names"):
            operator.block(wrong)


def test_lists_are_vectors() -> None:
    operator = nm.fisher_operator(HEAD, DATA)
    v = [torch.randn_like(p) for p in HEAD.parameters()]
    found = operator @ v
    assert isinstance(found, list)
    flat = operator @ torch.cat([one.flatten() for one in v])
    torch.testing.assert_close(torch.cat([one.flatten() for one in found]), flat)
    assert [one.shape for one in found] == [p.shape for p in HEAD.parameters()]
    with pytest.raises(ValueError, match="one for each parameter"):
        operator @ v[:-1]
    with pytest.raises(ValueError, match="shape"):
        operator @ v[::-1]


def test_positions_are_counted() -> None:
    for by_product in (False, True):
        operator = nm.fisher_operator(HEAD, SEQUENCES)
        if by_product:
            operator @ torch.zeros(size(HEAD), dtype=torch.float64)
        assert (operator.positions, operator.count) == (18, 5)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_spectral_density_has_the_moments_of_its_probes(steps: int) -> None:
    operator = nm.fisher_operator(HEAD, DATA)
    matrix = dense_of(operator)
    density = operator.spectral_density(probes=4, steps=steps, seed=3)
    generator = torch.Generator().manual_seed(3)
    signs = (2 * torch.randint(0, 2, (len(matrix), 4), generator=generator, dtype=torch.int8) - 1).double()
    for k in range(2 * steps):
        expected = (signs * (torch.linalg.matrix_power(matrix, k) @ signs)).sum(0)
        torch.testing.assert_close((density.weights * density.values**k).sum(1), expected, rtol=1e-8, atol=1e-10)


def test_the_smoothed_density_is_near_that_of_the_eigenvalues() -> None:
    operator = nm.fisher_operator(HEAD, DATA)
    values = torch.linalg.eigvalsh(dense_of(operator))
    points, width = torch.linspace(-0.2, float(values[-1]) + 0.2, 200).double(), 0.05
    expected = ((points[:, None] - values) / width).square().mul(-0.5).exp().sum(1) / (width * math.sqrt(2 * math.pi))
    found = operator.spectral_density(probes=40, steps=12)(points, width)
    step = float(points[1] - points[0])
    assert float(found.sum()) * step == pytest.approx(len(values), rel=0.02)
    assert float((found - expected).abs().sum()) * step < 0.15 * len(values)


def test_positions_are_in_every_result(tmp_path: Path) -> None:
    made = [nm.fisher_factors(HEAD, SEQUENCES), nm.fisher_matrix(HEAD, SEQUENCES), nm.fisher_kronecker(HEAD, SEQUENCES)]
    for found in made:
        found.save(tmp_path / "fim.safetensors")
        for one in (found, found.sum, 2 * found, nm.load(tmp_path / "fim.safetensors")):
            assert (one.positions, one.count) == (18, 5)
        assert found.trace.positions == 18
    assert made[1].layer("2").positions == made[2].layer("2").positions == made[0].filter("2.*").positions == 18
    for kind in (nm.fisher_factors, nm.fisher_matrix):
        assert (kind(HEAD, SEQUENCES[:1]) + kind(HEAD, SEQUENCES[1:])).positions == 18
    assert nm.fisher_gram(HEAD, SEQUENCES).positions == 18


@pytest.mark.parametrize("kind", ["operator", "matrix", "kronecker", "factors"])
def test_lists_and_dicts_from_the_left(kind: str) -> None:
    metric = getattr(nm, f"fisher_{kind}")(HEAD, DATA)
    named = {name: torch.randn_like(p) for name, p in HEAD.named_parameters()}
    flat = torch.cat([one.flatten() for one in named.values()])
    expected = metric @ flat
    torch.testing.assert_close(flat @ metric, expected)
    torch.testing.assert_close(torch.cat([one.flatten() for one in list(named.values()) @ metric]), expected)
    torch.testing.assert_close(torch.cat([one.flatten() for one in (named @ metric).values()]), expected)
    assert metric.T is metric


def test_xdiag_is_exact_where_the_rank_is_exhausted() -> None:
    operator = nm.fisher_operator(HEAD, DATA)  # of rank 14 at most
    found = operator.estimate_diagonal("xdiag", products=40)
    torch.testing.assert_close(found.value, dense_of(operator).diagonal())
    assert not found.stderr.any()


def test_xdiag_is_unbiased_and_better_than_hutchinson() -> None:
    operator = nm.fisher_matrix(HEAD, DATA)
    exact = operator.dense().diagonal()
    runs = [operator.estimate_diagonal("xdiag", products=12, seed=seed) for seed in range(400)]
    errors = torch.stack([run.value - exact for run in runs])
    spread, plain = (
        errors.std(0),
        torch.stack([operator.estimate_diagonal("hutchinson", 12, seed).value - exact for seed in range(400)]),
    )
    assert worst_z_score(errors, torch.zeros_like(exact)) < allowed_z_score(len(exact))
    biased = torch.stack([run.value * 1.05 - exact for run in runs])
    assert worst_z_score(biased, torch.zeros_like(exact)) > allowed_z_score(len(exact))
    assert float(spread.norm()) < 0.5 * float(plain.std(0).norm())
    stated = torch.stack([run.stderr for run in runs]).square().mean(0).sqrt()
    assert 0.4 < float(stated.norm() / spread.norm()) < 2.5


def test_xtrace_is_exact_where_the_rank_is_exhausted() -> None:
    operator = nm.fisher_operator(HEAD, DATA)  # of rank 14 at most
    found = operator.estimate_trace("xtrace", products=40)
    exact = float(dense_of(operator).trace())
    assert found.value == pytest.approx(exact, rel=1e-9)
    assert found.stderr == pytest.approx(0.0, abs=1e-9)


def test_xtrace_is_unbiased_and_better_than_hutchinson() -> None:
    operator = nm.fisher_matrix(HEAD, DATA)  # a dense one, since many products are taken
    exact = float(dense_of(operator).trace())
    runs = [operator.estimate_trace("xtrace", products=12, seed=seed) for seed in range(400)]
    errors = torch.tensor([run.value - exact for run in runs])
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / math.sqrt(len(errors))
    assert float(errors.std()) > 0
    plain = torch.tensor([operator.estimate_trace("hutchinson", 12, seed).value - exact for seed in range(400)])
    assert float(errors.std()) < 0.5 * float(plain.std())
    stated = math.sqrt(sum(run.stderr**2 for run in runs) / len(runs))
    assert 0.4 < stated / float(errors.std()) < 2.5


def test_xtrace_needs_four_products() -> None:
    with pytest.raises(ValueError, match="products"):
        nm.fisher_operator(HEAD, DATA).estimate_trace("xtrace", products=3)
    with pytest.raises(ValueError, match="xdiag takes at least 4"):
        nm.fisher_operator(HEAD, DATA).estimate_diagonal("xdiag", products=3)
