"""Wrong calls and unmet demands: what is said, when, and with which exit code."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import neuromanifold as nm
from neuromanifold.cli.app import app
from neuromanifold.results import Provenance
from tests.cli.commands import bad, good, own_module, run

NOISY = ["estimate", "-m", "my_own:model", "-d", "my_own:batches", "-o", "fim.safetensors"]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """my_own.py, and tracks.py: a model that leaves a track when it is loaded."""
    own_module(tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "tracks", raising=False)
    (tmp_path / "tracks.py").write_text(
        "import pathlib, my_own\ndef model():\n    pathlib.Path('loaded').touch()\n    return my_own.model()\n"
    )


# ------------------------------------------------------------------------------------------------------------- rtol


@pytest.mark.filterwarnings("default::neuromanifold.run.fisher.ToleranceNotReachedWarning")
def test_an_accuracy_that_is_not_reached_is_said_and_strict_fails() -> None:
    lax, strict = run(*NOISY, "--rtol", 1e-9), run(*NOISY, "--rtol", 1e-9, "--strict")
    for result in (lax, strict):
        assert "Note: `rtol=1e-09` was not reached: relative standard error " in result.output
        assert "ended:        rtol 1e-09 not reached: relative standard error " in result.output
        assert "written:      fim.safetensors" in result.output
    assert (lax.exit_code, strict.exit_code) == (0, 3)
    assert nm.load("fim.safetensors").provenance.stopped.startswith("rtol 1e-09 not reached")


def test_an_accuracy_that_is_reached_is_no_failure() -> None:
    assert "stopped after 1 batches: relative standard error" in good(*NOISY, "--rtol", 10, "--strict")
    assert "`strict` must be given together with --rtol" in bad(*NOISY, "--strict")


# ---------------------------------------------------------------------------------- noticed before the model is loaded


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-d", "missing.csv"], "There is no missing.csv"),
        (["-d", "my_own:missing"], "my_own has no 'missing'"),
        (["-d", "no_such_module:batches"], "no module 'no_such_module'"),
        (["-o", "no/folder/fim.safetensors"], "make it first"),
        (["-o", "."], "is a folder; name a file to write to"),
        (["--checkpoint", "no/folder/state"], "make it first"),
        (["--checkpoint", "fim.safetensors"], "a file of its own"),
        (["-b", "many"], "a number of rows, or auto"),
        (["-b", "auto", "--shard", "0/2"], "a number with --checkpoint or --shard"),
        (["-e", "guess"], "one of Hutchinson, Adaptive, Exact"),
        (["--granularity", "token"], "auto, sample or batch"),
        (["--likelihood", "poisson"], "one of categorical"),
        (["--shard", "2/2"], "I from 0 to N-1"),
    ],
)
def test_what_needs_no_model_is_checked_before_one_is_loaded(tmp_path: Path, options: list[str], said: str) -> None:
    given = {"-m": "tracks:model", "-d": "my_own:batches", "-o": "fim.safetensors"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    assert said in bad("estimate", *(part for pair in given.items() for part in pair))
    assert not (tmp_path / "loaded").exists()
    good("estimate", "-m", "tracks:model", "-d", "my_own:batches", "-o", "fim.safetensors")
    assert (tmp_path / "loaded").exists()


@contextmanager
def read_only_folder() -> Iterator[Path]:
    """A folder that this process, for once without a superuser's rights, may not write to."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    (folder / "tracks.py").write_text(Path("tracks.py").read_text())
    folder.chmod(0o555)
    root = os.getuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield folder
    finally:
        if root:
            os.setresuid(0, 0, 0)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "command",
    [
        ["estimate", "-m", "tracks:model", "-d", "my_own:batches", "-o", "FOLDER/fim.safetensors"],
        ["bounds", "-m", "tracks:model", "-d", "my_own:batches", "-o", "FOLDER/bounds.safetensors"],
        ["reproduce", "sst2", "-m", "missing", "-o", "FOLDER/paper"],
        ["demo", "--out", "FOLDER"],
        ["core-space", "--out", "FOLDER/new/plots"],
    ],
    ids=lambda command: command[0],
)
def test_a_read_only_folder_is_said_to_be_one_before_anything_is_computed(tmp_path: Path, command: list[str]) -> None:
    with read_only_folder() as folder:
        result = run(*(part.replace("FOLDER", str(folder)) for part in command))
    assert result.exit_code == 2
    assert f"Error: The folder {folder} cannot be written to: it is read-only." in result.output
    assert "space" not in result.output
    assert "room" not in result.output
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "loaded").exists()


