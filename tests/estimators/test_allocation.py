"""Which rows samples get: no other ones take more of the noise, by brute force."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.core import Core
from neuromanifold.estimators.allocation import Allocation, RowsSoFar, Scores, allocate, best_rows
from neuromanifold.estimators.choices import Choices
from tests.estimators.probes import normal


def scores_of(core: Core) -> Scores:
    """Scores of samples with one output distribution each, as `windows.py` makes them."""
    choices = Choices.of(core)
    assert choices is not None
    rest, norms, noise = (torch.where(core.trace()[:, None] > 0, part, 0.0) for part in choices.left())
    return Scores(rest, norms, noise, core.rank)


def peaked(n: int, c: int, seed: int = 0) -> nm.Categorical:
    """Predictions from near-uniform to certain."""
    return nm.Categorical(normal(n, c, seed=seed) * torch.linspace(0.1, 12, n).double()[:, None])


POPULATIONS = {
    "near-uniform": 0.1 * normal(50, 10),
    "random": 2 * normal(50, 10),
    "confident": 40 * normal(50, 10),
    "many classes": 8 * normal(50, 100),
    "peaked": peaked(50, 6).logits,
    "ties": torch.tensor([[3.0, 3, 3, 0], [0, 0, 0, 0], [5, 5, 0, 0], [1e4, 0, 0, 0], [700, 0, 0, 0]]).double(),
    "impossible classes": torch.tensor([[0.0, 1.0, -math.inf, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POPULATIONS)
def test_each_column_takes_less_noise_than_the_one_before(name: str, dtype: torch.dtype) -> None:
    """So that the best rows are those with the largest gains."""
    core = nm.Categorical(POPULATIONS[name].to(dtype))
    scores = scores_of(core)
    gains, t2 = scores.gains, float(scores.trace.square().amax())
    assert (gains[:, 1:] <= gains[:, :-1] + 1e-14 * t2).all()
    assert (gains >= 0).all()
    if gains.shape[1] == core.rank:
        assert scores.noise[:, core.rank - 1 :].amax() <= 1e-14 * t2
        assert scores.rest[:, core.rank].amax() <= 1e-14 * t2


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize(("n", "c"), [(1, 4), (3, 5), (4, 4)])
def test_no_other_rows_of_eigenvectors_take_more_noise(n: int, c: int, least: int) -> None:
    """Brute force over all numbers of rows of all samples."""
    scores = scores_of(nm.Categorical(normal(n, c) * torch.tensor([0.3, 8.0, 2.0, 5.0]).double()[:n, None]))
    choices = torch.tensor(list(itertools.product(range(least, c), repeat=n)))  # [choices, n]
    noise = scores.noise[torch.arange(n), choices].sum(1)
    for count in range(n * (c - 1 - least) + 3):
        own = best_rows(scores.gains, count, least)
        assert int(own.sum()) - least * n <= count
        best = noise[choices.sum(1) - least * n <= count].min()
        torch.testing.assert_close(scores.noise.gather(1, own[:, None]).sum(), best, rtol=1e-9, atol=1e-15)


def test_rows_that_take_nothing_are_not_made() -> None:
    gains = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    assert best_rows(gains, 100).tolist() == [2, 0, 3]
    assert best_rows(gains, 2).tolist() == [1, 0, 1]
    assert best_rows(gains, -1).tolist() == best_rows(gains, 0).tolist() == [0, 0, 0]
    assert best_rows(gains, 2, least=1).tolist() == [1, 1, 3]
    assert best_rows(gains, 5, least=3).tolist() == [3, 3, 3]
    assert best_rows(gains[:, :0], 5).tolist() == [0, 0, 0]
    assert best_rows(gains[:0], 5).tolist() == []


def test_rows_given_to_one_batch_after_the_other() -> None:
    """To columns that are among the best of all so far, never more than there are; the first batch gets the best."""
    batches, given = [scores_of(peaked(20, 6, seed)) for seed in range(4)], 0
    for least, share in itertools.product((0, 1), (0.0, 0.05, 0.35, 2.0, 100.0)):
        rows, given = RowsSoFar(), 0
        for i, scores in enumerate(batches):
            budget = math.floor(share * 20 * (i + 1))
            own = rows.best(scores, budget, least)
            given += int(own.sum()) - least * 20
            assert own.min() >= least
            assert given <= budget
            if i == 0:
                torch.testing.assert_close(own, best_rows(scores.gains, budget, least))
            gains = torch.cat([one.gains[:, least:].flatten() for one in batches[: i + 1]])
            smallest = gains.topk(max(1, min(budget, len(gains)))).values[-1]
            sent = torch.where(torch.arange(scores.gains.shape[1]) < own[:, None], scores.gains, math.inf)[:, least:]
            assert budget == 0 or sent.min() >= smallest
        assert rows.samples == 80
        assert given >= 0.6 * min(budget, sum(int((one.gains[:, least:] > 0).sum()) for one in batches))
    alike = scores_of(nm.Categorical(torch.zeros(8, 4)))
    assert RowsSoFar().best(alike, 4, 0).tolist() == [0] * 8  # none is better than another
    nothing = scores_of(nm.Categorical(torch.tensor([[0.0, -math.inf, -math.inf]] * 3)))
    assert RowsSoFar().best(nothing, 9, 1).tolist() == [0, 0, 0]
    assert RowsSoFar().best(scores_of(nm.Categorical(torch.zeros(0, 4))), 9, 0).tolist() == []


def least_variance(variances: Tensor, fourths: Tensor, own: Tensor, rows: float) -> Tensor:
    """The least Σ 2S² + A (1/π - 1) over 0 < π <= 1 with Σ (π + m) <= rows, for given m [choices, n]; inf if none."""
    roots = fourths.sqrt()
    low, high = (torch.full((len(own),), bound, dtype=torch.float64) for bound in (1e-30, 1e30))
    for _ in range(100):
        middle = (low * high).sqrt()
        over = ((roots / middle[:, None]).clamp(max=1) + own).sum(-1) > rows
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    found = (variances + roots * (high[:, None] - roots).clamp(min=0)).sum(-1)
    return torch.where(high < 1e29, found, math.inf)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "c"), [(1, 4), (3, 3), (4, 5), (5, 4)])
def test_no_other_allocation_of_as_many_rows_has_less_variance(n: int, c: int, seed: int) -> None:
    """Brute force over all numbers of rows of eigenvectors, with the best π for each.  Twin: as many for all."""
    core = nm.Categorical(normal(n, c, seed=seed) * torch.tensor([0.3, 8.0, 2.0, 5.0, 12.0]).double()[:n, None])
    scores = scores_of(core)
    choices = torch.tensor(list(itertools.product(range(c), repeat=n)))  # [choices, n]
    variances, fourths = (table[torch.arange(n), choices] for table in (scores.variances, scores.fourths))
    same, better = (choices == choices[:, :1]).all(1), 0
    for budget in torch.linspace(0.05, 0.95, 13).tolist():
        found = allocate(scores, budget * n * (c - 1))
        claimed = found.variance(scores)
        assert 0 < found.rows <= budget * n * (c - 1)
        least = least_variance(variances, fourths, choices, found.rows)
        assert claimed <= float(least.min()) * 1.005 + 1e-12 * float(scores.trace.amax()) ** 2
        better += bool((claimed < 0.9 * least[same]).all())
    assert better or n == 1


def test_what_is_left_of_confident_samples_is_not_worth_a_row_of_its_own() -> None:
    """Kept or left out as a whole, they would have several times the noise for as many rows."""
    scores = scores_of(nm.Categorical(40 * normal(500, 10)))
    for rows, times in ((0.37 * 500, 2), (0.67 * 500, 10)):
        low, high = 1e-20, 1.0
        while high > 1.001 * low:
            price = math.sqrt(low * high)
            keep = (scores.trace * math.sqrt(3 / price)).clamp(max=1)
            whole = Allocation(keep, ((scores.gains > price) & (keep >= 1)[:, None]).sum(1))
            low, high = (low, price) if whole.rows <= rows else (price, high)
        assert whole.rows == pytest.approx(rows, rel=0.01)
        assert whole.variance(scores) > times * allocate(scores, rows).variance(scores)


@pytest.mark.parametrize("name", ["random", "confident", "many classes", "peaked"])
def test_the_budget_is_spent_but_not_exceeded(name: str) -> None:
    """Up to one row; variance falls with it.  One price, π = √(A/μ), and no row more where it would take less."""
    scores, before = scores_of(nm.Categorical(POPULATIONS[name])), math.inf
    for mean in (0.1, 0.37, 0.67, 1.0, 1.5, 2.5, 4.0):
        found = allocate(scores, 50 * mean)
        assert 50 * mean * 0.998 - 1 <= found.rows <= 50 * mean
        variance, at_times = found.variance(scores), (found.keep > 0) & (found.keep < 1)
        assert variance < before
        fourths = found.of(scores.fourths)
        before, prices = variance, (fourths / found.keep.square())[at_times]
        if len(prices):
            price = float(prices[0])
            torch.testing.assert_close(prices, torch.full_like(prices, price))
            assert (fourths[found.keep == 1] >= price * (1 - 1e-9)).all()
            own, k = found.own[:, None], scores.gains.shape[1]
            more = (own < k) & (found.keep == 1)[:, None]
            taken = scores.variances[:, :-1] - scores.variances[:, 1:]
            assert (taken.gather(1, own.clamp(max=k - 1))[more] <= price).all()


def test_everything_is_exact_where_the_budget_allows() -> None:
    for core in (peaked(20, 10), nm.Bernoulli(3 * normal(20, 4)), nm.Gaussian(normal(20, 6)), peaked(20, 2)):
        found = allocate(scores_of(core), 20 * core.rank)
        assert found.keep.tolist() == [1.0] * 20
        assert found.own.tolist() == [core.rank - 1] * 20  # the probe is the last eigenvector
        assert found.variance(scores_of(core)) < 1e-14


@pytest.mark.parametrize("budget", [1e-3, 1.0, 100.0, 1e9])
def test_samples_without_information_have_no_rows(budget: float) -> None:
    core = nm.Categorical(torch.tensor([[0.0, -math.inf, -math.inf], [1e4, 0.0, 0.0], [0.0, 0.0, 0.0]]).double())
    scores = scores_of(core)
    found = allocate(scores, budget)
    assert found.keep[:2].tolist() == found.own[:2].tolist() == best_rows(scores.gains, 9)[:2].tolist() == [0, 0]
    assert found.rows <= budget
    assert found.keep[2] > 0
    assert math.isfinite(found.variance(scores))


def test_no_sample_and_none_with_information() -> None:
    for core in (nm.Categorical(torch.zeros(0, 4)), nm.Categorical(torch.tensor([[0.0, -math.inf, -math.inf]] * 3))):
        scores = scores_of(core)
        for budget in (0.0, 1.0, 1e9):
            found = allocate(scores, budget)
            assert found.keep.shape == found.own.shape == core.batch_shape
            assert (found.rows, found.variance(scores)) == (0, 0)


@pytest.mark.parametrize("smallest", [1e-10, 1e-30, 1e-100, 1e-150])
def test_a_huge_dynamic_range(smallest: float) -> None:
    """Everyone with information can be kept, and is at a large budget."""
    t = torch.logspace(math.log10(smallest), 0, 50, dtype=torch.float64)
    rest = t[:, None] * torch.tensor([1.0, 0.5, 0.0]).double()
    shares = torch.tensor([0.5, 0.0, 0.0]).double()
    scores = Scores(rest, rest.square() * (1 - shares), rest.square() * shares, 2)
    before = math.inf
    for budget in (1.0, 10.0, 50.0, 99.0):
        found = allocate(scores, budget)
        assert found.keep.isfinite().all()
        assert (found.keep > 0).all()
        assert 0 < found.rows <= budget
        assert found.variance(scores) < before
        before = found.variance(scores)
    assert allocate(scores, 100.0).keep.tolist() == [1.0] * 50
    assert allocate(scores, 100.0).own.tolist() == [1] * 50
    alone = scores_of(nm.Gaussian(smallest * normal(1, 3)))
    assert allocate(alone, 1.0).keep.tolist() == [1.0]
    assert allocate(alone, 0.5).rows == pytest.approx(0.5, rel=1e-3)


def test_the_allocation_of_equal_samples_is_uniform_sampling() -> None:
    scores = scores_of(nm.Gaussian(normal(40, 3)))
    found = allocate(scores, 40 / 3)
    torch.testing.assert_close(found.keep, torch.full((40,), 1 / 3).double(), rtol=1e-3, atol=0)
    assert found.own.tolist() == [0] * 40
    by_hand = Allocation.alike(40, 1 / 3)
    t, q = 3.0, 3.0
    assert by_hand.variance(scores) == pytest.approx(40 * (2 * (t**2 - q) * 3 + 2 * (t**2 + 2 * q)))
    assert by_hand.rows == pytest.approx(40 / 3)


@pytest.mark.parametrize("classes", [3, 10, 30])
@pytest.mark.parametrize("diagonal", [False, True])
def test_nothing_is_read_back_from_a_device(classes: int, diagonal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data: reading one, or mixing it with one on the CPU, is an error.  Twin: `best_rows` reads."""
    made = lambda shape, like, _: torch.ones(shape, dtype=like.dtype, device=like.device)  # noqa: E731
    monkeypatch.setattr("neuromanifold.estimators.choices.signs", made)
    choices = Choices(torch.empty(16, classes, device="meta"), diagonal)
    rest, norms, noise = choices.left()
    columns, rows, generator = choices.columns(), RowsSoFar(), torch.Generator()
    for budget, least in ((0, 0), (3, 0), (1000, 1)):
        own = rows.best(Scores(rest, norms, noise, classes), budget, least)
        for where in (own, torch.zeros(16, dtype=torch.long)):
            assert choices.probe(columns, where, generator).device.type == "meta"
    assert choices.only(torch.arange(4)).columns().shape == (4, choices.count, classes)
    with pytest.raises((RuntimeError, NotImplementedError)):
        best_rows(Scores(rest, norms, noise, classes).gains, 3)
