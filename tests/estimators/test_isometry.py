"""The isometry behind orthogonal probes: onto what is left of the space without √p and the leading eigenvectors."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

import neuromanifold as nm
from neuromanifold.core.sums import divide, square_root
from neuromanifold.estimators.isometry import complement
from neuromanifold.estimators.orthogonal import remainder
from tests.core.problems import PROBLEMS, logits
from tests.estimators.probes import outer


def scaled_eigenvectors(core: nm.Categorical, k: int) -> Tensor:
    """√λ_i v_i of the k leading eigenpairs, [..., k, C]; k may be 0."""
    return core.spectrum(k).factor() if k else core.probs.new_zeros(*core.batch_shape, 0, core.dim)


def directions(core: nm.Categorical, k: int) -> Tensor:
    roots = square_root(core.probs)[..., None, :]
    return torch.cat([roots, divide(scaled_eigenvectors(core, k), roots)], dim=-2)


def check_isometry(core: nm.Categorical) -> None:
    for k in range(core.rank):
        left_out, d = directions(core, k), core.rank - k
        axes = torch.eye(d, dtype=core.dtype).view(d, *[1] * len(core.batch_shape), d)
        B = complement(left_out)(axes.expand(d, *core.batch_shape, d)).movedim(0, -1)  # [..., c, d]
        assert (B.mT @ B - torch.eye(d)).abs().max() < 1e-12
        assert (left_out @ B).abs().max() < 1e-10
        lengths = left_out.norm(dim=-1)
        assert ((lengths == 0) | ((lengths - 1).abs() < 1e-10)).all()  # w of λ = 0 does not exist

        noise_dim, mix = remainder(core, scaled_eigenvectors(core, k))
        assert noise_dim == d
        whole = outer(
            torch.cat([mix(axes.expand(d, *core.batch_shape, d)), scaled_eigenvectors(core, k).movedim(-2, 0)])
        )
        scale = square_root(core.fisher().diagonal(dim1=-2, dim2=-1))  # entry by entry, however small
        error = (whole - core.fisher()).abs()
        assert (error <= 1e-12 * scale[..., :, None] * scale[..., None, :] + 1e-250).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_isometry_leaves_out_what_it_should(name: str) -> None:
    check_isometry(nm.Categorical(PROBLEMS[name]))


@given(logits(most=6))
def test_the_isometry_of_any_distribution(z: Tensor) -> None:
    check_isometry(nm.Categorical(z))
