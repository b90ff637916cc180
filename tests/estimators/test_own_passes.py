"""Which leading eigenvectors get a backward pass for themselves, and that it pays."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.estimators.orthogonal import leading_columns, orthonormal_noise, own_passes, remainder
from tests.estimators.probes import NOISES, drawn, normal, outer, special
from tests.zscores import allowed_z_score, worst_z_score


def predicted(core: Core, k: int, m: int) -> Tensor:
    """Half the mean variance of an entry over directions of J, if 0, 1, ... eigenvectors have their own passes: [own].

    By dense matrices: (d' - m')/(m' (d' - 1)) (R² - Q) for the m' passes and the d' eigenvalues that are left.
    """
    values = torch.linalg.eigvalsh(core.fisher()).flip(-1)[..., : core.rank].clamp(min=0).reshape(-1, core.rank)
    noise = []
    for own in range(min(k, m - 1, core.rank) + 1):
        left, d = values[:, own:], core.rank - own
        products = (left[:, :, None] * left[:, None, :]).sum((1, 2)) - left.square().sum(1)
        noise.append((d - (m - own)) / ((m - own) * max(1, d - 1)) * products.clamp(min=0).sum())
    return torch.stack(noise)


PREDICTIONS = {
    "even": 0.1 * normal(20, 30),
    "peaked": 8 * normal(20, 30),
    "mixed": torch.cat([0.1 * normal(20, 30), 8 * normal(7, 30, seed=1)]),
    "without information": torch.cat([special(30)[3:4].expand(50, -1), 8 * normal(2, 30, seed=1)]),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", PREDICTIONS)
def test_eigenvectors_get_passes_where_it_pays(name: str, noise: Any) -> None:
    """One number for the batch; cotangents and noise factors agree on it, whoever is asked first."""
    for m, k in itertools.product((2, 3, 5, 28), (1, 2, 40)):
        core, estimator = nm.Categorical(PREDICTIONS[name]), nm.Hutchinson(m, deflate=k, noise=noise)
        noises, own = predicted(core, k, m), own_passes(core, k, m)
        assert noises[own] <= noises.min() * (1 + 1e-9) + 1e-15
        u, factors = drawn(estimator, core), estimator.pass_noise(core, alone=True)
        relative = 2 * noises[own] / float((core.trace().square() + 2 * core.squared_norm()).sum())
        assert factors[:own] == pytest.approx([float(relative)] * own, rel=1e-6, abs=1e-15)
        assert all(factor > 0 for factor in factors[own:])
        assert factors == estimator.pass_noise(nm.Categorical(PREDICTIONS[name]), alone=True)
        assert estimator.pass_noise(core, alone=False) == [2 / 3] * m
        alone, signed = leading_columns(core, k, m)
        scaled = core.spectrum(min(k, core.rank)).factor()
        torch.testing.assert_close(outer(u[:own]), outer(scaled.movedim(-2, 0)[:own]))
        assert alone.shape == (*core.batch_shape, own, 30)
        assert signed.shape[-2] == (min(k, core.rank) - own if m - own == 1 else 0)
        torch.testing.assert_close(torch.cat([alone, signed], -2), scaled[..., : own + signed.shape[-2], :])


def test_peaked_and_even_predictions() -> None:
    def own(logits: Tensor, m: int, k: int = 1) -> int:
        return own_passes(nm.Categorical(logits), k, m)

    even, peaked = 0.1 * normal(20, 100), 5 * normal(20, 100)
    assert (own(even, 2), own(peaked, 2), own(peaked, 2, 9)) == (0, 1, 1)
    assert own(even, 80) == 1  # 1/159 of the trace is enough if there are so many passes
    assert own(torch.cat([even, peaked[:1]]), 2) == 0
    assert own(torch.zeros(0, 100), 2) == own(special(100)[3:4], 2) == 0  # empty, and a certain prediction
    assert own(torch.zeros(0, 100), 2, 0) == own(peaked, 2, 0) == 0
    assert own(20 * normal(20, 100), 5, 9) == 4  # all but one, for confident predictions


@pytest.mark.parametrize("m", [2, 3, 4])
def test_the_decision_is_for_the_better(m: int) -> None:
    """The error of generic entries, exactly, against the one with an eigenvector's own pass in any case."""
    jacobian = normal(20, 100, 50, seed=3)
    for scale, own in ((0.1, 0), (5.0, 1)):
        core = nm.Categorical(scale * normal(20, 100))
        errors = []
        for k in (0, 1):
            scaled = core.spectrum(1).factor()[:, :k]
            d, mix = remainder(core, scaled)
            axes = mix(torch.eye(d).double()[:, None].expand(d, 20, d))
            a = torch.einsum("rnc,ncp->nrp", axes, jacobian)
            one = m - k == 1  # random signs of all axes
            of_probes = (
                bounds.probe_variance if one else functools.partial(bounds.orthogonal_probe_variance, probes=m - k)
            )
            errors.append(of_probes(a, granularity="sample"))
        claimed = bounds.orthogonal_variance(core, jacobian, m, 1, granularity="sample")
        torch.testing.assert_close(claimed, errors[own])
        assert float((errors[1 - own] / errors[own]).log().mean()) > 0.1


def test_even_predictions_by_simulation() -> None:
    """The errors that are drawn, not those that are claimed: 100 classes, two passes.  Twin: always its own pass."""

    class Always(nm.Hutchinson):
        def _orthogonal(self, core: Core, generator: torch.Generator) -> Iterator[Tensor]:
            scaled = core.spectrum(1).factor()
            yield from scaled.unbind(-2)
            d, mix = remainder(core, scaled)
            for h in orthonormal_noise(core, d, 1, "rademacher", generator):
                yield mix(h) * math.sqrt(d)

    core, jacobian = nm.Categorical((0.1 * normal(100)).expand(5000, 100)), normal(100, 20, seed=1)
    exact = torch.einsum("cp,cd,dp->p", jacobian, core.fisher()[0], jacobian)
    error = {}
    for kind in (nm.Hutchinson, Always):
        u = kind(2).cotangents(core, None, torch.Generator().manual_seed(0))
        estimate = torch.einsum("mnc,cp->mnp", torch.stack(list(u)), jacobian).square().sum(0)
        assert worst_z_score(estimate, exact) < allowed_z_score(20)
        error[kind] = float(((estimate - exact) / exact).square().mean())
    assert error[nm.Hutchinson] < 0.6 * error[Always]


def test_the_spectrum_is_computed_once() -> None:
    calls = []

    class Counting(nm.Categorical):
        def spectrum(self, k: int) -> Any:
            calls.append(k)
            return super().spectrum(k)

    for scale in (0.1, 5.0):
        core, estimator = Counting(scale * normal(20, 10)), nm.Hutchinson(4, deflate=2)
        for alone in (False, True):
            estimator.pass_noise(core, alone)
        assert estimator.passes(core) == len(list(estimator.cotangents(core, None, torch.Generator()))) == 4
        assert calls == [2]
        calls.clear()
    nm.Hutchinson(4, deflate=0).pass_noise(Counting(normal(20, 10)), True)
    assert not calls
    core = Counting(5 * normal(20, 10).requires_grad_())
    with torch.no_grad():
        estimator.pass_noise(core, True)
    first = next(iter(estimator.cotangents(core, None, torch.Generator())))
    assert first.requires_grad  # what was found without gradients is not handed out
