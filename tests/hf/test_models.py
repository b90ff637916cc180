"""Models as they are found, loaded and refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import neuromanifold as nm
from neuromanifold.hf import LoadError, Task, load_data, load_model
from tests.hf.tiny import MODELS, save_adapter

Folder = Callable[[str], Path]
TASKS = {
    "text": "text",
    "decoder text": "text",
    "tokens": "tokens",
    "masked": "masked",
    "causal": "causal",
    "seq2seq": "seq2seq",
}
TASKS |= {"image": "image", "audio": "audio"}


@pytest.mark.parametrize("kind", TASKS)
def test_the_task_is_found_and_the_weights_are_the_files(folder: Folder, kind: str) -> None:
    loaded = load_model(str(folder(kind)), device="cpu")
    assert loaded.task == TASKS[kind]
    assert not loaded.newly_initialized
    assert not loaded.module.training
    from safetensors.torch import load_file

    stored = load_file(folder(kind) / "model.safetensors")
    state = loaded.module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in stored.items())
    assert loaded.classes == {"text": 2, "tokens": 2, "image": 3, "audio": 3}.get(TASKS[kind], 25)


def test_every_task_has_a_model_here() -> None:
    assert set(TASKS.values()) == set(Task)
    assert set(TASKS) | {"headless"} == set(MODELS)


def test_class_names_likelihood_and_precision(folder: Folder) -> None:
    loaded = load_model(str(folder("text")), dtype="float64", device="cpu")
    assert loaded.class_names == {"negative": 0, "positive": 1}
    assert loaded.likelihood is nm.Categorical
    assert next(loaded.module.parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "likelihood"),
    [({"problem_type": "multi_label_classification"}, nm.Bernoulli), ({"problem_type": "regression"}, nm.Gaussian)],
)
def test_the_problem_type_gives_the_likelihood(
    folder: Folder, tmp_path: Path, change: dict[str, str], likelihood: object
) -> None:
    copy = shutil.copytree(folder("text"), tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    assert load_model(str(copy), device="cpu").likelihood is likelihood


def test_a_model_without_a_classifier_is_refused_unless_one_is_asked_for(folder: Folder) -> None:
    source = str(folder("headless"))
    with pytest.raises(LoadError, match=r"classifier or a language model, got BertModel .* --task"):
        load_model(source)
    with pytest.raises(LoadError, match=r"trained classifier, got .* without classifier.bias.* --classes N"):
        load_model(source, task="text")
    with pytest.raises(LoadError, match=r"all weights of BertForMaskedLM"):
        load_model(source, task="masked")
    with pytest.raises(LoadError, match="`classes` must be left out for --task masked"):
        load_model(source, task="masked", classes=3)


def test_a_drawn_classifier_depends_on_the_seed_alone(folder: Folder) -> None:
    before = torch.random.get_rng_state()
    a, b, c = (load_model(str(folder("headless")), "text", classes=5, seed=s, device="cpu") for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert a.newly_initialized == ("classifier.bias", "classifier.weight")
    assert a.classes == 5
    weights = [one.module.classifier.weight for one in (a, b, c)]  # type: ignore[union-attr]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert "seed 1" in a.about


def test_another_number_of_classes_draws_a_new_classifier(folder: Folder) -> None:
    assert load_model(str(folder("text")), classes=4, device="cpu").newly_initialized == (
        "classifier.bias",
        "classifier.weight",
    )
    assert not load_model(str(folder("text")), classes=2, device="cpu").newly_initialized


def test_pickles_are_refused(folder: Folder, tmp_path: Path) -> None:
    copy = shutil.copytree(folder("text"), tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"safetensors, got .*pytorch_model.bin. A pickle can run any code"):
        load_model(str(copy))
    with pytest.raises(LoadError, match="a pickle: "):
        load_model(str(copy / "pytorch_model.bin"))


def test_damaged_weights_are_named(folder: Folder, tmp_path: Path) -> None:
    copy = shutil.copytree(folder("text"), tmp_path / "copy")
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadError, match=r"weights of .* are damaged"):
        load_model(str(copy))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"source": "./nowhere"}, "There is no nowhere"),
        ({"source": "EMPTY"}, "a folder with config.json"),
        ({"source": "TEXT", "task": "translate"}, "one of text, tokens, image"),
        ({"source": "TEXT", "dtype": "int8"}, "one of float32"),
        ({"source": "TEXT", "device": "abacus"}, "auto, cpu, cuda"),
        ({"source": "no_such_module:model"}, "no module 'no_such_module'"),
        ({"source": "torch.nn:NoSuchLayer"}, "torch.nn has no 'NoSuchLayer'"),
        ({"source": "torch:ones_like_no"}, "has no 'ones_like_no'"),
        ({"source": "math:pi"}, "a function that returns a torch.nn.Module, got float"),
        ({"source": "TEXT", "classes": 0}, "`classes` must be between 1"),
    ],
)
def test_bad_arguments(folder: Folder, tmp_path: Path, arguments: dict[str, object], said: str) -> None:
    places = {"EMPTY": str(tmp_path), "TEXT": str(folder("text"))}
    source = str(arguments.pop("source"))
    with pytest.raises(ValueError, match=said):
        load_model(places.get(source, source), **arguments)  # type: ignore[arg-type]


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_file.py").write_text(
        "import torch\ndef model():\n    return torch.nn.Linear(3, 2)\nready = torch.nn.Linear(2, 4).double()\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    loaded = load_model("own_model_file:model", device="cpu")
    assert isinstance(loaded.module, torch.nn.Linear)
    assert (loaded.task, loaded.classes, loaded.about) == (None, None, "own_model_file:model")
    ready = load_model("own_model_file:ready", device="cpu").module
    assert ready.out_features == 4
    assert ready.weight.dtype == torch.float64  # as it was made
    assert load_model("own_model_file:model", device="cpu", dtype="bfloat16").module.weight.dtype == torch.bfloat16
    assert sys.path == before


def test_an_adapter_makes_its_parameters_the_trainable_ones(folder: Folder, tmp_path: Path) -> None:
    adapted = save_adapter(folder("headless"), tmp_path / "adapter")
    loaded = load_model(str(folder("headless")), "text", adapter=str(tmp_path / "adapter"), classes=3, device="cpu")
    trainable = {name: p for name, p in loaded.module.named_parameters() if p.requires_grad}
    assert {name.split(".")[-3] for name in trainable if "lora" in name} == {"lora_A", "lora_B"}
    assert any("classifier" in name for name in trainable)
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits)


def test_an_adapter_that_is_a_pickle_is_refused(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(LoadError, match=r"a folder with adapter_model.safetensors, .* Pickles \(.bin\) are not read"):
        load_model(str(folder("text")), adapter=str(tmp_path), device="cpu")


def check_advice(lines: list[str]) -> None:
    model, data = lines
    assert "'someone/some-model' is no local path" in model
    assert "copy the model's folder" in model
    assert "HF_HUB_OFFLINE=1" in model
    assert "'someone/some-data' is no local path" in data
    assert "save the data as CSV" in data
    assert "--repo-type dataset" in data


def test_offline_the_message_tells_how_to_use_local_copies(folder: Folder) -> None:
    pytest.importorskip("datasets", reason="needs neuromanifold[hf]")
    with pytest.raises(LoadError) as model:
        load_model("someone/some-model")
    with pytest.raises(LoadError) as data:
        load_data("someone/some-data", load_model(str(folder("text"))))
    check_advice([str(model.value), str(data.value)])


OFFLINE = """
from neuromanifold.hf import load_data, load_model, load_data, LoadError
for load in (lambda: load_model("someone/some-model"), lambda: load_data("someone/some-data", load_model(FOLDER))):
    try:
        load()
    except LoadError as error:
        print(error)
"""


@pytest.mark.slow  # the hub's library tries several times
def test_a_hub_that_cannot_be_reached_is_the_same(folder: Folder) -> None:
    pytest.importorskip("datasets", reason="needs neuromanifold[hf]")
    code, home = OFFLINE.replace("FOLDER", repr(str(folder("text")))), str(folder("text") / "no-cache")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": home}
    env |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    check_advice(output.strip().splitlines())
