"""Confidence intervals for single entries: their quantiles, their views, and how often they hold the exact value."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.results.intervals import interval

ONE = math.sqrt(2 / 3)  # the relative standard error of one sample with one random probe


def result(sums: list[float], noise: list[float], dtype: torch.dtype = torch.float64) -> nm.DiagonalFisher:
    """A result with one parameter of these sums, over four samples."""
    model = nn.Linear(1, 2, bias=False)
    made = nm.fisher_diagonal(model, [torch.ones(4, 1)])
    tensors = [torch.tensor(values, dtype=dtype) for values in (sums, noise)]
    return replace(made, sums={"weight": tensors[0]}, noise={"weight": tensors[1]})


def normal_interval(values: Tensor, stderr: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """F̂ ± z standard errors, for comparison."""
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
    return values - z * stderr, values + z * stderr


def covered(exact: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return (lower <= exact * (1 + 1e-6)) & (exact * (1 - 1e-6) <= upper)


# ------------------------------------------------------------------------------------------------------- the formula


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_quantiles_are_those_of_scipy(level: float) -> None:
    """From one degree of freedom on, and for the upper end from a tenth."""
    r = torch.logspace(0, 8, 200, dtype=torch.float64)
    nu = (3 * r - 2 * r.sqrt()).numpy()
    lower, upper = interval(torch.ones(200).double(), (2 / (3 * r)).sqrt(), level)
    for found, probability in ((lower, (1 + level) / 2), (upper, (1 - level) / 2)):
        expected = torch.from_numpy(nu / chi2.ppf(probability, nu))
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
    few = torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64)
    upper = interval(torch.ones(3).double(), (2 / (few + 2)).sqrt(), level)[1]  # r = (ν + 2)/3 below one
    expected = torch.from_numpy(few.numpy() / chi2.ppf((1 - level) / 2, few.numpy()))
    torch.testing.assert_close(upper.log(), expected.log(), rtol=1e-3, atol=1e-3)


def test_one_sample_by_hand() -> None:
    """g² = F z²: F is between g²/5.024 and g²/0.000982 with probability 0.95."""
    fim = result([8.0], [8.0 * ONE])
    lower, upper = (end["weight"].item() for end in fim.sum.interval(0.95))
    assert lower == pytest.approx(8 / 5.02389, rel=1e-4)
    assert upper == pytest.approx(8 / 0.000982069, rel=1e-3)
    for share in (0.9, 0.5, 0.1):  # kept with this probability: the weight is in F̂
        found = interval(torch.tensor([8.0]), torch.tensor([8 * math.sqrt(1 - share / 3)]), 0.95)
        assert found[0].item() == pytest.approx(share * 8 / 5.02389, rel=1e-3)
        assert found[1].item() > 8 / 0.000982069


def test_ends_move_apart_as_there_is_more_noise() -> None:
    """Also where it is more than a sum of squares can have."""
    stderr = torch.logspace(-6, 3, 500, dtype=torch.float64)
    lower, upper = interval(torch.ones(500).double(), stderr, 0.95)
    assert (lower.diff() <= 0).all()
    assert (upper[1:] >= upper[:-1]).all()
    assert ((lower >= 0) & (lower <= 1) & (upper >= 1)).all()
    small = stderr < 1e-3  # many samples: the normal interval
    for found, expected in zip((lower, upper), normal_interval(torch.ones(1), stderr, 0.95), strict=True):
        assert ((found - expected).abs()[small] < 0.005 * stderr[small]).all()
    narrow, wide = (interval(torch.ones(1), torch.full((1,), 0.2), level) for level in (0.9, 0.99))
    assert wide[0] < narrow[0] < 1 < narrow[1] < wide[1]


def test_no_noise_and_no_estimate() -> None:
    lower, upper = (end["weight"].tolist() for end in result([3.0, 0.0, 0.0], [0.0, 0.0, 1e-3]).sum.interval())
    assert lower == [3.0, 0.0, 0.0]
    assert upper == [3.0, 0.0, 0.0]
    exact = nm.fisher_diagonal(nn.Linear(2, 3), [torch.randn(5, 2)], nm.Exact())
    for ends in exact.interval():
        assert all(torch.equal(ends[name], exact[name]) for name in exact)


def test_what_is_left_out_may_contribute() -> None:
    """To an entry in which nothing seems to be random as well: exact for the samples that were kept is a lower end."""
    fim = result([3.0, 0.0, 2.0], [0.0, 0.0, 0.2])
    some = replace(fim, provenance=replace(fim.provenance, left_out=1)).sum
    lower, upper = (end["weight"] for end in some.interval(0.95))
    assert lower[:2].tolist() == [3.0, 0.0]
    assert upper[0].item() == pytest.approx(3 / 0.000982069, rel=1e-3)
    assert upper[1] == math.inf
    assert torch.equal(torch.stack([lower, upper])[:, 2], torch.stack([e["weight"][2] for e in fim.sum.interval(0.95)]))


# --------------------------------------------------------------------------------------------------------- the views


@pytest.fixture(scope="module")
def estimate() -> nm.DiagonalFisher:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    return nm.fisher_diagonal(model, list(torch.split(torch.randn(20, 3), 5)))


def test_views_scaling_filter_and_files(estimate: nm.DiagonalFisher, tmp_path: Path) -> None:
    estimate.save(tmp_path / "fim.safetensors")
    others: list[tuple[Any, float]] = [(estimate.sum, 20.0), (estimate.mean, 1.0), (0.5 * estimate, 0.5)]
    others += [(estimate.filter("2.*"), 1.0), (nm.load(tmp_path / "fim.safetensors"), 1.0)]
    ends = estimate.interval(0.9)
    assert list(ends[0]) == list(estimate)
    assert len(ends[1]) == 4
    for other, factor in others:
        for own, found in zip(ends, other.interval(0.9), strict=True):
            assert list(found) == list(other)
            for name in other:
                assert found[name].shape == other[name].shape
                torch.testing.assert_close(found[name], factor * own[name])
    assert repr(ends[0]) == "lower ends of 90 % intervals of 4 parameters (mean)"
    assert repr(estimate.sum.interval(0.995)[1]) == "upper ends of 99.5 % intervals of 4 parameters (sum)"
    with pytest.raises(KeyError):
        ends[0]["3.weight"]


def test_float32_and_float64(estimate: nm.DiagonalFisher) -> None:
    for low, high in zip(estimate.interval(), estimate.to(torch.float64).interval(), strict=True):
        for name in estimate:
            assert (low[name].dtype, high[name].dtype) == (torch.float32, torch.float64)
            torch.testing.assert_close(low[name].double(), high[name], rtol=1e-5, atol=0)
    tiny = interval(torch.tensor([1e-40]), torch.tensor([1e-40]), 0.95)  # subnormal, and not known at all
    assert tiny[0] <= 1e-40 <= tiny[1]


@pytest.mark.parametrize("level", [95, 1, 1.0, 0, 0.0, -0.5, math.nan, math.inf, "95 %", None, True])
def test_levels_that_are_none(estimate: nm.DiagonalFisher, level: Any) -> None:
    with pytest.raises(ValueError, match=r"level.*0\.95 for intervals of 95 %"):
        estimate.interval(level)


# ------------------------------------------------------------------------------------------------------- simulations

NUMBERS = (1, 2, 4, 16, 128)


def simulated(ends: Any, kind: str, draws: int = 4000) -> dict[tuple[float, int], float]:
    """Coverage of nominal 95 % intervals for Σ_n w_n z_n², lognormal w: z normal, or signs along eight random axes."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for sigma in (0.0, 1.0, 2.0):
        for n in NUMBERS:
            w = (sigma * torch.randn(draws, n, generator=generator, dtype=torch.float64)).exp()
            if kind == "gaussian":
                z = torch.randn(draws, n, generator=generator, dtype=torch.float64)
            else:
                a = torch.randn(draws, n, 8, generator=generator)
                signs = 2.0 * torch.randint(0, 2, a.shape, generator=generator) - 1
                z = ((a * signs).sum(-1) / a.norm(dim=-1)).double()
            squares = w * z.square()
            values, stderr = squares.sum(-1), ONE * squares.square().sum(-1).sqrt()
            found[sigma, n] = float(covered(w.sum(-1), *ends(values, stderr, 0.95)).double().mean())
    return found


