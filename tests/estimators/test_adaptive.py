"""What is done at which cost, and the draw of samples whose probes are kept."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.core import Core
from neuromanifold.estimators import adaptive
from neuromanifold.estimators.adaptive import Strategy, chosen, in_full_groups, several, strategy
from neuromanifold.estimators.allocation import Allocation, best_rows
from tests.estimators.probes import normal
from tests.estimators.test_allocation import scores_of
from tests.zscores import allowed_z_score, worst_z_score

# ---------------------------------------------------------------------------------------------------------- plans


def test_which_strategy() -> None:
    """Chosen if some samples matter little, at a low cost; everyone where that leaves little noise; else alike."""

    def found(core: Core, *costs: float) -> list[str]:
        return [strategy(nm.Adaptive(cost), scores_of(core)).how for cost in costs]

    confident = nm.Categorical(torch.cat([40 * normal(60, 10), 2 * normal(4, 10, seed=1)]))
    assert found(confident, 0.3) == ["alike"]  # outputs alone cost a third
    assert found(confident, 0.5, 0.7, 1.0, 1.1) == ["chosen"] * 4
    assert found(confident, 1.3, 1.5, 3.0, 5.0) == ["everyone"] * 4  # hardly any noise is left
    assert found(confident, 7.0, 20.0) == ["alike"] * 2  # nine passes and more are exact
    mixed = nm.Categorical(normal(64, 10) * torch.linspace(0.1, 12, 64).double()[:, None])
    assert found(mixed, 0.5, 0.7, 1.0) == ["alike"] * 3  # outputs first would cost more than it brings
    assert found(mixed, 1.1, 1.3, 1.5, 3.0) == ["alike", *["everyone"] * 3]
    for c in (10, 100):  # no column stands out
        assert found(nm.Categorical(0.1 * normal(64, c)), 0.5, 1.0, 1.1, 1.5, 3.0, 9.0) == ["alike"] * 6
    for core in (nm.Gaussian(normal(64, 1)), nm.Gaussian(normal(64, 3))):  # all samples are the same
        assert found(core, 0.5, 1.0, 1.5, 3.0, 9.0) == ["alike"] * 5
    two = nm.Categorical(8 * normal(64, 2))
    assert found(two, 0.5, 0.7) == ["chosen"] * 2
    assert found(two, 1.0, 1.5, 9.0) == ["alike"] * 3  # one pass is exact
    assert found(nm.Categorical(normal(64, 2)), 0.5, 0.7, 1.0) == ["alike"] * 3


def test_several_passes_for_everyone_at_large_costs() -> None:
    """Rows of columns cost a whole pass each, those in a batch two thirds: many for all are better in batches."""
    scores = scores_of(nm.Categorical(12 * normal(64, 10)))
    plans = [strategy(nm.Adaptive(cost), scores) for cost in (1.3, 2.0, 3.0, 4.0, 5.0)]
    assert [how for how, _ in plans] == ["everyone"] * 5
    bases = [base for _, base in plans]
    assert bases == sorted(bases)
    assert bases[0] == 1 < bases[-1]
    for cost, (_, base) in zip((1.3, 2.0, 3.0, 4.0, 5.0), plans, strict=True):  # no other number of them is better
        estimator, noise = nm.Adaptive(cost), {}
        for other in range(1, math.floor(estimator.mean_passes) + 1):
            own = best_rows(scores.gains, estimator.rows(64, other), other - 1)
            spent = (1 + 2 * other) / 3 + float((own - (other - 1)).sum()) / 64
            assert spent <= cost * (1 + 1e-9)
            noise[other] = Allocation(torch.ones(64).double(), own).variance(scores)
        assert noise[base] == min(noise.values())


def test_without_information() -> None:
    for core in (nm.Categorical(torch.zeros(0, 4)), nm.Categorical(torch.tensor([[0.0, -math.inf, -math.inf]] * 3))):
        for cost in (0.5, 1.0, 1.5, 9.0):
            assert strategy(nm.Adaptive(cost), scores_of(core)) == Strategy("alike")
        keep = torch.zeros(core.batch_shape).double()
        assert len(chosen(keep, torch.Generator())) == 0
        assert in_full_groups(keep, 4, torch.Generator()).tolist() == keep.tolist()


def test_rows_that_a_cost_pays_for() -> None:
    for cost, base, rows in (
        (1.0, 1, 0),
        (1.1, 1, 6),
        (1.5, 1, 32),
        (2.0, 1, 64),
        (2.0, 2, 21),
        (0.7, 1, 0),
        (3, 4, 0),
    ):
        assert nm.Adaptive(cost).rows(64, base) == rows


def test_the_same_for_all() -> None:
    for cost, mean in ((0.2, 1), (1, 1), (1.5, 1.75), (2.0, 2.5), (7, 10)):
        estimator = nm.Adaptive(cost)
        assert estimator.mean_passes == mean
        assert sum(estimator.alike(batch).probes for batch in range(400)) == 400 * mean
        assert estimator.passes(nm.Categorical(normal(3, 40))) == estimator.alike(0).probes == math.floor(mean)
        assert estimator.for_batches() == nm.Hutchinson(
            math.floor(mean), deflate=8 if mean >= 2 else 1, orthogonal=False
        )
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
