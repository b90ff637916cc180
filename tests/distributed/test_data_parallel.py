"""Several processes give the result of one: to rounding, since sums are added in another order."""

from pathlib import Path
from typing import Any

import pytest
import torch

import neuromanifold as nm
from tests.distributed import runs
from tests.distributed.launch import checked_values

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "per batch": {"granularity": "batch"},
    "Exact": {"estimator": nm.Exact()},
    "Empirical, a shard": {"estimator": nm.Empirical(), "shard": (1, 2)},
    "adaptive": {"passes": 0.7},
    "adaptive, many": {"passes": 2.5},
    "rtol": {"rtol": 0.07},
}


def load(path: Path) -> nm.DiagonalFisher:
    found = nm.load(path)
    assert isinstance(found, nm.DiagonalFisher)
    return found


def assert_same(found: nm.DiagonalFisher, expected: nm.DiagonalFisher) -> None:
    """Numbers to rounding; standard errors are estimates, and fourth powers may be taken of other batches."""
    p, q = found.provenance, expected.provenance
    assert (found.count, found.positions, p.batches, p.passes) == (
        expected.count,
        expected.positions,
        q.batches,
        q.passes,
    )
    assert (p.granularity, p.draws, p.data_fingerprints) == (q.granularity, q.draws, q.data_fingerprints)
    assert p.noise_ratio == pytest.approx(q.noise_ratio, rel=1e-12)
    for name in expected:
        torch.testing.assert_close(found.sums[name], expected.sums[name], rtol=2e-6, atol=1e-20)
        assert float(found.noise[name].norm()) == pytest.approx(float(expected.noise[name].norm()), rel=0.25)


