"""`neuromanifold estimate` from end to end, on local models and files."""

import dataclasses
import random
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.hf import load_data, load_model
from neuromanifold.reference.network import reference_diagonal
from tests import forked
from tests.cli.commands import Folder, bad, good, own_module, run, write_data
from tests.hf.tiny import save_adapter, sentences, write_jsonl

KINDS = ("text", "decoder text", "pairs", "tokens", "masked", "causal", "image", "audio")


def model_of(kind: str) -> str:
    return "text" if kind == "pairs" else kind


def by_definition(folder: Path, data: list[dict[str, Tensor]], kind: str = "") -> tuple[dict[str, Tensor], int]:
    """Σ_x F(x) of the positions that count, from one gradient for each output; and how many samples count."""
    model = load_model(str(folder), dtype="float64", device="cpu").module

    def forward(module: nn.Module) -> Tensor:
        rows = []
        for batch in data:
            inputs = {name: v.double() if v.is_floating_point() else v for name, v in batch.items() if name != "labels"}
            logits = module(**inputs).logits
            counts = torch.ones(logits.shape[:-1], dtype=torch.bool)
            if logits.ndim == 3:
                counts = inputs["attention_mask"].bool()
                if kind == "causal":  # position t predicts token t + 1
                    counts, logits = counts[:, 1:] & counts[:, :-1] & (batch["labels"][:, 1:] != -100), logits[:, :-1]
                elif "labels" in batch:
                    counts = counts & (batch["labels"] != -100)
            rows.append(logits[counts])
        return torch.cat(rows)

    return reference_diagonal(model, forward), sum(len(next(iter(batch.values()))) for batch in data)


@pytest.mark.filterwarnings("default::neuromanifold.SlowPathWarning")  # normalised weights of a convolution
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_the_fisher_information(folder: Folder, tmp_path: Path, kind: str) -> None:
    source = folder(model_of(kind))
    path, options = write_data(kind, tmp_path, 4)
    out = tmp_path / "fim.safetensors"
    common = ["-m", source, "-d", path, "-o", out, "-b", 3, "--device", "cpu", *options]
    said = good("estimate", *common, "-e", "exact", "--dtype", "float64")
    assert str(out) in said.replace("\n", "")
    found = nm.load(out)
    assert isinstance(found, nm.DiagonalFisher)
    given = dict(zip(options[::2], options[1::2], strict=True))
    data = load_data(
        str(path),
        load_model(str(source), dtype="float64", device="cpu"),
        columns=given.get("--columns"),
        max_length=given.get("--max-length"),
        mask=given.get("--mask", 0.15),
        labels=False,
        batch_size=3,  # the group norm of a sound model looks at the padding of a batch
    )
    expected, count = by_definition(source, list(data), kind)  # type: ignore[arg-type]
    assert found.count == count
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found.sums[name].double(), value, rtol=1e-5, atol=1e-7)
    assert str(source) in found.provenance.model
    assert path.name in found.provenance.data


def test_options_reach_the_estimate(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path, 12)
    out = tmp_path / "fim.safetensors"
    options = ["-b", 2, "--batches", 4, "--seed", 5, "-p", "classifier.*", "-p", "*.query.*", "--granularity", "batch"]
    good("estimate", "-m", folder("text"), "-d", path, "-o", out, *options, "-e", "Hutchinson(probes=2)")
    found = nm.load(out)
    loaded = load_model(str(folder("text")), device="cpu")
    expected = nm.fisher_diagonal(
        loaded.module,
        load_data(str(path), loaded, batch_size=2, batches=4, seed=5, labels=False),
        estimator=nm.Hutchinson(probes=2),
        parameters=["classifier.*", "*.query.*"],
        granularity="batch",
        seed=5,
    )
    assert isinstance(found, nm.DiagonalFisher)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    good("estimate", "-m", folder("text"), "-d", path, "-o", out, *options, "--noise-seed", 6)
    other = nm.load(out)
    assert isinstance(other, nm.DiagonalFisher)
    assert other.provenance.seeds == [6]
    assert other.provenance.data == found.provenance.data


