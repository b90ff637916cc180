"""Commands given what does not go together: nothing is lost, nothing is passed over."""

import os
import shutil
from pathlib import Path

import pytest

import neuromanifold as nm
from tests.cli.commands import Folder, bad, good, own_module, run
from tests.hf.tiny import reviews, save_adapter


def test_nothing_that_is_needed_is_written_over(folder: Folder, tmp_path: Path) -> None:
    path, out = reviews(tmp_path / "r.csv"), tmp_path / "f.safetensors"
    common = ["estimate", "-m", folder("text"), "-d", path, "-b", 5]
    assert "of its own" in bad(*common, "-o", out, "--checkpoint", out)
    assert "of its own" in bad(*common, "-o", path)
    good(*common, "-o", out, "--shard", "0/2")
    before = out.read_bytes()
    good(*common, "-o", tmp_path / "1.safetensors", "--shard", "1/2")
    assert "of its own" in bad("report", out, "-o", out)
    assert "of its own" in bad("combine", out, tmp_path / "1.safetensors", "-o", out)
    assert out.read_bytes() == before


def test_a_pipe_is_not_replaced_by_a_file(folder: Folder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = reviews(tmp_path / "r.csv")
    assert "a pipe" in bad("estimate", "-m", folder("text"), "-d", path, "-o", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("estimator", ["Exact", "Hutchinson"])
def test_data_are_counted_once(folder: Folder, tmp_path: Path, estimator: str) -> None:
    path = reviews(tmp_path / "r.csv")
    common = ["estimate", "-m", folder("text"), "-d", path, "-b", 2, "-e", estimator]
    parts = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for i, part in enumerate(parts):
        good(*common, "-o", part, "--shard", f"{i}/3")
    whole, some, all_of_it = (tmp_path / f"{name}.safetensors" for name in ("whole", "some", "all"))
    good(*common, "-o", whole)
    copy = Path(shutil.copy(parts[0], tmp_path / "copy.safetensors"))
    for twice in ([parts[0], copy], [whole, parts[1]], [parts[1], parts[0], copy]):
        assert "a result over other data" in bad("combine", *twice, "-o", tmp_path / "no.safetensors")
    good("combine", *parts[:2], "-o", some)
    assert "a result over other data" in bad("combine", some, parts[0], "-o", tmp_path / "no.safetensors")
    good("combine", some, parts[2], "-o", all_of_it)
    assert nm.load(all_of_it).count == nm.load(whole).count == 10


def test_a_size_is_looked_for_only_where_it_is_used(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = reviews(tmp_path / "r.csv")
    for command in ("check", "bounds"):
        assert "batch-size" in bad(command, "-m", folder("text"), "-d", path, "-b", "auto", "--no-progress")
    own_module(tmp_path, monkeypatch)
    assert "batch-size" in bad("estimate", "-m", "my_own:model", "-d", "my_own:batches", "-o", "f", "-b", 7)


def test_errors_inside_a_function_or_a_model_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(tmp_path, monkeypatch)
    with (tmp_path / "my_own.py").open("a") as file:
        file.write("def wide():\n    return [torch.zeros(2, 7)]\ndef broken():\n    return {}['boom']\n")
    for data, said in (("wide", "shapes cannot be multiplied"), ("broken", "KeyError in ")):
        result = run("estimate", "-m", "my_own:model", "-d", f"my_own:{data}", "-o", tmp_path / "f")
        lines = [line for line in result.output.splitlines() if line.startswith("Error: ")]
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)  # no traceback
        assert len(lines) == 1
        assert said in lines[0]
        assert "NEUROMANIFOLD_TRACEBACK=1" in lines[0]
    monkeypatch.setenv("NEUROMANIFOLD_TRACEBACK", "1")
    result = run("estimate", "-m", "my_own:model", "-d", "my_own:broken", "-o", tmp_path / "f")
    assert isinstance(result.exception, KeyError)


def test_show_knows_all_that_commands_write(folder: Folder, tmp_path: Path) -> None:
    path, out = reviews(tmp_path / "r.csv"), tmp_path / "bounds.safetensors"
    good("bounds", "-m", folder("text"), "-d", path, "-b", 5, "-n", 1, "--no-progress", "-o", out)
    assert "Prop. 5" in good("show", out)
    assert "diagonal" in bad("report", out, "-o", tmp_path / "p.html")


def test_help_fits_a_narrow_terminal() -> None:
    from typer.testing import CliRunner

    from neuromanifold.cli.app import app

    said = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, ["estimate", "--help"]).output
    assert "--checkpoint-every" in said
    assert "…" not in said


def test_an_adapter_and_a_processor_are_named_as_such(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = reviews(tmp_path / "r.csv")
    common = ["estimate", "-m", folder("text"), "-d", path, "-o", tmp_path / "f"]
    assert "`processor`" in bad(*common, "--processor", "no/such")


def test_each_pattern_matches_something(folder: Folder, tmp_path: Path) -> None:
    common = ["estimate", "-m", folder("text"), "-d", reviews(tmp_path / "r.csv"), "-o", tmp_path / "f"]
    assert "bert.poler.*" in bad(*common, "-p", "classifier.*", "-p", "bert.poler.*")


def test_a_damaged_adapter_is_not_taken_for_a_damaged_model(folder: Folder, tmp_path: Path) -> None:
    save_adapter(folder("headless"), tmp_path / "lora")
    weights = tmp_path / "lora" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    options = ["--adapter", tmp_path / "lora", "--task", "text", "--classes", 3]
    said = bad("estimate", "-m", folder("headless"), "-d", reviews(tmp_path / "r.csv"), "-o", tmp_path / "f", *options)
    assert said.startswith("Error: `adapter`")
