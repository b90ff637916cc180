"""The variance of adaptive passes against the enumeration of all that is random: signs, columns, who is kept."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.estimators.adaptive import several
from tests.estimators.test_orthogonal_enumeration import all_probes

LOGITS = {"random": 1.0, "confident": 6.0, "nearly uniform": 0.05}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_estimates(core: Core, jacobian: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """All estimates [draws, P] of one sample's diagonal from m passes, and their probabilities."""
    if m == 1:  # one eigenvector and what is left of each column of the factor, with random signs
        v = core.spectrum(1).vectors[0]
        rest = core.factor_matrix() - torch.outer(v, v @ core.factor_matrix())
        columns = torch.cat([core.spectrum(1).factor(), rest.mT])  # [1 + C, C]
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(columns))), dtype=torch.float64)
        cotangents = (signs @ columns)[:, None]
        weights = torch.full((len(signs),), 1 / len(signs), dtype=torch.float64)
    elif m >= core.rank:
        cotangents = torch.stack([core.column(i) for i in range(core.rank)])[None]
        weights = torch.ones(1, dtype=torch.float64)
    else:
        cotangents, weights = all_probes(core, m, 8)
    return torch.einsum("dmc,cp->dmp", cotangents, jacobian).square().sum(1), weights


def enumerated(cores: list[Core], jacobian: Tensor, keep: Tensor, passes: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance [P] over all cases of all samples together."""
    total, weights = torch.zeros(1, jacobian.shape[-1]).double(), torch.ones(1).double()
    for core, J, pi, m in zip(cores, jacobian, keep.tolist(), passes, strict=True):
        found, probability = all_estimates(core, J, m)
        cases = torch.cat([found / pi, torch.zeros(1, J.shape[-1]).double()])
        chances = torch.cat([pi * probability, torch.tensor([1 - pi], dtype=torch.float64)])
        total = (total[:, None] + cases).flatten(0, 1)
        weights = (weights[:, None] * chances).flatten()
    mean = weights @ total
    return mean, weights @ (total - mean).square()


@pytest.mark.parametrize("size", LOGITS.values(), ids=LOGITS.keys())
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_two_samples_by_enumeration(classes: int, size: float) -> None:
    logits, jacobian = size * normal(2, classes), normal(2, classes, 3, seed=1)
    jacobian[0, :, 0] = 0  # an entry to which one of them contributes
    core = nm.Categorical(logits)
    F = torch.einsum("ncp,ncd,ndp->p", jacobian, core.fisher(), jacobian)
    for passes in itertools.product(range(1, classes + 1), repeat=2):
        keep = torch.tensor([1.0 if passes[0] > 1 else 0.4, 0.7], dtype=torch.float64)
        mean, variance = enumerated([nm.Categorical(z) for z in logits], jacobian, keep, list(passes))
        claimed = bounds.adaptive_variance(core, jacobian, keep, torch.tensor(passes))
        torch.testing.assert_close(mean, F, rtol=1e-12, atol=0)
        torch.testing.assert_close(claimed, variance, rtol=1e-12, atol=float(1e-13 * F.square().max()))


def test_other_likelihoods_by_enumeration() -> None:
    jacobian, keep = normal(2, 3, 4, seed=1), torch.tensor([0.3, 1.0], dtype=torch.float64)
    for make in (nm.Bernoulli, lambda z: nm.Gaussian(z, variance=torch.tensor([0.5, 1.0, 3.0]).double())):
        z = normal(2, 3)
        for passes in ([1, 1], [1, 2], [2, 3]):
            variance = enumerated([make(one) for one in z], jacobian, keep, passes)[1]
            claimed = bounds.adaptive_variance(make(z), jacobian, keep, torch.tensor(passes))
            torch.testing.assert_close(claimed, variance, rtol=1e-12, atol=1e-14)


def test_all_kept_with_one_pass_is_the_deflated_probe_and_with_all_passes_exact() -> None:
    core, jacobian = nm.Categorical(2 * normal(6, 5)), normal(6, 5, 3, seed=1)
    ones = torch.ones(6).double()
    claimed = bounds.adaptive_variance(core, jacobian, ones, torch.ones(6, dtype=torch.long))
    torch.testing.assert_close(claimed, bounds.deflated_variance(core, jacobian, granularity="sample"))
    assert bounds.adaptive_variance(core, jacobian, ones, torch.full((6,), 4)).abs().max() < 1e-25
    half = bounds.adaptive_variance(core, jacobian, ones / 2, torch.full((6,), 4))
    F = torch.einsum("ncp,ncd,ndp->np", jacobian, core.fisher(), jacobian)
    torch.testing.assert_close(half, F.square().sum(0))  # 1/π - 1 = 1
    empty = nm.Categorical(torch.zeros(0, 4))
    assert bounds.adaptive_variance(empty, torch.zeros(0, 4, 2), ones[:0], ones[:0]).tolist() == [0, 0]


@pytest.mark.parametrize("m", [1, 2, 3])
def test_it_is_the_variance_of_the_estimator(m: int) -> None:
    """One sample, drawn 40,000 times: within 5 standard errors of the variance."""
    logits, J, pi, draws = 2 * normal(5), normal(5, 3, seed=1), 0.6, 40_000
    generator = torch.Generator().manual_seed(0)
    core = nm.Categorical(logits.expand(draws, 5))
    gradients = [u @ J for u in several(m).cotangents(core, None, generator)]
    kept = torch.rand(draws, 1, generator=generator, dtype=torch.float64) < pi
    found = torch.stack(gradients).square().sum(0) * kept / pi  # [draws, p]
    one, how = nm.Categorical(logits[None]), (torch.tensor([pi], dtype=torch.float64), torch.tensor([m]))
    claimed = bounds.adaptive_variance(one, J[None], *how)
    squares = (found - found.mean(0)).square()
    assert ((squares.mean(0) - claimed).abs() < 5 * squares.std(0) / math.sqrt(draws)).all()
    twin = bounds.orthogonal_variance(one, J[None], m, 8 if m > 1 else 1, granularity="sample")  # nothing left out
    assert ((squares.mean(0) - twin).abs() > 5 * squares.std(0) / math.sqrt(draws)).all()


def test_what_would_be_biased_is_refused() -> None:
    core, jacobian, ones = nm.Categorical(normal(2, 3)), normal(2, 3, 2), torch.ones(2, dtype=torch.long)
    for keep in ([0.0, 1.0], [1.5, 1.0], [-0.1, 1.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match=r"keep.*biased"):
            bounds.adaptive_variance(core, jacobian, torch.tensor(keep), ones)
    with pytest.raises(ValueError, match="passes"):
        bounds.adaptive_variance(core, jacobian, torch.ones(2), ones[:1])
    with pytest.raises(ValueError, match=r"keep.*shape"):
        bounds.adaptive_variance(core, jacobian, torch.ones(3), ones)
    with pytest.raises(ValueError, match="probes"):
        bounds.adaptive_variance(core, jacobian, torch.ones(2), 0 * ones)
    jacobian[0] = 0  # nothing to miss
    claimed = bounds.adaptive_variance(core, jacobian, torch.tensor([0.0, 1.0]), ones)
    both = bounds.adaptive_variance(core, jacobian, torch.ones(2), ones)
    torch.testing.assert_close(claimed, both)
