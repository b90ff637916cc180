"""Who is kept with how many passes: the closed form, its predictions, and the draw itself."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold import bounds
from neuromanifold.core import Core
from neuromanifold.estimators import adaptive, allocation
from neuromanifold.estimators.adaptive import chosen, groups, in_full_groups, several, strategy
from neuromanifold.estimators.allocation import (
    Allocation,
    Scores,
    allocate,
    allocate_to_everyone,
    score,
    score_everyone,
)
from neuromanifold.estimators.orthogonal import least_noise, own_passes, remaining_noise
from tests.estimators.probes import normal
from tests.zscores import allowed_z_score, worst_z_score

PLENTY = 1e9


def scores_of(core: Core, budget: float = PLENTY) -> Scores:
    """Scores of samples with one output distribution each."""
    of: Callable[[Tensor], Core] = lambda rows: type(core)(_outputs(core)[rows])  # type: ignore[call-arg] # noqa: E731
    return score(core.trace(), core.squared_norm(), core.rank, of, budget)


def everyone(core: Core, budget: float = PLENTY) -> Scores:
    """Scores of the same samples where all of them are kept."""
    of: Callable[[Tensor], Core] = lambda rows: type(core)(_outputs(core)[rows])  # type: ignore[call-arg] # noqa: E731
    return score_everyone(core.trace(), core.squared_norm(), core.rank, of, budget)


def _outputs(core: Any) -> Tensor:
    return core.mean if isinstance(core, nm.Gaussian) else core.logits


def peaked(n: int, c: int, seed: int = 0) -> nm.Categorical:
    """Predictions from near-uniform to certain."""
    return nm.Categorical(normal(n, c, seed=seed) * torch.linspace(0.1, 12, n).double()[:, None])


# ---------------------------------------------------------------------------------------------------- allocation


def least_variance(noise: Tensor, fisher: Tensor, passes: Tensor, cost: float) -> Tensor:
    """The least Σ (2S² + F²)/π - F² over 0 < π <= 1 with Σ π(1 + 2m) <= cost, for given passes [choices, n]."""
    amount, price = 2 * noise + fisher, 1 + 2 * passes

    def keep(at: Tensor) -> Tensor:
        return (amount / (at[:, None] * price)).sqrt().clamp(max=1)

    low, high = (torch.full((len(noise),), bound, dtype=torch.float64) for bound in (1e-30, 1e30))
    for _ in range(60):
        middle = (low * high).sqrt()
        over = (keep(middle) * price).sum(-1) > cost
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return (amount / keep(high) - fisher).sum(-1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "c"), [(1, 4), (3, 3), (4, 5), (5, 4)])
def test_no_other_allocation_of_the_same_cost_has_less_variance(n: int, c: int, seed: int) -> None:
    """Brute force over all numbers of passes, with the best π for each, but for 5 %: several passes with π < 1.

    Twin: the same number of passes for all.
    """
    core = nm.Categorical(normal(n, c, seed=seed) * torch.tensor([0.3, 8.0, 2.0, 5.0, 12.0]).double()[:n, None])
    scores, better = scores_of(core), 0
    choices = torch.tensor(list(itertools.product(range(len(scores.passes)), repeat=n)))  # [choices, n]
    noise = scores.noise[torch.arange(n), choices]
    for budget in torch.linspace(0.3, 2 * c - 1, 12)[:-1].tolist():
        found = allocate(scores, budget * n)
        claimed, cost = found.variance(scores), found.cost
        assert 0 < cost <= budget * n * (1 + 1e-12)
        least = least_variance(noise, scores.fisher, scores.passes[choices], cost)
        assert claimed + found.price * cost <= (float(least.min()) + found.price * cost) * 1.01
        assert claimed <= float(least.min()) * 1.05 + 1e-12 * float(scores.fisher.max())
        same = (choices == choices[:, :1]).all(1)
        better += bool((claimed < 0.9 * least[same]).all())
    assert better or n == 1


def test_the_budget_is_spent_but_not_exceeded() -> None:
    """Up to one sample whose number of passes jumps; the price falls as the budget grows."""
    scores, before = scores_of(peaked(200, 10)), math.inf
    for mean in (0.1, 0.5, 1.0, 2.0, 3.5, 6.0, 12.0, 18.9):
        found = allocate(scores, 200 * mean)
        assert 0.98 * 200 * mean - 2 * 9 <= found.cost <= 200 * mean * (1 + 1e-12)
        assert found.price < before
        before = found.price
        assert bool(((found.keep == 1) | (found.passes == 1)).all())  # several passes only for those always kept
        torch.testing.assert_close(found.keep, (scores.trace / math.sqrt(found.price)).clamp(max=1))


def test_everything_is_exact_where_the_budget_allows() -> None:
    for core in (peaked(20, 10), nm.Bernoulli(3 * normal(20, 4)), nm.Gaussian(normal(20, 6)), peaked(20, 2)):
        scores = scores_of(core)
        found = allocate(scores, 20 * (1 + 2 * core.rank))
        assert (found.keep.tolist(), found.price) == ([1.0] * 20, 0.0)
        assert found.variance(scores) < 1e-14
        assert scores.passes[-1] == core.rank


@pytest.mark.parametrize("budget", [1e-3, 1.0, 100.0, PLENTY])
def test_samples_without_information_cost_nothing(budget: float) -> None:
    core = nm.Categorical(torch.tensor([[0.0, -math.inf, -math.inf], [1e4, 0.0, 0.0], [0.0, 0.0, 0.0]]).double())
    found = allocate(scores_of(core), budget)
    assert found.keep[:2].tolist() == [0, 0]
    assert found.cost <= budget
    assert found.keep[2] > 0


def test_no_sample_and_none_with_information() -> None:
    for core in (nm.Categorical(torch.zeros(0, 4)), nm.Categorical(torch.tensor([[0.0, -math.inf]] * 3))):
        for budget in (-1.0, 0.0, 1.0, PLENTY):
            scores = scores_of(core, budget)
            found = allocate(scores, budget)
            assert found.keep.shape == found.passes.shape == core.batch_shape
            assert (found.cost, found.variance(scores)) == (0, 0)
            assert strategy(nm.Adaptive(1.0), scores, everyone(core, budget)) == "alike"
        assert len(chosen(found.keep, torch.Generator())) == 0
        assert in_full_groups(found.keep, 4, torch.Generator()).tolist() == found.keep.tolist()


@pytest.mark.parametrize("smallest", [1e-10, 1e-30, 1e-100, 1e-150])
def test_a_huge_dynamic_range(smallest: float) -> None:
    """Everyone with information can be kept, and is at a large budget."""
    t = torch.logspace(math.log10(smallest), 0, 50, dtype=torch.float64)
    scores = Scores(t, t.square() / 2, torch.stack([t.square() / 2, 0 * t], -1), torch.tensor([1.0, 2.0]).double())
    for budget in (1.0, 10.0, 100.0, 200.0, 249.0):
        found = allocate(scores, budget)
        assert found.keep.isfinite().all()
        assert (found.keep > 0).all()
        assert 0.9 * budget - 5 <= found.cost <= budget * (1 + 1e-12)
    assert allocate(scores, 250.0).keep.tolist() == [1.0] * 50
    alone = Scores(t[:1], t[:1].square(), 0 * t[:1, None], torch.ones(1).double())
    assert allocate(alone, 3.0).keep.tolist() == [1.0]
    assert allocate(alone, 1.5).cost == pytest.approx(1.5, rel=1e-3)


def test_eigenvalues_are_computed_only_where_several_passes_may_pay() -> None:
    """With the same allocation as with all of them."""
    core, asked = peaked(100, 10), []

    def some(rows: Tensor) -> Core:
        asked.append(len(rows))
        return nm.Categorical(core.logits[rows])

    for mean in (1.0, 2.0, 2.5, 3.5):
        found = score(core.trace(), core.squared_norm(), core.rank, some, 100 * mean)
        ours, full = allocate(found, 100 * mean), allocate(scores_of(core), 100 * mean)
        torch.testing.assert_close(ours.keep, full.keep)
        assert torch.equal(ours.passes, full.passes)
    assert 0 < asked[0] < asked[1] < asked[2] <= 100  # none at the first budget


def test_numbers_of_passes_between_those_of_the_table() -> None:
    scores = Scores(
        torch.ones(2), torch.ones(2), torch.tensor([[8.0, 4.0, 0.0], [2.0, 1.0, 1.0]]), torch.tensor([1.0, 2, 4])
    )
    assert scores.at(torch.tensor([1.0, 2.0])).tolist() == [8, 1]
    assert scores.at(torch.tensor([1.5, 4.0])).tolist() == [6, 1]
    assert scores.at(torch.tensor([3.0, 100.0])).tolist() == [2, 1]
    assert scores.of(torch.tensor([1])).at(torch.tensor([1.0])).tolist() == [2]
    for rank in (1, 2, 3, 9, 10, 50, 1000, 10**6):
        choices = allocation._choices(rank)
        assert choices == sorted(set(choices))
        assert (choices[0], choices[-1]) == (1, min(rank, 2**12))
        assert choices[: min(rank, 9)] == list(range(1, min(rank, 9) + 1))


def test_which_strategy() -> None:
    """Everyone is kept where there is a budget for it; left out is who is not worth much, at a low cost."""

    def found(core: Core, cost: float) -> str:
        return strategy(nm.Adaptive(cost), scores_of(core), everyone(core))

    confident, even = (
        nm.Categorical(torch.cat([40 * normal(60, 10), 2 * normal(4, 10, seed=1)])),
        nm.Categorical(0.1 * normal(64, 100)),
    )
    for cost in (0.5, 0.7, 1.0, 1.1):
        assert found(confident, cost) == "chosen"
        assert found(even, cost) == "alike"
    for cost in (1.3, 1.5, 3.0):
        assert found(confident, cost) == "everyone"
        assert found(even, cost) == "alike"
    assert found(confident, 0.3) == "alike"  # outputs alone cost a third
    assert found(nm.Categorical(normal(64, 2)), 1.0) == "alike"  # one pass is exact
    assert found(nm.Gaussian(normal(64, 3)), 1.0) == "alike"


def test_the_same_for_all() -> None:
    for cost, mean in ((0.2, 1), (1, 1), (1.5, 1.75), (2.0, 2.5), (7, 10)):
        estimator = nm.Adaptive(cost)
        assert estimator.mean_passes == mean
        assert sum(estimator.alike(batch).probes for batch in range(400)) == 400 * mean
        assert estimator.passes(nm.Categorical(normal(3, 40))) == estimator.alike(0).probes == math.floor(mean)
        assert estimator.for_batches() == nm.Hutchinson(
            math.floor(mean), deflate=8 if mean >= 2 else 1, orthogonal=False
        )
    assert nm.Adaptive(0.5).allocation(3).cost == pytest.approx(3 * 0.5 * 3)  # kept at random, outputs not looked at
    assert several(1) == nm.Hutchinson()
    assert nm.Adaptive(1) == nm.Adaptive(1.0)
    assert nm.Adaptive(1) != nm.Adaptive(1, window=4)


@pytest.mark.parametrize("cost", [0, -1, math.nan, math.inf, "a", None, True])
def test_costs_that_are_none(cost: Any) -> None:
    with pytest.raises(ValueError, match=r"`passes` must be a number > 0, got .* costs as much as forward \+ backward"):
        nm.Adaptive(cost)
    for window in (0, -3):
        with pytest.raises(ValueError, match="`window` must be between 1 and"):
            nm.Adaptive(1.0, window=window)
    with pytest.raises(TypeError, match="`window` must be an int"):
        nm.Adaptive(1.0, window=1.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- predicted noise


def all_directions(d: int) -> tuple[Tensor, Tensor]:
    """Three-point Gauss-Hermite points [3^d, d] and weights: exact for polynomials of degree five of normal numbers."""
    points, weights = (
        torch.tensor([-math.sqrt(3), 0, math.sqrt(3)]).double(),
        torch.tensor([1 / 6, 2 / 3, 1 / 6]).double(),
    )
    index = torch.cartesian_prod(*[torch.arange(3)] * d).reshape(-1, d)
    return points[index], weights[index].prod(-1)


@pytest.mark.parametrize(
    "c", [2, 3, 4, 5, 6, 7, 8, 9, *(pytest.param(c, marks=pytest.mark.slow) for c in (10, 11, 12))]
)
def test_predicted_noise_along_eigenvectors(c: int) -> None:
    """Half the exact variance, averaged over directions, for columns √λ_i v_i: without own passes, and with any."""
    for scale in (0.0, 1.0, 6.0, 25.0):
        core = nm.Categorical(scale * normal(1, c))
        values = torch.linalg.eigvalsh(core.fisher()).flip(-1)[0, : c - 1].clamp(min=0)
        x, weights = all_directions(c - 1)
        for m, k in itertools.product({1, 2, 3, 4, 5, c - 2, c - 1} & set(range(1, c)), {0, 1, 2, min(8, c - 2)}):
            found = remaining_noise(
                core.spectrum(max(1, k)).values[:, :k], core.trace(), core.squared_norm(), c - 1, m
            )[0]
            assert len(found) == min(k, m - 1) + 1
            for own, noise in enumerate(found):
                a = (x * values.sqrt())[:, own:].T[None]  # [1, d', points]
                left, d = m - own, c - 1 - own
                if left == 1 and own:
                    variance = bounds.probe_variance(a, granularity="sample") if d > 1 else torch.zeros(1)
                elif left == d:
                    variance = torch.zeros(1)
                elif left % 2 == d % 2 == 0:  # all columns have their partners
                    variance = bounds.orthogonal_probe_variance(a, left, granularity="sample")
                else:
                    variance = bounds.probe_variance(a, granularity="sample", probes=left) * (d - left) / (d - 1)
                expected = (weights * variance).sum() if variance.numel() > 1 else variance.sum()
                torch.testing.assert_close(2 * noise, expected.double(), rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("c", range(3, 10))
def test_predicted_noise_is_that_of_the_estimator(c: int) -> None:
    """`bounds.orthogonal_variance` of `several(m)`, where one pass is left for the rest; else it is at least that."""
    x, weights = all_directions(c)
    for scale, m in itertools.product((0.3, 3.0, 12.0), range(2, c - 1)):
        core = nm.Categorical(scale * normal(1, c))
        variance = bounds.orthogonal_variance(core, x.T[None], m, 8, granularity="sample")
        found, own = float(weights @ variance), own_passes(core, 8, m)
        values = core.spectrum(min(8, c - 1)).values
        claimed = 2 * float(remaining_noise(values, core.trace(), core.squared_norm(), c - 1, m).amin())
        if m - own == 1:
            assert found == pytest.approx(claimed, rel=1e-6, abs=1e-15)
        else:  # axes that are no eigenvectors
            assert 0.7 * claimed - 1e-15 <= found <= 2 * claimed + 1e-15


@pytest.mark.parametrize("c", [3, 4, 10, 30])
def test_the_table_has_the_least_noise_of_each_number_of_passes(c: int) -> None:
    core, k = nm.Categorical(6 * normal(20, c)), min(8, c - 2)
    given = core.spectrum(k).values, core.trace(), core.squared_norm(), c - 1
    choices = torch.tensor([m for m in (1, 2, 3, 9, c - 1) if m <= c - 1]).double()
    for least in (0, 1):
        found = least_noise(*given, choices, least)
        for j, m in enumerate(map(int, choices)):
            expected = remaining_noise(*given, m)[:, min(least, m - 1) :].amin(-1)
            torch.testing.assert_close(found[:, j], expected, rtol=1e-6, atol=1e-15)


def test_equal_eigenvalues_have_no_first_eigenvector() -> None:
    """It would be another one when it is computed again: such samples get no passes of their own."""
    logits = torch.tensor([[3.0, 3.0, 3.0, 0.0], [3.0, 2.0, 1.0, 0.0], [3.0, 3.0, 0.0, 0.0]]).double()
    noise = everyone(nm.Categorical(logits)).noise
    assert (noise[:, -1] < noise[:, 0]).tolist() == [False, True, True]


def test_everyone_is_kept_at_the_cost_that_was_asked_for() -> None:
    """Brute force over all numbers of passes: at its price, no other choice has less variance + μ cost."""
    core = nm.Categorical(normal(4, 5) * torch.tensor([0.3, 8.0, 2.0, 5.0]).double()[:, None])
    scores = everyone(core)
    choices = torch.tensor(list(itertools.product(range(len(scores.passes)), repeat=4)))  # [choices, n]
    passes = scores.passes[choices]
    costs = torch.where(passes > 1, 2 * passes - 1, 0).sum(-1)
    variance = 2 * scores.noise[torch.arange(4), choices].sum(-1)
    for budget in (0.0, 2.9, 3.0, 8.0, 12.0, 19.0, 28.0):
        found = allocate_to_everyone(scores, budget)
        assert found.extra_cost <= budget
        assert bool((found.keep == 1).all())
        best = variance + found.price * costs
        assert found.variance(scores) + found.price * found.extra_cost <= float(best.min()) * 1.001 + 1e-12
        assert found.variance(scores) <= 2.5 * float(variance[costs <= budget].min()) + 1e-12
        again = allocate_to_everyone(scores, budget, least=1)
        assert bool((again.passes >= 2).all())
    assert allocate_to_everyone(scores, 28.0).variance(scores) < 1e-20


def test_predicted_noise_does_not_cancel() -> None:
    """float32 against float64: to a millionth of t², never negative, at most t²; also for confident predictions."""
    for scale, c in itertools.product((0.1, 3.0, 10.0, 30.0, 80.0), (3, 10, 100, 1000)):
        logits = (scale * normal(50, c)).float()
        single, double = nm.Categorical(logits), nm.Categorical(logits.double())
        t2 = double.trace().square()[:, None]
        ordinary = t2 > 1e-30  # below, ‖M‖² is no number of float32
        torch.testing.assert_close(
            single.squared_norm()[ordinary[:, 0]].double(), double.squared_norm()[ordinary[:, 0]], rtol=1e-5, atol=0
        )
        for m in {1, 2, 5, 8} & set(range(1, c - 1)):
            ours, exact = (
                remaining_noise(z.spectrum(min(8, c - 2)).values, z.trace(), z.squared_norm(), c - 1, m)
                for z in (single, double)
            )
            assert ((ours - exact).abs() <= 1e-4 * exact + 1e-6 * t2)[ordinary.expand_as(exact)].all(), (scale, c, m)
            assert (ours >= 0).all()
            assert (ours <= t2 * (1 + 1e-5) + 1e-300).all()


def test_squared_norms_of_confident_predictions() -> None:
    """‖M‖² against dense matrices in float64, where (Σp²)² - Σp⁴ has lost all digits.  Twin: that difference."""
    core = nm.Categorical(torch.tensor([[20.0, 1.0, 0.0], [40.0, 3.0, 0.0], [0.0, 0.0, 100.0]]).double())
    exact = core.fisher().square().sum((-2, -1))
    torch.testing.assert_close(core.squared_norm(), exact, rtol=1e-12, atol=0)
    p2 = core.probs.square()
    twin = (p2 * ((1 - core.probs).square() - p2)).sum(-1) + p2.sum(-1).square()
    assert ((twin - exact).abs() > 0.5 * exact)[1:].all()


# ------------------------------------------------------------------------------------------------- who is kept


def kept_by_start(keep: Tensor, starts: int, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Tensor:
    """Who is kept, [starts, n], for equally spaced starts of the systematic sample and one random order."""
    rows = torch.zeros(starts, len(keep), dtype=torch.float64)
    for i in range(starts):
        monkeypatch.setattr(adaptive, "_random", lambda _, i=i: torch.tensor((i + 0.5) / starts).double())
        rows[i, chosen(keep, torch.Generator().manual_seed(seed))] = 1
    return rows


@pytest.mark.parametrize(
    "keep", [[0.25, 0.5, 1.0, 0.125, 0.0, 0.875], [0.0625] * 9, [1.0, 1.0], [0.5], [0.9375, 1.0, 0.0625]]
)
def test_inclusion_probabilities_are_exact(keep: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """On average over all starts, whatever the order; and their number varies by one at most."""
    pi = torch.tensor(keep).double()
    for seed in range(5):
        kept = kept_by_start(pi, 64, monkeypatch, seed)
        assert kept.mean(0).tolist() == keep
        assert set(kept.sum(1).tolist()) <= {math.floor(pi.sum()), math.ceil(pi.sum())}


def test_groups_of_samples_with_as_many_passes() -> None:
    for passes, size, expected in (
        ([3, 3, 2, 1], 32, [2, 2]),  # two samples of 32 are enough
        ([3, 2, 2, 2, 2, 1, 1], 32, [5, 2]),  # the first one alone is not
        ([3, 2, 1, 1], 16, [1, 1, 2]),
        ([2] * 9 + [1] * 9, 8, [8, 1, 8, 1]),
        ([1] * 17, 8, [8, 8, 1]),
        ([5, 4, 3], 1, [1, 1, 1]),
        ([], 4, []),
    ):
        found = groups(torch.tensor(passes).double(), size)
        assert found == expected
        assert sum(found) == len(passes)


def test_every_second_sample_is_not_kept_or_left_out_together() -> None:
    """Pairs are kept together as often as any other pair, false-alarm rate 1e-6.  Twin: in the order of the data."""

    def draws(keep: Tensor, in_order: bool) -> Tensor:
        rows = []
        for seed in range(2000):
            generator, row = torch.Generator().manual_seed(seed), torch.zeros(16, dtype=torch.float64)
            if in_order:
                sums = torch.rand((), generator=generator).double() + keep.cumsum(0)
                row[sums.floor() > (sums - keep).floor()] = 1
            else:
                row[chosen(keep, generator)] = 1
            rows.append(row)
        return torch.stack(rows)

    keep = torch.full((16,), 0.5).double()
    expected = torch.full((15,), 8 / 16 * 7 / 15).double()  # of pairs (0, i) if eight of sixteen are drawn
    for in_order in (False, True):
        kept = draws(keep, in_order)
        assert worst_z_score(kept, keep) < allowed_z_score(16)
        z = worst_z_score(kept[:, 1:] * kept[:, :1], expected)
        assert z > 50 if in_order else z < allowed_z_score(15)


def in_full_groups_or_none(keep: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A biased twin of `in_full_groups`: rounds down to no sample at all."""
    expected = float(torch.where(keep < 1, keep, 0).sum())
    wanted = math.floor(expected / size + float(torch.rand((), generator=generator))) * size
    return torch.where(keep < 1, (keep * (wanted / max(expected, 1))).clamp(max=1), keep)