# ----------------------------------------------------------------------------------------------------------- tables


def deep_result(seed: int, target: str = "unbiased", noise: float = 0.1) -> nm.DiagonalFisher:
    """Twenty blocks whose names differ in the middle only."""
    head = "base_model.model.some_large_language_model.encoder.transformer_layers"
    names = [f"{head}.{i}.self_attention.output.{kind}" for i in range(20) for kind in ("query", "value")]
    generator = torch.Generator().manual_seed(seed)
    sums = {f"{name}.weight": torch.rand(30, 40, generator=generator) for name in names}
    provenance = Provenance("Empirical()" if not noise else "Hutchinson()", target, model="a model", data="data")
    return nm.DiagonalFisher(sums, {name: noise * value for name, value in sums.items()}, 5, 5, provenance)


@pytest.mark.parametrize("command", [["show"], ["show", "--each"], ["compare"]], ids=" ".join)
def test_tables_of_80_columns_keep_names_apart(tmp_path: Path, command: list[str]) -> None:
    files = [str(tmp_path / f"{i}.safetensors") for i in range(1 + (command == ["compare"]))]
    for i, file in enumerate(files):
        deep_result(i).save(file)
    made = CliRunner(env={"COLUMNS": "80"}).invoke(app, [command[0], *files, *command[1:]])
    assert made.exit_code == 0, made.output
    table = made.output.splitlines()[1:]
    rows = table[2 : table.index(table[1], 2)]
    assert len(rows) == (40 if "--each" in command else 20)
    assert max(map(len, rows)) <= 80
    assert len({row.split()[0] for row in rows}) == len(rows)
    for number in range(20):
        assert any(f"{number}" in row.split()[0] for row in rows)


def test_numbers_without_noise_do_not_look_accurate(tmp_path: Path) -> None:
    target = "biased (the labels of the data are not drawn from the model)"
    deep_result(0, target, noise=0.0).save(tmp_path / "e.safetensors")
    said = good("show", tmp_path / "e.safetensors")
    table = said.splitlines()[1:]
    assert table[0].endswith("rel. s.e.")
    assert all(row.endswith("–") for row in table[2 : table.index(table[1], 2)])
    assert "rel. s.e.: Σ standard errors / Σ entries, of the probes' noise; –: not random" in said
    assert "(not random, but biased)" in said
    assert f"right for F:  {target}" in said
    assert "±" not in said
    deep_result(0).save(tmp_path / "h.safetensors")
    assert "(standard error, at most)" in good("show", tmp_path / "h.safetensors")


# ------------------------------------------------------------------------------------------- files that are no results


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pickle", "A pickle can run any code"),
        ("folder", "is a folder, not a result. Name a file, such as other.safetensors"),
        ("model folder", "is the folder of a model, not a result"),
        ("weights", "the weights of a model?"),
        ("page", "is a page, not a result"),
        ("misspelt", "Did you mean result.safetensors?"),
        ("checkpoint", "is the checkpoint of a run that has not ended"),
    ],
)
def test_python_and_the_command_line_say_the_same_of_what_is_no_result(tmp_path: Path, kind: str, said: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "thing"
    if kind == "pickle":
        torch.save({"a": torch.ones(2)}, path)
    elif kind == "folder":
        path.mkdir()
        deep_result(0).save(path / "other.safetensors")
    elif kind == "model folder":
        path.mkdir()
        (path / "config.json").write_text("{}")
    elif kind == "weights":
        save_file({"layer.weight": torch.ones(2)}, path)
    elif kind == "page":
        path.write_text("<!doctype html><html></html>")
    elif kind == "checkpoint":
        (tmp_path / "interrupt").touch()
        interrupted = run(*NOISY[:4], "my_own:interrupted", *NOISY[5:], "--checkpoint", path)
        assert interrupted.exit_code == 130
    else:
        deep_result(0).save(tmp_path / "result.safetensors")
        path = tmp_path / "resullt.safetensors"
    line = bad("show", path)
    assert said in line
    with pytest.raises((ValueError, OSError)) as caught:
        nm.load(path)
    assert line == f"Error: {caught.value}"
