"""Every estimator against the definition, on every kind of network."""

import copy
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.core.sums import square_root
from neuromanifold.problem.cotangents import batch_seed
from neuromanifold.reference import network as reference
from tests.problems.architectures import ARCHITECTURES
from tests.problems.networks import PROBLEMS
from tests.problems.problem import Problem

ALL = {**PROBLEMS, **ARCHITECTURES}
# For what is random, a few networks suffice: that gradients are right is seen without randomness, on all of them.
SOME = {
    name: ALL[name]
    for name in (
        *("MLP", "CNN with BatchNorm", "depthwise conv", "LSTM", "transformer encoder", "tied embeddings"),
        *("nested dict inputs", "two classes", "segmentation, class_dim=1", "multi-label", "regression"),
        *("a forward of its own", "cross-attention", "DistilBERT", "GPT-2 (tokens, tied)"),
    )
}
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


_JACOBIANS: dict[int, tuple[Tensor, Tensor]] = {}


def jacobian(problem: Problem) -> tuple[Tensor, Tensor]:
    """∂z/∂θ by definition, [N, C, P], and z; the same for all tests."""
    key = id(problem.model)
    if key not in _JACOBIANS:
        _JACOBIANS[key] = reference.jacobian(problem.model, problem.forward)
    return _JACOBIANS[key]


def columns(problem: Problem, part: str) -> tuple[Tensor, list[slice], list[slice]]:
    """a = SᵀJ for each position, [N, r, P]; which positions make a batch; and which make a sample."""
    rows, logits = jacobian(problem)
    core = problem.likelihood(logits)
    if part == "full":
        factor = core.factor_matrix()
    elif part == "upper":
        factor = torch.diag_embed(square_root(core.upper_envelope()))
    else:
        values, vectors = core.spectrum(min(int(part), core.rank))
        factor = (square_root(values)[..., None] * vectors).mT
    positions = len(logits) // 4
    batches = [slice(0, 3 * positions), slice(3 * positions, None)]
    samples = [slice(n * positions, (n + 1) * positions) for n in range(4)]
    return torch.einsum("ncr,ncp->nrp", factor, rows), batches, samples


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def by_sample(result: nm.DiagonalFisher) -> Tensor:
    """For each entry, whether samples were squared one by one."""
    ways = result.provenance.granularity
    return torch.cat([torch.full((result[name].numel(),), ways[name] != "batch") for name in result])


def assert_close(problem: Problem, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        if problem.rtol > 1e-9:
            error = torch.linalg.vector_norm(found[key] - value)
            assert error <= problem.rtol * torch.linalg.vector_norm(value), key
        else:
            torch.testing.assert_close(
                found[key], value, rtol=problem.rtol, atol=1e-14, msg=lambda m, k=key: f"{k}: {m}"
            )


def z_scores(problem: Problem, result: nm.DiagonalFisher, part: str, noise: str, probes: int) -> Tensor:
    """(estimate - exact)/(exact standard deviation): the variance of Theorem 11 and its propositions.

    Where samples are squared one by one, it is that of batches of one sample.
    """
    a, batches, samples = columns(problem, part)
    exact = a.square().sum((0, 1))

    def variance(groups: list[slice]) -> Tensor:
        total = torch.zeros_like(exact)
        for group in groups:
            total += 2 * a[group].square().sum((0, 1)).square()
            if noise == "rademacher":
                total -= 2 * a[group].pow(4).sum((0, 1))
        return total

    deviation = (torch.where(by_sample(result), variance(samples), variance(batches)).clamp(min=0) / probes).sqrt()
    error = flat(result) - exact
    zero = 1e-20 * exact.amax()  # a key's bias has no effect, but gradients of 1e-20
    certain = (deviation <= 1e-7 * exact) | (exact <= zero)
    assert (error[certain].abs() <= 1e-7 * exact[certain] + zero).all()
    return (error / deviation)[~certain]


@pytest.mark.parametrize("name", ALL)
def test_exact_equals_the_definition(name: str) -> None:
    """And every parameter with a rule is done by it: a rule that is silently not used would be seen."""
    problem = ALL[name]
    rows, logits = jacobian(problem)
    fisher = problem.likelihood(logits).fisher()
    expected = reference.by_name(problem.model, torch.einsum("ncp,ncd,ndp->p", rows, fisher, rows))
    result = estimate(problem, nm.Exact())
    assert_close(problem, dict(result), expected)
    assert all((result.stderr[key] == 0).all() for key in result)
    ways = result.provenance.granularity
    assert [key for key in result if ways[key] not in ("sample", "token") and problem.by_rule(key)] == []


@pytest.mark.parametrize("part", ["upper", "1", "2"])
@pytest.mark.parametrize("name", ALL)
def test_exact_of_an_envelope_equals_its_definition(name: str, part: str) -> None:
    problem = ALL[name]
    core = nm.Upper() if part == "upper" else nm.Lower(int(part))
    expected = columns(problem, part)[0].square().sum((0, 1))
    assert_close(problem, dict(estimate(problem, nm.Exact(core))), reference.by_name(problem.model, expected))


@pytest.mark.parametrize("name", [name for name, p in ALL.items() if p.likelihood is nm.Categorical])
def test_empirical_equals_the_definition(name: str) -> None:
    problem = ALL[name]
    expected = reference.empirical_diagonal(problem.model, problem.forward, problem.labels_by_sample)
    assert_close(problem, dict(estimate(problem, nm.Empirical())), expected)


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Empirical()], ids=repr)
@pytest.mark.parametrize("name", [name for name, p in ALL.items() if p.likelihood is nm.Categorical])
def test_float32_to_five_digits(name: str, estimator: nm.Estimator) -> None:
    """Of each parameter's norm; a parameter without any effect has a norm of rounding errors."""
    problem = copy.copy(ALL[name])
    problem.model, problem.inputs = copy.deepcopy(problem.model).float(), _float(problem.inputs)
    result = estimate(problem, estimator)
    problem.inputs = _float(problem.inputs, torch.float64)
    if isinstance(estimator, nm.Exact):
        expected = reference.reference_diagonal(problem.model, problem.forward)
    else:
        expected = reference.empirical_diagonal(problem.model, problem.forward, problem.labels_by_sample)
    largest = max(float(value.abs().max()) for value in expected.values())
    for key, value in expected.items():
        assert result[key].dtype == torch.float32
        error = torch.linalg.vector_norm(result[key] - value)
        assert error <= 1e-5 * torch.linalg.vector_norm(value) + 1e-10 * largest, key


