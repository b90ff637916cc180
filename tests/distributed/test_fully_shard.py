"""Models in FSDP2 give what the whole model gives; verification sees wrong rules on any process."""

import random
from pathlib import Path
from typing import Any

import pytest

import neuromanifold as nm
from tests.distributed import runs, sharded_runs
from tests.distributed.launch import checked_values, outcomes

pytestmark = pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
RANDOM: list[dict[str, Any]] = [{}, {"estimator": nm.MonteCarlo(2)}, {"granularity": "batch"}]
EXACT: list[dict[str, Any]] = [{"estimator": nm.Exact()}, {"estimator": nm.Empirical()}, {"granularity": "sample"}]


def test_two_processes_equal_the_whole_model() -> None:
    """Five batches: one process runs a batch again for the other's sake."""
    checked_values(2, sharded_runs.estimators, 5, False, [*RANDOM, *EXACT])


def test_parts_without_noise_are_kept_apart() -> None:
    """One of several passes has no noise."""
    checked_values(2, sharded_runs.estimators, 3, False, [{"estimator": nm.Hutchinson(3)}])


@pytest.mark.parametrize(
    ("world", "columns"),
    [(2, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, True), (4, False), (4, True)))],
)
def test_error_bars_of_rows(world: int, columns: bool, tmp_path: Path) -> None:
    checked_values(world, sharded_runs.error_bars, tmp_path, columns)


def test_which_error_bars() -> None:
    checked_values(2, sharded_runs.choice_of_error_bars)


def test_error_bars_of_rows_end_a_run() -> None:
    checked_values(2, sharded_runs.soon_enough)


def test_parameters_without_a_rule_are_done_per_batch_or_one_by_one() -> None:
    """Other estimators: slow, with four processes."""
    others: list[dict[str, Any]] = [{"granularity": "sample"}, {"estimator": nm.SquaredBatchGradient()}]
    checked_values(2, sharded_runs.estimators, 3, True, [{}, *others])


@pytest.mark.parametrize(
    ("world", "number", "costs"),
    [
        (2, 7, [1.5]),
        pytest.param(2, 17, [0.5, 1.0, 1.5, 2.5], marks=pytest.mark.slow),
        *(pytest.param(world, 17, [0.5, 1.5], marks=pytest.mark.slow) for world in (3, 4)),
    ],
    ids=str,
)
def test_adaptive_passes(world: int, number: int, costs: list[float]) -> None:
    checked_values(world, sharded_runs.adaptive, number, costs)


@pytest.mark.parametrize(
    ("world", "more"), [(2, False), *(pytest.param(world, True, marks=pytest.mark.slow) for world in (2, 3))]
)
def test_adaptive_passes_of_other_kinds(world: int, more: bool) -> None:
    checked_values(world, sharded_runs.adaptive_otherwise, more)


def test_an_error_that_is_caught_ends_the_run_all_the_same() -> None:
    first, second = checked_values(2, sharded_runs.broken_when_alone)
    assert second == "BrokenError: too few samples"
    assert first.startswith("ProcessError: ")


def test_functions_of_parameters_that_are_freed_until_the_backward_pass() -> None:
    checked_values(2, sharded_runs.freed)


def test_fewer_batches_than_processes() -> None:
    checked_values(3, sharded_runs.estimators, 2, False, [{}, {"estimator": nm.Exact()}])


@pytest.mark.slow
@pytest.mark.parametrize("without", [False, True])
def test_four_processes_equal_the_whole_model(without: bool) -> None:
    checked_values(4, sharded_runs.estimators, 7, without, [*RANDOM, *EXACT])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_kinds_of_sharding(world: int) -> None:
    checked_values(world, sharded_runs.kinds)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_kinds_of_models(world: int) -> None:
    checked_values(world, sharded_runs.models)


NAMES = ["Llama", "GPT-2", "Mixtral"]


@pytest.mark.parametrize(
    ("world", "estimator", "names"),
    [
        (2, nm.Hutchinson(), ["GPT-2", "Mixtral"]),
        (2, nm.Empirical(), ["Llama"]),
        *(pytest.param(2, one, NAMES, marks=pytest.mark.slow) for one in (nm.Hutchinson(), nm.Empirical())),
        *(pytest.param(4, one, NAMES, marks=pytest.mark.slow) for one in (nm.Hutchinson(), nm.Empirical())),
    ],
    ids=str,
)
def test_language_models(world: int, estimator: nm.Estimator, names: list[str]) -> None:
    """Squared per token above the last attention; a tied head; routed experts, which have no rule."""
    checked_values(world, sharded_runs.language, names, {"estimator": estimator}, estimator.needs_labels)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), [(2, "Llama"), (2, "Mixtral"), (4, "Llama")])
def test_exact_language_models(world: int, name: str) -> None:
    checked_values(world, sharded_runs.language, [name], {"estimator": nm.Exact()}, False, 3)


