"""What is left of a distribution without leading columns: its predicted noise, and the probes of it."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.estimators.choices import COLUMNS, Choices
from neuromanifold.estimators.orthogonal import least_noise, own_passes, remaining_noise
from tests.estimators.probes import normal
from tests.estimators.test_allocation import scores_of
from tests.zscores import allowed_z_score, worst_z_score

# ---------------------------------------------------------------------------------------------- predicted noise


def choices_of(core: Core) -> Choices:
    found = Choices.of(core)
    assert found is not None
    return found


def all_directions(d: int) -> tuple[Tensor, Tensor]:
    """Three-point Gauss-Hermite points [3^d, d] and weights: exact for polynomials of degree five of normal numbers."""
    points, weights = (
        torch.tensor([-math.sqrt(3), 0, math.sqrt(3)]).double(),
        torch.tensor([1 / 6, 2 / 3, 1 / 6]).double(),
    )
    index = torch.cartesian_prod(*[torch.arange(3)] * d).reshape(-1, d)
    return points[index], weights[index].prod(-1)


@pytest.mark.parametrize(
    "c", [2, 3, 4, 5, 6, 7, 8, 9, *(pytest.param(c, marks=pytest.mark.slow) for c in (10, 11, 12))]
)
def test_predicted_noise_along_eigenvectors(c: int) -> None:
    """Half the exact variance, averaged over directions, for columns √λ_i v_i: without own passes, and with any."""
    for scale in (0.0, 1.0, 6.0, 25.0):
        core = nm.Categorical(scale * normal(1, c))
        values = torch.linalg.eigvalsh(core.fisher()).flip(-1)[0, : c - 1].clamp(min=0)
        x, weights = all_directions(c - 1)
        for m, k in itertools.product({1, 2, 3, 4, 5, c - 2, c - 1} & set(range(1, c)), {0, 1, 2, min(8, c - 2)}):
            found = remaining_noise(
                core.spectrum(max(1, k)).values[:, :k], core.trace(), core.squared_norm(), c - 1, m
            )[0]
            assert len(found) == min(k, m - 1) + 1
            for own, noise in enumerate(found):
                a = (x * values.sqrt())[:, own:].T[None]  # [1, d', points]
                left, d = m - own, c - 1 - own
                if left == 1 and own:
                    variance = bounds.probe_variance(a, granularity="sample") if d > 1 else torch.zeros(1)
                elif left == d:
                    variance = torch.zeros(1)
                elif left % 2 == d % 2 == 0:  # all columns have their partners
                    variance = bounds.orthogonal_probe_variance(a, left, granularity="sample")
                else:
                    variance = bounds.probe_variance(a, granularity="sample", probes=left) * (d - left) / (d - 1)
                expected = (weights * variance).sum() if variance.numel() > 1 else variance.sum()
                torch.testing.assert_close(2 * noise, expected.double(), rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("c", range(3, 10))
def test_predicted_noise_is_that_of_the_estimator(c: int) -> None:
    """`bounds.orthogonal_variance` of `several(m)`, where one pass is left for the rest; else it is at least that."""
    x, weights = all_directions(c)
    for scale, m in itertools.product((0.3, 3.0, 12.0), range(2, c - 1)):
        core = nm.Categorical(scale * normal(1, c))
        variance = bounds.orthogonal_variance(core, x.T[None], m, 8, granularity="sample")
        found, own = float(weights @ variance), own_passes(core, 8, m)
        values = core.spectrum(min(8, c - 1)).values
        claimed = 2 * float(remaining_noise(values, core.trace(), core.squared_norm(), c - 1, m).amin())
        if m - own == 1:
            assert found == pytest.approx(claimed, rel=1e-6, abs=1e-15)
        else:  # axes that are no eigenvectors
            assert 0.7 * claimed - 1e-15 <= found <= 2 * claimed + 1e-15


@pytest.mark.parametrize("c", [3, 4, 10, 30])
def test_the_least_noise_of_each_number_of_passes(c: int) -> None:
    """`with_passes` and `least_noise`: the best number of columns with passes of their own, for each sample."""
    scores = scores_of(nm.Categorical(6 * normal(20, c)))
    left = scores.rest.square() - scores.norms
    for m in (m for m in (1, 2, 3, 9, c - 1) if m <= c - 1):
        factors = [(c - 1 - m) / ((m - own) * max(1, c - 2 - own)) for own in range(min(left.shape[1], m))]
        expected = (left[:, : len(factors)] * torch.tensor(factors)).amin(-1)
        torch.testing.assert_close(least_noise(left, c - 1, torch.tensor([m]))[:, 0], expected, rtol=1e-6, atol=1e-15)
        torch.testing.assert_close(scores.with_passes(m), expected, rtol=1e-6, atol=1e-15)
    one, two = scores.with_passes(1), scores.with_passes(2)
    torch.testing.assert_close(scores.with_passes(1.25), 0.75 * one + 0.25 * two)
    assert scores.with_passes(c - 1).amax() == scores.with_passes(c + 7.5).amax() == 0


@pytest.mark.parametrize("c", [2, 3, 5, 10, 30])
def test_what_is_left_without_columns(c: int) -> None:
    """Trace, norm and noise of M - Σ u_k u_kᵀ by dense matrices."""
    for scale in (0.0, 1.0, 6.0):
        core = nm.Categorical(scale * normal(20, c))
        choices = choices_of(core)
        u, (rest, norms, noise) = choices.columns(), choices.left()
        parts = (u[..., :, None] * u[..., None, :]).cumsum(1)
        M = core.fisher()[:, None] - torch.cat([torch.zeros_like(parts[:, :1]), parts], 1)
        trace, norm = M.diagonal(dim1=-2, dim2=-1).sum(-1), M.square().sum((-2, -1))
        torch.testing.assert_close(rest, trace, rtol=1e-6, atol=1e-13)
        torch.testing.assert_close(norms, norm, rtol=1e-6, atol=1e-13)
        axes = torch.eye(c).double()[:, None].expand(-1, 20, -1)
        along = torch.cat([u, choices.mix(axes).transpose(0, 1)], 1).square().sum(-1).square()  # [n, k + c]
        later = torch.stack([along[:, m:].sum(1) for m in range(rest.shape[1])], 1)
        torch.testing.assert_close(noise, trace.square() + 2 * norm - 3 * later, rtol=1e-6, atol=1e-13)


def test_predicted_noise_does_not_cancel() -> None:
    """float32 against float64: to a millionth of t², never negative, at most t²; also for confident predictions."""
    for scale, c in itertools.product((0.1, 3.0, 10.0, 30.0, 80.0), (3, 10, 100, 1000)):
        logits = (scale * normal(50, c)).float()
        single, double = nm.Categorical(logits), nm.Categorical(logits.double())
        t2 = double.trace().square()[:, None]
        ordinary = t2 > 1e-30  # below, ‖M‖² is no number of float32
        torch.testing.assert_close(
            single.squared_norm()[ordinary[:, 0]].double(), double.squared_norm()[ordinary[:, 0]], rtol=1e-5, atol=0
        )
        ours, exact = choices_of(single).left()[2], choices_of(double).left()[2]
        assert ((ours - exact).abs() <= 1e-4 * exact + 1e-6 * t2)[ordinary[:, 0]].all(), (scale, c)
        assert ((ours >= 0) & (ours <= t2 * (1 + 1e-5) + 1e-300)).all()
        for m in {1, 2, 5, 8} & set(range(1, c - 1)):
            ours, exact = (
                remaining_noise(z.spectrum(min(8, c - 2)).values, z.trace(), z.squared_norm(), c - 1, m)
                for z in (single, double)
            )
            assert ((ours - exact).abs() <= 1e-4 * exact + 1e-6 * t2)[ordinary.expand_as(exact)].all(), (scale, c, m)
            assert (ours >= 0).all()
            assert (ours <= t2 * (1 + 1e-5) + 1e-300).all()


def test_squared_norms_of_confident_predictions() -> None:
    """‖M‖² against dense matrices in float64, where (Σp²)² - Σp⁴ has lost all digits.  Twin: that difference."""
    core = nm.Categorical(torch.tensor([[20.0, 1.0, 0.0], [40.0, 3.0, 0.0], [0.0, 0.0, 100.0]]).double())
    exact = core.fisher().square().sum((-2, -1))
    torch.testing.assert_close(core.squared_norm(), exact, rtol=1e-12, atol=0)
    p2 = core.probs.square()
    twin = (p2 * ((1 - core.probs).square() - p2)).sum(-1) + p2.sum(-1).square()
    assert ((twin - exact).abs() > 0.5 * exact)[1:].all()


# ------------------------------------------------------------------------------- probes without leading eigenvectors

DISTRIBUTIONS: dict[str, tuple[Core, int]] = {  # and how many eigenpairs are known
    **{f"{c} classes, all known": (nm.Categorical(3 * normal(c, seed=c)), c - 1) for c in range(2, 11)},
    **{
        f"{c} classes, {k} known": (nm.Categorical(3 * normal(c, seed=c)), k)
        for c, k in ((3, 1), (6, 2), (11, 9), (12, 9))
    },
    "30 classes, 3 known": (nm.Categorical(2 * normal(30)), 3),
    "confident": (nm.Categorical(15 * normal(6)), 3),
    "impossible classes": (nm.Categorical(torch.tensor([0.0, 1.0, 0.5, -math.inf]).double()), 3),
    "labels": (nm.Bernoulli(2 * normal(4)), 2),
    "all labels": (nm.Bernoulli(2 * normal(4)), 4),
    "regression": (nm.Gaussian(normal(3), variance=torch.tensor([0.5, 1.0, 3.0]).double()), 3),
    "equal variances": (nm.Gaussian(normal(3)), 2),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_probes_have_the_rest_as_their_mean(name: str) -> None:
    """E[u uᵀ] = M - Σ_{k<own} u_k u_kᵀ for all `own` at once; false-alarm rate 1e-6.  Twin: one fewer."""
    core, k = DISTRIBUTIONS[name]
    assert k <= min(COLUMNS, core.rank)
    draws, numbers = 4000 if core.dim < 20 else 2000, torch.arange(k + 1)
    many = _repeated(core, draws * (k + 1))
    choices = choices_of(many)
    columns = choices.columns()
    one = columns[0, :k]
    parts = one[:, :, None] * one[:, None, :]  # [k, C, C]
    rest = core.fisher() - torch.cat([torch.zeros_like(parts[:1]), parts.cumsum(0)])  # [k + 1, C, C]
    for fewer in (0, 1):
        own = (numbers - fewer).clamp(min=0).repeat(draws)
        u = choices.probe(columns, own, torch.Generator().manual_seed(0)).view(draws, k + 1, core.dim)
        z = worst_z_score(u[..., :, None] * u[..., None, :], rest)
        assert z > 20 if fewer else z < allowed_z_score((k + 1) * core.dim * (core.dim + 1) // 2)
    assert (u.sum(-1).abs().amax() < 1e-12) == isinstance(core, nm.Categorical)  # orthogonal to e


def _repeated(core: Any, n: int) -> Core:
    if isinstance(core, nm.Gaussian):
        return nm.Gaussian(core.mean.expand(n, -1), core.variance.expand(n, -1))
    made: Core = type(core)(core.logits.expand(n, -1))
    return made


def test_a_probe_of_nothing_is_zero() -> None:
    choices = choices_of(nm.Categorical(3 * normal(20, 5)))
    u = choices.probe(choices.columns(), torch.full((20,), 4), torch.Generator().manual_seed(0))
    assert u.abs().amax() == 0


def test_signs_are_drawn_for_each_distribution_by_itself() -> None:
    """Products of the probes of two of them have mean zero, false-alarm rate 1e-6."""
    choices, generator = choices_of(nm.Categorical((2 * normal(4)).expand(2, -1))), torch.Generator().manual_seed(0)
    columns, own = choices.columns(), torch.tensor([0, 1])
    probes = [choices.probe(columns, own, generator) for _ in range(4000)]
    products = torch.stack([u[0, :, None] * u[1] for u in probes])
    assert worst_z_score(products, torch.zeros(4, 4).double()) < allowed_z_score(16)
