"""Every estimator against the definition, on every kind of network."""

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.core.sums import square_root
from neuromanifold.reference import network as reference
from tests.run.networks import PROBLEMS, Problem

PROBES = 100
# |z| that the worst of 1000 entries exceeds with a probability below 1e-6, for means of PROBES squares of normal
# numbers: the tail is that of χ² with 100 degrees of freedom, 4e-10 beyond eight standard deviations.
LIMIT = 8.0


def estimate(problem: Problem, estimator: nm.Estimator, **options: object) -> nm.DiagonalFisher:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        return nm.fisher_diagonal(
            problem.model, problem.data, estimator, problem.likelihood, reduction="sum", **problem.options, **options
        )


def columns(problem: Problem, part: str) -> tuple[Tensor, list[slice]]:
    """a = SᵀJ for each position, [N, r, P], and which positions make a batch."""
    jacobian, logits = reference.jacobian(problem.model, problem.forward)
    core = problem.likelihood(logits)
    if part == "full":
        factor = core.factor_matrix()
    elif part == "upper":
        factor = torch.diag_embed(square_root(core.upper_envelope()))
    else:
        values, vectors = core.spectrum(min(int(part), core.rank))
        factor = (square_root(values)[..., None] * vectors).mT
    positions = len(logits) // 4
    return torch.einsum("ncr,ncp->nrp", factor, jacobian), [slice(0, 3 * positions), slice(3 * positions, None)]


def z_scores(problem: Problem, result: nm.DiagonalFisher, part: str, noise: str, probes: int) -> Tensor:
    """(estimate - exact)/(exact standard deviation): the variance of Theorem 11 and its propositions."""
    a, batches = columns(problem, part)
    exact = a.square().sum((0, 1))
    variance = torch.zeros_like(exact)
    for batch in batches:
        variance += 2 * a[batch].square().sum((0, 1)).square()
        if noise == "rademacher":
            variance -= 2 * a[batch].pow(4).sum((0, 1))
    flat = torch.cat([result[name].flatten() for name in result])
    deviation = (variance.clamp(min=0) / probes).sqrt()
    error = flat - exact
    zero = 1e-20 * exact.amax()  # a key's bias has no effect, but gradients of 1e-20
    certain = (deviation <= 1e-7 * exact) | (exact <= zero)
    assert (error[certain].abs() <= 1e-7 * exact[certain] + zero).all()
    return (error / deviation)[~certain]


@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_equals_the_definition(name: str) -> None:
    problem = PROBLEMS[name]
    expected = reference.fisher_diagonal(problem.model, problem.forward, problem.likelihood)
    result = estimate(problem, nm.Exact())
    assert set(result) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=1e-10, atol=1e-14)
        assert (result.stderr[key] == 0).all()