def test_a_process_has_the_squares_of_one_layer_at_full_size_at_a_time() -> None:
    checked_values(2, sharded_runs.one_layer_at_a_time)


def test_a_wrong_rule_on_one_process_is_seen_by_all() -> None:
    checked_values(2, sharded_runs.wrong_rule)


def test_what_cannot_be_done_is_refused() -> None:
    for found in checked_values(2, sharded_runs.refused):
        assert found == ["distributed", "tensor parallel", "whole on each"]


def test_an_error_on_one_process_ends_the_other() -> None:
    found = outcomes(2, sharded_runs.failing)
    assert found[1] == (False, "BrokenError: no batch 3")
    assert not found[0][0]
    assert "Rank 1 of 2 has failed" in found[0][1] or "died" in found[0][1]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_are_saved_by_all_and_gathered_by_none(world: int, tmp_path: Path) -> None:
    checked_values(world, sharded_runs.saved, tmp_path)


@pytest.mark.parametrize(
    ("worlds", "kind"),
    [((2, 3, 2), True), ((2, 1, 2), "rows"), pytest.param((4, 2, 4), True, marks=pytest.mark.slow)],
    ids=str,
)
def test_checkpoints_are_resumed_by_any_number_of_processes(worlds: tuple[int, ...], kind: Any, tmp_path: Path) -> None:
    options = {"error_bars": kind}
    for i, world in enumerate(worlds[:-1]):
        found = outcomes(world, sharded_runs.checkpointed, tmp_path, 8, 3 + 3 * i, options)
        assert found[-1] == (False, f"BrokenError: no batch {3 + 3 * i}")
    assert nm.Checkpoint(tmp_path / "state").files() == {0: tmp_path / "state.index.json"}
    with pytest.raises(ValueError, match=r"differs in result \(ShardedSums, now DiagonalSums\)"):
        nm.fisher_diagonal(sharded_runs.network(), runs.batches(8), checkpoint=tmp_path / "state")
    checked_values(worlds[-1], sharded_runs.checkpointed, tmp_path, 8, -1, options)
    expected = nm.fisher_diagonal(sharded_runs.network(), runs.batches(8), **options)
    found = nm.load(tmp_path / "fim.safetensors")
    sharded_runs.compare(found, expected)
    assert found.provenance.passes == expected.provenance.passes
    nm.Checkpoint(tmp_path / "state").remove()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("state")]


def test_windows_of_adaptive_passes_are_resumed_by_another_number_of_processes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"estimator": nm.Adaptive(1.5, window=2)}
    found = outcomes(3, sharded_runs.checkpointed, tmp_path, 11, 8, options)
    assert found[-1] == (False, "BrokenError: no batch 8")
    checked_values(2, sharded_runs.checkpointed, tmp_path, 11, -1, options)
    expected = nm.fisher_diagonal(sharded_runs.confident(), runs.batches(11), **options)
    found = nm.load(tmp_path / "fim.safetensors")
    sharded_runs.compare(found, expected)
    assert found.provenance.passes == expected.provenance.passes


def test_ctrl_c_in_one_process_ends_all_of_them(tmp_path: Path) -> None:
    first, second = checked_values(2, sharded_runs.interrupted, tmp_path, "return")
    assert first == second == ["interrupted after 4 batches", "64"]
    first, second = checked_values(2, sharded_runs.interrupted, tmp_path, "raise")
    assert second == ["KeyboardInterrupt", ""]
    assert first[0] == "ProcessError"
    assert first[1].startswith("Rank 1 of 2 was interrupted, which ends the run on all processes; with a checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"error_bars": "rows"}, {"estimator": nm.Adaptive(1.5, window=2)}], ids=str)
@pytest.mark.parametrize(("seed", "worlds"), [(0, [2, 2, 3]), (1, [2, 4]), (2, [4, 4, 2])])
def test_processes_killed_at_random_times_change_nothing(
    seed: int, worlds: list[int], options: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever they were at, such as the files of a checkpoint; another number of processes goes on."""
    chance, number, died = random.Random(seed), 24, 0
    for _ in range(5):
        world = chance.choice(worlds)
        who, after = chance.randrange(world), chance.uniform(0.05, 0.8)
        found = outcomes(world, sharded_runs.killed, tmp_path, who, after, number, options)
        died += found[who] is None
        for rank, one in enumerate(found):
            told = "Another process has died", f"Rank {who} of {world} has not been heard of", "store"
            assert rank == who or one[0] or any(text in one[1] for text in told), one
    assert died >= 2
    checked_values(chance.choice(worlds), sharded_runs.checkpointed, tmp_path, number, -1, options)
    whole = sharded_runs.confident() if "estimator" in options else sharded_runs.network()
    expected = nm.fisher_diagonal(whole, runs.batches(number), **options)
    sharded_runs.compare(nm.load(tmp_path / "fim.safetensors"), expected, noise=False)