@pytest.mark.parametrize("kind", ["gaussian", "signs"])
def test_coverage_in_simulations(kind: str) -> None:
    """Standard errors are 0.005: 0.887 and more in a longer run, and 0.95 on average."""
    found = simulated(interval, kind)
    assert min(found.values()) >= 0.87, found
    assert sum(found.values()) / len(found) >= 0.93, found
    assert found[0.0, 1] >= 0.93
    twin = simulated(normal_interval, kind)
    assert min(twin.values()) == pytest.approx(0.54, abs=0.05)
    assert sum(twin.values()) / len(twin) < 0.85


# ---------------------------------------------------------------------------------------------------- real networks

COMMON, WORDS = 20, 60


class Texts(nn.Module):
    """The mean of embeddings, a hidden layer, confident predictions."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.relu(self.hidden(self.embed(x).mean(1))))
        return 20 * logits


def texts(number: int, first: int = 0) -> Tensor:
    """Four words each; from the 20th on they occur once or twice, after the first samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, COMMON, (number, 4), generator=generator)
    rows = (torch.randperm(number - first, generator=generator) + first).tolist()
    for word in range(COMMON, WORDS):
        for _ in range(1 + word % 2):
            x[rows.pop(), word % 4] = word
    return x


def coverage(
    model: nn.Module, data: list[Tensor], rare: tuple[str, Any], ends: str = "interval", **how: Any
) -> tuple[float, float, nm.DiagonalFisher]:
    """The share of positive entries inside of their intervals, of rare rows and of all: medians over seeds."""
    exact, shares = nm.fisher_diagonal(model, data, nm.Exact()), []
    for seed in range(5):
        found = nm.fisher_diagonal(model, data, seed=seed, **how)
        lower, upper = found.interval(0.95)
        if ends == "normal":
            pairs = {k: normal_interval(found[k], found.stderr[k], 0.95) for k in exact}
            lower, upper = ({k: pair[i] for k, pair in pairs.items()} for i in (0, 1))
        inside = {k: covered(exact[k], lower[k], upper[k]).double() for k in exact}
        inside = {k: one.masked_fill(exact[k] <= 0, math.nan) for k, one in inside.items()}
        every = torch.cat([one.flatten() for one in inside.values()])
        shares.append(torch.stack([inside[rare[0]][rare[1]].nanmean(), every.nanmean()]))
    of_rare, of_all = torch.stack(shares).median(0).values.tolist()
    return of_rare, of_all, found


