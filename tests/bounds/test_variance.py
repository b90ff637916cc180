"""Variances against the enumeration of everything that is random: all sign patterns, all labels."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from tests.core.problems import logits
from tests.zscores import allowed_z_score, worst_z_score


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CORES: dict[str, Core] = {
    "categorical-N3-C2": nm.Categorical(normal(3, 2)),
    "categorical-N3-C3": nm.Categorical(2 * normal(3, 3)),
    "categorical-N1-C5": nm.Categorical(normal(1, 5)),
    "categorical-N2-C4-uniform": nm.Categorical(torch.zeros(2, 4, dtype=torch.float64)),
    "categorical-N2-C3-saturated": nm.Categorical(torch.tensor([[30.0, 0.0, 1.0], [0.0, 9.0, -math.inf]]).double()),
    "bernoulli-N4-C1": nm.Bernoulli(normal(4, 1)),
    "bernoulli-N2-C3": nm.Bernoulli(3 * normal(2, 3)),
    "gaussian-N3-C2": nm.Gaussian(normal(3, 2), variance=torch.tensor([0.5, 2.0])),
}
SETS = [name for name in CORES if not name.startswith("gaussian")]  # with labels that can be enumerated
GRANULARITIES = ("batch", "sample")


def jacobian_of(core: Core, parameters: int = 4) -> torch.Tensor:
    jacobian = normal(core.batch_shape[0], core.dim, parameters, seed=1)
    jacobian[0, :, 0] = 0  # a parameter that the first sample does not touch
    jacobian[:, :, 1] *= 1e-3
    return jacobian


def all_signs(size: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=size)), dtype=torch.float64)


# An estimator by its definition: how many random numbers a sample takes, and the cotangent that they become.
Mix = tuple[int, Callable[[torch.Tensor], torch.Tensor]]


def full(core: Core) -> Mix:
    return core.dim, core.factor


def upper(core: Core) -> Mix:
    return core.dim, lambda xi: core.upper_envelope().sqrt() * xi


def lower(core: Core, rank: int) -> Mix:
    values, vectors = core.lower_envelope(rank)
    return rank, lambda xi: ((values.sqrt() * xi)[..., None] * vectors).sum(-2)


def deflated(core: Core, k: int) -> Mix:
    projector = torch.eye(core.dim).double() - core.spectrum(k).vectors.mT @ core.spectrum(k).vectors
    size, leading = lower(core, k)

    def mix(xi: torch.Tensor) -> torch.Tensor:
        return leading(xi[..., :k]) + (projector @ core.factor(xi[..., k:])[..., None])[..., 0]

    return size + core.dim, mix


def estimates(cotangents: torch.Tensor, jacobian: torch.Tensor, granularity: str) -> torch.Tensor:
    """Estimates [draws, P] from cotangents [draws, N, C]."""
    gradients = torch.einsum("dnc,ncp->dnp", cotangents, jacobian)
    return gradients.sum(1).square() if granularity == "batch" else gradients.square().sum(1)


def enumerated(core: Core, mix: Mix, jacobian: torch.Tensor, granularity: str) -> torch.Tensor:
    """The estimates [2^(N size), P] for all sign patterns."""
    n, (size, cotangent) = core.batch_shape[0], mix
    return estimates(cotangent(all_signs(n * size).view(-1, n, size)), jacobian, granularity)


def assert_variance(actual: torch.Tensor, draws: torch.Tensor) -> None:
    expected = draws.var(0, correction=0)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=float(1e-14 * draws.mean(0).square().max()))


# ----------------------------------------------------------------------------------------- every sign pattern


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", CORES)
def test_rademacher_probes_by_enumeration(name: str, granularity: Any) -> None:
    core, jacobian = CORES[name], jacobian_of(CORES[name])
    how = {"granularity": granularity}
    assert_variance(
        bounds.hutchinson_variance(core, jacobian, **how), enumerated(core, full(core), jacobian, granularity)
    )
    assert_variance(bounds.upper_variance(core, jacobian, **how), enumerated(core, upper(core), jacobian, granularity))
    for k in range(1, min(core.dim, 2) + 1):
        draws = enumerated(core, lower(core, k), jacobian, granularity)
        assert_variance(bounds.lower_variance(core, jacobian, k, **how), draws)
        if core.batch_shape[0] * (core.dim + k) <= 12:
            draws = enumerated(core, deflated(core, k), jacobian, granularity)
            assert_variance(bounds.deflated_variance(core, jacobian, k, **how), draws)
            torch.testing.assert_close(draws.mean(0), enumerated(core, full(core), jacobian, granularity).mean(0))


def test_two_probes_by_enumeration() -> None:
    core, jacobian = CORES["categorical-N1-C5"], jacobian_of(CORES["categorical-N1-C5"])
    one = enumerated(core, full(core), jacobian, "batch")
    two = (one[:, None] + one[None, :]).flatten(0, 1) / 2
    assert_variance(bounds.hutchinson_variance(core, jacobian, probes=2), two)


def test_theorem_11_as_printed() -> None:
    core, jacobian = CORES["categorical-N3-C3"], jacobian_of(CORES["categorical-N3-C3"])
    p = core.probs[..., None]  # type: ignore[attr-defined]
    dl = jacobian - (p * jacobian).sum(1, keepdim=True)
    fisher = (p * dl**2).sum((0, 1))
    printed = 2 * fisher**2 - 2 * (p**2 * dl**4).sum((0, 1))
    torch.testing.assert_close(bounds.hutchinson_variance(core, jacobian), printed)
    torch.testing.assert_close(bounds.hutchinson_variance(core, jacobian, "gaussian"), 2 * fisher**2)


def test_nothing_cancels() -> None:
    columns = torch.tensor([1.0, 1e-9, 1e-12], dtype=torch.float64)[None, :, None]
    a, b, c = (Fraction(float(column)) ** 2 for column in columns.flatten())
    assert math.isclose(bounds.probe_variance(columns).item(), float(4 * (a * b + a * c + b * c)), rel_tol=1e-15)


# ---------------------------------------------------------------------------------------------- Gaussian noise


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gaussian_probes_by_simulation(granularity: Any) -> None:
    """False-alarm rate 1e-6.  The biased twin claims the variance that Rademacher noise would have."""
    core, jacobian = CORES["categorical-N3-C3"], jacobian_of(CORES["categorical-N3-C3"])
    draws = estimates(core.factor(normal(200_000, 3, 3, seed=7)), jacobian, granularity)
    squares = (draws - enumerated(core, full(core), jacobian, granularity).mean(0)).square()
    right = bounds.hutchinson_variance(core, jacobian, "gaussian", granularity)
    wrong = bounds.hutchinson_variance(core, jacobian, "rademacher", granularity)
    assert worst_z_score(squares, right) < allowed_z_score(4) < worst_z_score(squares, wrong)


# ------------------------------------------------------------------------------------------- labels at random


def all_labels(core: Core) -> tuple[torch.Tensor, torch.Tensor]:
    """All label sets of the batch and their probabilities, [sets, N] or [sets, N, C] and [sets]."""
    n, probs = core.batch_shape[0], core.probs  # type: ignore[attr-defined]
    if isinstance(core, nm.Categorical):
        y = torch.tensor(list(itertools.product(range(core.dim), repeat=n)))
        return y, probs.expand(len(y), n, core.dim).gather(-1, y[..., None])[..., 0].prod(-1)
    labels = (all_signs(n * core.dim).view(-1, n, core.dim) + 1) / 2
    return labels, (labels * probs + (1 - labels) * (1 - probs)).flatten(1).prod(-1)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", SETS)
def test_monte_carlo_by_enumeration_of_labels(name: str, granularity: Any) -> None:
    core, jacobian = CORES[name], jacobian_of(CORES[name])
    y, probability = all_labels(core)
    draws, weight = estimates(core.score(y), jacobian, granularity), probability[:, None]
    mean = (weight * draws).sum(0)
    variance = (weight * (draws - mean).square()).sum(0)
    slack = float(1e-14 * mean.square().max())
    actual = bounds.monte_carlo_variance(core, jacobian, granularity)
    torch.testing.assert_close(actual, variance, rtol=1e-9, atol=slack)
    torch.testing.assert_close(bounds.monte_carlo_variance(core, jacobian, granularity, samples=4), actual / 4)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_monte_carlo_of_regression_is_a_gaussian_probe(granularity: Any) -> None:
    core, jacobian = CORES["gaussian-N3-C2"], jacobian_of(CORES["gaussian-N3-C2"])
    probe = bounds.hutchinson_variance(core, jacobian, "gaussian", granularity)
    torch.testing.assert_close(bounds.monte_carlo_variance(core, jacobian, granularity), probe)


def test_monte_carlo_has_no_bound_and_hutchinson_has() -> None:
    core = nm.Categorical(torch.tensor([[0.0, -20.0]], dtype=torch.float64))
    jacobian = torch.tensor([0.0, 1.0], dtype=torch.float64)[None, :, None]
    fisher = core.fisher()[0, 1, 1]
    assert bounds.monte_carlo_variance(core, jacobian).sqrt() / fisher > 10_000
    assert bounds.hutchinson_variance(core, jacobian).sqrt() / fisher <= bounds.CV_BOUND


# ------------------------------------------------------------------------------------------------- properties


@st.composite
def problems(draw: st.DrawFn) -> tuple[Core, torch.Tensor]:
    z = draw(logits(most=6))
    n = draw(st.integers(1, 3))
    numbers = draw(st.lists(st.floats(-1, 1), min_size=n * len(z) * 2, max_size=n * len(z) * 2))
    jacobian = torch.tensor(numbers, dtype=torch.float64).view(n, len(z), 2)
    core: type[Core] = draw(st.sampled_from([nm.Categorical, nm.Bernoulli]))
    return core(z.roll(draw(st.integers(0, len(z) - 1))).expand(n, -1)), jacobian


@given(problems(), st.integers(1, 2))
def test_every_coefficient_of_variation_is_at_most_the_square_root_of_two(
    problem: tuple[Core, torch.Tensor], k: int
) -> None:
    core, jacobian = problem

    def diagonal(matrix: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ncp,ncd,ndp->p", jacobian, matrix, jacobian)

    fisher, dg = diagonal(core.fisher()), diagonal(torch.diag_embed(core.upper_envelope()))
    rounding = 1e-14 * (core.upper_envelope().sum(-1) * jacobian.square().sum(1).mT).sum(-1)  # of a mean that cancels
    tiny = 1e-300  # below it numbers lose their digits
    for variance, mean in (
        (lambda *a: bounds.hutchinson_variance(core, jacobian, *a), fisher),
        (lambda *a: bounds.upper_variance(core, jacobian, *a), dg),
        (lambda *a: bounds.lower_variance(core, jacobian, k, *a), diagonal(core.lower_envelope(k).dense())),
        (lambda *a: bounds.deflated_variance(core, jacobian, k, *a), fisher),
    ):
        batch, gaussian = variance("rademacher", "batch"), variance("gaussian", "batch")
        sample = variance("rademacher", "sample")
        assert (sample >= 0).all()
        assert (sample <= batch * (1 + 1e-12) + tiny).all()
        assert (batch <= gaussian * (1 + 1e-12) + tiny).all()
        assert (gaussian <= (bounds.CV_BOUND * (mean * (1 + 1e-12) + rounding)).square() + tiny).all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_where_no_variance_is_left(scale: float) -> None:
    two, jacobian = nm.Categorical(scale * normal(5, 2)), normal(5, 2, 6, seed=1)
    floor = 1e-28 * torch.einsum("ncp,ncd,ndp->p", jacobian, two.fisher(), jacobian).square()
    assert (bounds.deflated_variance(two, jacobian, granularity="sample") <= floor).all()
    assert (bounds.deflated_variance(two, jacobian) > 0.01 * floor / 1e-28).all()  # between samples it is left
    three, jacobian = nm.Categorical(scale * normal(5, 3)), normal(5, 3, 6, seed=1)
    assert (bounds.lower_variance(three, jacobian, granularity="sample") == 0).all()
    one, jacobian = nm.Bernoulli(scale * normal(5, 1)), normal(5, 1, 6, seed=1)
    assert (bounds.hutchinson_variance(one, jacobian, granularity="sample") == 0).all()


def test_no_deflation_and_full_deflation() -> None:
    core, jacobian = CORES["categorical-N3-C3"], jacobian_of(CORES["categorical-N3-C3"])
    plain, whole = bounds.hutchinson_variance(core, jacobian), bounds.lower_variance(core, jacobian, rank=2)
    torch.testing.assert_close(bounds.deflated_variance(core, jacobian, deflate=0), plain)
    for deflate in (2, 3, 100):
        torch.testing.assert_close(bounds.deflated_variance(core, jacobian, deflate), whole)


def test_empty_problems_and_small_types() -> None:
    empty = nm.Categorical(torch.zeros(0, 3))
    for granularity in GRANULARITIES:
        how: dict[str, Any] = {"granularity": granularity}
        assert bounds.hutchinson_variance(empty, torch.zeros(0, 3, 2), **how).tolist() == [0, 0]
        assert bounds.deflated_variance(empty, torch.zeros(0, 3, 2), **how).tolist() == [0, 0]
        assert bounds.monte_carlo_variance(empty, torch.zeros(0, 3, 2), **how).tolist() == [0, 0]
        assert bounds.probe_variance(torch.zeros(2, 0, 3), **how).tolist() == [0, 0, 0]
    core, jacobian = nm.Categorical(normal(4, 3).float()), 1e-15 * normal(4, 3, 2, seed=1).float()
    small = bounds.hutchinson_variance(core, jacobian)  # 1e-60 has no float32
    torch.testing.assert_close(small, 1e-60 * bounds.hutchinson_variance(core, 1e15 * jacobian), rtol=1e-5, atol=0)
    assert small.dtype == torch.float64


# ------------------------------------------------------------------------------------- minibatches, Cantelli


def test_the_remark_on_minibatches() -> None:
    core = nm.Categorical(normal(12, 3))
    jacobian = normal(12, 3, 5, seed=1)
    fishers, total = [], torch.zeros(5, dtype=torch.float64)
    for j in range(4):
        some = nm.Categorical(core.logits[3 * j : 3 * j + 3])
        part = jacobian[3 * j : 3 * j + 3]
        fishers.append(torch.einsum("ncp,ncd,ndp->p", part, some.fisher(), part))
        total += bounds.hutchinson_variance(some, part, probes=2)
    fisher = torch.stack(fishers)
    bound = bounds.minibatch_variance_bound(fisher, probes=2)
    assert (total <= bound).all()
    assert (bound <= fisher.sum(0).square()).all()
    equal = bounds.minibatch_variance_bound(torch.ones(8, 1))
    assert equal.item() == 2 / 8 * 8**2


@given(st.floats(1.01, 10), problems())
def test_cantelli_holds_for_probes(alpha: float, problem: tuple[Core, torch.Tensor]) -> None:
    core, jacobian = problem
    if core.batch_shape[0] * core.dim > 9:
        return
    draws = enumerated(core, full(core), jacobian, "batch")
    often = (draws >= alpha * draws.mean(0)).double().mean(0)
    positive = draws.mean(0) > 1e-100
    assert (often[positive] <= bounds.cantelli(alpha)).all()


def test_cantelli_is_attained_by_two_points() -> None:
    for alpha, cv in ((2.0, bounds.CV_BOUND), (1.5, 0.1)):
        high = bounds.cantelli(alpha, cv)  # X = alpha with this probability, else what makes the mean 1
        low = (1 - high * alpha) / (1 - high)
        variance = high * (alpha - 1) ** 2 + (1 - high) * (low - 1) ** 2
        assert math.isclose(math.sqrt(variance), cv)
    assert bounds.cantelli(2.0, 0.0) == 0


# -------------------------------------------------------------------------------------------------- bad input

GOOD_CORE, GOOD_J = CORES["categorical-N3-C3"], torch.zeros(3, 3, 2)
BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: bounds.hutchinson_variance(torch.zeros(3), GOOD_J), TypeError, "`core` must be a core"),  # type: ignore[arg-type]
    (lambda: bounds.hutchinson_variance(nm.Categorical(torch.zeros(3)), GOOD_J), ValueError, "`core` .* shape \\[N\\]"),
    (lambda: bounds.upper_variance(GOOD_CORE, torch.zeros(3, 2, 2)), ValueError, "`jacobian` .* \\[3, 3, P\\]"),
    (lambda: bounds.upper_variance(GOOD_CORE, torch.zeros(3, 3)), ValueError, "`jacobian` must be of shape"),
    (lambda: bounds.upper_variance(GOOD_CORE, [1.0]), TypeError, "`jacobian` must be a torch.Tensor"),  # type: ignore[arg-type]
    (lambda: bounds.lower_variance(GOOD_CORE, GOOD_J, rank=4), ValueError, "`rank` must be between 1 and 3"),
    (lambda: bounds.deflated_variance(GOOD_CORE, GOOD_J, deflate=-1), ValueError, "`deflate` must be between 0"),
    (lambda: bounds.probe_variance(GOOD_J[0]), ValueError, "`columns` must be of shape \\[N, r, P\\]"),
    (lambda: bounds.probe_variance(GOOD_J, "uniform"), ValueError, "`noise` must be 'rademacher' or 'gaussian'"),  # type: ignore[arg-type]
    (lambda: bounds.probe_variance(GOOD_J, granularity="auto"), ValueError, "`granularity` must be 'batch' or"),  # type: ignore[arg-type]
    (lambda: bounds.probe_variance(GOOD_J, probes=0), ValueError, "`probes` must be between 1"),
    (lambda: bounds.monte_carlo_variance(GOOD_CORE, GOOD_J, samples=True), TypeError, "`samples` must be an int"),
    (lambda: bounds.minibatch_variance_bound(torch.zeros(3)), ValueError, "`fisher` must be of shape \\[J, P\\]"),
    (lambda: bounds.minibatch_variance_bound(-torch.ones(1, 1)), ValueError, "`fisher` .* a negative entry"),
    (lambda: bounds.cantelli(1.0), ValueError, "`alpha` must be above 1"),
    (lambda: bounds.cantelli(2.0, -1.0), ValueError, "`cv` must be a coefficient of variation"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_named(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