def _float(inputs: object, dtype: torch.dtype = torch.float32) -> object:
    if isinstance(inputs, dict):
        return {key: _float(value, dtype) for key, value in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs  # type: ignore[attr-defined]


@pytest.mark.parametrize("granularity", ["auto", "sample", "batch"])
@pytest.mark.parametrize("name", ALL)
def test_one_backward_squares_what_it_says(name: str, granularity: str) -> None:
    """The very cotangents of a run, sent back by definition: squared per token, sample or batch as it says."""
    problem, estimator = ALL[name], nm.Hutchinson(2, deflate=0, orthogonal=False)
    result = estimate(problem, estimator, granularity=granularity, seed=3)
    ways = result.provenance.granularity
    if granularity != "auto":
        assert set(ways.values()) <= ({"batch"} if granularity == "batch" else {"sample", "sample, one by one"})
    assert all(ways[key] in ("sample", "token") or not problem.by_rule(key) or granularity == "batch" for key in ways)
    rows, logits = jacobian(problem)
    positions, generator = len(logits) // 4, torch.Generator()
    squares, fourths = torch.zeros(3, rows.shape[-1]).double(), torch.zeros(3, rows.shape[-1]).double()
    for number, batch in enumerate((slice(0, 3 * positions), slice(3 * positions, None))):
        core = problem.likelihood(logits[batch])
        generator.manual_seed(batch_seed(3, number))
        for u in estimator.cotangents(core, None, generator):
            token = torch.einsum("nc,ncp->np", u, rows[batch])
            single = token.view(-1, positions, rows.shape[-1]).sum(1)
            for i, g in enumerate((single.sum(0, keepdim=True), single, token)):
                constant = estimator.pass_noise(core, alone=i == 2 or (i == 1 and positions == 1))[0]
                squares[i] += g.square().sum(0)
                fourths[i] += constant * g.pow(4).sum(0)
    per_token = torch.cat([torch.full((value.numel(),), ways[key] == "token") for key, value in result.items()])
    which = torch.where(per_token, 2, by_sample(result).long())[None]
    expected, stderr = squares.gather(0, which)[0], fourths.gather(0, which)[0].sqrt()
    assert_close(problem, dict(result), reference.by_name(problem.model, expected))
    error = (flat(result.stderr) - stderr).abs()
    assert (error <= max(1e-8, problem.rtol) * (stderr + stderr.amax())).all()


HUTCHINSON = {
    "rademacher": (nm.Hutchinson(PROBES, deflate=0, orthogonal=False), "full", "rademacher"),
    "gaussian": (nm.Hutchinson(PROBES, deflate=0, noise="gaussian", orthogonal=False), "full", "gaussian"),
    "upper": (nm.Hutchinson(PROBES, envelope=nm.Upper(), orthogonal=False), "upper", "rademacher"),
    "lower 1": (nm.Hutchinson(PROBES, envelope=nm.Lower(1), orthogonal=False), "1", "rademacher"),
    "lower 2": (nm.Hutchinson(PROBES, envelope=nm.Lower(2), orthogonal=False), "2", "rademacher"),
}


@pytest.mark.parametrize(
    ("kind", "granularity"), [*((kind, "auto") for kind in HUTCHINSON), ("rademacher", "batch"), ("gaussian", "batch")]
)
@pytest.mark.parametrize("name", SOME)
def test_hutchinson_is_unbiased_with_the_variance_of_the_paper(name: str, kind: str, granularity: str) -> None:
    """Mean right within the exact standard deviation; false-alarm rate below 1e-6 for each test."""
    estimator, part, noise = HUTCHINSON[kind]
    result = estimate(SOME[name], estimator, granularity=granularity)
    z = z_scores(SOME[name], result, part, noise, PROBES)
    assert z.numel() == 0 or z.abs().max() < LIMIT


@pytest.mark.parametrize("granularity", ["auto", "batch"])
@pytest.mark.parametrize("estimator", [nm.Hutchinson(PROBES, orthogonal=False), nm.MonteCarlo(PROBES)], ids=repr)
@pytest.mark.parametrize("name", SOME)
def test_deflated_and_monte_carlo_are_unbiased(name: str, estimator: nm.Estimator, granularity: str) -> None:
    """By the standard error that the run itself reports; that is random too, so no false-alarm rate is claimed."""
    problem = SOME[name]
    expected = reference.reference_diagonal(problem.model, problem.forward, problem.likelihood)
    result = estimate(problem, estimator, granularity=granularity, seed=1)
    for key, value in expected.items():
        error, stderr = (result[key] - value).abs(), result.stderr[key]
        assert (error <= LIMIT * stderr + 1e-9 * value + 1e-20).all()


class Unsigned(nm.Hutchinson):
    """The biased twin: |S ξ|, a defect that is found in published code."""

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (cotangent.abs() for cotangent in super().cotangents(core, labels, generator))


class SumOfProbes(nm.Hutchinson):
    """The biased twin: four probes for which nobody divides.  (The sign does not matter to the square of a sample.)"""

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (2 * cotangent for cotangent in super().cotangents(core, labels, generator))


class DividedTwice(nm.MonteCarlo):
    """The biased twin: the mean over sampled labels divided once too often."""

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (cotangent / math.sqrt(2) for cotangent in super().cotangents(core, labels, generator))


@pytest.mark.parametrize("granularity", ["auto", "batch"])
@pytest.mark.parametrize("name", SOME)
def test_biased_twins_would_be_seen(name: str, granularity: str) -> None:
    problem = SOME[name]
    expected = reference.reference_diagonal(problem.model, problem.forward, problem.likelihood)
    twin = estimate(problem, DividedTwice(3 * PROBES), granularity=granularity)
    seen = any(((twin[k] - v).abs() > LIMIT * twin.stderr[k] + 1e-9 * v).any() for k, v in expected.items())
    assert seen
    if problem.likelihood is nm.Categorical:
        kind = Unsigned if granularity == "batch" else SumOfProbes
        result = estimate(problem, kind(PROBES, deflate=0, orthogonal=False), granularity=granularity)
        try:
            z = z_scores(problem, result, "full", "rademacher", PROBES)
        except AssertionError:
            return  # an entry without randomness is wrong
        assert z.abs().max() > LIMIT


def test_two_classes_deflated_has_no_class_noise() -> None:
    """One sample, two classes: only a sign is random, so the square is exact."""
    problem = PROBLEMS["two classes"]
    data = [problem.inputs[i : i + 1] for i in range(4)]
    result = nm.fisher_diagonal(problem.model, data, nm.Hutchinson(), reduction="sum")
    expected = reference.reference_diagonal(problem.model, problem.forward)
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
        problem = ALL[name]
        fisher = reference.reference_matrix(problem.model, problem.forward)
        direction = torch.randn(len(fisher), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for size in (1e-4, 1e-5, 1e-6):
            step = size * direction
            divergence = reference.divergence(problem.model, problem.forward, reference.by_name(problem.model, step))
            ratio = 2 * divergence / (step @ fisher @ step)
            assert abs(ratio - 1) < 300 * size


@pytest.mark.parametrize(
    ("noise", "granularity"),
    [
        pytest.param("rademacher", "batch", marks=pytest.mark.slow),
        pytest.param("gaussian", "batch", marks=pytest.mark.slow),
        ("rademacher", "sample"),
    ],
)
def test_variance_over_many_seeds_is_that_of_theorem_11(noise: str, granularity: str) -> None:
    """False-alarm rate below 1e-6; half the variance is seen.  By samples it is the sum of that of single samples."""
    problem, seeds = PROBLEMS["MLP"], 1000
    a, _, samples = columns(problem, "full")
    exact = a.square().sum((0, 1))
    variance = torch.zeros_like(exact)
    for group in [slice(None)] if granularity == "batch" else samples:
        variance += 2 * a[group].square().sum((0, 1)).square()
        variance -= 2 * a[group].pow(4).sum((0, 1)) if noise == "rademacher" else 0
    squares = []
    for seed in range(seeds):
        estimator = nm.Hutchinson(deflate=0, noise=noise)
        result = nm.fisher_diagonal(problem.model, [problem.inputs], estimator, granularity=granularity, seed=seed).sum
        squares.append(flat(result))
    deviations = (torch.stack(squares) - exact).square()
    z = (deviations.mean(0) - variance) / (deviations.std(0) / math.sqrt(seeds))
    assert z.abs().max() < LIMIT
    assert ((0.5 * deviations.mean(0) - variance) / (0.5 * deviations.std(0) / math.sqrt(seeds))).abs().max() > LIMIT
    assert (variance.sqrt() <= math.sqrt(2) * exact).all()  # the coefficient of variation is at most √2