@pytest.mark.parametrize("part", ["upper", "1", "2"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_of_an_envelope_equals_its_definition(name: str, part: str) -> None:
    problem = PROBLEMS[name]
    core = nm.Upper() if part == "upper" else nm.Lower(int(part))
    result = estimate(problem, nm.Exact(core))
    expected = columns(problem, part)[0].square().sum((0, 1))
    torch.testing.assert_close(torch.cat([result[key].flatten() for key in result]), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", [name for name, p in PROBLEMS.items() if p.likelihood is nm.Categorical])
def test_empirical_equals_the_definition(name: str) -> None:
    problem = PROBLEMS[name]
    expected = reference.empirical_diagonal(problem.model, problem.forward, problem.labels)
    result = estimate(problem, nm.Empirical())
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=1e-10, atol=1e-14)


HUTCHINSON = {
    "rademacher": (nm.Hutchinson(PROBES), "full", "rademacher"),
    "gaussian": (nm.Hutchinson(PROBES, noise="gaussian"), "full", "gaussian"),
    "upper": (nm.Hutchinson(PROBES, core=nm.Upper()), "upper", "rademacher"),
    "lower 1": (nm.Hutchinson(PROBES, core=nm.Lower(1)), "1", "rademacher"),
    "lower 2": (nm.Hutchinson(PROBES, core=nm.Lower(2)), "2", "rademacher"),
}


@pytest.mark.parametrize("kind", HUTCHINSON)
@pytest.mark.parametrize("name", PROBLEMS)
def test_hutchinson_is_unbiased_with_the_variance_of_the_paper(name: str, kind: str) -> None:
    """Mean right within the exact standard deviation; false-alarm rate below 1e-6 for each test."""
    estimator, part, noise = HUTCHINSON[kind]
    z = z_scores(PROBLEMS[name], estimate(PROBLEMS[name], estimator), part, noise, PROBES)
    assert z.numel() == 0 or z.abs().max() < LIMIT


@pytest.mark.parametrize("estimator", [nm.Hutchinson(PROBES, deflate=1), nm.MonteCarlo(PROBES)], ids=repr)
@pytest.mark.parametrize("name", PROBLEMS)
def test_deflated_and_monte_carlo_are_unbiased(name: str, estimator: nm.Estimator) -> None:
    """By the standard error that the run itself reports; that is random too, so no false-alarm rate is claimed."""
    problem = PROBLEMS[name]
    expected = reference.fisher_diagonal(problem.model, problem.forward, problem.likelihood)
    result = estimate(problem, estimator)
    for key, value in expected.items():
        error, stderr = (result[key] - value).abs(), result.stderr[key]
        assert (error <= LIMIT * stderr + 1e-9 * value + 1e-20).all()


class Unsigned(nm.Hutchinson):
    """The biased twin: |S ξ|, a defect that is found in published code."""

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (cotangent.abs() for cotangent in super().cotangents(core, labels, generator))


class DividedTwice(nm.MonteCarlo):
    """The biased twin: the mean over sampled labels divided once too often."""

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (cotangent / math.sqrt(2) for cotangent in super().cotangents(core, labels, generator))


@pytest.mark.parametrize("name", PROBLEMS)
def test_biased_twins_would_be_seen(name: str) -> None:
    problem = PROBLEMS[name]
    z = z_scores(problem, estimate(problem, Unsigned(PROBES)), "full", "rademacher", PROBES)
    expected = reference.fisher_diagonal(problem.model, problem.forward, problem.likelihood)
    twin = estimate(problem, DividedTwice(2 * PROBES))
    seen = any(((twin[k] - v).abs() > LIMIT * twin.stderr[k] + 1e-9 * v).any() for k, v in expected.items())
    assert seen
    if problem.likelihood is nm.Categorical:
        assert z.abs().max() > LIMIT


def test_two_classes_deflated_has_no_class_noise() -> None:
    """One sample, two classes: only a sign is random, so the square is exact."""
    problem = PROBLEMS["two classes"]
    data = [problem.inputs[i : i + 1] for i in range(4)]
    result = nm.fisher_diagonal(problem.model, data, nm.Hutchinson(deflate=1), reduction="sum")
    expected = reference.fisher_diagonal(problem.model, problem.forward)
    torch.testing.assert_close(result["weight"], expected["weight"], rtol=1e-12, atol=0)


def test_squared_batch_gradient_is_what_it_says_and_no_fisher() -> None:
    problem = PROBLEMS["MLP"]
    result = estimate(problem, nm.SquaredBatchGradient())
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for inputs, labels in problem.data:
        loss = torch.nn.functional.cross_entropy(problem.model(inputs), labels, reduction="sum")
        expected += torch.autograd.grad(loss, problem.model[0].weight)[0].square()
    torch.testing.assert_close(result["0.weight"], expected)
    whole = nm.fisher_diagonal(problem.model, [(problem.inputs, problem.labels)], nm.SquaredBatchGradient())
    assert not torch.allclose(whole.sum["0.weight"], expected)  # it depends on how the data are cut into batches


def test_the_meaning_of_the_matrix_is_a_divergence() -> None:
    """2 KL(p_θ ‖ p_θ+δ)/δᵀFδ -> 1 as δ -> 0, linearly in δ."""
    for name in ("MLP", "transformer encoder", "LSTM", "GPT-2 (tokens, tied)"):
        problem = PROBLEMS[name]
        fisher = reference.fisher_matrix(problem.model, problem.forward)
        direction = torch.randn(len(fisher), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for size in (1e-4, 1e-5, 1e-6):
            step = size * direction
            divergence = reference.divergence(problem.model, problem.forward, reference.by_name(problem.model, step))
            ratio = 2 * divergence / (step @ fisher @ step)
            assert abs(ratio - 1) < 300 * size


@pytest.mark.parametrize("noise", ["rademacher", "gaussian"])
def test_variance_over_many_seeds_is_that_of_theorem_11(noise: str) -> None:
    """False-alarm rate below 1e-6; twenty per cent more or less variance is seen."""
    problem = PROBLEMS["MLP"]
    a, _ = columns(problem, "full")
    exact = a.square().sum((0, 1))
    variance = 2 * exact.square() - (2 * a.pow(4).sum((0, 1)) if noise == "rademacher" else 0)
    squares = []
    for seed in range(3000):
        result = nm.fisher_diagonal(problem.model, [problem.inputs], nm.Hutchinson(noise=noise), seed=seed).sum
        squares.append(torch.cat([result[key].flatten() for key in result]))
    deviations = (torch.stack(squares) - exact).square()
    z = (deviations.mean(0) - variance) / (deviations.std(0) / math.sqrt(len(squares)))
    assert z.abs().max() < LIMIT
    assert ((0.5 * deviations.mean(0) - variance) / (0.5 * deviations.std(0) / math.sqrt(3000))).abs().max() > LIMIT
    assert (variance.sqrt() <= math.sqrt(2) * exact).all()  # the coefficient of variation is at most √2
