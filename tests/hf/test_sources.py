"""Sources of data: what can be said of them before a model is loaded, and what `datasets` reads."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import neuromanifold as nm
from neuromanifold.cli.options import Setup
from neuromanifold.hf import LoadedModel, LoadError, check_data_source, load_data, load_model
from neuromanifold.hf.tables import read_table
from neuromanifold.problem.problem import Problem
from tests.hf.tiny import images, reviews, sentences, transformers, write_csv, write_jsonl

datasets = pytest.importorskip("datasets", reason="needs neuromanifold[hf]")
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(folder: Folder) -> Callable[[str], LoadedModel]:
    return lambda kind: load_model(str(folder(kind)), device="cpu")


def batches(source: Path | str, model: LoadedModel, **options: Any) -> list[Any]:
    return list(load_data(str(source), model, **options))


# ------------------------------------------------------------------------------------- before anything is loaded


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("missing.csv", {}, "There is no missing.csv"),
        ("./missing", {}, "There is no missing"),
        ("some/where/else", {}, "There is no some/where/else"),
        ("empty.csv", {}, "empty.csv is empty"),
        ("text.npz", {}, "text.npz is not an NPZ file"),
        ("text.parquet", {}, "text.parquet is not a Parquet file"),
        ("weights.pt", {}, "weights.pt is a file of an unknown kind: expected one of .csv.*, got .pt"),
        ("folder", {}, "No data found in folder: expected tables"),
        ("good.csv", {"split": "test"}, "--split test chooses a part .* good.csv has no parts"),
        ("good.csv", {"subset": "sst2"}, "--subset sst2"),
        ("no_such_module:batches", {}, "no module 'no_such_module'"),
        ("math:sqrt", {"columns": "text=a"}, "math:sqrt is a function"),
    ],
)
def test_data_are_checked_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.npz", "text.parquet", "weights.pt"):
        (tmp_path / name).write_text("text,label\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "folder").mkdir()
    reviews(tmp_path / "good.csv")
    with pytest.raises(LoadError, match=said):
        check_data_source(source, **options)
    with pytest.raises(LoadError, match=said):  # the command line's: there is no such model, either
        Setup("./no-model", source, **options).load_model()
    check_data_source("good.csv")
    check_data_source("a-name/on-the-hub")


# ------------------------------------------------------------------------------------------------------- tables


def test_cells_of_a_csv_file_are_the_text_that_they_are(tmp_path: Path) -> None:
    cells = ["NA", "null", "007", "1.50", "True", 'a "quoted",\nline', "2020-01-01", "é"]
    path = write_csv(tmp_path / "a[1]*.csv", {"text": list(cells), "": list(range(8)), "label": [1] * 8})
    table = read_table(str(path))
    assert table.columns == ("text", "Unnamed: 1", "label")
    assert table.take("text", [7, *range(7)]) == [cells[7], *cells[:7]]
    assert table.take("label", [3]) == ["1"]


def test_a_column_may_change_its_kind_far_down(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", {"id": [*range(12_000), "a1"]})  # beyond the first block that is read
    assert read_table(str(path)).take("id", [0, 12_000]) == ["0", "a1"]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for text in ("good", "dull"):
        write_csv(path, {"text": [text]})
        os.utime(path, (1, 1))  # as copying with its times does
        assert read_table(str(path)).take("text", [0]) == [text]


def test_labels_of_json_may_be_numbers_and_names(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets refuses columns of two kinds")
    path = write_jsonl(tmp_path / "t.jsonl", {"text": ["good", "bad", "dull"], "label": [1, "negative", "1"]})
    collate = load_data(str(path), loaded("text")).collate  # type: ignore[union-attr]
    assert collate([0, 1, 2])["labels"].tolist() == [1, 0, 1]  # type: ignore[call-overload]


def test_data_sets_saved_to_disk(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["positive", "negative"])  # the model's are in the other order
    features = datasets.Features({"sentence": datasets.Value("string"), "label": names})
    rows = {"sentence": sentences(3), "label": [0, 0, 1]}
    data = datasets.Dataset.from_dict(rows, features=features)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(tmp_path / "both")
    for name in ("one", "both"):
        assert sorted(batches(tmp_path / name, loaded("text"))[0]["labels"].tolist()) == [0, 1, 1]
    assert batches(tmp_path / "both", loaded("text"), split="test")[0]["labels"].tolist() == [0]
    for name in ("one", "both"):
        with pytest.raises(LoadError, match=r"no split 'other' \(splits: train"):
            batches(tmp_path / name, loaded("text"), split="other")


# ------------------------------------------------------------------------------------------------------ folders


def photos(folder: Path, *paths: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(folder / path)


def test_folders_of_images_may_have_splits(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    photos(tmp_path, "train/0/a.png", "train/1/b.png", "train/2/test_c.png", "test/2/d.png")
    assert sorted(batches(tmp_path, loaded("image"))[0]["labels"].tolist()) == [0, 1, 2]
    assert batches(tmp_path, loaded("image"), split="test")[0]["labels"].tolist() == [2]
    with pytest.raises(LoadError, match=r"no split 'validation' \(splits: test, train\)"):
        batches(tmp_path, loaded("image"), split="validation")


def test_a_class_may_be_named_as_a_split(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    photos(tmp_path, "car/a.png", "train/b.png", "tram/test_c.png")
    (batch,) = batches(tmp_path, loaded("image"))
    assert sorted(batch["labels"].tolist()) == [0, 1, 2]  # in the order of the alphabet, as the model names none
    with pytest.raises(LoadError, match="has no split 'test'"):
        batches(tmp_path, loaded("image"), split="test")


def test_labels_of_images_in_a_table_beside_them(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    photos(tmp_path, "a.png", "b.png")
    write_jsonl(tmp_path / "metadata.jsonl", {"file_name": ["a.png", "b.png"], "label": [2, 1]})
    assert sorted(batches(tmp_path, loaded("image"))[0]["labels"].tolist()) == [1, 2]


def test_photos_are_turned_as_the_camera_was(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.load(images(tmp_path / "i.npz"))["images"][0]
    turned = pillow.fromarray(np.rot90(pixels).copy())  # counter-clockwise: orientation 6 turns it back
    exif = pillow.Exif()
    exif[0x0112] = 6
    for name, image, more in (("a", pillow.fromarray(pixels), {}), ("b", turned, {"exif": exif})):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "x.png", **more)
    (a,), (b,) = (batches(tmp_path / name, loaded("image"), labels=False) for name in ("a", "b"))
    assert torch.equal(a["pixel_values"], b["pixel_values"])


# ------------------------------------------------------------------------------------- encoder-decoder models


def test_decoder_inputs_come_from_the_labels(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = loaded("seq2seq")
    columns: dict[str, list[object]] = {"text": list(sentences(5)), "summary": list(sentences(5, seed=1))}
    (batch,) = batches(write_csv(tmp_path / "t.csv", columns), model)
    assert (batch["labels"] == -100).any()  # padding does not count
    with torch.no_grad():
        expected = model.module(**batch).logits  # transformers' own way in training
        problem = Problem.of(model.module, [batch])
        torch.testing.assert_close(problem.evaluate(next(problem.batches())).logits, expected)
    with pytest.raises(LoadError, match="No target column found"):
        batches(reviews(tmp_path / "r.csv"), model)


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_labels_alone_give_the_decoder_inputs_of_a_function_s_batches(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    (tmp_path / "own_pairs.py").write_text(
        "import torch\n"
        "def batches():\n"
        "    return [{'input_ids': torch.tensor([[5, 6, 9]]), 'labels': torch.tensor([[7, 8, -100]])}]\n"
    )
    monkeypatch.chdir(tmp_path)
    module = loaded("seq2seq").module
    if adapter:
        peft = pytest.importorskip("peft", reason="needs neuromanifold[peft]")
        lora = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q", "v"])
        module = peft.get_peft_model(copy.deepcopy(module), lora)
    (batch,) = batches("own_pairs:batches", loaded("seq2seq"))
    found = nm.fisher_diagonal(module, [batch], nm.Empirical())
    given = {**batch, "decoder_input_ids": torch.tensor([[0, 7, 8]])}
    assert found.positions == 2
    expected = nm.fisher_diagonal(module, [given], nm.Empirical())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_labels_and_masks_of_trained_prompts_are_those_of_the_text(
    loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    """Virtual tokens add positions, for which labels and masks need no entries, and may have some."""
    peft = pytest.importorskip("peft", reason="needs neuromanifold[peft]")
    model = loaded("causal")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(copy.deepcopy(model.module), config)
    (batch,) = batches(reviews(tmp_path / "r.csv", 4), model, labels=False)
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    padded = torch.nn.functional.pad(labels, (3, 0), value=-100)
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    given = [unlabelled, {**batch, "labels": labels}, {**batch, "labels": padded}]
    found = [nm.fisher_diagonal(tuned, [one], nm.Exact()) for one in given]
    assert {one.positions for one in found} == {int(batch["attention_mask"].sum())}
    for name in found[0]:
        for other in found[1:]:
            torch.testing.assert_close(other[name], found[0][name])


def test_an_encoder_decoder_model_of_masked_text_predicts_the_whole_text(folder: Folder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder("text"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder")
             for name, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    config = transformers.BartConfig(vocab_size=25, d_model=16, max_position_embeddings=32, **special, **sizes)
    transformers.BartForConditionalGeneration(config).save_pretrained(copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    model = load_model(str(copy), "masked", device="cpu")
    (batch,) = batches(reviews(tmp_path / "r.csv"), model, mask=0.5)
    whole = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    assert torch.equal(batch["decoder_input_ids"][:, 1:], whole[:, :-1])
    assert (batch["decoder_input_ids"][:, 0] == 3).all()
    assert load_model(str(copy), device="cpu").task == "seq2seq"
