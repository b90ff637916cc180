"""`neuromanifold core-space` as a user sees it."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neuromanifold.cli.app import app


def test_core_space_prints_a_table_and_draws_a_plot(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["core-space", "--out", str(tmp_path / "plots"), "--classes", "5"])
    assert result.exit_code == 0, result.output
    assert "Theorem 1" in result.output
    assert "1000" in result.output
    assert (tmp_path / "plots" / "core-space.png").stat().st_size > 5000


def test_core_space_refuses_too_few_classes() -> None:
    result = CliRunner().invoke(app, ["core-space", "--classes", "3"])
    assert result.exit_code == 2
    assert "--classes" in result.output


def test_without_matplotlib_the_table_is_printed_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["core-space", "--out", str(tmp_path / "plots")])
    assert result.exit_code == 2
    assert "Theorem 1" in result.output
    assert "neuromanifold[plots]" in result.output
    assert not (tmp_path / "plots").exists()
