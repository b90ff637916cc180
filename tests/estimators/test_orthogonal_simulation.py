"""Orthogonal probes by simulation: unbiased, with the variance that is claimed; biased twins are seen."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.estimators import orthogonal
from neuromanifold.estimators.orthogonal import own_passes
from tests.estimators.probes import GRANULARITIES, drawn, normal
from tests.zscores import allowed_z_score, worst_z_score


class Uncentred(nm.Hutchinson):
    """The biased twin of a squared batch: a pass without its random sign."""

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        del labels
        return self._orthogonal(core, generator)


class Unscaled(nm.Hutchinson):
    """The biased twin of every square: √(d/m) with the d of another rank."""

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (math.sqrt(1.1) * u for u in super().cotangents(core, labels, generator))


def simulated(estimator: nm.Estimator, core: Core, jacobian: Tensor, granularity: str, draws: int) -> tuple[Any, Any]:
    """Estimates [draws, P], and g⁴ of each pass [m, P] on average (sample-wise: summed over the samples)."""
    many = type(core)(core.logits.expand(draws, *core.logits.shape))  # type: ignore[attr-defined]
    g = torch.einsum("mbnc,ncp->mbnp", drawn(estimator, many), jacobian)
    g = g.sum(2, keepdim=True) if granularity == "batch" else g
    return g.square().sum((0, 2)), g.pow(4).sum(2).mean(1)


SIMULATED = {
    "rademacher": (nm.Hutchinson(2, deflate=0), nm.Categorical(2 * normal(3, 6))),
    "rademacher, deflated": (nm.Hutchinson(3), nm.Categorical(2 * normal(3, 6))),
    "rademacher, deflated 5": (nm.Hutchinson(3, deflate=5), nm.Categorical(2 * normal(3, 6))),
    "rademacher, even predictions": (nm.Hutchinson(2), nm.Categorical(0.1 * normal(3, 6))),
    "rademacher, even d": (nm.Hutchinson(2, deflate=0), nm.Categorical(2 * normal(3, 7))),
    "rademacher, even d, three": (nm.Hutchinson(3, deflate=0), nm.Categorical(2 * normal(3, 7))),
    "rademacher, columns": (nm.Hutchinson(9, deflate=0), nm.Categorical(2 * normal(3, 3))),
    "rademacher, Bernoulli": (nm.Hutchinson(3, deflate=0), nm.Bernoulli(normal(3, 4))),
    "gaussian": (nm.Hutchinson(2, deflate=0, noise="gaussian"), nm.Categorical(2 * normal(3, 6))),
    "gaussian, deflated": (nm.Hutchinson(3, noise="gaussian"), nm.Categorical(2 * normal(3, 6))),
    "gaussian, even predictions": (nm.Hutchinson(2, noise="gaussian"), nm.Categorical(0.1 * normal(3, 6))),
    "gaussian, Bernoulli": (nm.Hutchinson(3, deflate=0, noise="gaussian"), nm.Bernoulli(normal(3, 4))),
}


@pytest.mark.slow  # enumeration says the same for smaller ones
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", SIMULATED)
def test_mean_and_variance_by_simulation(name: str, granularity: Any) -> None:
    """False-alarm rate 1e-6 for each; twins that are biased by their scale, or by a missing sign, are seen."""
    estimator, core = SIMULATED[name]
    jacobian = normal(3, core.dim, 4, seed=1) + 0.5  # samples that pull the same way: their cross terms do not vanish
    exact = torch.einsum("ncp,ncd,ndp->p", jacobian, core.fisher(), jacobian)
    settings = {f.name: getattr(estimator, f.name) for f in dataclasses.fields(estimator)}
    estimates, fourth = simulated(estimator, core, jacobian, granularity, 100_000)
    limit = allowed_z_score(4)
    assert worst_z_score(estimates, exact) < limit
    assert worst_z_score(simulated(Unscaled(**settings), core, jacobian, granularity, 100_000)[0], exact) > limit
    if granularity == "batch" and ("deflated" in name or "columns" in name or estimator.noise == "gaussian"):
        assert worst_z_score(simulated(Uncentred(**settings), core, jacobian, granularity, 100_000)[0], exact) > limit

    claimed = bounds.orthogonal_variance(
        core, jacobian, estimator.probes, estimator.deflate, estimator.noise, granularity
    )
    squares = (estimates - exact).square()
    assert worst_z_score(squares, claimed) < limit
    if granularity == "batch" or "columns" not in name:
        assert worst_z_score(squares, 1.2 * claimed) > limit
    factors = torch.tensor(estimator.pass_noise(core, alone=granularity == "sample"), dtype=torch.float64)
    bound = (factors[:, None] * fourth).sum(0)
    assert (bound >= 0.95 * claimed).all()  # five per cent for the fourth powers, which are simulated
    if estimator.noise == "gaussian" and granularity == "sample":
        own = own_passes(core, estimator.deflate or 0, estimator.probes)  # their share is for single entries
        torch.testing.assert_close((factors[own:, None] * fourth[own:]).sum(0), claimed, rtol=0.05, atol=0)


def test_one_order_of_the_axes_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many classes: unbiased for each distribution, uncorrelated between them; false-alarm rate 1e-6.

    Batches are what is independent then, so each is a mean over few distributions, along two axes of the inner space.
    """
    monkeypatch.setattr(orthogonal, "ORDERS_OF_THEIR_OWN", 0)
    core, estimator = nm.Gaussian(torch.zeros(2, 4).double()), nm.Hutchinson(2, deflate=0)
    generator, estimates = torch.Generator().manual_seed(0), []
    for _ in range(3000):
        u = torch.stack(list(estimator.cotangents(core, None, generator)))
        estimates.append(u[..., :2].sum(-1).square().sum(0))  # the derivatives are 1, 1, 0, 0: F = 2
    estimate = torch.stack(estimates)  # [batches, 2]
    assert worst_z_score(estimate, torch.full((2,), 2.0).double()) < allowed_z_score(2)
    squares = (estimate - 2).square()
    claimed = bounds.orthogonal_probe_variance(torch.tensor([1.0, 1.0, 0.0, 0.0])[None, :, None].double(), 2)
    assert worst_z_score(squares, claimed.expand(2)) < allowed_z_score(2)
    product = (estimate - 2).prod(-1, keepdim=True)
    assert worst_z_score(product, torch.zeros(1).double()) < allowed_z_score(1)


def test_cross_terms_of_passes_are_uncorrelated() -> None:
    """E[u_j u_lᵀ] = 0, false-alarm rate 1e-6.  Columns are correlated without a random sign for each of them."""
    core = nm.Categorical(normal(5).expand(200_000, 5))
    for estimator, seen in (
        (nm.Hutchinson(2, deflate=0), False),
        (nm.Hutchinson(4, deflate=0), False),
        (Uncentred(4, deflate=0), True),
    ):
        u = drawn(estimator, core)
        products = u[0][:, :, None] * u[1][:, None, :]
        assert (worst_z_score(products, torch.zeros(5, 5).double()) > allowed_z_score(25)) is seen


def test_a_frame_of_gaussian_noise_is_centred_only_by_its_signs() -> None:
    """False-alarm rate 1e-6."""
    core = nm.Categorical(normal(5).expand(50_000, 5))
    for kind, seen in ((nm.Hutchinson, False), (Uncentred, True)):
        u = drawn(kind(2, deflate=0, noise="gaussian"), core)
        z = [worst_z_score(one, torch.zeros(5).double()) for one in u]
        assert (max(z) > allowed_z_score(10)) is seen
