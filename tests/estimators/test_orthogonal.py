"""Orthogonal probes: exact at full rank, better than independent ones before, for all shapes and many classes."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core.sums import divide
from neuromanifold.estimators.base import random_signs
from neuromanifold.estimators.orthogonal import remainder
from tests.estimators.probes import CORES, NOISES, drawn, normal, outer, target


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("part", [None, nm.Upper(), nm.Lower(2)], ids=repr)
@pytest.mark.parametrize("name", CORES)
def test_exact_from_the_rank_on(name: str, part: Any, noise: Any) -> None:
    core = CORES[name]
    rank = core.rank if part is None else part.size(core)
    for probes in {max(2, rank), rank + 1, 1000}:
        for deflate in (0, 1, 5) if part is None else (0,):
            estimator = nm.Hutchinson(probes, deflate=deflate, noise=noise, envelope=part)
            assert estimator.passes(core) == rank
            assert estimator.pass_noise(core, alone=True) == [0.0] * rank
            assert estimator.pass_noise(core, alone=False) == [2 / 3] * rank
            torch.testing.assert_close(outer(drawn(estimator, core)), target(part, core), rtol=1e-12, atol=1e-15)


def test_one_probe_and_independent_probes_are_as_before() -> None:
    core = CORES["categorical-C4"]
    for noise, deflate in itertools.product(NOISES, (0, 2)):
        one = nm.Hutchinson(1, deflate=deflate, noise=noise)  # type: ignore[arg-type]
        assert torch.equal(drawn(one, core), drawn(dataclasses.replace(one, orthogonal=False), core))
        assert one.pass_noise(core, True) == one.pass_noise(core, False) == [2 / 3]
    generator = torch.Generator().manual_seed(1000)
    expected = torch.stack([core.factor(random_signs(core, 4, generator)) for _ in range(3)]) / math.sqrt(3)
    torch.testing.assert_close(drawn(nm.Hutchinson(3, deflate=0, orthogonal=False), core), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("deflate", [0, 1])
def test_the_error_falls_with_the_probes_to_zero(noise: Any, deflate: int) -> None:
    core = nm.Categorical(2 * normal(200, 8))
    errors = []
    for m in range(1, 9):
        u = drawn(nm.Hutchinson(m, deflate=deflate, noise=noise), core)
        errors.append(float((outer(u) - core.fisher()).square().sum((-2, -1)).mean().sqrt()))
        independent = drawn(nm.Hutchinson(m, deflate=deflate, noise=noise, orthogonal=False), core)
        if m > 1:
            assert errors[-1] < float((outer(independent) - core.fisher()).square().sum((-2, -1)).mean().sqrt())
    assert errors == sorted(errors, reverse=True)
    assert max(errors[6:]) < 1e-14 < errors[5]


def test_where_an_independent_probe_has_no_noise() -> None:
    one = nm.Bernoulli(normal(3, 1))
    two, three = nm.Categorical(normal(3, 2)), nm.Categorical(normal(3, 3))
    for estimator, core, exact in [
        (nm.Hutchinson(deflate=0), one, True),
        (nm.Hutchinson(), one, True),
        (nm.Hutchinson(deflate=0, noise="gaussian"), one, False),
        (nm.Hutchinson(deflate=0), two, False),
        (nm.Hutchinson(), two, True),
        (nm.Hutchinson(3, deflate=2, orthogonal=False), two, True),
        (nm.Hutchinson(noise="gaussian"), two, False),
        (nm.Hutchinson(), three, False),
        (nm.Hutchinson(deflate=2), three, False),  # two eigenvectors in one pass: their product is noise
        (nm.Hutchinson(envelope=nm.Lower(1)), three, True),
        (nm.Hutchinson(envelope=nm.Lower(2)), two, True),
        (nm.Hutchinson(envelope=nm.Lower(2)), three, False),
        (nm.Hutchinson(envelope=nm.Upper()), one, True),
        (nm.Hutchinson(envelope=nm.Upper()), two, False),
    ]:
        assert estimator.pass_noise(core, alone=True) == [0.0 if exact else 2 / 3] * estimator.passes(core), estimator
        assert estimator.pass_noise(core, alone=False) == [2 / 3] * estimator.passes(core)
        error = outer(drawn(estimator, core)) - target(estimator.envelope, core)
        assert (bool(error.abs().max() < 1e-12)) is exact, estimator


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_shapes_and_types(shape: tuple[int, ...], dtype: torch.dtype, noise: Any) -> None:
    core = nm.Categorical(normal(*shape, 6).to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for part, deflate in [(None, 0), (None, 2), (nm.Upper(), 0), (nm.Lower(4), 0)]:
        for m in (2, 3, 4, 9):
            u = drawn(nm.Hutchinson(m, deflate=deflate, noise=noise, envelope=part), core)
            assert u.shape[1:] == (*shape, 6)
            assert u.dtype == dtype
            if m == 9:
                torch.testing.assert_close(outer(u), target(part, core), rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.size = max(self.size, *sizes, 0)
        return out


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("noise", NOISES)
def test_many_classes_take_no_matrix(noise: Any, own: int) -> None:
    logits = 3 * normal(2, 20_000).float()
    logits[:, 7] = 16.0 if own else 0.0
    core = nm.Categorical(logits)
    with Largest() as largest:
        u = drawn(nm.Hutchinson(3, noise=noise), core).double()
    assert 40_000 <= largest.size <= 3 * 40_000
    assert (u.sum(-1).abs() < 1e-5).all()
    m, d = 3 - own, 19_999 - own
    inner = divide(u, core.probs.double().sqrt())[own:] / math.sqrt(d / m)  # S B h = √p∘(B h): orthonormal again
    gram = torch.einsum("mnc,lnc->nml", inner, inner)
    torch.testing.assert_close(gram, torch.eye(m).double().expand(2, m, m), rtol=0, atol=1e-4)


def test_bad_input_is_named() -> None:
    for bad in (1, None, "yes"):
        with pytest.raises(TypeError, match="`orthogonal` must be True or False"):
            nm.Hutchinson(orthogonal=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`probes` must be between 1"):
        bounds.orthogonal_variance(nm.Categorical(torch.zeros(1, 3)), torch.zeros(1, 3, 1), 0)
    with pytest.raises(ValueError, match="`columns` must be of shape"):
        bounds.orthogonal_probe_variance(torch.zeros(3), 2)
    with pytest.raises(TypeError, match=r"`core` must be .* use orthogonal=False"):
        remainder(None, torch.zeros(0, 3))  # type: ignore[arg-type]
