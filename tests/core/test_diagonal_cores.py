"""Bernoulli (multi-label) and Gaussian cores: a diagonal metric."""

import pytest
import torch

import neuromanifold as nm
from tests.zscores import allowed_z_score, worst_z_score


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Z = 2 * torch.randn(3, 5, generator=generator(), dtype=torch.float64)
CORES = {
    "bernoulli": nm.Bernoulli(Z),
    "bernoulli-one-label": nm.Bernoulli(Z[:, :1]),
    "gaussian": nm.Gaussian(Z),
    "gaussian-number": nm.Gaussian(Z, 0.25),
    "gaussian-tensor": nm.Gaussian(Z, torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1])),
}


@pytest.mark.parametrize("name", CORES)
def test_products_spectrum_and_envelopes_equal_the_dense_matrix(name: str) -> None:
    core = CORES[name]
    v = torch.randn(4, *core.batch_shape, core.dim, generator=generator(1), dtype=torch.float64)
    fisher, factor = core.fisher(), core.factor_matrix()
    torch.testing.assert_close(factor @ factor.mT, fisher)
    torch.testing.assert_close(core.matvec(v), torch.einsum("...ij,...j->...i", fisher, v))
    torch.testing.assert_close(core.factor(v), torch.einsum("...ij,...j->...i", factor, v))
    torch.testing.assert_close(core.factor_transpose(v), torch.einsum("...ji,...j->...i", factor, v))
    torch.testing.assert_close(core.spectrum(core.dim).dense(), fisher)
    torch.testing.assert_close(core.spectrum(1).values[..., 0], torch.linalg.eigvalsh(fisher)[..., -1])
    torch.testing.assert_close(torch.diag_embed(core.upper_envelope()), fisher)
    columns = torch.stack([core.column(i) for i in range(core.rank)], dim=-1)
    torch.testing.assert_close(columns @ columns.mT, fisher)
    torch.testing.assert_close(core.trace(), fisher.diagonal(dim1=-2, dim2=-1).sum(-1))


def test_bernoulli_metric_is_the_derivative_of_the_sigmoid() -> None:
    z = Z.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(z.sigmoid().sum(), z)
    torch.testing.assert_close(nm.Bernoulli(Z).diagonal, derivative)


def test_bernoulli_with_two_labels_is_a_product_of_simplices() -> None:
    """One binary label with logit z is the simplex with logits (z, 0)."""
    simplex = nm.Categorical(torch.stack([Z, torch.zeros_like(Z)], dim=-1))
    torch.testing.assert_close(nm.Bernoulli(Z).diagonal, simplex.fisher()[..., 0, 0])


def test_bernoulli_is_accurate_relatively_when_saturated() -> None:
    core = nm.Bernoulli(torch.tensor([700.0, -700.0], dtype=torch.float64))
    expected = torch.exp(torch.tensor([-700.0, -700.0], dtype=torch.float64))
    torch.testing.assert_close(core.diagonal, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(core.score(torch.tensor([1, 0])), expected * torch.tensor([1, -1]), rtol=1e-12, atol=0)


def test_gaussian_score_is_the_gradient_of_the_log_density() -> None:
    mean, variance = Z.clone().requires_grad_(), torch.tensor(0.25, dtype=torch.float64)
    y = nm.Gaussian(Z, 0.25).sample(generator())
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum()
    (gradient,) = torch.autograd.grad(density, mean)
    torch.testing.assert_close(nm.Gaussian(Z, 0.25).score(y), gradient)


@pytest.mark.parametrize("name", CORES)
def test_sampled_scores_have_the_metric_as_covariance_and_the_stated_variance(name: str) -> None:
    """False-alarm rate 1e-6 for each of the two; the twin has a metric that is five per cent off."""
    core = CORES[name]
    y = core.sample(generator(), (20_000,))
    matrices, limit = core.empirical_fisher(y), allowed_z_score(core.fisher().numel())
    assert worst_z_score(matrices, core.fisher()) < limit
    assert worst_z_score(1.1 * matrices, core.fisher()) > limit
    squares = (matrices - core.fisher()).square()
    variance = core.score_variance().variance
    assert worst_z_score(squares, variance) < limit
    assert worst_z_score(1.3 * squares, variance) > limit


def test_sampling_uses_the_given_generator_alone() -> None:
    state = torch.random.get_rng_state()
    for core in CORES.values():
        assert torch.equal(core.sample(generator(3), (2,)), core.sample(generator(3), (2,)))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("make", [nm.Bernoulli, nm.Gaussian])
def test_an_empty_batch_is_fine(make: type[nm.Bernoulli] | type[nm.Gaussian]) -> None:
    core = make(torch.zeros(0, 5))
    assert core.fisher().shape == (0, 5, 5)
    assert core.spectrum(2).vectors.shape == (0, 2, 5)
    assert core.score(core.sample(generator())).shape == (0, 5)
