"""The variance of every entry of the random matrix, against the enumeration of all signs."""

import itertools

import pytest
import torch

from neuromanifold import bounds
from tests.zscores import allowed_z_score, worst_z_score

SHAPES = [(1, 1, 1), (1, 3, 4), (3, 2, 5), (2, 4, 1), (4, 1, 3)]  # samples, columns, parameters


def columns(n: int, r: int, p: int) -> torch.Tensor:
    a = torch.randn(n, r, p, generator=torch.Generator().manual_seed(n + r + p), dtype=torch.float64)
    a[0, :, 0] = 0  # a parameter that the first sample does not touch
    return a


def matrices(a: torch.Tensor, xi: torch.Tensor, granularity: str) -> torch.Tensor:
    """Σ g gᵀ [draws, P, P] for noise ξ [draws, N, r]."""
    g = torch.einsum("dnr,nrp->dnp", xi, a)
    g = g.sum(1, keepdim=True) if granularity == "batch" else g
    return g.mT @ g


def all_signs(n: int, r: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n * r)), dtype=torch.float64).view(-1, n, r)


@pytest.mark.parametrize("granularity", ["batch", "sample"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_that_of_all_signs(shape: tuple[int, int, int], granularity: str) -> None:
    a = columns(*shape)
    draws = matrices(a, all_signs(*shape[:2]), granularity)
    found = bounds.matrix_variance(a, granularity=granularity, probes=3)
    torch.testing.assert_close(3 * found, draws.var(0, correction=0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(draws.mean(0), torch.einsum("nrp,nrq->pq", a, a))
    on_the_diagonal = bounds.probe_variance(a, granularity=granularity, probes=3)
    torch.testing.assert_close(found.diagonal(), on_the_diagonal, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("granularity", ["batch", "sample"])
def test_gaussian_noise_has_the_first_two_terms(granularity: str) -> None:
    """50,000 draws; worst z-score of the squared deviations, and a twin without F_ij² that fails."""
    a, generator = columns(2, 3, 4), torch.Generator().manual_seed(0)
    xi = torch.randn(50_000, 2, 3, generator=generator, dtype=torch.float64)
    draws = matrices(a, xi, granularity)
    mean = torch.einsum("nrp,nrq->pq", a, a)
    squares = (draws - mean).square().flatten(1)
    variance = bounds.matrix_variance(a, "gaussian", granularity)
    summed = a.reshape(1, -1, 4) if granularity == "batch" else a
    twin = variance - (summed.mT @ summed).square().sum(0)
    limit = allowed_z_score(16)
    assert worst_z_score(squares, variance.flatten()) < limit
    assert worst_z_score(squares, twin.flatten()) > limit


def test_no_entry_is_better_known_than_the_diagonal_allows() -> None:
    """Var <= F_ii F_jj + F_ij² for both kinds of noise, with equality for Gaussian noise and whole batches."""
    a = columns(3, 2, 5)
    F = torch.einsum("nrp,nrq->pq", a, a)
    bound = F.diagonal()[:, None] * F.diagonal() + F.square()
    torch.testing.assert_close(bounds.matrix_variance(a, "gaussian"), bound)
    for granularity in ("batch", "sample"):
        assert bool((bounds.matrix_variance(a, granularity=granularity) <= bound + 1e-12).all())


def test_wrong_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \[N, r, P\]"):
        bounds.matrix_variance(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="granularity"):
        bounds.matrix_variance(torch.zeros(1, 2, 3), granularity="token")  # type: ignore[arg-type]