NUMBER = 35  # over batches of which fourth powers are thinned out; the last round is not full, the last batch shorter


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The results of all options, made by the same processes one after the other: in files KIND/RANK."""
    folder, world = tmp_path_factory.mktemp("results"), request.param
    calls: list[Any] = []
    for kind, options in OPTIONS.items():
        (folder / kind).mkdir()
        calls.append((runs.diagonal, folder / kind, NUMBER, options))
    assert checked_values(world, runs.several, calls) == [[""] * len(calls)] * world
    return world, folder


@pytest.mark.parametrize("kind", OPTIONS)
def test_several_processes_give_the_result_of_one(kind: str, results: tuple[int, Path]) -> None:
    world, folder = results
    first, options, data = load(folder / kind / "0"), OPTIONS[kind], runs.batches(NUMBER)
    if kind == "rtol":  # which is looked at when all processes have done a batch more
        assert first.provenance.stopped.startswith(f"stopped after {first.provenance.batches} batches: relative")
        assert 5 < first.provenance.batches < NUMBER
        assert first.provenance.batches % world == 0
        data, options = data[: first.provenance.batches], {}
    assert_same(first, nm.fisher_diagonal(runs.network(), data, **options))
    assert first.provenance.processes == world
    for rank in range(1, world):  # every rank has the whole result, with the same bits
        other = load(folder / kind / f"{rank}")
        assert other.provenance == first.provenance
        for name in first:
            assert torch.equal(other.sums[name], first.sums[name])
            assert torch.equal(other.noise[name], first.noise[name])


def test_processes_without_a_batch(tmp_path: Path) -> None:
    """One batch for two processes: bit for bit what one process gives.  None at all is an error in all of them."""
    expected = nm.fisher_diagonal(runs.network(), runs.batches(1))
    for ended in checked_values(2, runs.several, [(runs.diagonal, tmp_path, 1, {}), (runs.diagonal, tmp_path, 0, {})]):
        assert not ended[0]
        assert "`data` must be an iterable with at least one sample, got 0 batches" in ended[1]
    for rank in range(2):
        found = load(tmp_path / f"{rank}")
        assert_same(found, expected)
        assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)


def test_traces_too() -> None:
    kinds: list[Any] = [{}, {"granularity": "batch"}, {"estimator": nm.Hutchinson(3, deflate=0)}]
    found = checked_values(2, runs.traces, 7, kinds)
    assert found[0] == found[1]
    for one, options in zip(found[0], kinds, strict=True):
        expected = nm.fisher_trace(runs.network(), runs.batches(7), **options)
        assert float(one) == pytest.approx(float(expected), rel=1e-6)
        assert one.stderr == pytest.approx(expected.stderr, rel=1e-6)


def test_a_model_in_ddp_is_taken_out_of_it_and_can_be_trained_on(tmp_path: Path) -> None:
    expected = nm.fisher_diagonal(runs.Counting(), runs.batches(5))
    names = checked_values(2, runs.wrapped, tmp_path, 5)
    assert names[0] == list(expected)
    assert_same(load(tmp_path / "1"), expected)


# Data of their own.


def test_a_distributed_sampler_means_that_each_process_has_data_of_its_own(tmp_path: Path) -> None:
    """The samples are all there once, and the noise of each batch is another: the batches are numbered in turn."""
    checked_values(2, runs.sampled, tmp_path, 44, 2, False, {"estimator": nm.Exact()})
    found = load(tmp_path / "0")
    expected = nm.fisher_diagonal(runs.network(), runs.loader(0, 44, 1), nm.Exact())
    assert found.count == expected.count == 44
    for name in expected:
        torch.testing.assert_close(found.sums[name], expected.sums[name], rtol=2e-6, atol=1e-20)
    checked_values(2, runs.sampled, tmp_path, 44, 2, False, {})
    found = load(tmp_path / "0")
    parts = [iter(runs.loader(rank, 44, 2)) for rank in range(2)]
    in_turn = [batch for pair in zip(*parts, strict=True) for batch in pair]
    assert_same_but_for_the_data(found, nm.fisher_diagonal(runs.network(), in_turn))


def assert_same_but_for_the_data(found: nm.DiagonalFisher, expected: nm.DiagonalFisher) -> None:
    found.provenance.data_fingerprints[:] = expected.provenance.data_fingerprints
    assert_same(found, expected)


def test_data_of_their_own_of_different_lengths(tmp_path: Path) -> None:
    checked_values(2, runs.own_batches, tmp_path, {"distributed": "own data", "estimator": nm.Exact()})
    data = [*runs.batches(12)[:3], *runs.batches(12)[4:6]]
    expected, found = nm.fisher_diagonal(runs.network(), data, nm.Exact()), load(tmp_path / "1")
    assert found.count == expected.count
    for name in expected:
        torch.testing.assert_close(found.sums[name], expected.sums[name], rtol=2e-6, atol=1e-20)


def test_processes_that_differ_are_refused(tmp_path: Path) -> None:
    """Before the run where it can be seen; of later batches at the end."""
    same_data = "ValueError: `data` must be the same batches in the same order on all processes, got "
    apart = "ValueError: `data` must be different on each process, got the same first batch in 2 of them. Samples would"
    same = "ValueError: `arguments` must be the same on all processes"
    cases: dict[str, tuple[tuple[Any, ...], str]] = {
        "the same rank for all samplers": ((runs.sampled, tmp_path, 44, 2, True, {}), apart),
        "the same data called their own": ((runs.diagonal, tmp_path, 5, {"distributed": "own data"}), apart),
        "samplers for other processes": ((runs.sampled, tmp_path, 44, 3, False, {}), "DistributedSampler for 2"),
        "different data without a word": ((runs.own_batches, tmp_path, {}), f"{same_data}different first batches"),
        "no data in one": ((runs.different, "nothing"), f"{same_data}no batch on some of them"),
        "another first batch": ((runs.different, "first batch"), f"{same_data}different first batches"),
        "another later batch": ((runs.different, "later batch"), f"{same_data}different ones"),
        "another length": ((runs.different, "length"), f"{same_data}different ones"),
        "weights": ((runs.different, "weights"), "weights of the model"),
        "seed": ((runs.different, "seed"), same),
        "estimator": ((runs.different, "estimator"), same),
    }
    for found in checked_values(2, runs.several, [call for call, _ in cases.values()]):
        for text, (what, (_, expected)) in zip(found, cases.items(), strict=True):
            assert expected in text, what


def test_one_process_may_run_alone(tmp_path: Path) -> None:
    checked_values(2, runs.alone, tmp_path, 5)
    assert_same(load(tmp_path / "0"), nm.fisher_diagonal(runs.network(), runs.batches(5)))


def test_without_a_process_group_the_argument_does_nothing() -> None:
    data = runs.batches(3)
    found = [nm.fisher_diagonal(runs.network(), data, distributed=each) for each in ("auto", "own data", False)]
    assert all(torch.equal(one.sums[name], found[0].sums[name]) for one in found for name in one)
    with pytest.raises(ValueError, match="`distributed` must be 'auto', 'own data' or False, got True"):
        nm.fisher_diagonal(runs.network(), data, distributed=True)  # type: ignore[arg-type]
