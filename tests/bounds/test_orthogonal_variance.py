"""The exact variance of orthogonal probes; tests/estimators compares it with enumeration and simulation."""

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from tests.core.problems import logits

NOISES = ("rademacher", "gaussian")
GRANULARITIES = ("batch", "sample")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_variance_of_squared_batches_with_passes_of_their_own() -> None:
    """An entry that one eigenvector carries gains nothing from more passes, if whole batches are squared."""
    core = nm.Categorical(normal(5).expand(50, 5))
    jacobian = core.spectrum(1).vectors.mT.contiguous()  # [n, c, 1]
    F = torch.einsum("ncp,ncd,ndp->p", jacobian, core.fisher(), jacobian)
    together = [float(bounds.orthogonal_variance(core, jacobian, 3, k)) for k in (0, 1)]
    assert together[0] <= float(2 * F.square() / 3)
    assert float(1.9 * F.square()) < together[1] <= float(2 * F.square())
    assert float(bounds.orthogonal_variance(core, jacobian, 3, 1, granularity="sample")) < 1e-25
    two = nm.Categorical(normal(50, 2))  # a single pass, however many probes
    J = torch.tensor([1.0, -1.0]).double()[None, :, None].expand(50, 2, 1)
    one_pass = bounds.deflated_variance(two, J)
    torch.testing.assert_close(bounds.orthogonal_variance(two, J, 100), one_pass)


@given(logits(least=3, most=6), st.integers(2, 5), st.integers(0, 2), st.sampled_from(NOISES))
def test_variance_is_within_its_bounds(z: Tensor, m: int, k: int, noise: Any) -> None:
    """Sample-wise at most 2F²/(m-k) and below the sum over batches; batch-wise at most 2F², and 2F²/m without k."""
    core, jacobian = nm.Categorical(z.expand(2, -1)), normal(2, len(z), 3, seed=1)
    F = torch.einsum("ncp,ncd,ndp->np", jacobian, core.fisher(), jacobian)
    sample = bounds.orthogonal_variance(core, jacobian, m, k, noise, "sample")
    batch = bounds.orthogonal_variance(core, jacobian, m, k, noise, "batch")
    loose, tiny = 1 + 1e-9, 1e-200
    assert (sample >= 0).all()
    assert (sample <= 2 * F.square().sum(0) / max(1, m - k) * loose + tiny).all()
    assert (sample <= batch * loose).all()
    assert (batch <= 2 * F.sum(0).square() / (1 if k or m >= core.rank else m) * loose + tiny).all()


def test_a_derivative_along_one_axis() -> None:
    """Pairs of probes have no noise there, like independent signs; one without its partner has a little."""
    for d in (8, 9, 10, 11):
        core, jacobian = nm.Bernoulli(normal(1, d)), torch.eye(d)[None, :, 3:4].double()
        F = core.fisher()[0, 3, 3]
        assert bounds.hutchinson_variance(core, jacobian, granularity="sample", probes=2) == 0
        for m in range(2, d):
            claimed = bounds.orthogonal_variance(core, jacobian, m, granularity="sample")[0]
            if d % 2 == 0 and m % 2 == 0:
                assert claimed == 0
            else:
                alone = {8: 0.5, 10: 0.8}.get(d, m / d if m % 2 == 0 else 1 - m / d)  # how often a column is
                torch.testing.assert_close(claimed, F.square() / 2 / m**2 * alone)


@given(st.integers(2, 12), st.data())
def test_pairs_have_the_variance_of_independent_signs_times_what_is_left(d: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, d - 1))
    a = torch.tensor(data.draw(st.lists(st.floats(-1, 1), min_size=d, max_size=d)), dtype=torch.float64)[None, :, None]
    claimed = bounds.orthogonal_probe_variance(a, m, granularity="sample")
    independent = bounds.probe_variance(a, granularity="sample", probes=m) * (d - m) / (d - 1)
    F = a.square().sum()
    assert (claimed >= 0).all()
    if d % 2 == m % 2 == 0:
        torch.testing.assert_close(claimed, independent, rtol=1e-12, atol=0)
    assert (claimed - independent <= F.square() / (2 * m * m) * (1 + 1e-12)).all()
    assert (claimed <= 2 * F.square() / m * (1 + 1e-12)).all()


def test_the_decision_is_that_of_the_batch() -> None:
    """Even predictions share all passes, peaked ones do not; a batch of both is decided as one."""
    even, peaked, jacobian = 0.1 * normal(5, 20), 9 * normal(5, 20, seed=2), normal(5, 20, 50, seed=1)

    def variance(logits: Tensor, J: Tensor, k: int) -> Tensor:
        return bounds.orthogonal_variance(nm.Categorical(logits), J, 2, k, granularity="sample")

    assert torch.equal(variance(even, jacobian, 1), variance(even, jacobian, 0))
    assert variance(peaked, jacobian, 1).sum() < 0.5 * variance(peaked, jacobian, 0).sum()
    both, twice = torch.cat([even, peaked[:1]]), torch.cat([jacobian, jacobian[:1]])
    parts = variance(even, jacobian, 0) + variance(peaked[:1], jacobian[:1], 0)
    torch.testing.assert_close(variance(both, twice, 1), parts)


def test_empty_problems_and_one_probe() -> None:
    empty = nm.Categorical(torch.zeros(0, 4))
    for m, k, granularity in itertools.product((1, 2, 3), (0, 1), GRANULARITIES):
        how: Any = {"granularity": granularity}
        assert bounds.orthogonal_variance(empty, torch.zeros(0, 4, 2), m, k, **how).tolist() == [0, 0]
    core, jacobian = nm.Categorical(normal(6, 4)), normal(6, 4, 2, seed=1)
    one, deflated = bounds.orthogonal_variance(core, jacobian, 1, 1), bounds.deflated_variance(core, jacobian, 1)
    assert torch.equal(one, deflated)