GROUPS = {
    "less than a group": (torch.full((128,), 1 / 6), 64),
    "one sure group and a little": (torch.tensor([1.0] * 16 + [0.3] * 10), 16),
    "several groups": (torch.cat([torch.ones(5), torch.linspace(0.05, 0.95, 95)]), 8),
    "groups of one": (torch.linspace(0.05, 0.95, 20), 1),
    "all sure": (torch.ones(7), 4),
}


@pytest.mark.parametrize("name", GROUPS)
def test_full_groups_leave_estimates_unbiased(name: str) -> None:
    """Σ 1/π over kept samples is 1 on average for each, at the cost that it was, false-alarm rate 1e-6."""
    keep, size = GROUPS[name][0].double(), GROUPS[name][1]
    zs = {}
    for method in (in_full_groups, in_full_groups_or_none):
        weights, numbers, full = torch.zeros(600, len(keep)).double(), [], 0
        for seed in range(len(weights)):
            generator = torch.Generator().manual_seed(seed)
            pi = method(keep, size, generator)
            rows = chosen(pi, generator)
            weights[seed, rows] = 1 / pi[rows]
            numbers.append(len(rows))
            full += int((keep[rows] < 1).sum()) % size == 0
            if method is in_full_groups:
                assert (pi >= 0.5 * keep - 1e-12).all()
                assert (pi <= 1).all()
        zs[method] = worst_z_score(weights, torch.ones(len(keep)).double())
        if method is in_full_groups and name == "several groups":
            assert full > 0.9 * len(weights)
            assert sum(numbers) / len(numbers) == pytest.approx(float(keep.sum()), rel=0.02)
    assert zs[in_full_groups] < allowed_z_score(len(keep))
    if name in ("less than a group", "one sure group and a little"):
        assert zs[in_full_groups_or_none] > allowed_z_score(len(keep))


def test_the_allocation_of_equal_samples_is_uniform_sampling() -> None:
    scores = scores_of(nm.Gaussian(normal(40, 3)))
    found = allocate(scores, 40.0)
    assert found.cost == pytest.approx(40, rel=1e-3)
    torch.testing.assert_close(found.keep, torch.full((40,), 1 / 3).double(), rtol=1e-3, atol=0)
    by_hand = Allocation(torch.full((40,), 1 / 3).double(), torch.ones(40).double(), 0.0)
    t, q = 3.0, 3.0
    assert by_hand.variance(scores) == pytest.approx(40 * (2 * (t**2 - q) * 3 + 2 * (t**2 + 2 * q)))
