"""`forecast`, `check` and `bounds` from end to end, and what every command has in common."""

from pathlib import Path

import pytest
import torch

from neuromanifold.cli.app import app
from neuromanifold.cli.parsing import parse_estimator
from neuromanifold.estimators import Exact, Hutchinson, Lower, MonteCarlo
from tests.cli.commands import Folder, bad, good, own_module, run, write_data

COMMANDS = (
    "estimate",
    "forecast",
    "check",
    "bounds",
    "show",
    "compare",
    "combine",
    "report",
    "env",
    "demo",
    "core-space",
)


def test_a_forecast_says_time_memory_and_size(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path, 12)
    said = good("forecast", "-m", folder("text"), "-d", path, "-b", 2, "--tries", 2)
    for word in ("6, of 2 samples", "each further", "memory", "result file"):
        assert word in said
    assert "--checkpoint" not in said


def test_the_batch_size_is_found(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("image", tmp_path, 6)
    common = ["-m", folder("image"), "-d", path, "-b", "auto"]
    assert "Batch size: " in good("forecast", *common)
    out = tmp_path / "fim.safetensors"
    assert "Batch size: " in good("estimate", *common, "-o", out)
    assert "a number with --checkpoint or --shard" in bad("estimate", *common, "-o", out, "--shard", "0/2")


@pytest.mark.parametrize("size", ["auto", "1", "7"])
def test_a_function_chooses_its_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    own_module(tmp_path, monkeypatch)
    said = bad("forecast", "-m", "my_own:model", "-d", "my_own:batches", "-b", size)
    assert f"left out where --data is a function, got {size}. The function returns whole batches." in said


@pytest.mark.filterwarnings("default")
def test_check_gives_a_verdict(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path, 8)
    common = ["check", "-m", folder("text"), "-d", path, "-b", 4, "--no-progress"]
    said = good(*common)
    for word in ("Exact()", "Hutchinson()", "Empirical()", "RelMAE", "use it"):
        assert word in said
    few = good(*common, "--no-labels", "-e", "montecarlo")
    assert "MonteCarlo()" in few
    assert "Empirical()" not in few


def test_bounds_are_shown_and_written(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("image", tmp_path, 4)
    out = tmp_path / "bounds.json"
    said = good("bounds", "-m", folder("image"), "-d", path, "-b", 2, "-k", 2, "--no-progress", "-o", out)
    for statement in ("Prop. 5", "Prop. 7", "Prop. 8", "Prop. 9", "Prop. 10"):
        assert statement in said
    assert out.stat().st_size > 100
    assert "`rank`" in bad("bounds", "-m", folder("image"), "-d", path, "-k", 3, "--no-progress")
    labels = bad("bounds", "-m", folder("image"), "-d", path, "--labels", "--columns", "label=x", "--no-progress")
    assert "labels" in labels or "columns" in labels


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    said = good(command, "--help")
    assert "Usage:" in said
    assert len(said.split("\n\n")) > 1


def test_the_help_lists_every_command() -> None:
    said = good("--help")
    assert all(command in said for command in COMMANDS)
    assert {command.name for command in app.registered_commands} >= set(COMMANDS)


def test_missing_options_are_named() -> None:
    result = run("estimate", "-m", "x")
    assert result.exit_code == 2
    assert "--data" in result.output


@pytest.mark.parametrize(
    ("text", "estimator"),
    [
        ("hutchinson", Hutchinson()),
        ("Hutchinson(probes=3, deflate=0, noise='gaussian')", Hutchinson(probes=3, deflate=0, noise="gaussian")),
        ("monte-carlo", MonteCarlo()),
        ("Exact(envelope=Lower(rank=2))", Exact(envelope=Lower(rank=2))),
        ("exact(lower(2))", Exact(envelope=Lower(rank=2))),
    ],
)
def test_estimators_as_text(text: str, estimator: object) -> None:
    assert parse_estimator(text) == estimator


def test_what_a_result_says_of_its_estimator_can_be_typed_again() -> None:
    for estimator in (Hutchinson(probes=2), Exact(envelope=Lower(rank=2)), MonteCarlo(samples=3)):
        assert parse_estimator(repr(estimator)) == estimator


def test_errors_of_ours_keep_their_traceback_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Folder
) -> None:
    monkeypatch.setenv("NEUROMANIFOLD_TRACEBACK", "1")
    result = run("show", tmp_path / "none.safetensors")
    assert isinstance(result.exception, FileNotFoundError)
    monkeypatch.delenv("NEUROMANIFOLD_TRACEBACK")

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("neuromanifold.cli.commands.estimate.fisher_diagonal", fails)
    path, _ = write_data("text", tmp_path)
    said = bad("estimate", "-m", folder("text"), "-d", path, "-o", tmp_path / "fim.safetensors")
    assert "smaller --batch-size" in said
