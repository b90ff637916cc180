"""Shards of a run add up to the run: the noise of a batch depends on the seed and the batch's number alone."""

import math
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.problem.cotangents import batch_seed
from neuromanifold.results import Provenance
from neuromanifold.results.provenance import _overlap
from tests.problems.networks import PROBLEMS
from tests.run.test_contract import MODEL, X, Y, batches
from tests.zscores import allowed_z_score, worst_z_score

ESTIMATORS: dict[str, dict[str, Any]] = {
    "default": {},
    "three probes": {"estimator": nm.Hutchinson(3, deflate=0)},
    "per batch": {"granularity": "batch"},
    "Monte Carlo": {"estimator": nm.MonteCarlo(2)},
    "Exact": {"estimator": nm.Exact()},
    "Empirical": {"estimator": nm.Empirical()},
}


def assert_equal_but_for_rounding(found: nm.DiagonalFisher, expected: nm.DiagonalFisher) -> None:
    assert (found.count, found.positions) == (expected.count, expected.positions)
    for name in expected:
        torch.testing.assert_close(found.sums[name], expected.sums[name], rtol=1e-12, atol=1e-300)
        torch.testing.assert_close(found.noise[name], expected.noise[name], rtol=1e-6, atol=1e-300)


@pytest.mark.parametrize("shards", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_shards_add_up_to_one_run(kind: str, shards: int) -> None:
    """Without a warning, although the seed is the same."""
    data, options = batches(7), ESTIMATORS[kind]
    parts = [nm.fisher_diagonal(MODEL, data, shard=(i, shards), seed=4, **options) for i in range(shards)]
    assert [part.provenance.batches for part in parts] == [len(data[i::shards]) for i in range(shards)]
    expected = nm.fisher_diagonal(MODEL, data, seed=4, **options)
    together = sum(parts)
    assert isinstance(together, nm.DiagonalFisher)
    assert_equal_but_for_rounding(together, expected)
    assert (together.provenance.batches, together.provenance.parts) == (10, shards)


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_shards_add_up_to_one_run_for_any_model(name: str) -> None:
    problem = PROBLEMS[name]
    data = [*problem.data, *problem.data]
    options = {"likelihood": problem.likelihood, **problem.options}

    def run(shard: tuple[int, int] | None) -> nm.DiagonalFisher:
        return nm.fisher_diagonal(problem.model, data, shard=shard, **options)

    whole, parts = run(None), [run((0, 2)), run((1, 2))]
    same = [key for key, way in whole.provenance.granularity.items() if parts[1].provenance.granularity[key] == way]
    found = parts[0] + parts[1]
    for key in same:  # one sample at a time is per sample, too
        torch.testing.assert_close(found.sums[key], whole.sums[key], rtol=problem.rtol, atol=1e-14)
    assert len(same) == len(whole) or parts[1].count == 2


def test_traces_of_shards_add_up() -> None:
    data = batches(7)
    parts = [nm.fisher_trace(MODEL, data, shard=(i, 3)) for i in range(3)]
    whole = nm.fisher_trace(MODEL, data)
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)
    assert sum(parts).stderr == pytest.approx(whole.stderr, rel=1e-12)


def test_error_bars_of_many_batches_agree_although_fourth_powers_are_taken_of_some_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    data = list(torch.randn(80, 32, 6))
    whole, *parts = (nm.fisher_diagonal(model, data, nm.Hutchinson(deflate=0), shard=s) for s in (None, (0, 2), (1, 2)))
    found = parts[0] + parts[1]
    assert found.relative_error == pytest.approx(whole.relative_error, rel=0.1)
    torch.testing.assert_close(found["0.weight"], whole["0.weight"])


def test_a_shard_is_not_another_one() -> None:
    """The twin: both halves with the noise of the same batches; standard errors then add, and a warning says so."""
    data = batches(8)
    halves = [nm.fisher_diagonal(MODEL, data[i::2], seed=0) for i in range(2)]
    with pytest.warns(UserWarning, match=r"same seed.*shard=\(rank, ranks\)"):
        wrong = halves[0] + halves[1]
    whole = nm.fisher_diagonal(MODEL, data, seed=0)
    assert not torch.allclose(wrong["0.weight"], whole["0.weight"], rtol=1e-6)
    assert wrong.relative_error > 1.2 * whole.relative_error


def draws(*parts: list[int]) -> Provenance:
    return Provenance("e", "unbiased", seeds=sorted({part[0] for part in parts}), draws=list(parts))


