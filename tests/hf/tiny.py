"""Tiny models of transformers with tokenizers and processors, and files for them; all is made on the spot."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs neuromanifold[hf]")

TEXT = "the a film story actor is was good bad dull bright not very and it they play moves"
WORDS = TEXT.split()
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
LABELS = {"negative": 0, "positive": 1}


def save_tokenizer(folder: Path, decoder: bool = False, pair_ids: bool = True) -> None:
    """Words, and pieces of words ("##s"); a decoder's has no classifier token and nothing to pad with."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS, "##s", "##ly"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder:
        names: dict[str, object] = {"unk_token": "[UNK]", "eos_token": "[SEP]"}
    else:
        pairs = "[CLS] $A [SEP] $B:1 [SEP]:1"
        special = [("[CLS]", 2), ("[SEP]", 3)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=pairs, special_tokens=special
        )
        names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
        names["model_input_names"] = ["input_ids", *(["token_type_ids"] if pair_ids else []), "attention_mask"]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names)
    fast.save_pretrained(folder)


def _save(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def _vocabulary() -> int:
    return len(SPECIAL) + len(WORDS) + 2


def _bert(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        config = transformers.BertConfig(
            vocab_size=_vocabulary(),
            max_position_embeddings=32,
            label2id=LABELS,
            id2label={0: "negative", 1: "positive"},
            **SIZE,
        )
        save_tokenizer(folder)
        return _save(getattr(transformers, kind)(config), folder)

    return make


def _gpt2(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        config = transformers.GPT2Config(
            vocab_size=_vocabulary(), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=3, eos_token_id=3
        )
        save_tokenizer(folder, decoder=True)
        return _save(getattr(transformers, kind)(config), folder)

    return make


def _t5(folder: Path) -> Path:
    config = transformers.T5Config(
        vocab_size=_vocabulary(), d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0,
        eos_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    save_tokenizer(folder, pair_ids=False)
    return _save(transformers.T5ForConditionalGeneration(config), folder)


def _resnet(folder: Path) -> Path:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    numbers = {"size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}
    processor = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "resample": 2, "do_normalize": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **numbers}))
    return _save(transformers.ResNetForImageClassification(config), folder)


def _wav2vec2(folder: Path) -> Path:
    config = transformers.Wav2Vec2Config(
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_labels=3,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8, vocab_size=8, **SIZE,
    )  # fmt: skip
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)
    return _save(transformers.Wav2Vec2ForSequenceClassification(config), folder)


MODELS = {  # task: a folder with such a model
    "text": _bert("BertForSequenceClassification"),
    "decoder text": _gpt2("GPT2ForSequenceClassification"),
    "tokens": _bert("BertForTokenClassification"),
    "masked": _bert("BertForMaskedLM"),
    "headless": _bert("BertModel"),
    "causal": _gpt2("GPT2LMHeadModel"),
    "seq2seq": _t5,
    "image": _resnet,
    "audio": _wav2vec2,
}


def save_adapter(base: Path, folder: Path) -> torch.nn.Module:
    """A LoRA adapter with a classifier of three classes, for a model without one; and the model with it."""
    peft = pytest.importorskip("peft", reason="needs neuromanifold[peft]")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    adapted: torch.nn.Module = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return adapted


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=generator)
    return [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (int(n),), generator=generator)) for n in lengths]


def write_csv(path: Path, columns: dict[str, list[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_jsonl(path: Path, columns: dict[str, list[object]]) -> Path:
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def reviews(path: Path, count: int = 10) -> Path:
    return write_csv(path, {"text": list(sentences(count)), "label": [i % 2 for i in range(count)]})


def images(path: Path, count: int = 7) -> Path:
    generator = np.random.default_rng(0)
    np.savez(path, images=generator.integers(0, 256, (count, 20, 24, 3), dtype=np.uint8), labels=np.arange(count) % 3)
    return path


def clips(path: Path, count: int = 5) -> Path:
    generator = np.random.default_rng(0)
    audio = generator.normal(size=(count, 800)).astype(np.float32)
    np.savez(path, audio=audio, lengths=np.array([800, 400, 600, 800, 500])[:count], labels=np.arange(count) % 3)
    return path
