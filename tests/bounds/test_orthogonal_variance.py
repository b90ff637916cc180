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


def test_a_derivative_along_one_column() -> None:
    """The price of orthogonality: independent signs have no noise there, columns of Hartley's matrix have some."""
    core, jacobian = nm.Bernoulli(normal(1, 9)), torch.eye(9)[None, :, 3:4].double()
    F = core.fisher()[0, 3, 3]
    assert bounds.hutchinson_variance(core, jacobian, granularity="sample", probes=2) == 0
    for m in (2, 5, 8):
        claimed = bounds.orthogonal_variance(core, jacobian, m, granularity="sample")[0]
        torch.testing.assert_close(claimed, F.square() / 2 / m * (9 - m) / 8)


def test_empty_problems_and_one_probe() -> None:
    empty = nm.Categorical(torch.zeros(0, 4))
    for m, k, granularity in itertools.product((1, 2, 3), (0, 1), GRANULARITIES):
        how: Any = {"granularity": granularity}
        assert bounds.orthogonal_variance(empty, torch.zeros(0, 4, 2), m, k, **how).tolist() == [0, 0]
    core, jacobian = nm.Categorical(normal(6, 4)), normal(6, 4, 2, seed=1)
    one, deflated = bounds.orthogonal_variance(core, jacobian, 1, 1), bounds.deflated_variance(core, jacobian, 1)
    assert torch.equal(one, deflated)
