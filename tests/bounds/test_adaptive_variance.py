"""The variance of adaptive passes against the enumeration of all that is random: signs, and whose probes are kept."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.estimators.adaptive import several
from neuromanifold.estimators.allocation import Allocation, Scores
from neuromanifold.estimators.choices import Choices

LOGITS = {"random": 1.0, "confident": 6.0, "nearly uniform": 0.05}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choices_of(core: Core) -> Choices:
    found = Choices.of(core)
    assert found is not None
    return found


def all_estimates(core: Core, jacobian: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """(the part of rows of columns [P], all estimates of the rest [draws, P], equally likely) of one sample."""
    if own:
        choices = choices_of(type(core)(_outputs(core)[None], *_variance(core)))  # type: ignore[call-arg]
        alone = choices.columns()[0]
        columns = torch.cat([alone[own:], choices.mix(torch.eye(core.dim).double()[:, None])[:, 0]])
    else:
        v, alone = core.spectrum(1).vectors, core.spectrum(1).factor()
        columns = torch.cat([alone, (core.factor_matrix() - v.mT @ (v @ core.factor_matrix())).mT])
    columns = columns[columns.abs().sum(1) > 0]
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(columns))), dtype=torch.float64)
    return (alone[:own] @ jacobian).square().sum(0), (signs.view(2 ** len(columns), -1) @ columns @ jacobian).square()


def _outputs(core: Any) -> Tensor:
    return core.mean if isinstance(core, nm.Gaussian) else core.logits


def _variance(core: Any) -> tuple[Tensor, ...]:
    return (core.variance[None],) if isinstance(core, nm.Gaussian) else ()


def enumerated(cores: list[Core], jacobian: Tensor, keep: Tensor, own: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance [P] over all cases of all samples together."""
    total, weights = torch.zeros(1, jacobian.shape[-1]).double(), torch.ones(1).double()
    for core, J, pi, m in zip(cores, jacobian, keep.tolist(), own, strict=True):
        sure, found = all_estimates(core, J, m)
        cases = sure + torch.cat([found / pi, torch.zeros(1, J.shape[-1]).double()])
        chances = torch.tensor([pi / len(found)] * len(found) + [1 - pi], dtype=torch.float64)
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
    for own in itertools.product(range(classes), repeat=2):
        keep = torch.tensor([1.0 if own[1] else 0.4, 0.7], dtype=torch.float64)
        mean, variance = enumerated([nm.Categorical(z) for z in logits], jacobian, keep, list(own))
        claimed = bounds.adaptive_variance(core, jacobian, keep, torch.tensor(own))
        torch.testing.assert_close(mean, F, rtol=1e-12, atol=0)
        torch.testing.assert_close(claimed, variance, rtol=1e-12, atol=float(1e-13 * F.square().max()))


def test_other_likelihoods_by_enumeration() -> None:
    jacobian, keep = normal(2, 3, 4, seed=1), torch.tensor([0.3, 1.0], dtype=torch.float64)
    for make in (nm.Bernoulli, lambda z: nm.Gaussian(z, variance=torch.tensor([0.5, 1.0, 3.0]).double())):
        z = normal(2, 3)
        for own in ([0, 0], [0, 1], [2, 0], [1, 3]):
            variance = enumerated([make(one) for one in z], jacobian, keep, own)[1]
            claimed = bounds.adaptive_variance(make(z), jacobian, keep, torch.tensor(own))
            torch.testing.assert_close(claimed, variance, rtol=1e-12, atol=1e-14)


def test_special_cases() -> None:
    """All kept without rows of eigenvectors: the deflated probe.  Rows for all but one: exact.  Left out at times."""
    core, jacobian = nm.Categorical(2 * normal(6, 5)), normal(6, 5, 3, seed=1)
    columns = choices_of(core).columns()
    ones, none = torch.ones(6).double(), torch.zeros(6, dtype=torch.long)
    claimed = bounds.adaptive_variance(core, jacobian, ones, none)
    torch.testing.assert_close(claimed, bounds.deflated_variance(core, jacobian, granularity="sample"))
    assert bounds.adaptive_variance(core, jacobian, ones, none + 3).abs().max() < 1e-25
    for m in (0, 2, 3):
        half = bounds.adaptive_variance(core, jacobian, ones / 2, none + m)
        once = bounds.adaptive_variance(core, jacobian, ones, none + m)
        leading = (columns[:, :m] @ jacobian).square().sum(1)
        rest = torch.einsum("ncp,ncd,ndp->np", jacobian, core.fisher(), jacobian) - leading
        torch.testing.assert_close(half, 2 * once + rest.square().sum(0))  # 1/π - 1 = 1
    assert bounds.adaptive_variance(core, jacobian, 0 * ones, none + 4).abs().max() < 1e-25  # probes of nothing
    empty = nm.Categorical(torch.zeros(0, 4))
    assert bounds.adaptive_variance(empty, torch.zeros(0, 4, 2), ones[:0], none[:0]).tolist() == [0, 0]


