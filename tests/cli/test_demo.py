"""The command line as a user meets it."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import neuromanifold
from neuromanifold.cli import main
from neuromanifold.cli.app import app


def test_demo_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "pictures"), "--classes", "5"])
    assert result.exit_code == 0, result.output
    assert "Theorem 1" in result.output
    assert "1000" in result.output
    assert (tmp_path / "pictures" / "core-space.png").stat().st_size > 5000


def test_demo_refuses_too_few_classes() -> None:
    result = CliRunner().invoke(app, ["demo", "--classes", "3"])
    assert result.exit_code == 2
    assert "--classes" in result.output


def test_version_and_module() -> None:
    command = [sys.executable, "-m", "neuromanifold", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"neuromanifold {neuromanifold.__version__}"


def test_without_typer_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "neuromanifold.cli.app")
    with pytest.raises(SystemExit, match=r"pip install 'neuromanifold\[cli,plots\]'"):
        main()


def test_without_matplotlib_the_table_is_printed_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "pictures")])
    assert result.exit_code == 1
    assert "Theorem 1" in result.output
    assert "neuromanifold[plots]" in result.output
    assert not (tmp_path / "pictures").exists()
