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
from tests.zscores import allowed_z_score

ALL = {**PROBLEMS, **ARCHITECTURES}
# For what is random, a few networks suffice: that gradients are right is seen without randomness, on all of them.
SOME = {
    name: ALL[name]
    for name in (
        *("MLP", "CNN with BatchNorm", "depthwise conv", "LSTM", "transformer encoder", "tied embeddings"),
        *("nested dict inputs", "segmentation, class_dim=1", "multi-label", "regression"),
        *("a forward of its own", "cross-attention", "DistilBERT", "GPT-2 (tokens, tied)"),
    )
}
FEW = {("MLP", "auto"), ("LSTM", "batch"), ("multi-label", "batch"), ("transformer encoder", "auto")}
PROBES = 400
# |z| that the worst of 1000 entries exceeds with a probability below 1e-6, for means of PROBES squares of normal
# numbers: the tail is that of χ² with 400 degrees of freedom, 5e-10 beyond seven standard deviations.
LIMIT = 7.0


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


def columns(problem: Problem, part: str) -> Tensor:
    """a = SᵀJ for each position, [N, r, P]."""
    rows, logits = jacobian(problem)
    core = problem.likelihood(logits)
    if part == "full":
        factor = core.factor_matrix()
    elif part == "upper":
        factor = torch.diag_embed(square_root(core.upper_envelope()))
    else:
        values, vectors = core.spectrum(min(int(part), core.rank))
        factor = (square_root(values)[..., None] * vectors).mT
    return torch.einsum("ncr,ncp->nrp", factor, rows)


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def squared_together(result: nm.DiagonalFisher, positions: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Entries by how they were squared, and for all pairs of positions 1 if their gradients were added before."""
    each = torch.arange(positions)
    sample = each // (positions // 4)
    methods = [
        (m, value.numel()) for value, m in zip(result.values(), result.provenance.granularity.values(), strict=True)
    ]
    for method, group in (("token", each), ("sample", sample), ("batch", sample // 3)):  # of three samples and of one
        entries = torch.cat([torch.full((size,), m.startswith(method)) for m, size in methods])
        yield entries, (group[:, None] == group).double()


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


def weights_of(exact: Tensor) -> Tensor:
    """w with Σ_k w_k v_k the mean of v_k/F_kk, over all entries that are more than rounding errors."""
    weights = torch.where(exact > 1e-9 * exact.amax(), 1 / exact, 0)
    return weights / weights.count_nonzero()


def deviations(problem: Problem, result: nm.DiagonalFisher, part: str, noise: str) -> tuple[Tensor, Tensor]:
    """The exact standard deviation for one probe, of each entry and of their mean ratio to what they estimate.

    All are sums of ξᵀMξ, which for signs have the variance 2‖M‖² - 2 Σ M_ii²: Theorem 11.  Here M is Σ_k w_k a_k a_kᵀ.
    """
    a = columns(problem, part)
    weights, size = weights_of(a.square().sum((0, 1))), a.shape[1]
    variances, M = torch.zeros_like(weights), torch.zeros(len(a) * size, len(a) * size, dtype=a.dtype)
    for entries, together in squared_together(result, len(a)):
        own, lengths = a[..., entries], a[..., entries].square().sum(1)
        variances[entries] = 2 * (lengths * (together @ lengths)).sum(0)
        products = (own * weights[entries]).flatten(0, 1) @ own.flatten(0, 1).T
        M += products * together.repeat_interleave(size, 0).repeat_interleave(size, 1)
    variance = 2 * M.square().sum()
    if noise == "rademacher":
        variances -= 2 * a.pow(4).sum((0, 1))
        variance -= 2 * M.diagonal().square().sum()
    return variances.clamp(min=0).sqrt(), variance.clamp(min=0).sqrt()


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
    expected = columns(problem, part).square().sum((0, 1))
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
            for i, g in enumerate((token, single, single.sum(0, keepdim=True))):
                constant = estimator.pass_noise(core, alone=i == 0 or (i == 1 and positions == 1))[0]
                squares[i] += g.square().sum(0)
                fourths[i] += constant * g.pow(4).sum(0)
    expected, stderr = torch.zeros(2, rows.shape[-1]).double()
    for i, (entries, _) in enumerate(squared_together(result, len(logits))):
        expected[entries], stderr[entries] = squares[i, entries], fourths[i, entries].sqrt()
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


# Each of them on two networks; the rest is slow.
WAYS = [*((kind, "auto") for kind in HUTCHINSON), ("rademacher", "batch"), ("gaussian", "batch")]
CHOSEN = [
    pytest.param(name, *way, marks=[] if (i - j) % len(WAYS) == 0 else pytest.mark.slow)
    for i, name in enumerate(SOME)
    for j, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("name", "kind", "granularity"), CHOSEN)
def test_hutchinson_is_unbiased_with_the_variance_of_the_paper(name: str, kind: str, granularity: str) -> None:
    """Within the exact standard deviation, with a false-alarm rate below 1e-5; 30 % too much in all is seen.

    The latter by the mean ratio over all entries: a single one would have to be wrong by a half.
    """
    problem, (estimator, part, noise) = SOME[name], HUTCHINSON[kind]
    result = estimate(problem, estimator, granularity=granularity)
    exact = columns(problem, part).square().sum((0, 1))
    each, of_ratio = (deviation / math.sqrt(PROBES) for deviation in deviations(problem, result, part, noise))
    zero = 1e-20 * exact.amax()  # a key's bias has no effect, but gradients of 1e-20
    error = (flat(result) - exact).abs()
    assert (error <= torch.where(exact <= zero, zero, LIMIT * each + 1e-7 * exact)).all()
    ratio, allowed = weights_of(exact) @ flat(result), allowed_z_score(1) * of_ratio + 1e-7
    assert abs(ratio - 1) <= allowed
    assert abs(1.3 * ratio - 1) > allowed


def mean_ratios(name: str, estimator: nm.Estimator, granularity: str) -> Tensor:
    """Of many runs, which are right on average if they have the mean 1."""
    problem = SOME[name]
    exact = flat(reference.reference_diagonal(problem.model, problem.forward, problem.likelihood))
    runs = [estimate(problem, estimator, granularity=granularity, seed=seed) for seed in range(20)]
    return torch.stack([weights_of(exact) @ flat(run) for run in runs])


def t_score(ratios: Tensor) -> float:
    return float((ratios.mean() - 1).abs() / (ratios.std() / math.sqrt(len(ratios)) + 1e-9))


T_LIMIT = 5.9  # exceeded by |t| of 19 degrees of freedom with a probability of 1e-5


@pytest.mark.parametrize("estimator", [nm.Hutchinson(30, orthogonal=False), nm.MonteCarlo(30)], ids=repr)
@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        pytest.param(name, granularity, marks=[] if (name, granularity) in FEW else pytest.mark.slow)
        for name in SOME
        for granularity in ("auto", "batch")
    ],
)
def test_deflated_and_monte_carlo_are_unbiased(name: str, estimator: nm.Estimator, granularity: str) -> None:
    ratios = mean_ratios(name, estimator, granularity)
    assert t_score(ratios) < T_LIMIT
    assert t_score(1.3 * ratios) > T_LIMIT


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


@pytest.mark.parametrize(
    ("twin", "granularity"),
    [
        (DividedTwice(30), "auto"),
        (Unsigned(30, deflate=0, orthogonal=False), "batch"),
        (SumOfProbes(30, deflate=0, orthogonal=False), "sample"),
    ],
)
def test_biased_twins_are_seen(twin: nm.Estimator, granularity: str) -> None:
    assert t_score(mean_ratios("MLP", twin, granularity)) > T_LIMIT


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
    problem, seeds = PROBLEMS["MLP"], 600
    a = columns(problem, "full")
    exact = a.square().sum((0, 1))
    variance = torch.zeros_like(exact)
    for group in [slice(None)] if granularity == "batch" else [slice(n, n + 1) for n in range(4)]:
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
