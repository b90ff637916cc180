"""The command line as a user sees it, and its demo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import neuromanifold
from neuromanifold.cli import main
from neuromanifold.cli.app import app


def test_demo_prints_a_table_draws_a_plot_and_saves_the_result(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new"), "--samples", "20"])
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    for name in ("Exact()", "Hutchinson()", "MonteCarlo()", "Empirical()", "SquaredBatchGradient()"):
        assert sum(line.startswith(f"{name} ") for line in result.output.splitlines()) >= 1, name
    assert "test accuracy 9" in result.output
    assert (tmp_path / "new" / "fisher-histograms.png").stat().st_size > 5000
    saved = neuromanifold.load(tmp_path / "new" / "fisher.safetensors")
    assert isinstance(saved, neuromanifold.DiagonalFisher)
    assert saved.count == 20
    assert "deflate=1" in saved.provenance.estimator


@pytest.mark.parametrize("samples", ["0", "1409"])
def test_demo_refuses_impossible_numbers_of_samples(samples: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--samples", samples])
    assert result.exit_code == 2
    assert "--samples" in result.output


def test_without_scikit_learn_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new")])
    assert result.exit_code == 2
    assert "pip install 'neuromanifold[demo]'" in result.output
    assert not (tmp_path / "new").exists()


def test_without_matplotlib_the_table_is_printed_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new"), "--samples", "2"])
    assert result.exit_code == 2
    assert "RelMAE" in result.output
    assert "neuromanifold[plots]" in result.output
    assert not (tmp_path / "new").exists()


def test_version_and_module() -> None:
    command = [sys.executable, "-m", "neuromanifold", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"neuromanifold {neuromanifold.__version__}"


def test_without_typer_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "neuromanifold.cli.app")
    with pytest.raises(SystemExit, match=r"pip install 'neuromanifold\[cli,plots\]'"):
        main()
