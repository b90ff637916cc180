"""Orthogonal probes: exact at full rank, unbiased before, with the variance that is claimed for them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.core.sums import divide, square_root
from neuromanifold.estimators import orthogonal
from neuromanifold.estimators.isometry import complement
from neuromanifold.estimators.orthogonal import (
    columns_in_pairs,
    hartley_column,
    leading_columns,
    own_columns,
    random_signs,
    remainder,
)
from tests.core.problems import PROBLEMS, logits
from tests.zscores import allowed_z_score, worst_z_score

NOISES = ("rademacher", "gaussian")
GRANULARITIES = ("batch", "sample")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def special(classes: int) -> Tensor:
    """Random, peaked, uniform, one-hot, tied and impossible classes: [6, C]."""
    rows = [normal(classes), 30 * normal(classes, seed=1), torch.zeros(classes), torch.full((classes,), -math.inf)]
    rows += [normal(classes, seed=2).round(), normal(classes, seed=3)]
    rows[3][-1] = 0.0
    rows[5][1 : max(2, classes - 1)] = -math.inf
    return torch.stack([row.double() for row in rows])


CORES: dict[str, Core] = {f"categorical-C{c}": nm.Categorical(special(c)) for c in (2, 3, 4, 7)}
CORES |= {f"bernoulli-C{c}": nm.Bernoulli(3 * normal(4, c)) for c in (1, 3, 5)}
CORES |= {f"gaussian-C{c}": nm.Gaussian(normal(3, c), variance=normal(c, seed=1).exp()) for c in (1, 4)}


def drawn(estimator: nm.Estimator, core: Core, seed: int = 1000) -> Tensor:
    """All cotangents of one run, [m, ..., C]."""
    cotangents = list(estimator.cotangents(core, None, torch.Generator().manual_seed(seed)))
    assert len(cotangents) == estimator.passes(core) == len(estimator.pass_noise(core, True))
    return torch.stack(cotangents)


def outer(u: Tensor) -> Tensor:
    """Σ_j u_j u_jᵀ for u [m, ..., C]."""
    return torch.einsum("m...c,m...d->...cd", u, u)


def target(part: Any, core: Core) -> Tensor:
    if isinstance(part, nm.Upper):
        return torch.diag_embed(core.upper_envelope())
    return core.lower_envelope(part.size(core)).dense() if isinstance(part, nm.Lower) else core.fisher()


# ------------------------------------------------------------------------------------------------ the isometry


def directions(core: nm.Categorical, k: int) -> Tensor:
    roots = square_root(core.probs)[..., None, :]
    return torch.cat([roots, divide(leading_columns(core, k), roots)], dim=-2)


def check_isometry(core: nm.Categorical) -> None:
    for k in range(core.rank):
        left_out, d = directions(core, k), core.rank - k
        axes = torch.eye(d, dtype=core.dtype).view(d, *[1] * len(core.batch_shape), d)
        B = complement(left_out)(axes.expand(d, *core.batch_shape, d)).movedim(0, -1)  # [..., c, d]
        assert (B.mT @ B - torch.eye(d)).abs().max() < 1e-12
        assert (left_out @ B).abs().max() < 1e-10
        lengths = left_out.norm(dim=-1)
        assert ((lengths == 0) | ((lengths - 1).abs() < 1e-10)).all()  # w of λ = 0 does not exist

        noise_dim, mix = remainder(core, leading_columns(core, k))
        assert noise_dim == d
        whole = outer(torch.cat([mix(axes.expand(d, *core.batch_shape, d)), leading_columns(core, k).movedim(-2, 0)]))
        scale = square_root(core.fisher().diagonal(dim1=-2, dim2=-1))  # entry by entry, however small
        error = (whole - core.fisher()).abs()
        assert (error <= 1e-12 * scale[..., :, None] * scale[..., None, :] + 1e-250).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_isometry_leaves_out_what_it_should(name: str) -> None:
    check_isometry(nm.Categorical(PROBLEMS[name]))


@given(logits(most=6))
def test_the_isometry_of_any_distribution(z: Tensor) -> None:
    check_isometry(nm.Categorical(z))


# ---------------------------------------------------------------------------------------- exact at full rank


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("part", [nm.Full(), nm.Upper(), nm.Lower(2)], ids=repr)
@pytest.mark.parametrize("name", CORES)
def test_exact_from_the_rank_on(name: str, part: Any, noise: Any) -> None:
    core = CORES[name]
    rank = part.size(core)
    for probes in {max(2, rank), rank + 1, 1000}:
        for deflate in (0, 1, 5) if isinstance(part, nm.Full) else (0,):
            estimator = nm.Hutchinson(probes, noise, part, deflate)
            assert estimator.passes(core) == rank
            assert estimator.pass_noise(core, alone=True) == [0.0] * rank
            assert estimator.pass_noise(core, alone=False) == [2 / 3] * rank
            torch.testing.assert_close(outer(drawn(estimator, core)), target(part, core), rtol=1e-12, atol=1e-15)


def test_one_probe_and_independent_probes_are_as_before() -> None:
    core = CORES["categorical-C4"]
    for noise, deflate in itertools.product(NOISES, (0, 2)):
        one = nm.Hutchinson(1, noise, deflate=deflate)  # type: ignore[arg-type]
        assert torch.equal(drawn(one, core), drawn(dataclasses.replace(one, orthogonal=False), core))
        assert one.pass_noise(core, True) == one.pass_noise(core, False) == [2 / 3]
    generator = torch.Generator().manual_seed(1000)
    expected = torch.stack([core.factor(random_signs(core, 4, generator)) for _ in range(3)]) / math.sqrt(3)
    torch.testing.assert_close(drawn(nm.Hutchinson(3, orthogonal=False), core), expected, rtol=1e-15, atol=0)


# ------------------------------------------------- every sign pattern, every order of the axes, every choice of columns


def design(d: int, m: int) -> dict[tuple[int, ...], float]:
    """All sets of columns with their probabilities: whole pairs {j, d-j}, {0, d/2}, one of a pair, 0 if d is odd."""
    pairs = [(j, (d - j) % d if j else d // 2) for j in range(d % 2, (d + 1) // 2)]
    cases = [((0,), m - 1, m / d), ((), m, 1 - m / d)] if d % 2 else [((), m, 1.0)]
    sets: dict[tuple[int, ...], float] = {}
    for start, left, probability in cases:
        some = []
        for taken in itertools.combinations(pairs, left // 2):
            whole = start + tuple(j for pair in taken for j in pair)
            rest = [j for pair in pairs if pair not in taken for j in pair]
            some += [tuple(sorted((*whole, j))) for j in rest] if left % 2 else [tuple(sorted(whole))]
        sets |= dict.fromkeys(some, probability / max(1, len(some)))
    return sets


def all_frames(d: int, m: int) -> tuple[Tensor, Tensor]:
    """All values of the Rademacher probes h [draws, m, d] and their weights; signs up to one for each probe."""
    signs = torch.tensor([(1.0, *rest) for rest in itertools.product((-1.0, 1.0), repeat=d - 1)], dtype=torch.float64)
    sets = design(d, m)
    chosen, weights = torch.tensor(list(sets)), torch.tensor(list(sets.values()), dtype=torch.float64)
    frames = [
        hartley_column(signs[:, None, None], chosen.expand(len(signs), -1, -1), torch.tensor(order))
        for order in itertools.permutations(range(d))
    ]
    h = torch.stack(frames)  # [orders, signs, sets, m, d]
    return h.flatten(0, 2), weights.repeat(len(frames) * len(signs)) / (len(frames) * len(signs))


def all_probes(core: Core, m: int, deflate: int = 0) -> tuple[Tensor, Tensor]:
    """All values of a core's cotangents, up to a sign for each, [draws, probes, C], and their weights."""
    scaled = own_columns(core, deflate, m)
    d, mix = remainder(core, scaled)
    h, weights = all_frames(d, m - len(scaled))
    rest = mix(h) * math.sqrt(d / h.shape[1])
    return torch.cat([scaled.expand(len(h), -1, -1), rest], dim=1), weights


