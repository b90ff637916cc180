"""Orthogonal probes by every sign pattern, every order of the axes, every choice of columns: mean and variance."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.estimators.orthogonal import (
    columns_in_pairs,
    hartley_column,
    leading_columns,
    remainder,
)
from tests.estimators.probes import GRANULARITIES, normal, special
from tests.zscores import allowed_z_score, worst_z_score


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
    """All values of a core's cotangents, up to a sign for each, [draws, probes, C], and their weights.

    Where eigenvectors have all passes but one, that one is Σ ±√λ_i v_i over the others of the k leading eigenvectors,
    and all axes of what is left with random signs.
    """
    own, signed = leading_columns(core, deflate, m)
    if m - len(own) == 1:
        d, mix = remainder(core, torch.cat([own, signed]))
        columns = torch.cat([signed, mix(torch.eye(d, dtype=torch.float64))]) if d else signed
        draws = list(itertools.product((-1.0, 1.0), repeat=len(columns) - 1))
        rest = torch.tensor([(1.0, *draw) for draw in draws], dtype=torch.float64)[:, None] @ columns
        weights = torch.full((len(rest),), 1 / len(rest), dtype=torch.float64)
    else:
        d, mix = remainder(core, own)
        h, weights = all_frames(d, m - len(own))
        rest = mix(h) * math.sqrt(d / h.shape[1])
    return torch.cat([own.expand(len(rest), -1, -1), rest], dim=1), weights


SINGLE: dict[str, Core] = {
    **{f"categorical-{i}": nm.Categorical(z) for i, z in enumerate(special(5))},
    "categorical-6": nm.Categorical(normal(6)),
    "bernoulli": nm.Bernoulli(2 * normal(4)),
    "gaussian": nm.Gaussian(normal(5)),
}
CASES = [(name, m, k) for name, core in SINGLE.items() for m in range(2, core.rank) for k in (0, 1, 2, 8)]


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


def square(u: Tensor) -> Tensor:
    """u uᵀ, which does not know the sign of u."""
    return u[..., :, None] * u[..., None, :]


def test_both_kinds_of_passes_are_among_the_cases() -> None:
    """Shared by orthogonal probes; and a single one, with and without signs of eigenvectors, down to no axis at all."""
    kinds = set()
    for name, m, k in CASES:
        own, signed = leading_columns(SINGLE[name], k, m)
        left = SINGLE[name].rank - len(own) - len(signed)
        kinds.add("shared" if m - len(own) > 1 else (len(signed) > 0, left > 0))
    assert kinds == {"shared", (True, True), (True, False), (False, True)}


@pytest.mark.parametrize(("name", "m", "k"), [("categorical-0", 2, 2), ("categorical-1", 3, 8), ("bernoulli", 2, 1)])
def test_probes_are_drawn_as_enumerated(name: str, m: int, k: int) -> None:
    """Every value of the last pass, up to its sign, as often as any other; false-alarm rate 1e-6."""
    core, n = SINGLE[name], 20_000
    values, weights = all_probes(core, m, k)
    many = type(core)((core.logits if hasattr(core, "logits") else core.mean).expand(n, -1))  # type: ignore[attr-defined]
    drawn = torch.stack(list(nm.Hutchinson(m, deflate=k).cotangents(many, None, torch.Generator().manual_seed(0))), 1)
    for j in range(m - 1):
        torch.testing.assert_close(square(drawn[:, j]), square(values[:1, j]).expand(n, -1, -1))
    of_draws, of_values = square(drawn[:, -1]).flatten(1), square(values[:, -1]).flatten(1)
    distance, which = torch.cdist(of_draws, of_values).min(1)
    assert float(distance.max()) < 1e-6 * float(core.trace())
    assert worst_z_score(torch.nn.functional.one_hot(which, len(values)).double(), weights) < allowed_z_score(
        len(values)
    )


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