DISJOINT = {
    "halves": (draws([0, 0, 10, 2]), draws([0, 1, 10, 2])),
    "one after the other": (draws([0, 0, 10, 1]), draws([0, 10, 20, 1])),
    "other seeds": (draws([0, 0, 10, 1]), draws([1, 0, 10, 1])),
    "sums of shards": (draws([0, 0, 10, 4], [0, 1, 10, 4]), draws([0, 2, 10, 4], [0, 3, 10, 4])),
    "seeds crosswise": (draws([0, 0, 9, 2], [1, 1, 9, 2]), draws([0, 1, 9, 2], [1, 0, 9, 2])),
}
SHARED = {
    "the same": (draws([0, 0, 10, 1]), draws([0, 0, 10, 1])),
    "a half and all": (draws([0, 1, 10, 2]), draws([0, 0, 10, 1])),
    "thirds and halves": (draws([0, 0, 10, 3]), draws([0, 0, 10, 2])),
    "one of several": (draws([0, 0, 10, 4], [0, 1, 10, 4]), draws([0, 1, 10, 4])),
    "of an earlier version": (Provenance("e", "unbiased", seeds=[0]), draws([0, 0, 10, 2])),
}


@pytest.mark.parametrize("what", DISJOINT)
def test_disjoint_batches_share_no_noise(what: str) -> None:
    a, b = DISJOINT[what]
    assert not a.shares_noise_with(b)
    assert not b.shares_noise_with(a)


@pytest.mark.parametrize("what", SHARED)
def test_common_batches_share_noise(what: str) -> None:
    a, b = SHARED[what]
    for one, other in ((a, b), (b, a)):
        with pytest.warns(UserWarning, match="same seed"):
            assert one.shares_noise_with(other)


def test_common_batches_are_those_of_both_ranges() -> None:
    chance = random.Random(0)
    for _ in range(4000):
        a, b = ([0, chance.randrange(20), chance.randrange(60), chance.randrange(1, 9)] for _ in range(2))
        assert _overlap(a, b) == bool(set(range(*a[1:])) & set(range(*b[1:]))), (a, b)
    assert not _overlap([0, 0, 2**60, 2], [0, 1, 2**60, 2])
    assert _overlap([0, 0, 2**60, 3], [0, 1, 2**60, 2])


def test_provenance_of_shards_survives_a_file(tmp_path: Path) -> None:
    for i in range(2):
        nm.fisher_diagonal(MODEL, batches(8), shard=(i, 2)).save(tmp_path / f"{i}")
    parts = [nm.load(tmp_path / f"{i}") for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = parts[0] + parts[1]  # type: ignore[operator]
    assert both.provenance.draws == [[0, 0, 7, 2], [0, 1, 8, 2]]
    assert_equal_but_for_rounding(both, nm.fisher_diagonal(MODEL, batches(8)))


def test_a_shard_keeps_a_checkpoint(tmp_path: Path) -> None:
    data, path = batches(4), tmp_path / "state"
    expected = nm.fisher_diagonal(MODEL, data, shard=(1, 3))
    nm.fisher_diagonal(MODEL, data[:8], shard=(1, 3), checkpoint=path)
    found = nm.fisher_diagonal(MODEL, data, shard=(1, 3), checkpoint=path)
    assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)
    verified = expected.provenance.verified + 1  # a resumed run verifies its first batch
    assert found.provenance == replace(expected.provenance, verified=verified)


@pytest.mark.parametrize(
    ("shard", "error", "text"),
    [
        ((2, 2), ValueError, r"`shard\[0\]` must be between 0 and 1"),
        ((-1, 2), ValueError, r"`shard\[0\]` must be between"),
        ((0, 0), ValueError, r"`shard\[1\]` must be between"),
        ((0.0, 2), TypeError, r"`shard\[0\]` must be an int"),
        ("0/2", TypeError, "`shard` must be a pair"),
        (3, TypeError, "`shard` must be a pair"),
        ((20, 30), ValueError, "`data` must be .*0 batches in shard 20 of 30"),
    ],
)
def test_bad_shards_are_named(shard: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        nm.fisher_diagonal(MODEL, batches(8), shard=shard)


# ---------------------------------------------------------------------------------------------------- the noise


def signs(seed: int, batch: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch_seed(seed, batch))
    return 2.0 * torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8).double() - 1


SEEDS, NUMBERS, COUNT = 400, 32, 16


