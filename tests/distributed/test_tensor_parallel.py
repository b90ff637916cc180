"""Tensor-parallel models give what the whole model gives; verification sees wrong rules on any process."""

from pathlib import Path
from typing import Any

import pytest

import neuromanifold as nm
from tests.distributed import parallel_runs, runs, sharded_runs
from tests.distributed.launch import checked_values, outcomes

pytestmark = pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
RANDOM: list[dict[str, Any]] = [{}, {"estimator": nm.MonteCarlo(2)}, {"granularity": "batch"}]
EXACT: list[dict[str, Any]] = [{"estimator": nm.Exact()}, {"estimator": nm.Empirical()}, {"granularity": "sample"}]
WORLDS = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])


@WORLDS
def test_layers_by_columns_and_rows(world: int) -> None:
    """Of a head of five classes, four processes have 2, 2, 1 and 0."""
    checked_values(world, parallel_runs.estimators, [*RANDOM, *EXACT])


@pytest.mark.parametrize(
    ("world", "several", "number"),
    [
        (2, [{}, {"estimator": nm.Empirical()}, {"estimator": nm.SquaredBatchGradient()}], 2),
        (2, [{"estimator": nm.Exact()}], 1),
        pytest.param(4, [*RANDOM, *EXACT], 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_by_heads(world: int, several: list[dict[str, Any]], number: int) -> None:
    """Squared per token where the whole model is."""
    checked_values(world, parallel_runs.attention, several, number)


@WORLDS
def test_norms_of_parts_of_a_sequence(world: int) -> None:
    checked_values(world, parallel_runs.sequence_parallel)


@WORLDS
def test_kinds_of_models(world: int) -> None:
    checked_values(world, parallel_runs.kinds)


@pytest.mark.filterwarnings("ignore:Gradients that were zero")  # of a layer in which nothing is active at first
@pytest.mark.parametrize(
    ("world", "first", "number"),
    [(2, 0, 5), *(pytest.param(world, 100 * world, 30, marks=pytest.mark.slow) for world in (2, 4))],
)
def test_plans_drawn_at_random(world: int, first: int, number: int) -> None:
    """Networks of layers alone and in pairs, embeddings and norms, for each estimator."""
    checked_values(world, parallel_runs.random_plans, first, number)


@WORLDS
def test_parameters_without_a_rule_are_done_per_batch_or_one_by_one(world: int) -> None:
    checked_values(world, parallel_runs.without_rule)


@pytest.mark.parametrize(
    ("world", "names", "options"),
    [
        (2, ["Llama"], {}),
        pytest.param(2, ["Mixtral", "Qwen2", "Qwen3"], {}, marks=pytest.mark.slow),
        pytest.param(2, ["Llama", "Mixtral", "Qwen3"], {"estimator": nm.Empirical()}, marks=pytest.mark.slow),
        pytest.param(4, ["Llama", "Qwen3"], {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_plans_of_transformers(world: int, names: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    """Fused experts, and norms of which each process has its own heads, are left to autograd."""
    pytest.importorskip("transformers.distributed")
    checked_values(world, parallel_runs.language, tmp_path, names, options)


def test_a_wrong_rule_on_one_process_is_seen_by_all() -> None:
    checked_values(2, parallel_runs.wrong_rule)


def test_a_wrong_square_on_one_process_makes_the_comparison_fail() -> None:
    checked_values(2, parallel_runs.planted)


def test_logits_that_differ_by_rounding_have_the_same_cotangents() -> None:
    checked_values(2, parallel_runs.rounded)


def test_what_cannot_be_done_is_refused() -> None:
    assert len(checked_values(2, parallel_runs.refused)[0]) > 10


@WORLDS
def test_results_are_saved_by_all(world: int, tmp_path: Path) -> None:
    checked_values(world, parallel_runs.saved, tmp_path)


@pytest.mark.parametrize("worlds", [(2, 2), pytest.param((4, 2), marks=pytest.mark.slow)], ids=str)
def test_checkpoints_are_resumed(worlds: tuple[int, int], tmp_path: Path) -> None:
    """By any number of processes."""
    for trace in (False, True):
        found = outcomes(worlds[0], parallel_runs.checkpointed, tmp_path, 6, 3, trace)
        assert found[-1] == (False, "BrokenError: no batch 3")
        assert f"Rank {worlds[0] - 1} of {worlds[0]} has failed" in found[0][1] or "died" in found[0][1]
        assert nm.Checkpoint(tmp_path / "state").files() == {0: tmp_path / "state.index.json"}
        last = checked_values(worlds[1], parallel_runs.checkpointed, tmp_path, 6, -1, trace)[-1]
        nm.Checkpoint(tmp_path / "state").remove()
    expected = nm.fisher_diagonal(parallel_runs.network(), runs.batches(6))
    found = nm.load(tmp_path / "fim.safetensors")
    sharded_runs.compare(found, expected)
    assert (found.provenance.passes, found.provenance.verified) == (6, 4)
    of_one = nm.fisher_trace(parallel_runs.network(), runs.batches(6))
    assert last.value == pytest.approx(of_one.value, rel=1e-6)
    assert last.stderr == pytest.approx(of_one.stderr, rel=1e-6)
    assert last.count == of_one.count