@pytest.mark.parametrize("m", [0, 1, 2])
def test_it_is_the_variance_of_the_estimator(m: int) -> None:
    """One sample, drawn 40,000 times: within 5 standard errors of the variance."""
    logits, J, pi, draws = 2 * normal(5), normal(5, 3, seed=1), 0.6, 40_000
    generator = torch.Generator().manual_seed(0)
    core = nm.Categorical(logits.expand(draws, 5))
    choices, own = choices_of(core), torch.full((draws,), m)
    columns = choices.columns()
    probes = choices.probe(columns, own, generator) if m else next(several(1).cotangents(core, None, generator))
    kept = torch.rand(draws, 1, generator=generator, dtype=torch.float64) < pi
    rows = (columns[:, :m] @ J).square().sum(1)
    found = rows + (probes @ J).square() * kept / pi  # [draws, p]
    one, how = nm.Categorical(logits[None]), (torch.tensor([pi], dtype=torch.float64), torch.tensor([m]))
    claimed = bounds.adaptive_variance(one, J[None], *how)
    squares = (found - found.mean(0)).square()
    assert ((squares.mean(0) - claimed).abs() < 5 * squares.std(0) / math.sqrt(draws)).all()
    twin = bounds.adaptive_variance(one, J[None], 0 * how[0] + 1, how[1])  # nothing left out
    assert ((squares.mean(0) - twin).abs() > 5 * squares.std(0) / math.sqrt(draws)).all()


@pytest.mark.parametrize("c", [3, 4, 5])
def test_predictions_are_its_mean_over_directions(c: int) -> None:
    """Σ V of `Allocation` by Gauss-Hermite points; of whole probes, which have more noise than predicted, to a half."""
    points = torch.cartesian_prod(*[torch.tensor([-math.sqrt(3), 0, math.sqrt(3)]).double()] * c)
    weights = torch.cartesian_prod(*[torch.tensor([1 / 6, 2 / 3, 1 / 6]).double()] * c).prod(-1)
    for size, m in itertools.product(LOGITS.values(), range(c)):
        core, keep = nm.Categorical(size * normal(1, c)), torch.tensor([0.35]).double()
        mean = float(bounds.adaptive_variance(core, points.mT[None], keep, torch.tensor([m])) @ weights)
        scores = Scores(*choices_of(core).left(), c - 1)
        claimed = Allocation(keep, torch.tensor([m])).variance(scores)
        assert (1 - 1e-6) * claimed - 1e-14 <= mean <= (1 + 1e-6 if m else 1.5) * claimed + 1e-14


def test_what_would_be_biased_is_refused() -> None:
    core, jacobian, none = nm.Categorical(normal(2, 3)), normal(2, 3, 2), torch.zeros(2, dtype=torch.long)
    for keep in ([0.0, 1.0], [1.5, 1.0], [-0.1, 1.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match=r"keep.*biased"):
            bounds.adaptive_variance(core, jacobian, torch.tensor(keep), none)
    with pytest.raises(ValueError, match=r"own.*shape"):
        bounds.adaptive_variance(core, jacobian, torch.ones(2), none[:1])
    with pytest.raises(ValueError, match=r"keep.*shape"):
        bounds.adaptive_variance(core, jacobian, torch.ones(3), none)
    for own in (none - 1, none + 3, none + 0.5):
        with pytest.raises(ValueError, match=r"own.*between 0 and 2, the number of columns"):
            bounds.adaptive_variance(core, jacobian, torch.ones(2), own)
    jacobian[0] = 0  # nothing to miss
    claimed = bounds.adaptive_variance(core, jacobian, torch.tensor([0.0, 1.0]), none)
    both = bounds.adaptive_variance(core, jacobian, torch.ones(2), none)
    torch.testing.assert_close(claimed, both)
