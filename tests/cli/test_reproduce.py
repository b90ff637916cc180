"""`neuromanifold reproduce` from end to end, on tiny local models and files: text, pairs, images and sound."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import neuromanifold as nm
from neuromanifold.diagnostics.runs import EPSILON
from neuromanifold.experiments.paper import figures
from neuromanifold.experiments.paper.columns import COLUMNS, EXACT, curve
from neuromanifold.experiments.paper.tasks import TASKS
from neuromanifold.hf import load_data, load_model
from tests.cli.commands import Folder, bad, good, own_module, run, write_data
from tests.cli.test_estimate import by_definition

pytestmark = pytest.mark.filterwarnings("default::neuromanifold.SlowPathWarning")  # normalised weights

KINDS = {"text": "sst2", "pairs": "mnli", "headless": "dbpedia", "image": "resnet50", "audio": "speech"}  # and tasks
COUNT = 5  # rows
SIZES = ["--batches", 3, "--batch-size", 2, "--dtype", "float64", "--device", "cpu"]


def not_drawn(patch: pytest.MonkeyPatch) -> None:
    """Figures are empty files: to write them takes as long as all the rest."""
    patch.setattr(figures, "save_figure", lambda _, path: path.touch())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    not_drawn(monkeypatch)


class Finished:
    """A task that has been run."""

    def __init__(self, kind: str, model: Path, folder: Path) -> None:
        self.task, self.model, self.out = KINDS[kind], model, folder / "out"
        self.data, self.options = write_data("text" if kind == "headless" else kind, folder, COUNT + COUNT % 2)
        rounds = 1 if kind == "text" else 0
        self.command = ["reproduce", self.task, "-m", model, "-d", self.data, *self.options, *SIZES, "-o", self.out]
        with pytest.MonkeyPatch.context() as patch:
            if kind != "text":
                not_drawn(patch)
            self.said = good(*self.command, "--rounds", rounds)

    def numbers(self, key: str) -> dict[str, Any]:
        return json.loads((self.out / self.task / f"{key}.json").read_text())

    def diagonal(self, key: str) -> nm.DiagonalFisher:
        found = nm.load(self.out / self.task / f"{key}.safetensors")
        assert isinstance(found, nm.DiagonalFisher)
        return found


@pytest.fixture(scope="module")
def finished(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(kind: str) -> Finished:
        return Finished(kind, folder("text" if kind == "pairs" else kind), tmp_path_factory.mktemp(kind))

    return make


@pytest.mark.usefixtures("undrawn")
def test_the_curve_can_end_early_and_be_continued_later(folder: Folder, tmp_path: Path) -> None:
    data, options = write_data("text", tmp_path, 4)
    out = tmp_path / "out"
    command = ["reproduce", "dbpedia", "-m", folder("headless"), "-d", data, *options, *SIZES, "-o", out, "--rounds", 0]

    def along() -> set[str]:
        return {path.stem for path in (out / "dbpedia").glob("probes_*.json")}

    good(*command, "--most-probes", 4)
    assert along() == {"probes_2", "probes_4"}
    assert "11 of 13 estimators were finished before" in good(*command)
    assert along() == {"probes_2", "probes_4", "probes_8", "probes_13"}


@pytest.mark.parametrize(
    "kind", [kind if kind in ("text", "image") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_column_is_finished_and_every_file_is_there(finished: Any, kind: str) -> None:
    done = finished(kind)
    classes = 2 if kind in ("text", "pairs") else TASKS[done.task].classes
    keys = [column.key for column in (EXACT, *COLUMNS, *curve(classes)[1:])]
    names = {path.name for path in (done.out / done.task).iterdir()}
    expected = {f"{key}.json" for key in keys} | {f"{column.key}.safetensors" for column in (EXACT, *COLUMNS)}
    expected |= {f"{name}.{kind}" for name in ("histograms", "passes") for kind in ("png", "pdf")}
    expected |= {"rows.json", "facts.json", *(["speed.json"] if kind == "text" else [])}
    assert names == expected  # and no checkpoint
    assert {path.name for path in done.out.iterdir()} == {
        "settings.json",
        "table.txt",
        "table.csv",
        "table.tex",
        done.task,
    }
    settings = json.loads((done.out / "settings.json").read_text())
    assert settings["settings"] == {"batches": 3, "batch_size": 2, "dtype": "float64", "device": "cpu", "seed": 0}
    assert settings["tasks"][done.task]["classes"] == classes
    assert settings["versions"]["torch"] == torch.__version__
    assert (done.out / "table.txt").read_text().strip() in done.said
    assert TASKS[done.task].row in done.said


@pytest.mark.parametrize("kind", ["text", "image", "audio"])
def test_the_exact_diagonal_is_the_definition(finished: Any, kind: str) -> None:
    done = finished(kind)
    exact = done.diagonal("exact")
    task = TASKS[done.task]
    classes = None if task.fine_tuned else task.classes
    source = done.model
    if classes is not None:  # the classifier that was drawn, in a folder of its own
        source = done.out.parent / "drawn"
        drawn = load_model(str(done.model), classes=classes, dtype="float64", device="cpu")
        drawn.module.save_pretrained(source)
    model = load_model(str(done.model), classes=classes, dtype="float64", device="cpu")
    data = load_data(str(done.data), model, labels=False, batch_size=2, batches=3, seed=0)
    expected, count = by_definition(source, list(data))  # type: ignore[arg-type]
    assert exact.count == count == len(done.numbers("rows")["rows"])
    for name, value in expected.items():
        torch.testing.assert_close(exact.sums[name].double(), value, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", ["text", "pairs", "headless"])
def test_columns_are_the_estimators_and_their_errors_are_those_of_the_paper(finished: Any, kind: str) -> None:
    done = finished(kind)
    task = TASKS[done.task]
    classes = None if task.fine_tuned else task.classes
    model = load_model(str(done.model), task="text", classes=classes, dtype="float64", device="cpu")
    columns = done.options[1] if done.options else None
    data = load_data(str(done.data), model, columns=columns, labels=True, batch_size=2, batches=3, seed=0)
    exact = done.diagonal("exact")
    for column in COLUMNS:
        found, numbers = done.diagonal(column.key), done.numbers(column.key)
        expected = nm.fisher_diagonal(model.module, data, column.estimator, granularity=column.granularity, seed=0)
        assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)
        a, b = (torch.cat([one.sums[name].flatten().double() for name in exact]) for one in (found, exact))
        assert numbers["errors"]["all"]["relmae"] == pytest.approx(((a - b).abs() / (b + EPSILON)).mean().item())
        assert numbers["errors"]["all"]["mae"] == pytest.approx((a - b).abs().mean().item())
        embeddings = [name for name in exact if "_embeddings." in name]
        rest = [name for name in exact if name not in embeddings]
        for group, names in (("embeddings", embeddings), ("rest", rest)):
            a, b = (torch.cat([one.sums[name].flatten().double() for name in names]) for one in (found, exact))
            assert numbers["errors"][group]["relmae"] == pytest.approx(((a - b).abs() / (b + EPSILON)).mean().item())


@pytest.mark.parametrize("kind", KINDS)
def test_more_probes_end_in_the_exact_diagonal(finished: Any, kind: str) -> None:
    done = finished(kind)
    classes = json.loads((done.out / "settings.json").read_text())["tasks"][done.task]["classes"]
    along = [done.numbers(column.key) for column in curve(classes)]
    assert [numbers["passes"] for numbers in along] == [m for m in (1, 2, 4, 8, 16, 32, 64) if m < classes - 1] + [
        classes - 1
    ]
    assert along[-1]["without_rule"] == []
    assert along[-1]["errors"]["all"]["relmae"] < 1e-6
    assert "for want of a rule" not in done.said
    if classes > 2:
        assert along[0]["errors"]["all"]["relmae"] > 0.01


def test_tables_hold_the_numbers_and_the_papers(finished: Any) -> None:
    done = finished("text")
    rows = list(csv.DictReader((done.out / "table.csv").read_text().splitlines()))
    assert {row["group"] for row in rows} == {"all", "rest", "embeddings"}
    for column in COLUMNS:
        row = next(row for row in rows if row["column"] == column.key and row["group"] == "all")
        assert float(row["relmae"]) == done.numbers(column.key)["errors"]["all"]["relmae"]
        assert float(row["rank_correlation"]) <= 1 + 1e-9
        seconds = done.numbers("speed")["seconds"]
        assert float(row["speed"]) == pytest.approx(seconds["squared_batch_gradient"] / seconds[column.key])
    upper = next(row for row in rows if row["column"] == "upper_per_batch")
    assert (float(upper["paper_relmae"]), float(upper["paper_speed"])) == (341, 1.07)
    text, latex = ((done.out / f"table.{kind}").read_text() for kind in ("txt", "tex"))
    assert "341 ×1.07" in text
    assert "SST-2 *" in text  # not the paper's own network
    assert latex.count(r"\\") == 5  # two heads, all, all but embeddings, the paper
    assert r"\mathbf{0}" in latex  # deflated, two classes
    assert latex.count("{") == latex.count("}")


def test_a_rerun_does_nothing_again_and_gives_the_same_table(finished: Any) -> None:
    done = finished("text")
    before = {path: path.stat().st_mtime_ns for path in (done.out / "sst2").glob("*.json")}
    said = good(*done.command)
    assert "9 of 9 estimators were finished before" in said
    assert {path: path.stat().st_mtime_ns for path in (done.out / "sst2").glob("*.json")} == before
    table = (done.out / "table.txt").read_text().strip()
    assert table in said
    assert table in done.said


def test_other_settings_in_the_same_folder_are_refused(finished: Any, tmp_path: Path) -> None:
    done = finished("text")
    assert "other settings: batches (3, now 4)" in bad(*done.command, "--batches", 4)
    assert "other settings: seed (0, now 1)" in bad(*done.command, "--seed", 1)
    other, _ = write_data("text", tmp_path, 8)
    command = [other if part == done.data else part for part in done.command]
    assert "other settings of sst2: source" in bad(*command)
    shutil.copytree(done.out, tmp_path / "out")
    copy = [tmp_path / "out" if part == done.out else part for part in done.command]
    changed = Path(shutil.copy(done.data, tmp_path / "kept.csv"))
    said = bad(*[changed if part == done.data else part for part in copy])
    assert "Give another folder with --out" in said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "an empty folder" in bad(*done.command[:-1], tmp_path / "mine")
    foreign = {"format": "neuromanifold", "version": 1, "kind": "trace"}
    (tmp_path / "mine" / "settings.json").write_text(json.dumps(foreign))
    assert "another settings.json" in bad(*done.command[:-1], tmp_path / "mine")
    assert "is a file; name a folder to write to" in bad(*done.command[:-1], done.data)


def test_weights_that_have_changed_are_noticed(finished: Any, folder: Folder) -> None:
    done = finished("text")
    model = load_model(str(folder("text")), device="cpu").module
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    before = {path: path.read_bytes() for path in folder("text").iterdir()}
    try:
        model.save_pretrained(folder("text"))
        assert "other settings of sst2: weights" in bad(*done.command)
    finally:
        for path, contents in before.items():
            path.write_bytes(contents)


@pytest.mark.slow
def test_a_run_that_is_killed_resumes(finished: Any, tmp_path: Path) -> None:
    done, out = finished("image"), tmp_path / "out"
    command = [out if part == done.out else part for part in done.command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start_and_send(which: signal.Signals, once: str) -> tuple[int, str]:
        arguments = [sys.executable, "-m", "neuromanifold", *map(str, command), "--rounds", "0"]
        process = subprocess.Popen(
            arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        while not (out / "resnet50" / once).exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(which)
        return process.wait(), process.communicate()[1]

    assert start_and_send(signal.SIGKILL, "exact.checkpoint")[0] == -signal.SIGKILL
    assert not (out / "resnet50" / "deflated.json").exists()
    code, said = start_and_send(signal.SIGINT, "empirical.json")
    assert code == 130, said
    assert "the same command resumes there" in said
    assert not (out / "resnet50" / "probes_99.json").exists()
    before = (out / "resnet50" / "exact.json").stat().st_mtime_ns
    said = good(*command, "--rounds", 0)
    assert "were finished before" in said
    assert (out / "resnet50" / "exact.json").stat().st_mtime_ns == before
    for column in (EXACT, *COLUMNS, *curve(100)[1:]):
        a, b = (json.loads((one / "resnet50" / f"{column.key}.json").read_text()) for one in (out, done.out))
        assert a["errors"].keys() == b["errors"].keys()
        for group, errors in a["errors"].items():  # sums over all entries may be rounded otherwise in another process
            assert errors == pytest.approx(b["errors"][group], rel=1e-9)
        assert a["passes"] == b["passes"]
    assert not list((out / "resnet50").glob("*.checkpoint"))


@pytest.mark.usefixtures("undrawn")
def test_in_batches_of_one_batches_are_samples(folder: Folder, tmp_path: Path) -> None:
    path, _ = write_data("text", tmp_path, 4)
    out, sizes = tmp_path / "out", ["-n", 3, "-b", 1, "--device", "cpu", "--rounds", 0, "--dtype", "float64"]
    good("reproduce", "sst2", "-m", folder("text"), "-d", path, *sizes, "-o", out)
    pairs = (("squared_batch_gradient", "empirical"), ("lower_per_batch", "exact"))  # of two classes, one eigenvalue
    found = {key: nm.load(out / "sst2" / f"{key}.safetensors") for pair in pairs for key in pair}
    for a, b in pairs:
        for name, value in found[a].sums.items():  # type: ignore[union-attr]
            torch.testing.assert_close(value, found[b].sums[name], rtol=1e-6, atol=1e-12)  # type: ignore[union-attr]
    upper = json.loads((out / "sst2" / "upper_per_batch.json").read_text())["errors"]["all"]
    assert upper["mean_ratio"] > 1


# -------------------------------------------------------------------------------------------------------- labels


@pytest.mark.usefixtures("undrawn")
def test_a_few_rows_without_a_class_are_left_out(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "".join(f"good film {i},{-1 if i == 3 else i % 2}\n" for i in range(8)))
    out = tmp_path / "out"
    sizes = ["--batches", 2, "--batch-size", 4, "--device", "cpu", "--rounds", 0]
    good("reproduce", "sst2", "-m", folder("text"), "-d", path, *sizes, "-o", out)
    rows = json.loads((out / "sst2" / "rows.json").read_text())
    assert (sorted(rows["rows"]), rows["labelled"], rows["left_out"]) == ([0, 1, 2, 4, 5, 6, 7], True, 1)
    assert "1 without a usable label left out" in (out / "table.txt").read_text()
    assert nm.load(out / "sst2" / "exact.safetensors").count == 7  # type: ignore[union-attr]


@pytest.mark.usefixtures("undrawn")
def test_where_most_rows_have_no_class_the_columns_that_need_one_stay_empty(folder: Folder, tmp_path: Path) -> None:
    audio = np.random.default_rng(0).normal(size=(5, 800)).astype(np.float32)
    np.savez(tmp_path / "s.npz", audio=audio, labels=np.array([2, -1, -1, 1, -1]))
    out = tmp_path / "out"
    sizes = ["--batches", 2, "--batch-size", 3, "--device", "cpu", "--exact-only", "--rounds", 1]
    said = good("reproduce", "speech", "-m", folder("audio"), "-d", tmp_path / "s.npz", *sizes, "-o", out)
    assert "3 of 5 rows have no label of the 12 classes, so columns that need labels stay empty" in said
    names = {path.name for path in (out / "speech").iterdir()}
    assert "squared_batch_gradient.json" not in names
    assert "empirical.json" not in names
    assert "deflated.json" in names
    assert {name for name in names if name.endswith("safetensors")} == {"exact.safetensors"}  # --exact-only
    speed = json.loads((out / "speech" / "speed.json").read_text())
    assert speed["seconds"]["squared_batch_gradient"] > 0  # what speeds are relative to all the same
    assert nm.load(out / "speech" / "exact.safetensors").count == 5  # type: ignore[union-attr]
    row = next(line for line in (out / "table.txt").read_text().splitlines() if line.startswith("SpeechCommands"))
    assert row.split()[2:4] == ["-", "-"]
    assert " & -- & -- & " in (out / "table.tex").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_folder_of_words_has_the_classes_of_the_task(folder: Folder, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="needs neuromanifold[hf]")
    for i, word in enumerate(("yes", "bed", "up", "up", "_unknown_")):
        (tmp_path / "clips" / word).mkdir(parents=True, exist_ok=True)
        clip = np.random.default_rng(i).normal(size=700) / 9
        soundfile.write(tmp_path / "clips" / word / f"{i}.wav", clip, 16000)
    out, sizes = tmp_path / "out", ["--batches", 2, "--batch-size", 2, "--device", "cpu", "--rounds", 0, "--exact-only"]
    good("reproduce", "speech", "-m", folder("audio"), "-d", tmp_path / "clips", *sizes, "-o", out)
    rows = json.loads((out / "speech" / "rows.json").read_text())
    assert (rows["labelled"], rows["left_out"], sorted(rows["rows"])) == (
        True,
        1,
        [0, 2, 3, 4],
    )  # in order: _, bed, ...
    model = load_model(str(folder("audio")), task="audio", classes=12, device="cpu")
    model.class_names.update(TASKS["speech"].class_names)
    data = load_data(str(tmp_path / "clips"), model, labels=True, batch_size=5)
    assert [data.collate([row])["labels"].tolist() for row in (0, 2, 3, 4)] == [[11], [2], [2], [0]]


# ----------------------------------------------------------------------------------------------------- bad input


def test_a_hub_that_is_not_there_is_answered_with_how_to_use_local_copies(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "neuromanifold", "reproduce", "mnli", "-o", str(tmp_path / "out")]
    result = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    said = result.stderr.strip()
    assert said.startswith("Error: Task mnli: `model`: 'textattack/roberta-base-MNLI' is no local path")
    assert said.endswith("For local copies: neuromanifold reproduce mnli --model FOLDER --data FILE.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sst3"], "`task` must be one of sst2, dbpedia, mnli, resnet50, efficientnet, speech, got 'sst3'"),
        (["sst2", "-m", "./missing"], "Task sst2: `model` must be a folder that exists"),
        (["sst2", "-m", "."], "Task sst2: `model` must be a folder with config.json and *.safetensors"),
        (["sst2", "-m", "MODEL", "-d", "missing.csv"], "There is no missing.csv"),
        (
            ["sst2", "-m", "MODEL", "-d", "body.csv"],
            "No text column found in body.csv (columns: id, body, label). Name it with --columns text=id.",
        ),
        (["sst2", "-m", "MODEL", "-d", "nolabel.csv"], "No label column found in nolabel.csv"),
        (
            ["sst2", "-m", "MODEL", "-d", "body.csv", "--columns", "text=review"],
            "No column 'review' found in body.csv (columns: id, body, label).",
        ),
        (["sst2", "-m", "MODEL", "-d", "arrays.npz"], "No text column found in arrays.npz"),
        (["sst2", "-m", "my_own:model"], "is a function; here it must be a folder"),
        (["sst2", "-m", "MODEL", "-d", "my_own:batches"], "is a function; here it must be a file"),
        (["sst2", "mnli", "-m", "MODEL"], "`model` must be TASK="),
        (["sst2", "-m", "mnli=MODEL"], "for one of the tasks sst2"),
        (["sst2", "-m", "sst2=a", "-m", "b"], "given once for sst2, got 'a' and 'b'"),
        (["sst2", "mnli", "--columns", "text=a"], "left out with several tasks"),
        (["sst2", "--device", "abacus"], "auto, cpu, cuda"),
        (["sst2", "-m", "MODEL", "--dtype", "int8"], "one of float32"),
    ],
)
def test_bad_options_are_one_clear_line(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    own_module(tmp_path, monkeypatch)
    (tmp_path / "body.csv").write_text("id,body,label\n1,good,0\n")
    (tmp_path / "nolabel.csv").write_text("text\ngood\n")
    np.savez(tmp_path / "arrays.npz", inputs=np.zeros((2, 2)))
    given = [part.replace("MODEL", str(folder("text"))) for part in arguments]
    assert said in bad("reproduce", *given, "-o", tmp_path / "out")
    assert not list(tmp_path.glob("out/*/*"))


def test_a_run_that_could_not_begin_leaves_nothing_behind(tmp_path: Path) -> None:
    common = ["reproduce", "sst2", "-m", tmp_path / "missing", "-o", tmp_path / "out"]
    assert "a folder that exists" in bad(*common, "--batches", 3)
    assert "a folder that exists" in bad(*common, "--batches", 4)  # other settings
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["model", "data"])
def test_sources_of_all_tasks_are_checked_before_the_first_is_loaded(
    folder: Folder, tmp_path: Path, wrong: str
) -> None:
    path, _ = write_data("text", tmp_path)
    first = ["-m", f"sst2={folder('text')}", "-d", f"sst2={path}"]
    second = {"model": folder("text"), "data": path, wrong: tmp_path / "missing.csv"}
    given = [*first, "-m", f"mnli={second['model']}", "-d", f"mnli={second['data']}"]
    said = bad("reproduce", "sst2", "mnli", *given, "-o", tmp_path / "out")
    assert said.startswith("Error: Task mnli: ")
    assert "There is no" in said
    assert not (tmp_path / "out").exists()


def test_too_little_room_is_said_before_the_run(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_data("text", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    said = bad("reproduce", "sst2", "-m", folder("text"), "-d", path, "-o", tmp_path / "out")
    assert "--exact-only" in said


def test_without_matplotlib_all_but_the_plots_is_made(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = finished("text")
    out = shutil.copytree(done.out, tmp_path / "out")
    for path in (out / "sst2").glob("*.p*"):
        path.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = [out if part == done.out else part for part in done.command]
    assert "pip install 'neuromanifold[plots]'" in good(*command)
    assert not list((out / "sst2").glob("*.p*"))
    monkeypatch.undo()
    good(*command)
    assert len(list((out / "sst2").glob("*.p*"))) == 4


def test_the_help_names_tasks_and_options() -> None:
    said = run("reproduce", "--help").output
    for word in (*TASKS, "--model", "--data", "--columns", "--batches", "--batch-size", "--dtype", "--device", "--out"):
        assert word in said
