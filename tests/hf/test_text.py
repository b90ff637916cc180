"""Text as batches: what by hand comes out of the tokenizer, comes out of the loader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neuromanifold.hf import LoadedModel, LoadError, load_data, load_model
from tests.hf.tiny import SPECIAL, WORDS, reviews, sentences, transformers, write_csv, write_jsonl

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(folder: Folder) -> Callable[[str], LoadedModel]:
    return lambda kind: load_model(str(folder(kind)), device="cpu")


def batches(path: Path, model: LoadedModel, **options: Any) -> list[dict[str, Tensor]]:
    return list(load_data(str(path), model, **options))  # type: ignore[arg-type]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_batches_are_what_the_tokenizer_makes_by_hand(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = loaded("text")
    data = load_data(str(reviews(tmp_path / "r.csv", 10)), model, batch_size=4, seed=3)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.processor)
    found = list(data)
    assert len(data) == len(found) == 3
    for i, batch in enumerate(found):
        rows = order[4 * i : 4 * i + 4]
        by_hand = dict(tokenizer([sentences(10)[row] for row in rows], padding=True, return_tensors="pt"))
        assert same(batch, {**by_hand, "labels": torch.tensor([row % 2 for row in rows])})
    assert all(same(a, b) for a, b in zip(found, data, strict=True))  # as often as one likes


def test_a_smaller_subset_is_the_beginning_of_a_larger_one(
    loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    path, model = reviews(tmp_path / "r.csv", 12), loaded("text")
    every, some = batches(path, model, batch_size=3), batches(path, model, batch_size=3, batches=2)
    assert len(every) == 4
    assert all(same(a, b) for a, b in zip(some, every[:2], strict=True))
    other = batches(path, model, batch_size=3, batches=2, seed=1)
    assert not all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(some, other, strict=True))


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_every_row_comes_once(loaded: Callable[[str], LoadedModel], tmp_path: Path, batch_size: int) -> None:
    path = write_csv(tmp_path / "r.csv", {"text": ["good"] * 10, "label": [i % 2 for i in range(10)]})
    found = batches(path, loaded("text"), batch_size=batch_size)
    assert sum(len(batch["labels"]) for batch in found) == 10


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_kind_of_table_is_the_same(loaded: Callable[[str], LoadedModel], tmp_path: Path, suffix: str) -> None:
    import json

    columns: dict[str, list[object]] = {"text": list(sentences(6)), "label": [0, 1, 0, 1, 1, 0]}
    path = tmp_path / f"table.{suffix}"
    if suffix == "tsv":
        path.write_text("text\tlabel\n" + "".join(f"{t}\t{y}\n" for t, y in zip(*columns.values(), strict=True)))
    elif suffix == "json":
        path.write_text(json.dumps([{"text": t, "label": y} for t, y in zip(*columns.values(), strict=True)]))
    elif suffix == "parquet":
        arrow = pytest.importorskip("pyarrow", reason="needs neuromanifold[hf]")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
    else:
        {"csv": write_csv, "jsonl": write_jsonl}[suffix](path, columns)
    expected = batches(write_csv(tmp_path / "expected.csv", columns), loaded("text"))
    found = batches(path, loaded("text"))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_pairs_of_texts_by_usual_and_by_given_names(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    a, b = sentences(4), sentences(4, seed=1)
    usual = write_csv(tmp_path / "usual.csv", {"premise": list(a), "hypothesis": list(b), "label": [0] * 4})
    other = write_csv(tmp_path / "other.csv", {"x": list(a), "y": list(b), "z": [0] * 4})
    (first,) = batches(usual, loaded("text"))
    (second,) = batches(other, loaded("text"), columns="text=x,text_pair=y,label=z")
    assert same(first, second)
    assert bool(first["token_type_ids"].any())


def test_a_copy_of_a_data_set_has_splits_and_names_of_classes(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="needs neuromanifold[hf]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["positive", "negative"])}
    )
    (tmp_path / "copy").mkdir()
    for split, label in (("train", 0), ("test", 1)):
        columns = {"sentence": list(sentences(3)), "label": [label] * 3}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "copy" / f"{split}.parquet")
    copy = tmp_path / "copy"
    assert batches(copy, loaded("text"))[0]["labels"].tolist() == [1, 1, 1]  # positive is 1 in the model
    assert batches(copy, loaded("text"), split="test")[0]["labels"].tolist() == [0, 0, 0]
    with pytest.raises(LoadError, match="has no such part"):
        batches(copy, loaded("text"), split="other")


@pytest.mark.parametrize("labels", [["negative", "Positive", "positive"], ["0", "1", "1"], [0.0, 1.0, "1.0"]])
def test_labels_by_name_and_by_number(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, labels: list[object]
) -> None:
    path = write_csv(tmp_path / "r.csv", {"text": ["good"] * 3, "label": labels})
    (batch,) = batches(path, loaded("text"))
    order = torch.randperm(3, generator=torch.Generator().manual_seed(0))
    assert batch["labels"].tolist() == torch.tensor([0, 1, 1])[order].tolist()


def test_data_that_count_their_classes_differently_are_translated(loaded: Callable[[str], LoadedModel]) -> None:
    from neuromanifold.hf.columns import LabelReader

    assert LabelReader(loaded("text"), ["positive", "negative"]).tensor([0, 1], [0, 1]).tolist() == [1, 0]
    assert LabelReader(loaded("text"), ["pos", "neg"]).tensor([0, 1], [0, 1]).tolist() == [0, 1]  # unknown names


def test_labels_are_left_out_where_unwanted_and_missed_where_needed(
    loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    path = reviews(tmp_path / "r.csv")
    assert "labels" not in batches(path, loaded("text"), labels=False)[0]
    bare = write_csv(tmp_path / "bare.csv", {"text": ["good", "bad"]})
    assert "labels" not in batches(bare, loaded("text"))[0]
    with pytest.raises(
        LoadError, match=r"No label column found in .*bare.csv \(columns: text\). Name it with --columns label=NAME"
    ):
        batches(bare, loaded("text"), labels=True)


def test_a_decoder_that_classifies_finds_the_last_token(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model, path = loaded("decoder text"), reviews(tmp_path / "r.csv", 5)
    with torch.no_grad():
        together = torch.cat([model.module(**_inputs(batch)).logits for batch in batches(path, model, batch_size=5)])
        alone = torch.cat([model.module(**_inputs(batch)).logits for batch in batches(path, model, batch_size=1)])
    torch.testing.assert_close(together, alone)


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.parametrize("write", [write_csv, write_jsonl], ids=["csv", "jsonl"])
def test_words_have_their_label_at_their_first_token(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, write: Callable[[Path, dict[str, list[object]]], Path]
) -> None:
    words, tags = [["the", "films", "moves"], ["good"]], [[0, 1, 0], [1]]
    in_cells = write is write_csv
    columns: dict[str, list[object]] = {
        "tokens": [" ".join(w) for w in words] if in_cells else list(words),
        "ner_tags": [" ".join(map(str, t)) for t in tags] if in_cells else list(tags),
    }
    path = write(tmp_path / f"w.{'csv' if in_cells else 'jsonl'}", columns)
    (batch,) = batches(path, loaded("tokens"))
    row = int(batch["attention_mask"].sum(1).argmax())
    assert batch["labels"][row].tolist() == [-100, 0, 1, -100, 0, -100]  # [CLS] the film ##s moves [SEP]
    assert batch["labels"][1 - row].tolist() == [-100, 1, -100, -100, -100, -100]
    (blind,) = batches(path, loaded("tokens"), labels=False)
    assert torch.equal(blind["labels"] >= 0, batch["labels"] >= 0)  # the same positions count


def test_labels_of_a_causal_model_stand_at_their_token(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", {"text": ["the film is good", "", "  ", "a story"]})
    data = load_data(str(path), loaded("causal"), labels=True)
    assert "all of 3 rows, 1 without text left out" in data.about
    (batch,) = data
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]  # type: ignore[call-overload]
    assert sorted(mask.sum(1).tolist()) == [2, 4]
    assert torch.equal(labels, ids.masked_fill(mask == 0, -100))
    (blind,) = batches(path, loaded("causal"), labels=False)
    assert torch.equal(blind["labels"], labels)  # they say which positions count


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (("prompt", "completion"), {}),
        (("question", "answer"), {}),
        (("a", "b"), {"columns": "prompt=a,completion=b"}),
    ],
)
def test_prompts_of_a_causal_model_do_not_count(
    columns: tuple[str, str], options: dict[str, str], loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    pairs = {columns[0]: ["the film ", "", "the film is very"], columns[1]: ["is good", "a story", "ly good"]}
    (batch,) = batches(
        write_jsonl(tmp_path / "p.jsonl", {k: list(v) for k, v in pairs.items()}), loaded("causal"), **options
    )
    shown = {
        tuple(ids[mask.bool()].tolist()): (labels != -100)[mask.bool()].tolist()
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    }
    number = {word: i for i, word in enumerate([*SPECIAL, *WORDS, "##s", "##ly"])}
    assert shown == {
        tuple(number[word] for word in words.split()): counts
        for words, counts in {
            "the film is good": [False, False, True, True],
            "a story": [True, True],
            "the film is very ##ly good": [False, False, False, False, True, True],
        }.items()
    }


def test_texts_and_prompts_do_not_mix(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {"text": ["a film"], "prompt": ["a"], "completion": [" story"]}
    path = write_jsonl(tmp_path / "t.jsonl", columns)
    (pair,), (text,) = batches(path, loaded("causal")), batches(path, loaded("causal"), columns="text=text")
    assert (pair["labels"] == -100).tolist() == [[True, False]]
    assert (text["labels"] == -100).tolist() == [[False, False]]
    with pytest.raises(LoadError, match="text, or prompt and completion"):
        load_data(str(path), loaded("causal"), columns="text=text,prompt=prompt")
    with pytest.raises(LoadError, match="No completion column found"):
        load_data(str(write_jsonl(tmp_path / "p.jsonl", {"prompt": ["a"]})), loaded("causal"), columns="prompt=prompt")


def test_masking_depends_on_seed_and_row_alone(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    path = reviews(tmp_path / "r.csv", 9)

    def shown(**options: Any) -> dict[tuple[int, ...], list[int]]:
        found = {}
        for batch in batches(path, loaded("masked"), mask=0.4, **options):
            masked, original = batch["input_ids"], batch["labels"]
            assert torch.equal(masked == 4, original != -100)
            whole = torch.where(original == -100, masked, original)
            for row in range(len(masked)):
                length = int(batch["attention_mask"][row].sum())
                assert (original[row] != -100).any()
                found[tuple(whole[row, :length].tolist())] = masked[row, :length].tolist()
        return found

    assert shown(batch_size=2) == shown(batch_size=9)
    assert shown(batch_size=9) != shown(batch_size=9, seed=1)


def test_text_is_cut(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", {"text": ["good " * 100, "bad"], "label": [0, 1]})
    assert batches(path, loaded("text"))[0]["input_ids"].shape == (2, 32)  # what the model takes
    assert batches(path, loaded("text"), max_length=5)[0]["input_ids"].shape == (2, 5)


@pytest.mark.parametrize(
    ("kind", "content", "options", "said"),
    [
        (
            "text",
            "id,body\n1,good\n",
            {},
            r"No text column found in .*t.csv \(columns: id, body\). Name it with --columns text=id.",
        ),
        ("text", "id,text\n1,good\n", {"columns": "text=body"}, r"No column 'body' found in .* \(columns: id, text\)"),
        ("text", "text\ngood\n", {"columns": "words=text"}, "roles among text, text_pair, label"),
        ("text", "text\ngood\n", {"columns": "text"}, "such as text=sentence"),
        ("text", "text,label\ngood,2\n", {}, "between 0 and 1, as the model has 2 classes, got 2 in row 0"),
        ("text", "text,label\ngood,-1\n", {}, "got -1 in row 0.* --no-labels"),
        ("text", "text,label\ngood,maybe\n", {}, "or one of negative, positive, got 'maybe'"),
        ("text", "text,label\ngood,0.5\n", {}, "got '0.5' in row 0"),
        ("text", "text,label\ngood,\n", {}, "got '' in row 0"),
        ("text", "text,label\ngood,1,2\nbad,0,1\n", {}, "does not match length of data"),
        ("text", "text,label\ngood,1\nbad,0,1\n", {}, "Expected 2 fields in line 3, saw 3"),
        ("text", "text,label\n", {}, "has no rows"),
        ("text", "", {}, "is empty"),
        ("text", "text,label\ngood,0\n", {"batch_size": 0}, "`batch_size` must be between 1"),
        ("text", "text,label\ngood,0\n", {"batches": 0}, "`batches` must be between 1"),
        ("tokens", "words,tags\ngood film,1\n", {}, "as many as words, got 1 for 2 words in row 0"),
        ("masked", "text\ngood\n", {"mask": 2.0}, "a share of the tokens"),
        ("causal", "text\n \n", {}, "has no rows"),
    ],
)
def test_bad_tables(
    loaded: Callable[[str], LoadedModel],
    tmp_path: Path,
    kind: str,
    content: str,
    options: dict[str, Any],
    said: str,
) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(ValueError, match=said):
        batches(tmp_path / "t.csv", loaded(kind), **options)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", b'{"text": "good"}\nnot json\n', "not JSON lines or a JSON list .* row 1"),
        ("t.jsonl", b"[1, 2]", "got int in row [01]"),
        ("t.jsonl", b'{"text": 3}', "The text column does not hold text: got int in row 0"),
        ("t.csv", b"text\n\xff\xfe\n", "not a CSV file in UTF-8"),
        ("t.parquet", b"PAR1 no", "not a Parquet file"),
        ("t.parquet", b"no", "not a Parquet file, or is damaged"),
        ("t.pkl", b"\x80\x04.", "unknown kind: expected one of .csv.* Pickles are not read"),
    ],
)
def test_damaged_files(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="needs neuromanifold[hf]")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=said):
        batches(tmp_path / name, loaded("text"))


def test_missing_files_and_tokenizers(loaded: Callable[[str], LoadedModel], folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"There is no .*none.csv"):
        batches(tmp_path / "none.csv", loaded("text"))
    with pytest.raises(LoadError, match=r"No data found in .* got nothing"):
        batches(tmp_path, loaded("text"))
    with pytest.raises(LoadError, match=r"There is no .*x.npz"):
        batches(tmp_path / "x.npz", loaded("text"))
    bare = load_model(str(folder("text")), processor=str(tmp_path), device="cpu")
    with pytest.raises(LoadError, match=r"No tokenizer could be loaded|no vocabulary"):
        batches(reviews(tmp_path / "r.csv"), bare)


def test_empty_texts_are_left_out_of_a_subset_as_well(
    loaded: Callable[[str], LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuromanifold.hf.data._CHUNK", 3)
    path = write_csv(
        tmp_path / "t.csv", {"text": [text for pair in zip(sentences(8), [""] * 8, strict=True) for text in pair]}
    )
    every, some = (batches(path, loaded("causal"), batch_size=2, batches=n) for n in (None, 3))
    assert sum(len(batch["input_ids"]) for batch in every) == 8
    assert all(same(a, b) for a, b in zip(some, every[:3], strict=True))
