"""Data that look right and are not: each is refused, or read as what it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from neuromanifold.hf import LoadedModel, LoadError, load_data, load_model
from tests.hf.tiny import SIZE, images, reviews, save_tokenizer, transformers, write_csv, write_jsonl

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(folder: Folder) -> Callable[[str], LoadedModel]:
    return lambda kind: load_model(str(folder(kind)), device="cpu")


def ids(source: Path, model: LoadedModel, **options: object) -> list[list[int]]:
    (batch,) = load_data(str(source), model, labels=False, **options)  # type: ignore[arg-type]
    found: list[list[int]] = batch["input_ids"].tolist()  # type: ignore[call-overload, index]
    return found


def refused(source: Path | str, model: LoadedModel, **options: object) -> str:
    with pytest.raises(LoadError) as error:
        list(load_data(str(source), model, **options))  # type: ignore[arg-type]
    return str(error.value)


def of_sizes(path: Path, model: LoadedModel) -> tuple[torch.Tensor, ...]:
    """Logits of ten rows in one batch, and one by one."""
    return tuple(
        torch.cat([model.module(**b).logits for b in load_data(str(path), model, labels=False, batch_size=size)])  # type: ignore[arg-type]
        for size in (10, 1)
    )


def test_a_folder_without_a_tokenizer_is_not_read_with_an_empty_one(folder: Folder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder("text"), tmp_path / "model"))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refused(reviews(tmp_path / "r.csv"), load_model(str(copy), device="cpu"))
    (copy / "tokenizer.json").write_text("{}")  # of which tokenizers makes an exception of no kind
    assert "tokenizer" in refused(reviews(tmp_path / "r.csv"), load_model(str(copy), device="cpu"))


def test_a_decoder_finds_the_last_token_also_where_the_tokenizer_pads_otherwise(folder: Folder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder("decoder text"), tmp_path / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
    tokenizer.pad_token = "[PAD]"
    tokenizer.save_pretrained(copy)
    model, path = load_model(str(copy), device="cpu"), reviews(tmp_path / "r.csv")
    torch.testing.assert_close(*of_sizes(path, model))


def test_positions_of_roberta_begin_after_its_padding(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.model_max_length, tokenizer.model_input_names = 10**9, ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(tmp_path)
    config = transformers.RobertaConfig(vocab_size=30, max_position_embeddings=20, pad_token_id=0, **SIZE)
    transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    path = write_csv(tmp_path / "long.csv", {"text": ["the film " * 40]})
    (batch,) = load_data(str(path), model)
    assert batch["input_ids"].shape == (1, 19)  # type: ignore[call-overload, index]
    assert model.module(**batch).logits.shape == (1, 2)  # type: ignore[arg-type]


def test_lengths_that_cannot_be(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    path = reviews(tmp_path / "r.csv")
    assert "at most 32" in refused(path, loaded("text"), max_length=33)
    assert "max_length" in refused(path, loaded("text"), max_length=1)  # [CLS] and [SEP] stay


def test_a_text_without_tokens_has_no_class(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    path = write_csv(tmp_path / "e.csv", {"text": ["the film", ""], "label": [0, 1]})
    assert "row 1" in refused(path, loaded("decoder text"))
    assert "row 1 is missing" in refused(
        write_jsonl(tmp_path / "n.jsonl", {"text": ["the film", None]}), loaded("text")
    )
    words = write_jsonl(tmp_path / "w.jsonl", {"words": [["the", None]]})
    assert "row 0" in refused(words, loaded("tokens"))


def test_one_column_is_not_both_texts_of_a_pair(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {"premise": ["the film"], "hypothesis": ["story is good"]}
    path, model = write_csv(tmp_path / "p.csv", columns), loaded("text")
    alone = write_csv(tmp_path / "a.csv", {"text": ["story is good"]})
    assert ids(path, model, columns="text=hypothesis") == ids(alone, model)
    assert "each role once" in refused(path, model, columns="text=premise,text=hypothesis")


def test_lines_of_json_end_where_lines_end(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    records = [{"text": "the film\u2028is good"}, {"text": "a\x85story"}]
    path = tmp_path / "u.jsonl"
    path.write_bytes("".join(json.dumps(one, ensure_ascii=False) + "\r\n" for one in records).encode())
    assert len(ids(path, loaded("text"))) == 2
    path.write_text('{"text": "a"}\n\n{"text":\n')
    assert "row 1" in refused(path, loaded("text"))


def test_tables_by_any_case_and_with_columns_of_different_names(
    loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    path = write_csv(tmp_path / "R.CSV", {"text": ["the film"]})
    assert len(ids(path, loaded("text"))) == 1
    (tmp_path / "d.csv").write_text("text,text\na,b\n")
    assert "'text' occurs twice" in refused(tmp_path / "d.csv", loaded("text"))


def test_a_folder_of_other_things(folder: Folder, loaded: Callable[[str], LoadedModel]) -> None:
    assert "tables" in refused(folder("text"), loaded("text"))


def test_options_of_a_hub_are_not_passed_over_for_a_file(
    loaded: Callable[[str], LoadedModel], folder: Folder, tmp_path: Path
) -> None:
    path = reviews(tmp_path / "r.csv")
    assert "--split test" in refused(path, loaded("text"), split="test")
    assert "--subset sst2" in refused(path, loaded("text"), subset="sst2")
    with pytest.raises(LoadError, match="revision"):
        load_model(str(folder("text")), revision="abc", device="cpu")


def test_folders_with_numbers_are_the_classes_of_these_numbers(
    loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    stored = np.load(images(tmp_path / "i.npz"))["images"]
    for name in ("1", "2"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        pillow.fromarray(stored[int(name)]).save(tmp_path / "photos" / name / "x.png")
    found = [batch["labels"].tolist() for batch in load_data(str(tmp_path / "photos"), loaded("image"), batch_size=1)]  # type: ignore[call-overload, index]
    assert sorted(found) == [[1], [2]]
    (tmp_path / "photos" / "1").rename(tmp_path / "photos" / "cat")
    assert "The data name 2 classes and the model has 3" in refused(tmp_path / "photos", loaded("image"))
    assert len(list(load_data(str(tmp_path / "photos"), loaded("image"), labels=False))) == 1


def test_images_of_16_bits_are_scaled_and_others_refused(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (1, 20, 24), dtype=np.uint8)
    wide = grey.astype(np.uint16) * 257
    np.savez(tmp_path / "8.npz", images=grey)
    np.savez(tmp_path / "16.npz", images=wide)
    one, two = (next(iter(load_data(str(tmp_path / name), loaded("image")))) for name in ("8.npz", "16.npz"))
    assert torch.equal(one["pixel_values"], two["pixel_values"])  # type: ignore[call-overload, index]
    np.savez(tmp_path / "f.npz", images=grey / np.float32(255))
    assert "float32 of shape [20, 24]" in refused(tmp_path / "f.npz", loaded("image"))


def test_audio_of_integers_is_scaled(tmp_path: Path) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=4, chunk_length=1)
    extractor.save_pretrained(tmp_path)
    config = transformers.WhisperConfig(
        num_mel_bins=4, d_model=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8, num_labels=3,
        max_source_positions=50, classifier_proj_size=4, vocab_size=20, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    transformers.WhisperForAudioClassification(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    audio = np.random.default_rng(0).integers(-100, 100, (2, 800), dtype=np.int16)
    np.savez(tmp_path / "i.npz", audio=audio)
    np.savez(tmp_path / "f.npz", audio=audio / np.float32(32768))
    one, two = (next(iter(load_data(str(tmp_path / name), model))) for name in ("i.npz", "f.npz"))
    torch.testing.assert_close(one["input_features"], two["input_features"])  # type: ignore[call-overload, index]


def test_audio_without_length_or_with_channels(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    audio, model = np.ones((2, 800), np.float32), loaded("audio")
    for lengths in ([800, 0], [801, 800], [-5, 800]):
        np.savez(tmp_path / "a.npz", audio=audio, lengths=np.array(lengths))
        assert "between 1 and 800" in refused(tmp_path / "a.npz", model)
    np.savez(tmp_path / "a.npz", audio=np.ones((2, 800, 2), np.float32))
    assert "one channel" in refused(tmp_path / "a.npz", model)
    soundfile = pytest.importorskip("soundfile")
    (tmp_path / "s").mkdir()
    soundfile.write(tmp_path / "s" / "x.wav", np.zeros(0), 16000)
    assert "length zero" in refused(tmp_path / "s", model)


def test_classes_whose_names_differ_in_case(folder: Folder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder("text"), tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    config.update(id2label={"0": "A", "1": "a"}, label2id={"A": 0, "a": 1})
    (copy / "config.json").write_text(json.dumps(config))
    path = write_csv(tmp_path / "r.csv", {"text": ["the film"], "label": ["A"]})
    (batch,) = load_data(str(path), load_model(str(copy), device="cpu"))
    assert batch["labels"].tolist() == [0]  # type: ignore[call-overload, index]


def test_names_of_classes_are_those_of_the_predictions(folder: Folder, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder("text"), tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    config["id2label"] = {"0": "good", "1": "bad"}
    for by_name in (None, {"bad": 0, "good": 1}):
        config.pop("label2id", None)
        (copy / "config.json").write_text(json.dumps(config if by_name is None else {**config, "label2id": by_name}))
        assert load_model(str(copy), device="cpu").class_names == {"good": 0, "bad": 1}


def test_a_seed_that_is_none_is_not_the_models_fault(folder: Folder) -> None:
    with pytest.raises(ValueError, match="`seed`"):
        load_model(str(folder("text")), seed=2**70, device="cpu")


def test_xlnet_has_no_limit_and_looks_at_the_end(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.model_max_length = 10**9
    tokenizer.save_pretrained(tmp_path)
    config = transformers.XLNetConfig(vocab_size=30, d_model=16, n_layer=1, n_head=2, d_inner=24, pad_token_id=0)
    transformers.XLNetForSequenceClassification(config).save_pretrained(tmp_path)
    path, model = (
        write_csv(tmp_path / "long.csv", {"text": ["the film " * 300]}),
        load_model(str(tmp_path), device="cpu"),
    )
    (batch,) = load_data(str(path), model)
    assert batch["input_ids"].shape == (1, 512)  # type: ignore[call-overload, index]
    torch.testing.assert_close(*of_sizes(reviews(tmp_path / "r.csv"), model))  # it looks at the last position
