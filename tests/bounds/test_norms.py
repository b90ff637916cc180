"""Norms of matrices that are only known by their products."""

import pytest
import torch

from neuromanifold.bounds.norms import Norm, frobenius_norm, spectral_norm
from tests.zscores import allowed_z_score, worst_z_score

GENERATOR = torch.Generator().manual_seed(0)
FACTOR = torch.randn(30, 12, generator=GENERATOR, dtype=torch.float64) * torch.linspace(0.1, 2, 12).double()
SIGNS = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)
A = FACTOR * SIGNS @ FACTOR.T  # symmetric, indefinite, of rank 12


def squares(sketch: int, draws: int, bias: float = 1.0) -> torch.Tensor:
    """‖A‖² as estimated so many times."""
    generator, like = torch.Generator().manual_seed(sketch), torch.zeros(30, 1, dtype=torch.float64)
    norms = [frobenius_norm(lambda v: bias * (A @ v), like, sketch, 4, generator) for _ in range(draws)]
    return torch.tensor([norm.value**2 for norm in norms], dtype=torch.float64)


@pytest.mark.parametrize("sketch", [1, 4])
def test_the_square_is_unbiased_and_a_biased_one_would_be_seen(sketch: int) -> None:
    """False alarms: 1e-6.  What is returned is its root."""
    expected = A.square().sum()
    assert worst_z_score(squares(sketch, 1000), expected) < allowed_z_score(1)
    assert worst_z_score(squares(sketch, 1000, bias=1.1), expected) > allowed_z_score(1)


def test_the_error_covers_the_truth() -> None:
    generator, like = torch.Generator().manual_seed(1), torch.zeros(30, 1, dtype=torch.float64)
    truth = float(torch.linalg.matrix_norm(A))
    norms = [frobenius_norm(lambda v: A @ v, like, 4, 8, generator) for _ in range(400)]
    assert 0.85 < sum(abs(n.value - truth) <= 2 * n.error for n in norms) / 400 <= 1


def test_low_rank_is_exact() -> None:
    B = FACTOR[:, :3] @ FACTOR[:, :3].T
    found = frobenius_norm(lambda v: B @ v, torch.zeros(30, 1).double(), 4, 2, torch.Generator().manual_seed(0))
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(B)), rel=1e-10)
    nothing = frobenius_norm(lambda v: 0 * v, torch.zeros(30, 1).double(), 4, 2, torch.Generator().manual_seed(0))
    assert nothing == Norm(0.0, 0.0)


def test_the_spectral_norm_of_an_indefinite_matrix() -> None:
    start = torch.randn(30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    truth = float(torch.linalg.matrix_norm(A, 2))
    assert spectral_norm(lambda v: A @ v, start).value == pytest.approx(truth, rel=1e-10)
    early = spectral_norm(lambda v: A @ v, start, steps=3)
    assert early.value <= truth
    assert early.error > 0
    assert float((torch.linalg.eigvalsh(A).abs() - early.value).abs().min()) <= early.error
    assert spectral_norm(lambda v: 0 * v, start).value == 0


def test_another_inner_product() -> None:
    """FACTOR diag(SIGNS) FACTORᵀ on vectors FACTOR u, by coefficients u alone."""
    gram, start = FACTOR.T @ FACTOR, torch.ones(12, dtype=torch.float64)
    found = spectral_norm(lambda u: SIGNS * (gram @ u), start, metric=lambda u: gram @ u)
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(A, 2)), rel=1e-10)