SINGLE: dict[str, Core] = {
    **{f"categorical-{i}": nm.Categorical(z) for i, z in enumerate(special(5))},
    "categorical-6": nm.Categorical(normal(6)),
    "bernoulli": nm.Bernoulli(2 * normal(4)),
    "gaussian": nm.Gaussian(normal(5)),
}
CASES = [(name, m, k) for name, core in SINGLE.items() for m in range(2, core.rank) for k in (0, 1, 2)]


@pytest.mark.parametrize("d", [2, 3, 4, 5])
def test_hartley_frames_are_orthonormal(d: int) -> None:
    for m in range(1, d + 1):
        h, weights = all_frames(d, m)
        torch.testing.assert_close(h @ h.mT, torch.eye(m).double().expand(len(h), m, m), rtol=0, atol=1e-14)
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0).double())


@pytest.mark.parametrize("d", [2, 3, 4, 5, 6, 7, 8, 9, 100, 101])
def test_columns_come_in_pairs(d: int) -> None:
    """No column twice, at most one without its partner, and all of them if there are as many.  Pairs are flat."""
    partner = {j: d - j for j in range(1, d)} | {0: 0}
    if d % 2 == 0:
        partner |= {0: d // 2, d // 2: 0}
    core = nm.Categorical(torch.zeros(50, 2, 3))
    for m in {1, 2, 3, 4, d // 2, d - 2, d - 1, d} & set(range(1, d + 1)):
        chosen = columns_in_pairs(core, d, m, torch.Generator().manual_seed(m))
        assert chosen.shape == (50, 2, m)
        for row in chosen.flatten(0, 1).tolist():
            assert len(set(row)) == m
            assert set(row) <= set(partner)
            assert len(set(row) - {partner[j] for j in row}) == (m - (d % 2 and 0 in row)) % 2
    columns = hartley_column(torch.ones(d, d).double(), torch.arange(d), torch.arange(d)).square()
    for j, other in partner.items():
        torch.testing.assert_close(columns[j] + columns[other], torch.full((d,), 2 / d, dtype=torch.float64))


@pytest.mark.parametrize(("d", "m"), [(d, m) for d in range(2, 8) for m in range(1, d)])
def test_columns_are_drawn_by_design(d: int, m: int) -> None:
    """Every set of columns as often as it should, false-alarm rate 1e-6; each column with probability m/d."""
    n = 100_000
    chosen = columns_in_pairs(nm.Categorical(torch.zeros(n, 2)), d, m, torch.Generator().manual_seed(0))
    sets = design(d, m)
    codes = {sum(2**j for j in some): i for i, some in enumerate(sets)}
    index = torch.full((2**d,), -1)
    index[torch.tensor(list(codes))] = torch.tensor(list(codes.values()))
    drawn_sets = torch.nn.functional.one_hot(index[(2**chosen).sum(-1)], len(sets)).double()
    probabilities = torch.tensor(list(sets.values())).double()
    assert worst_z_score(drawn_sets, probabilities) < allowed_z_score(len(sets))
    for j in range(d):
        assert sum(p for some, p in sets.items() if j in some) == pytest.approx(m / d, rel=1e-14)
    for one in chosen.unbind(-1):  # each pass on its own: E[h hᵀ] = I/d, which cross terms between samples need
        diagonal = hartley_column(torch.ones(1, d).double(), one, torch.arange(d)).square()
        assert worst_z_score(diagonal, torch.full((d,), 1 / d, dtype=torch.float64)) < allowed_z_score(d)


@pytest.mark.parametrize(("name", "m", "k"), CASES)
def test_mean_and_variance_by_enumeration(name: str, m: int, k: int) -> None:
    core = SINGLE[name]
    u, weights = all_probes(core, m, k)
    mean = torch.einsum("n,nmc,nmd->cd", weights, u, u)
    torch.testing.assert_close(mean, core.fisher(), rtol=0, atol=1e-12 * float(core.trace()))

    jacobian = torch.cat([normal(core.dim, 5, seed=1), torch.eye(core.dim).double()], dim=1)  # also along one axis
    g = torch.einsum("nmc,cp->nmp", u, jacobian)
    exact = torch.einsum("cp,cd,dp->p", jacobian, core.fisher(), jacobian)
    variance = weights @ (g.square().sum(1) - exact).square()
    floor = 1e-13 * float(exact.square().max())
    batch = type(core)(core.logits[None] if hasattr(core, "logits") else core.mean[None])  # type: ignore[attr-defined]
    for granularity in GRANULARITIES:  # one sample: the same
        claimed = bounds.orthogonal_variance(batch, jacobian[None], m, k, granularity=granularity)  # type: ignore[arg-type]
        torch.testing.assert_close(claimed, variance, rtol=1e-9, atol=floor)

    fourth = torch.einsum("n,nmp->mp", weights, g.pow(4))
    factors = torch.tensor(nm.Hutchinson(m, deflate=k).pass_noise(core, alone=True), dtype=torch.float64)
    bound = (factors[:, None] * fourth).sum(0)
    assert (bound >= variance * (1 - 1e-9) - floor).all()
    assert (bound <= (2 / 3) * fourth.sum(0) * (1 + 1e-12)).all()


FRAMES = {(d, m): all_frames(d, m) for d in range(2, 6) for m in range(1, d)}


@given(st.sampled_from(sorted(FRAMES)), st.data())
def test_variance_and_its_bound_hold_for_all_derivatives(dm: tuple[int, int], data: st.DataObject) -> None:
    (d, m), (h, weights) = dm, FRAMES[dm]
    a = torch.tensor(data.draw(st.lists(st.floats(-1, 1), min_size=d, max_size=d)), dtype=torch.float64)
    g, F = math.sqrt(d / m) * h @ a, a.square().sum()
    torch.testing.assert_close(weights @ g.square().sum(1), F, rtol=1e-12, atol=1e-300)
    variance = weights @ (g.square().sum(1) - F).square()
    claimed = bounds.orthogonal_probe_variance(a[None, :, None], m)[0]
    torch.testing.assert_close(claimed, variance, rtol=1e-10, atol=1e-14)
    bound = (2 / 3) * (d - m) / (d - 1) * (weights @ g.pow(4).sum(1))
    assert variance <= bound * (1 + 1e-9) + 1e-14 * F.square()


def special_derivatives(d: int) -> Tensor:
    """Random, along one axis, even, along two axes at distance d/2, along four that are mirror images: [5, d]."""
    a = torch.zeros(5, d, dtype=torch.float64)
    a[0], a[1, d - 1], a[2], a[3, 1 % d], a[3, (1 + d // 2) % d] = normal(d), 1.0, 1.0, 1.0, 1.0
    for i in (1, d - 1, 1 + d // 2, d - 1 + d // 2):
        a[4, i % d] = 1.0
    return a


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_six_dimensions_by_enumeration(m: int) -> None:
    """Also the derivatives that would be the worst for columns in pairs if the axes had no random order."""
    a, (h, weights) = special_derivatives(6), all_frames(6, m)
    g, F = math.sqrt(6 / m) * torch.einsum("nmd,pd->nmp", h, a), a.square().sum(1)
    variance = weights @ (g.square().sum(1) - F).square()
    claimed = bounds.orthogonal_probe_variance(a.T[None], m)
    torch.testing.assert_close(claimed, variance, rtol=1e-10, atol=1e-13)
    assert (variance <= (2 / 3) * (6 - m) / 5 * (weights @ g.pow(4).sum(1)) * (1 + 1e-9)).all()
    if m % 2 == 0:
        assert claimed[1] == 0
        torch.testing.assert_close(claimed, 2 / m * (6 - m) / 5 * (F.square() - a.pow(4).sum(1)), rtol=1e-12, atol=0)


def test_columns_in_pairs_need_the_axes_in_random_order() -> None:
    """The trap: with the axes as they are, the claimed bound is too small for derivatives at distance d/2."""
    a, sets = special_derivatives(4)[3], design(4, 2)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)), dtype=torch.float64)
    h = torch.stack([torch.stack([hartley_column(signs, torch.tensor(j), torch.arange(4)) for j in s]) for s in sets])
    g = math.sqrt(2) * h @ a  # [sets, m, signs]
    variance, fourth = g.square().sum(1).var(correction=0), g.pow(4).sum(1).mean()
    torch.testing.assert_close(variance, fourth)  # a constant of 1 instead of 4/9


# -------------------------------------------------------------------------------------------------- simulation


class Uncentred(nm.Hutchinson):
    """The biased twin of a squared batch: a pass without its random sign."""

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        del labels
        return self._orthogonal(core, generator)


class Unscaled(nm.Hutchinson):
    """The biased twin of every square: √(d/m) with the d of another rank."""

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (math.sqrt(1.1) * u for u in super().cotangents(core, labels, generator))


def simulated(estimator: nm.Estimator, core: Core, jacobian: Tensor, granularity: str, draws: int) -> tuple[Any, Any]:
    """Estimates [draws, P], and g⁴ of each pass [m, P] on average (sample-wise: summed over the samples)."""
    many = type(core)(core.logits.expand(draws, *core.logits.shape))  # type: ignore[attr-defined]
    g = torch.einsum("mbnc,ncp->mbnp", drawn(estimator, many), jacobian)
    g = g.sum(2, keepdim=True) if granularity == "batch" else g
    return g.square().sum((0, 2)), g.pow(4).sum(2).mean(1)


SIMULATED = {
    "rademacher": (nm.Hutchinson(2), nm.Categorical(2 * normal(3, 6))),
    "rademacher, deflated": (nm.Hutchinson(3, deflate=1), nm.Categorical(2 * normal(3, 6))),
    "rademacher, deflated 5": (nm.Hutchinson(3, deflate=5), nm.Categorical(2 * normal(3, 6))),
    "rademacher, even predictions": (nm.Hutchinson(2, deflate=1), nm.Categorical(0.1 * normal(3, 6))),
    "rademacher, even d": (nm.Hutchinson(2), nm.Categorical(2 * normal(3, 7))),
    "rademacher, even d, three": (nm.Hutchinson(3), nm.Categorical(2 * normal(3, 7))),
    "rademacher, columns": (nm.Hutchinson(9), nm.Categorical(2 * normal(3, 3))),
    "rademacher, Bernoulli": (nm.Hutchinson(3), nm.Bernoulli(normal(3, 4))),
    "gaussian": (nm.Hutchinson(2, "gaussian"), nm.Categorical(2 * normal(3, 6))),
    "gaussian, deflated": (nm.Hutchinson(3, "gaussian", deflate=1), nm.Categorical(2 * normal(3, 6))),
    "gaussian, even predictions": (nm.Hutchinson(2, "gaussian", deflate=1), nm.Categorical(0.1 * normal(3, 6))),
    "gaussian, Bernoulli": (nm.Hutchinson(3, "gaussian"), nm.Bernoulli(normal(3, 4))),
}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", SIMULATED)
def test_mean_and_variance_by_simulation(name: str, granularity: Any) -> None:
    """False-alarm rate 1e-6 for each; twins that are biased by their scale, or by a missing sign, are seen."""
    estimator, core = SIMULATED[name]
    jacobian = normal(3, core.dim, 4, seed=1) + 0.5  # samples that pull the same way: their cross terms do not vanish
    exact = torch.einsum("ncp,ncd,ndp->p", jacobian, core.fisher(), jacobian)
    settings = {f.name: getattr(estimator, f.name) for f in dataclasses.fields(estimator)}
    estimates, fourth = simulated(estimator, core, jacobian, granularity, 100_000)
    limit = allowed_z_score(4)
    assert worst_z_score(estimates, exact) < limit
    assert worst_z_score(simulated(Unscaled(**settings), core, jacobian, granularity, 100_000)[0], exact) > limit
    if granularity == "batch" and ("deflated" in name or "columns" in name or estimator.noise == "gaussian"):
        assert worst_z_score(simulated(Uncentred(**settings), core, jacobian, granularity, 100_000)[0], exact) > limit

    claimed = bounds.orthogonal_variance(
        core, jacobian, estimator.probes, estimator.deflate, estimator.noise, granularity
    )
    squares = (estimates - exact).square()
    assert worst_z_score(squares, claimed) < limit
    if granularity == "batch" or "columns" not in name:
        assert worst_z_score(squares, 1.2 * claimed) > limit
    factors = torch.tensor(estimator.pass_noise(core, alone=granularity == "sample"), dtype=torch.float64)
    bound = (factors[:, None] * fourth).sum(0)
    assert (bound >= 0.95 * claimed).all()  # five per cent for the fourth powers, which are simulated
    if estimator.noise == "gaussian" and granularity == "sample":
        torch.testing.assert_close(bound, claimed, rtol=0.05, atol=0)


def test_one_order_of_the_axes_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many classes: unbiased for each distribution, uncorrelated between them; false-alarm rate 1e-6.

    Batches are what is independent then, so each is a mean over few distributions, along two axes of the inner space.
    """
    monkeypatch.setattr(orthogonal, "ORDERS_OF_THEIR_OWN", 0)
    core, estimator = nm.Gaussian(torch.zeros(2, 4).double()), nm.Hutchinson(2)
    generator, estimates = torch.Generator().manual_seed(0), []
    for _ in range(3000):
        u = torch.stack(list(estimator.cotangents(core, None, generator)))
        estimates.append(u[..., :2].sum(-1).square().sum(0))  # the derivatives are 1, 1, 0, 0: F = 2
    estimate = torch.stack(estimates)  # [batches, 2]
    assert worst_z_score(estimate, torch.full((2,), 2.0).double()) < allowed_z_score(2)
    squares = (estimate - 2).square()
    claimed = bounds.orthogonal_probe_variance(torch.tensor([1.0, 1.0, 0.0, 0.0])[None, :, None].double(), 2)
    assert worst_z_score(squares, claimed.expand(2)) < allowed_z_score(2)
    product = (estimate - 2).prod(-1, keepdim=True)
    assert worst_z_score(product, torch.zeros(1).double()) < allowed_z_score(1)


def test_cross_terms_of_passes_are_uncorrelated() -> None:
    """E[u_j u_lᵀ] = 0, false-alarm rate 1e-6.  Columns are correlated without a random sign for each of them."""
    core = nm.Categorical(normal(5).expand(200_000, 5))
    for estimator, seen in ((nm.Hutchinson(2), False), (nm.Hutchinson(4), False), (Uncentred(4), True)):
        u = drawn(estimator, core)
        products = u[0][:, :, None] * u[1][:, None, :]
        assert (worst_z_score(products, torch.zeros(5, 5).double()) > allowed_z_score(25)) is seen


def test_a_frame_of_gaussian_noise_is_centred_only_by_its_signs() -> None:
    """False-alarm rate 1e-6."""
    core = nm.Categorical(normal(5).expand(50_000, 5))
    for kind, seen in ((nm.Hutchinson, False), (Uncentred, True)):
        u = drawn(kind(2, "gaussian"), core)
        z = [worst_z_score(one, torch.zeros(5).double()) for one in u]
        assert (max(z) > allowed_z_score(10)) is seen


# -------------------------------------------------------------------------------------------- what it is good for


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("deflate", [0, 1])
def test_the_error_falls_with_the_probes_to_zero(noise: Any, deflate: int) -> None:
    core = nm.Categorical(2 * normal(200, 8))
    errors = []
    for m in range(1, 9):
        u = drawn(nm.Hutchinson(m, noise, deflate=deflate), core)
        errors.append(float((outer(u) - core.fisher()).square().sum((-2, -1)).mean().sqrt()))
        independent = drawn(nm.Hutchinson(m, noise, deflate=deflate, orthogonal=False), core)
        if m > 1:
            assert errors[-1] < float((outer(independent) - core.fisher()).square().sum((-2, -1)).mean().sqrt())
    assert errors == sorted(errors, reverse=True)
    assert max(errors[6:]) < 1e-14 < errors[5]


def test_where_an_independent_probe_has_no_noise() -> None:
    one = nm.Bernoulli(normal(3, 1))
    two, three = nm.Categorical(normal(3, 2)), nm.Categorical(normal(3, 3))
    for estimator, core, exact in [
        (nm.Hutchinson(), one, True),
        (nm.Hutchinson(deflate=1), one, True),
        (nm.Hutchinson(noise="gaussian"), one, False),
        (nm.Hutchinson(), two, False),
        (nm.Hutchinson(deflate=1), two, True),
        (nm.Hutchinson(3, deflate=2, orthogonal=False), two, True),
        (nm.Hutchinson(noise="gaussian", deflate=1), two, False),
        (nm.Hutchinson(deflate=1), three, False),
        (nm.Hutchinson(deflate=2), three, False),  # two eigenvectors in one pass: their product is noise
        (nm.Hutchinson(core=nm.Lower(1)), three, True),
        (nm.Hutchinson(core=nm.Lower(2)), two, True),
        (nm.Hutchinson(core=nm.Lower(2)), three, False),
        (nm.Hutchinson(core=nm.Upper()), one, True),
        (nm.Hutchinson(core=nm.Upper()), two, False),
    ]:
        assert estimator.pass_noise(core, alone=True) == [0.0 if exact else 2 / 3] * estimator.passes(core), estimator
        assert estimator.pass_noise(core, alone=False) == [2 / 3] * estimator.passes(core)
        error = outer(drawn(estimator, core)) - target(estimator.core, core)
        assert (bool(error.abs().max() < 1e-12)) is exact, estimator


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_shapes_and_types(shape: tuple[int, ...], dtype: torch.dtype, noise: Any) -> None:
    core = nm.Categorical(normal(*shape, 6).to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for part, deflate in [(nm.Full(), 0), (nm.Full(), 2), (nm.Upper(), 0), (nm.Lower(4), 0)]:
        for m in (2, 3, 4, 9):
            u = drawn(nm.Hutchinson(m, noise, part, deflate), core)
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
        u = drawn(nm.Hutchinson(3, noise, deflate=1), core).double()
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