def test_passes_and_what_they_leave_out(folder: Folder, tmp_path: Path) -> None:
    """As many as from Python, said in the terminal and on the page."""
    path, _ = write_data("text", tmp_path, 12)
    out, page = tmp_path / "fim.safetensors", tmp_path / "page.html"
    said = good("estimate", "-m", folder("text"), "-d", path, "-o", out, "-b", 4, "--passes", 0.5)
    found = nm.load(out)
    assert isinstance(found, nm.DiagonalFisher)
    about = found.provenance
    assert (about.estimator, about.target) == ("Adaptive(cost=0.5, window=16)", "unbiased")
    assert 0 < about.left_out < found.count == 12
    sentence = f"{about.left_out} of these samples, for which others have larger weights"
    assert sentence in " ".join(said.split())
    good("report", out, "-o", page)
    assert sentence in page.read_text()
    said = good("estimate", "-m", folder("text"), "-d", path, "-o", out, "-b", 4)
    assert "left out" not in said


def test_a_relative_error_ends_the_run(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("image", tmp_path, 6)
    out = tmp_path / "fim.safetensors"
    said = good("estimate", "-m", folder("image"), "-d", path, "-o", out, "-b", 1, "--rtol", 10)
    assert "stopped after 1 batches" in said


def test_empirical_estimates_read_labels(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path)
    out = tmp_path / "fim.safetensors"
    good("estimate", "-m", folder("text"), "-d", path, "-o", out, "-e", "Empirical")
    path.write_text("text,label\ngood,7\n")
    good("estimate", "-m", folder("text"), "-d", path, "-o", out)  # nobody looks at labels
    out.unlink()
    said = bad("estimate", "-m", folder("text"), "-d", path, "-o", out, "-e", "Empirical")
    assert "`labels` must be between 0 and 1, as the model has 2 classes, got 7 in row 0" in said
    assert not out.exists()


def test_a_fresh_classifier(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path)
    out = tmp_path / "fim.safetensors"
    common = ["estimate", "-m", folder("headless"), "-d", path, "-o", out, "--task", "text"]
    assert "--classes N" in bad(*common)
    good(*common, "--classes", 4)
    found = nm.load(out)
    assert isinstance(found, nm.DiagonalFisher)
    assert found["classifier.weight"].shape == (4, 16)
    assert "classifier initialized with seed 0" in found.provenance.model


def test_an_adapter_has_a_fisher_information_of_its_own(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path)
    adapted = save_adapter(folder("headless"), tmp_path / "adapter")
    out = tmp_path / "fim.safetensors"
    options = ["--task", "text", "--classes", 3, "--adapter", tmp_path / "adapter", "-e", "Exact"]
    good("estimate", "-m", folder("headless"), "-d", path, "-o", out, *options)
    found = nm.load(out)
    assert isinstance(found, nm.DiagonalFisher)
    assert set(found) == {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    loaded = load_model(str(folder("headless")), "text", classes=3, device="cpu")
    expected = nm.fisher_diagonal(adapted, load_data(str(path), loaded, labels=False), nm.Exact())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-8)


# ----------------------------------------------------------------------------------- parts, interruptions, resuming


def test_two_shards_combined_equal_one_run(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path, 14)
    common = ["estimate", "-m", folder("text"), "-d", path, "-b", 2]
    for shard in ("0/2", "1/2"):
        good(*common, "--shard", shard, "-o", tmp_path / f"{shard[0]}.safetensors")
    good(*common, "-o", tmp_path / "one.safetensors")
    parts = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    said = good("combine", *parts, "-o", tmp_path / "both.safetensors")
    assert "Note:" not in said  # their noise is not shared
    one, both = (nm.load(tmp_path / f"{name}.safetensors") for name in ("one", "both"))
    assert isinstance(one, nm.DiagonalFisher)
    assert isinstance(both, nm.DiagonalFisher)
    assert (one.count, one.provenance.batches) == (both.count, both.provenance.batches) == (14, 7)
    for name in one:
        torch.testing.assert_close(both.sums[name], one.sums[name], rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(both.noise[name], one.noise[name], rtol=1e-4, atol=1e-8)
    assert "twice" in bad("combine", parts[0], parts[0], "-o", tmp_path / "both.safetensors")


def test_ctrl_c_keeps_what_was_done_and_a_rerun_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(tmp_path, monkeypatch)
    common = ["estimate", "-m", "my_own:model", "-d", "my_own:interrupted"]
    good(*common, "-o", "whole.safetensors")
    (tmp_path / "interrupt").touch()
    result = run(*common, "-o", "part.safetensors", "--checkpoint", "state.safetensors")
    assert result.exit_code == 130, result.output
    assert "run the same command again" in result.output
    part = nm.load("part.safetensors")
    assert isinstance(part, nm.DiagonalFisher)
    assert 3 <= part.provenance.batches < 8
    assert part.provenance.stopped.startswith("interrupted after")
    good(*common, "-o", "part.safetensors", "--checkpoint", "state.safetensors")
    assert not (tmp_path / "state.safetensors").exists()
    assert_same_result(tmp_path / "whole.safetensors", tmp_path / "part.safetensors")


def assert_same_result(whole: Path, resumed: Path) -> None:
    """Bit for bit the same, but for how often gradients were verified: a resumed run does that anew."""
    a, b = (nm.load(path) for path in (whole, resumed))
    assert dataclasses.replace(b.provenance, verified=a.provenance.verified) == a.provenance
    assert all(torch.equal(a.sums[name], b.sums[name]) for name in a)
    assert all(torch.equal(a.noise[name], b.noise[name]) for name in a)


def test_a_run_that_was_killed_goes_on_to_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(tmp_path, monkeypatch)
    common = ["estimate", "-m", "my_own:model", "-d", "my_own:killed"]
    good(*common, "-o", "whole.safetensors")
    (tmp_path / "kill").touch()
    keeping = ["-o", "fim.safetensors", "--checkpoint", "state.safetensors", "--checkpoint-every", "0"]
    assert forked.run(forked.command(*common, *keeping)).returncode == -9
    assert not (tmp_path / "fim.safetensors").exists()
    assert (tmp_path / "state.safetensors").exists()
    good(*common, *keeping)
    assert_same_result(tmp_path / "whole.safetensors", tmp_path / "fim.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_times_many_times_the_file_is_the_same(folder: Folder, tmp_path: Path, seed: int) -> None:
    """Each run is given a little longer than the one before, so that some are killed early and the last one ends."""
    path, _ = write_data("text", tmp_path)
    common = ["estimate", "-m", folder("text"), "-d", path, "-b", "1", "--seed", seed]
    good(*common, "-o", tmp_path / "whole")
    keeping = ["-o", tmp_path / "fim", "--checkpoint", tmp_path / "state", "--checkpoint-every", "0"]
    command = [sys.executable, "-m", "neuromanifold", *map(str, [*common, *keeping])]
    draw, kills = random.Random(seed), 0
    while not (tmp_path / "fim").exists():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(1.0, 4.0) + 0.2 * kills)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    assert kills
    assert_same_result(tmp_path / "whole", tmp_path / "fim")
    assert {entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")} == set()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(tmp_path, monkeypatch)
    (tmp_path / "interrupt").touch()
    common = ["estimate", "-m", "my_own:model", "-d", "my_own:interrupted", "-o", "fim.safetensors"]
    assert run(*common, "--checkpoint", "state.safetensors").exit_code == 130
    assert "differs in seed" in bad(*common, "--checkpoint", "state.safetensors", "--seed", 1)


def test_a_disk_that_is_full_leaves_nothing_half_written(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path)
    model, out = folder("text"), tmp_path / "out" / "fim.safetensors"
    out.parent.mkdir()

    def estimate() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        forked.command("estimate", "-m", model, "-d", path, "-o", out)()

    result = forked.run(estimate)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert list(out.parent.iterdir()) == []


def test_too_little_room_is_said_before_the_run(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    path, _ = write_data("text", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    taken = {}
    for bars in ("entries", "rows", "none"):
        common = ("estimate", "-m", folder("text"), "-d", path, "-o", tmp_path / "fim.safetensors")
        said = " ".join(bad(*common, "--error-bars", bars).split())
        assert "Make room" in said
        taken[bars] = float(re.findall(r"takes ([\d.]+) kB", said)[0])
    assert taken["rows"] == taken["none"] == pytest.approx(taken["entries"] / 2, rel=0.02)


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-d", "missing.csv"], "There is no missing.csv"),
        (["-m", "./missing"], "There is no missing"),
        (["-m", "my_own:nothing"], "has no 'nothing'"),
        (["-d", "my_own:unlabelled"], "NaN"),
        (["-o", "no/folder/fim.safetensors"], "make it first"),
        (["-e", "Hutchinson(probe=2)"], "unexpected keyword argument"),
        (["-e", "__import__('os')"], "one of Hutchinson, Adaptive, Exact"),
        (["-e", "Upper"], "one of Hutchinson, Adaptive, Exact"),
        (["-e", "guess"], "one of Hutchinson, Adaptive, Exact"),
        (["--shard", "2/2"], "I from 0 to N-1"),
        (["--granularity", "token"], "auto, sample or batch"),
        (["--likelihood", "poisson"], "one of categorical"),
        (["--rtol", "-1"], "a number > 0"),
        (["-b", "many"], "a number of rows, or auto"),
        (["-p", "nothing.*"], "a selection that matches something"),
        (["--columns", "text=a"], "roles among label"),
        (["-e", "Empirical"], "`labels` must be given"),
        (["--device", "abacus"], "auto, cpu, cuda"),
    ],
)
def test_bad_options_are_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    own_module(tmp_path, monkeypatch)
    (tmp_path / "table.csv").write_text("a,label\n1,0\n")
    given = {"-m": "my_own:model", "-d": "table.csv" if "--columns" in options else "my_own:batches"}
    given |= {"-o": "fim.safetensors", **dict(zip(options[::2], options[1::2], strict=True))}
    assert said in bad("estimate", *(part for pair in given.items() for part in pair))
    assert not (tmp_path / "fim.safetensors").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".fim")]


def test_wrong_columns_are_answered_with_those_present(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,body\n1,good\n")
    common = ["estimate", "-m", folder("text"), "-d", path, "-o", tmp_path / "fim.safetensors"]
    assert "(columns: id, body). Name it with --columns text=id." in bad(*common)
    assert "No column 'review' found in" in bad(*common, "--columns", "text=review")
    good(*common, "--columns", "text=body")


def test_damaged_and_pickled_models(folder: Folder, tmp_path: Path) -> None:
    import shutil

    path, _ = write_data("text", tmp_path)
    copy = shutil.copytree(folder("text"), tmp_path / "copy")
    whole = (copy / "model.safetensors").read_bytes()
    common = ["estimate", "-m", copy, "-d", path, "-o", tmp_path / "fim.safetensors"]
    (copy / "model.safetensors").write_bytes(whole[:-100])
    assert "are damaged" in bad(*common)
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    assert "A pickle can run any code" in bad(*common)


def test_the_help_names_every_option_with_its_default() -> None:
    said = good("estimate", "--help")
    for option in ("--model", "--adapter", "--data", "--columns", "--estimator", "--granularity", "--rtol", "--batches",
                   "--batch-size", "--max-length", "--dtype", "--device", "--parameters", "--seed", "--checkpoint",
                   "--shard"):  # fmt: skip
        assert option in said
    assert "Hutchinson()" in said


@pytest.mark.parametrize("kind", ["LoRA", "prompt"])
def test_an_adapter_of_a_causal_model_from_table_to_page(kind: str, folder: Folder, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs neuromanifold[peft]")
    loaded = load_model(str(folder("causal")), device="cpu")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted = peft.get_peft_model(loaded.module, lora if kind == "LoRA" else prompt)
    adapted.save_pretrained(tmp_path / "adapter")
    words = sentences(6)
    rows = {"prompt": [f"{words[-1]} "] * 5, "completion": list(words[:5])}
    path, out = write_jsonl(tmp_path / "x.jsonl", rows), tmp_path / "f.safetensors"
    options = ["--adapter", tmp_path / "adapter", "--task", "causal", "--data", path, "-e", "Exact"]
    said = good("estimate", "--model", folder("causal"), *options, "-o", out)
    assert "5 sequences, " in said
    assert "shifted by one" in said
    found = nm.load(out)
    assert isinstance(found, nm.DiagonalFisher)
    assert set(found) == {name for name, value in adapted.named_parameters() if value.requires_grad}
    expected = nm.fisher_diagonal(adapted, load_data(str(path), loaded, labels=False), nm.Exact())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-8)
    good("report", out, "-o", tmp_path / "f.html")
    assert "per sequence" in (tmp_path / "f.html").read_text()
