"""Images, audio, arrays, tables of numbers, and functions of one's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from neuromanifold.hf import LoadedModel, LoadError, load_data, load_model
from tests.hf.tiny import clips, images, transformers, write_csv

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(folder: Folder) -> Callable[[str], LoadedModel]:
    return lambda kind: load_model(str(folder(kind)), device="cpu")


def batches(source: Path | str, model: LoadedModel, **options: Any) -> list[Any]:
    return list(load_data(str(source), model, **options))


def order(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def test_images_of_an_array_go_through_the_processor(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    path, model = images(tmp_path / "i.npz"), loaded("image")
    stored = np.load(path)
    processor = transformers.ViTImageProcessor.from_pretrained(model.processor)
    expected = processor(images=list(stored["images"][order(7)]), return_tensors="pt")["pixel_values"]
    (batch,) = batches(path, model)
    torch.testing.assert_close(batch["pixel_values"], expected)
    assert batch["labels"].tolist() == stored["labels"][order(7)].tolist()
    assert model.module(pixel_values=batch["pixel_values"]).logits.shape == (7, 3)


def test_images_in_folders_and_in_tables_are_the_same(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    from PIL import Image

    stored, paths = np.load(images(tmp_path / "i.npz")), []
    for i, (pixels, label) in enumerate(zip(stored["images"], stored["labels"], strict=True)):
        place = tmp_path / "folders" / f"class {label}" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place)
        paths.append(place)
    (batch,) = batches(tmp_path / "folders", loaded("image"))
    table = write_csv(tmp_path / "t.csv", {"image": list(map(str, sorted(paths))), "label": [0, 0, 0, 1, 1, 2, 2]})
    (same,) = batches(table, loaded("image"))
    assert torch.equal(batch["pixel_values"], same["pixel_values"])
    assert torch.equal(batch["labels"], same["labels"])
    arrow = pytest.importorskip("pyarrow", reason="needs neuromanifold[hf]")
    stored_bytes = [{"bytes": path.read_bytes(), "path": None} for path in sorted(paths)]
    columns = arrow.table({"image": stored_bytes, "label": [0, 0, 0, 1, 1, 2, 2]})
    pytest.importorskip("pyarrow.parquet").write_table(columns, tmp_path / "t.parquet")
    assert torch.equal(batches(tmp_path / "t.parquet", loaded("image"))[0]["pixel_values"], same["pixel_values"])


def test_audio_of_an_array_is_cut_to_its_length(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    path, model = clips(tmp_path / "s.npz"), loaded("audio")
    (batch,) = batches(path, model)
    lengths = np.load(path)["lengths"][order(5)]
    assert batch["attention_mask"].sum(1).tolist() == lengths.tolist()
    with torch.no_grad():
        together = model.module(input_values=batch["input_values"], attention_mask=batch["attention_mask"]).logits
        alone = torch.cat(
            [
                model.module(input_values=one["input_values"], attention_mask=one["attention_mask"]).logits
                for one in batches(path, model, batch_size=1)
            ]
        )
    assert together.shape == alone.shape == (5, 3)
    assert batches(path, model, max_length=400)[0]["input_values"].shape == (5, 400)


@pytest.mark.parametrize(
    ("extractor", "shape"),
    [
        ("WhisperFeatureExtractor(feature_size=8, chunk_length=1)", (5, 8, 100)),
        ("ASTFeatureExtractor(num_mel_bins=16, max_length=20)", (5, 20, 16)),
    ],
)
def test_audio_for_models_that_take_clips_of_one_length(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, extractor: str, shape: tuple[int, ...]
) -> None:
    eval(f"transformers.{extractor}").save_pretrained(tmp_path)
    model = replace(loaded("audio"), processor=str(tmp_path))
    (batch,) = batches(clips(tmp_path / "s.npz"), model, labels=False)
    assert [value.shape for value in batch.values()] == [shape]


def test_audio_files_are_read_and_resampled(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="needs neuromanifold[hf]")
    wave = 0.3 * np.sin(np.linspace(0, 60, 800)).astype(np.float32)
    for name, values, rate in (("a", wave, 16000), ("b", wave[::2], 8000), ("c", np.stack([wave, wave], 1), 16000)):
        (tmp_path / "folders" / name).mkdir(parents=True)
        soundfile.write(tmp_path / "folders" / name / "x.wav", values, rate)
    (batch,) = batches(tmp_path / "folders", loaded("audio"))
    by_label = {int(y): x for x, y in zip(batch["input_values"], batch["labels"], strict=True)}
    torch.testing.assert_close(by_label[0], by_label[2], atol=1e-3, rtol=1e-3)  # two channels
    middle = slice(100, 700)
    torch.testing.assert_close(by_label[0][middle], by_label[1][middle], atol=0.05, rtol=0.05)  # another rate


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    (tmp_path / "own_data_file.py").write_text(
        "import torch\n"
        "def model():\n    return torch.nn.Linear(3, 2)\n"
        "calls = []\n"
        "def listed():\n    calls.append(1)\n    return [torch.full((2, 3), float(i)) for i in range(4)]\n"
        "def generated():\n    return (batch for batch in listed())\n"
        "def number():\n    return 3\n"
        "def nothing():\n    return []\n"
    )
    monkeypatch.chdir(tmp_path)
    return load_model("own_data_file:model", device="cpu")


@pytest.mark.parametrize("function", ["listed", "generated"])
def test_a_function_of_ones_own_can_be_read_again(own: LoadedModel, function: str) -> None:
    data = load_data(f"own_data_file:{function}", own, batches=3)
    for _ in range(2):
        assert [float(batch[0, 0]) for batch in data] == [0.0, 1.0, 2.0]  # type: ignore[index, call-overload]
    if function == "listed":
        assert len(data) == 3
    else:
        with pytest.raises(TypeError):
            len(data)


def test_arrays_and_tables_of_numbers_for_a_model_of_ones_own(own: LoadedModel, tmp_path: Path) -> None:
    x, y = torch.arange(12.0).view(4, 3), [0, 1, 0, 1]
    np.savez(tmp_path / "x.npz", inputs=x.numpy(), labels=np.array(y))
    write_csv(tmp_path / "x.csv", {**{f"x{i}": x[:, i].tolist() for i in range(3)}, "label": list(y)})
    expected: tuple[Tensor, Tensor] = (x[order(4)], torch.tensor(y)[order(4)])
    for name in ("x.npz", "x.csv"):
        (batch,) = batches(tmp_path / name, own)
        assert torch.equal(batch[0], expected[0])
        assert torch.equal(batch[1], expected[1])
        (blind,) = batches(tmp_path / name, own, labels=False)
        assert len(blind) == 1
        assert blind[0].shape == (4, 3)


def test_inputs_have_the_models_precision(folder: Folder, tmp_path: Path) -> None:
    model = load_model(str(folder("image")), dtype="bfloat16", device="cpu")
    (batch,) = batches(images(tmp_path / "i.npz"), model)
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("own_data_file:number", "a function that returns batches, got int"),
        ("own_data_file:nothing", "at least one batch"),
        ("own_data_file:lost", "has no 'lost'.* It has generated, listed, model, nothing, number"),
        ("words.csv", "Rows .* are not numbers"),
        ("objects.npz", "Pickled objects are not read"),
        ("cut.npz", "not an NPZ file of arrays"),
        ("single.npz", "not an NPZ file as np.savez writes it"),
        ("other.npz", r"No 'inputs' found in other.npz \(arrays: values\)"),
        ("uneven.npz", "expected 4 labels"),
        ("missing.npz", "There is no missing.npz"),
        ("empty", "No data found in empty: expected tables .* got nothing"),
    ],
)
def test_bad_data_of_ones_own(own: LoadedModel, tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    write_csv(tmp_path / "words.csv", {"x": ["good"], "label": [0]})
    np.savez(tmp_path / "objects.npz", inputs=np.array([{}, []], dtype=object))
    (tmp_path / "cut.npz").write_bytes(images(tmp_path / "whole.npz").read_bytes()[:500])
    np.savez(tmp_path / "other.npz", values=np.zeros(3))
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(tmp_path / "uneven.npz", inputs=np.zeros((4, 3)), labels=np.zeros(3))
    with pytest.raises(LoadError, match=said):
        batches(source, own)


def test_bad_images_and_folders(loaded: Callable[[str], LoadedModel], folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match=r"No data found in .*empty"):
        batches(tmp_path / "empty", loaded("image"))
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").write_bytes(b"no image")
    with pytest.raises(LoadError, match=r"No label column found in .*flat"):
        batches(tmp_path / "flat", loaded("image"), labels=True)
    with pytest.raises(LoadError, match=r"a.png .* cannot be read as an image"):
        batches(tmp_path / "flat", loaded("image"))
    bare = load_model(str(folder("image")), processor=str(tmp_path), device="cpu")
    with pytest.raises(LoadError, match=r"No image processor could be loaded"):
        batches(images(tmp_path / "i.npz"), bare)