@pytest.mark.parametrize("classes", [3, 14])
@pytest.mark.parametrize("how", [{"estimator": nm.Hutchinson()}, {"passes": 0.8}], ids=["one pass", "passes=0.8"])
def test_coverage_of_rare_words(classes: int, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data = Texts(classes).double(), list(torch.split(texts(300), 50))
    rare, every, found = coverage(model, data, ("embed.weight", slice(COMMON, None)), **how)
    assert rare >= 0.90
    assert every >= 0.93
    assert bool(found.provenance.left_out) == ("passes" in how)  # otherwise nothing would be tested
    twin = coverage(model, data, ("embed.weight", slice(COMMON, None)), "normal", **how)
    assert twin[0] < rare - 0.05


def test_samples_that_were_kept_at_times_are_not_taken_for_exact() -> None:
    """F̂ of a word in one sample is random squares over π, so that F̂ - F < 1.3 stderr; others of its group are exact."""
    torch.manual_seed(0)
    model, data = Texts(3).double(), list(torch.split(texts(900), 50))
    exact, once = nm.fisher_diagonal(model, data, nm.Exact())["embed.weight"], slice(COMMON, None, 2)
    for seed in range(3):
        found = nm.fisher_diagonal(model, data, seed=seed, passes=1.5)
        excess = (found["embed.weight"] - exact * (1 + 1e-6))[once]
        assert bool((excess > 0).any())
        assert bool((excess <= 1.3 * found.stderr["embed.weight"][once]).all())


def some_exact() -> tuple[nn.Module, list[Tensor]]:
    """Near-uniform predictions for three classes, and entries that a few samples dominate.

    With `passes=1.5` six of eight batches have two passes, which are exact, and the others one.
    """
    torch.manual_seed(0)
    model = nn.Linear(30, 3)
    with torch.no_grad():
        model.weight *= 0.05
    x = torch.randn(192, 30) * torch.randn(192, 30).exp() * (torch.rand(192, 30) < 0.1)
    return model, list(x.split(24))


def test_coverage_where_most_of_a_value_is_exact() -> None:
    """The noise is that of two batches, whose squares may be small by chance beside a sum that is exact.

    Twin: the same interval about the whole value, which takes small squares for little noise.
    """
    model, data = some_exact()
    exact, covered_by = nm.fisher_diagonal(model, data, nm.Exact())["weight"], torch.zeros(2)
    for seed in range(8):
        found = nm.fisher_diagonal(model, data, passes=1.5, seed=seed)
        assert (found.provenance.left_out, found.provenance.passes) == (0, 14)
        for i, one in enumerate((found, replace(found, noiseless={}))):
            lower, upper = (end["weight"] for end in one.interval(0.95))
            covered_by[i] += covered(exact, lower, upper).double().mean() / 8
    assert 0.93 <= covered_by[0] <= 1
    assert covered_by[1] < 0.85


def test_what_is_exact_goes_with_the_result(tmp_path: Path) -> None:
    """Through files, views, sums of shards, rows, filters and multiples, the interval is F̂₀ + that of the rest."""
    model, data = some_exact()
    found = nm.fisher_diagonal(model, data, passes=1.5)
    part = found.noiseless["weight"]
    assert bool(((part >= 0) & (part <= found.sums["weight"] * (1 + 1e-6))).all())
    six = nm.fisher_diagonal(model, [data[i] for i in (1, 2, 3, 5, 6, 7)], nm.Exact(), reduction="sum")
    torch.testing.assert_close(part, six["weight"])
    lower, upper = (end["weight"] for end in found.sum.interval())
    ends = interval(found.sums["weight"] - part, found.noise["weight"], 0.95)
    random = found.noise["weight"] > 0
    for own, end in zip((lower, upper), ends, strict=True):
        torch.testing.assert_close(own[random], (part + end)[random])
        assert torch.equal(own[~random], found.sums["weight"][~random])
    found.save(tmp_path / "fim.safetensors")
    loaded = nm.load(tmp_path / "fim.safetensors")
    shards = sum(nm.fisher_diagonal(model, data, nm.Adaptive(1.5, window=4), shard=(i, 2)) for i in range(2))
    whole = nm.fisher_diagonal(model, data, nm.Adaptive(1.5, window=4))
    pairs = [(loaded, found), (found.filter("weight"), found), ((2 * found) / 2, found), (shards, whole)]
    for one, other in pairs:
        assert isinstance(one, nm.DiagonalFisher)
        for mine, theirs in zip(one.interval(), other.interval(), strict=True):
            torch.testing.assert_close(mine["weight"], theirs["weight"], rtol=1e-3, atol=0)
    torch.testing.assert_close(found.rows.noiseless["weight"], part.sum(1))


def test_a_part_of_the_data_in_which_nothing_is_random_is_only_added(tmp_path: Path) -> None:
    """Five answers to choose from leave noise where three do not: the interval is that of the five, moved."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    five, three = (nm.fisher_diagonal(Choices(model), [torch.randn(6, k, 4)], nm.Hutchinson(2)) for k in (5, 3))
    assert not any(bool(noise.any()) for noise in three.noise.values())
    five.save(tmp_path / "five.safetensors", shard_size=1)
    lower, upper = (end["layer.weight"] for end in five.sum.interval())
    for both in (five + three, three + five, nm.load(tmp_path / "five.safetensors") + three):
        for end, of_five in zip(both.sum.interval(), (lower, upper), strict=True):
            torch.testing.assert_close(end["layer.weight"], of_five + three.sums["layer.weight"])
    exact = three + nm.fisher_diagonal(Choices(model), [torch.randn(6, 3, 4)], nm.Hutchinson(2), seed=1)
    assert not exact.noiseless
    assert (five.to(torch.float64) + three).noiseless["layer.weight"].dtype == torch.float64


class Choices(nn.Module):
    """Scores each answer by itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores[..., 0]


@pytest.mark.parametrize("classes", [3, 14])
def test_coverage_where_fourth_powers_are_not_taken_of_all_batches(classes: int) -> None:
    """Rare words of a linear layer: most of them are only in batches whose fourth powers are left out."""
    torch.manual_seed(0)
    x = nn.functional.one_hot(texts(600, first=200), WORDS).sum(1).float()
    model = nn.Sequential(nn.Linear(WORDS, 512), nn.ReLU(), nn.Linear(512, classes))
    rare, every, found = coverage(model, list(torch.split(x, 40)), ("0.weight", (slice(None), slice(COMMON, None))))
    assert rare >= 0.90
    assert every >= 0.93
    noise, sums = found.noise["0.weight"], found.sums["0.weight"]
    assert ((noise > 0) == (sums > 0)).all()