def correlations(make: Any) -> dict[str, Tensor]:
    """Products of signs [seeds, batches, count] that must be zero on average: one row for each seed."""
    x = torch.stack([torch.stack([make(s, b, COUNT) for b in range(NUMBERS)]) for s in range(SEEDS)])
    upper = torch.triu_indices(NUMBERS, NUMBERS, 1)
    return {
        "single": x.sum(1),
        "neighbours": (x[:, 1:] * x[:, :-1]).sum(1),
        "seeds": (x[1:] * x[:-1]).sum(1),
        "diagonals": (x[1:, :-1] * x[:-1, 1:]).sum(1),  # seed + 1, batch against seed, batch + 1
        "pairs of batches": torch.einsum("sbi,sci->sbc", x, x)[:, upper[0], upper[1]],
    }


@pytest.mark.parametrize("kind", ["single", "neighbours", "seeds", "diagonals", "pairs of batches"])
def test_batches_and_seeds_have_independent_noise(kind: str) -> None:
    """False-alarm rate below 1e-6 for each kind; the sums' variance is that of independent signs, too."""
    found = correlations(signs)[kind]
    assert worst_z_score(found, torch.zeros(found.shape[1:]).double()) < allowed_z_score(found[0].numel())
    terms = COUNT if kind == "pairs of batches" else NUMBERS - (kind in ("neighbours", "diagonals"))
    excess = float((found.square().mean() / terms - 1) / math.sqrt(2 / found.numel()))
    assert abs(excess) < 6


DRAWN = {
    "normal": nm.Hutchinson(deflate=0, noise="gaussian"),
    "default": nm.Hutchinson(),
    "labels": nm.MonteCarlo(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_cotangents_of_batches_and_seeds_are_independent(name: str) -> None:
    """Of each estimator as it is, and of their squares, which a common size would show in."""
    generator, core = torch.Generator(), nm.Categorical(torch.linspace(0, 1, 8).double().reshape(2, 4))

    def make(seed: int, batch: int) -> Tensor:
        (u,) = DRAWN[name].cotangents(core, None, generator.manual_seed(batch_seed(seed, batch)))
        return u.flatten()

    x = torch.stack([torch.stack([make(s, b) for b in range(8)]) for s in range(SEEDS // 4)])
    for values in (x, x.square()):
        centred = values - values.mean((0, 1))
        for found in (
            centred[:, 1:] * centred[:, :-1],
            centred[1:] * centred[:-1],
            centred[1:, :-1] * centred[:-1, 1:],
        ):
            rows = found.flatten(0, 1)
            varies = rows.var(0) > 1e-20
            zeros = torch.zeros(int(varies.sum())).double()
            assert worst_z_score(rows[:, varies], zeros) < allowed_z_score(len(zeros))


def test_plain_sums_of_seed_and_batch_would_be_seen() -> None:
    """The twin: seed + batch gives batch b of seed 1 the noise of batch b + 1 of seed 0."""

    def twin(seed: int, batch: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + batch)
        return 2.0 * torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8).double() - 1

    found = correlations(twin)["diagonals"]
    assert worst_z_score(found, torch.zeros(found.shape[1:]).double()) > 10


def test_no_two_batches_of_a_seed_share_what_a_cpu_looks_at() -> None:
    for seed in (0, 1, 2**62):
        assert len({batch_seed(seed, b) & (2**32 - 1) for b in range(20000)}) == 20000
    assert len({batch_seed(seed, 0) for seed in range(20000)}) == 20000
    assert all(0 <= batch_seed(seed, b) < 2**64 for seed in (0, 2**63 - 1) for b in (0, 2**31))


def test_the_noise_of_a_batch_does_not_depend_on_the_others() -> None:
    x = [(X[:16], Y[:16]), (X[16:32], Y[16:32])]
    both = nm.fisher_diagonal(MODEL, x, nm.Hutchinson(deflate=0))
    first = nm.fisher_diagonal(MODEL, [(X[32:35], Y[32:35]), x[1]], nm.Hutchinson(deflate=0), shard=(1, 2))
    second = nm.fisher_diagonal(MODEL, x[:1], nm.Hutchinson(deflate=0))
    torch.testing.assert_close(both.sums["0.weight"], first.sums["0.weight"] + second.sums["0.weight"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_shards_on_a_gpu_add_up_with_cuda_graphs_too(cuda_graphs: bool) -> None:
    """A captured graph reads the generator's seed anew with each replay."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).cuda()
    data = list(torch.randn(24, 16, 6))
    whole = nm.fisher_diagonal(model, data)
    parts = [nm.fisher_diagonal(model, data, shard=(i, 2), cuda_graphs=cuda_graphs) for i in range(2)]
    for name in whole:
        torch.testing.assert_close((parts[0] + parts[1])[name], whole[name])
