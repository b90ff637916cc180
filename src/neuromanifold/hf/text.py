"""Text: classes of texts, pairs and words; causal and masked language models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.hf.batches import Rows
from neuromanifold.hf.columns import LabelReader, find_column, label_column, needed
from neuromanifold.hf.errors import LoadError, hub_error, require
from neuromanifold.hf.models import LoadedModel
from neuromanifold.hf.tables import Table
from neuromanifold.hf.tasks import Task

IGNORED = -100  # the label of positions that do not count
_NO_WORDS = 2  # tokens beside special ones, at most
LONGEST = 512  # tokens, unless told otherwise or the model takes fewer


def text_rows(
    table: Table,
    model: LoadedModel,
    given: Mapping[str, str],
    labels: bool | None,
    max_length: int | None,
    mask: float,
    seed: int,
    about: str,
) -> Rows:
    """Rows of text for one of the four tasks."""
    tokenizer = _tokenizer(model)
    length = _length(tokenizer, model, max_length)
    if model.task is Task.TOKENS:
        return Rows(len(table), _words(table, model, given, labels, tokenizer, length), about)
    column = needed(table, "text", given)
    if model.task is Task.TEXT:
        return Rows(len(table), _classified(table, model, column, given, labels, tokenizer, length), about)
    read = _reader(table, column)

    def counts(rows: list[int]) -> list[bool]:
        return [bool(str(text or "").strip()) for text in table.take(column, rows)]

    if model.task is Task.CAUSAL:
        return Rows(len(table), _causal(read, labels, tokenizer, length), about, counts)
    return Rows(len(table), _masked(read, tokenizer, length, mask, seed), f"{about}, {mask:g} masked", counts)


def _classified(
    table: Table,
    model: LoadedModel,
    column: str,
    given: Mapping[str, str],
    labels: bool | None,
    tokenizer: Any,
    length: int,
) -> Callable[[list[int]], dict[str, Tensor]]:
    """A class for each text, or pair of texts."""
    pair, label = find_column(table, "text_pair", given, required=False), label_column(table, given, labels)
    readers = [_reader(table, name) for name in (column, pair) if name is not None]
    classes = LabelReader(model, table.classes.get(label or ""))

    def make(rows: list[int]) -> dict[str, Tensor]:
        texts = [read(rows) for read in readers]
        made = dict(tokenizer(*texts, truncation=True, max_length=length, padding=True, return_tensors="pt"))
        _check_tokens(made, rows, length)
        if label is not None:
            made["labels"] = classes.tensor(table.take(label, rows), rows)
        return made

    return make


def _words(
    table: Table, model: LoadedModel, given: Mapping[str, str], labels: bool | None, tokenizer: Any, length: int
) -> Callable[[list[int]], dict[str, Tensor]]:
    """A class for each word, at its first token; the other tokens do not count."""
    if not tokenizer.is_fast:
        raise LoadError(message("model", "one with a fast tokenizer", type(tokenizer).__name__, "It aligns words."))
    column, label = needed(table, "words", given), label_column(table, given, labels)
    classes = LabelReader(model)

    def make(rows: list[int]) -> dict[str, Tensor]:
        words = [_split(value, row) for value, row in zip(table.take(column, rows), rows, strict=True)]
        tags: list[list[Any]] = [[0] * len(sentence) for sentence in words]  # which positions count is all that is used
        if label is not None:
            tags = [_split(value, row) for value, row in zip(table.take(label, rows), rows, strict=True)]
        arguments = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}
        made = tokenizer(words, is_split_into_words=True, **arguments)
        _check_tokens(made, [], length)
        aligned = torch.full(made["input_ids"].shape, IGNORED)
        for i, row in enumerate(rows):
            if len(tags[i]) != len(words[i]):
                got = f"{len(tags[i])} for {len(words[i])} words in row {row}"
                raise LoadError(message("labels", "as many as words", got))
            before = None
            for position, word in enumerate(made.word_ids(i)):
                if word is not None and word != before and tags[i][word] not in (IGNORED, str(IGNORED)):
                    aligned[i, position] = classes.one(tags[i][word], row) if label is not None else 0
                before = word
        return {**made, "labels": aligned}

    return make


def _causal(
    read: Callable[[list[int]], list[str]], labels: bool | None, tokenizer: Any, length: int
) -> Callable[[list[int]], dict[str, Tensor]]:
    """The next token at every position.  A label belongs to the logits at its own position: labels are shifted here."""

    def make(rows: list[int]) -> dict[str, Tensor]:
        made = dict(tokenizer(read(rows), truncation=True, max_length=length, padding=True, return_tensors="pt"))
        made.pop("token_type_ids", None)
        _check_tokens(made, rows, length)
        if labels:
            following = torch.where(made["attention_mask"].bool(), made["input_ids"], IGNORED)[:, 1:]
            made["labels"] = torch.nn.functional.pad(following, (0, 1), value=IGNORED)  # the last has none
        return made

    return make


def _masked(
    read: Callable[[list[int]], list[str]], tokenizer: Any, length: int, share: float, seed: int
) -> Callable[[list[int]], dict[str, Tensor]]:
    """Some tokens of each text are masked: they are what counts.  Which ones depends on seed and row alone."""
    if not 0 < share <= 1:
        raise LoadError(message("mask", "a share of the tokens between 0 and 1", str(share)))
    if tokenizer.mask_token_id is None:
        raise LoadError(message("model", "one whose tokenizer has a mask token", type(tokenizer).__name__))

    def make(rows: list[int]) -> dict[str, Tensor]:
        arguments = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}
        made = dict(tokenizer(read(rows), return_special_tokens_mask=True, **arguments))
        _check_tokens(made, [], length)
        maskable = ~made.pop("special_tokens_mask").bool() & made["attention_mask"].bool()
        chosen = torch.zeros_like(maskable)
        for i, row in enumerate(rows):
            places = maskable[i].nonzero().flatten()
            count = max(1, round(share * len(places)))
            order = torch.randperm(len(places), generator=_generator(seed, row))
            chosen[i, places[order[:count]]] = True
        made["labels"] = torch.where(chosen, made["input_ids"], IGNORED)
        made["input_ids"] = torch.where(chosen, tokenizer.mask_token_id, made["input_ids"])
        return made

    return make


def _check_tokens(made: Mapping[str, Tensor], rows: list[int], length: int) -> None:
    """Of each of these rows at least one token, and no more than asked for: tokenizers do not say when they cannot."""
    found = made["input_ids"].shape[1]
    if found > length:
        advice = "Some are added to every text, and cannot be left out."
        raise LoadError(
            message("max_length", f"at least as many tokens as stay of each text ({found})", str(length), advice)
        )
    mask = made.get("attention_mask")  # a few models take none
    counts = [found] * len(rows) if mask is None else mask.sum(1).tolist()
    empty = next((row for row, count in zip(rows, counts, strict=False) if not count), None)
    if empty is not None:
        raise LoadError(message("data", "texts with at least one token", f"none in row {empty}", "Remove it."))


def _generator(seed: int, row: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def _reader(table: Table, column: str) -> Callable[[list[int]], list[str]]:
    def read(rows: list[int]) -> list[str]:
        values = table.take(column, rows)
        for value, row in zip(values, rows, strict=True):
            if not isinstance(value, str):
                what = "nothing" if value is None else type(value).__name__
                got = f"{what} in row {row} of column {column!r}"
                advice = (
                    "Fill it in or remove the row." if value is None else "Name the right column: --columns text=NAME."
                )
                raise LoadError(message("data", "text", got, advice))
        return values

    return read


def _split(value: Any, row: int) -> list[Any]:
    """A list of words or labels; in a CSV file they stand in one cell with spaces between."""
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list) and None not in value:
        return value
    expected = "a list of words, or words with spaces between"
    got = "a missing one" if isinstance(value, list) else type(value).__name__
    raise LoadError(message("data", expected, f"{got} in row {row}"))


def _tokenizer(model: LoadedModel) -> Any:
    transformers = require("transformers", "hf", "Text")
    if model.processor is None:
        raise LoadError(message("processor", "where the tokenizer is", "none", "Give it: --processor FOLDER."))
    local = Path(model.processor).is_dir()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.processor, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain ones
        if not local and isinstance(error, OSError):
            raise hub_error("processor", model.processor, error) from error
        advice = "tokenizer.save_pretrained(folder) writes one; or name another folder with --processor."
        got = f"{model.processor} ({' '.join(str(error).split())[:200]})"
        raise LoadError(message("processor", "a folder with a tokenizer", got, advice)) from error
    if len(tokenizer) - len(set(tokenizer.all_special_ids)) <= _NO_WORDS:  # made of nothing, where no file is
        advice = "tokenizer.save_pretrained(folder) writes one; or name another folder with --processor."
        got = f"{model.processor}, whose tokenizer knows no words"
        raise LoadError(message("processor", "a folder with a tokenizer", got, advice))
    used = getattr(model.config, "pad_token_id", None)
    if isinstance(used, int) and 0 <= used < len(tokenizer):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(used)  # decoders look for the last token by it
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # what stands there is masked
    if tokenizer.pad_token_id is None:
        advice = "Add a pad_token to it and save it."
        raise LoadError(message("processor", "a tokenizer with a token to pad with", model.processor, advice))
    at_the_end = model.task is Task.TEXT and getattr(model.config, "summary_type", None) == "last"  # XLNet
    tokenizer.padding_side = "left" if at_the_end else "right"
    return tokenizer


def _length(tokenizer: Any, model: LoadedModel, asked: int | None) -> int:
    """As asked for; else what tokenizer and model take, at most 512."""
    table = _places(model)
    if asked is not None:
        integer_in_range(asked, "max_length", 1, 10**7, "tokens")
        if table is not None and asked > table:
            raise LoadError(message("max_length", f"at most {table}, the model's positions", str(asked)))
        return asked
    places = table or getattr(model.config, "max_position_embeddings", None) or LONGEST
    return int(min(LONGEST, tokenizer.model_max_length, places if places > 0 else LONGEST))  # XLNet has -1: no limit


def _places(model: LoadedModel) -> int | None:
    """Positions that the model has a vector for; None where it computes them.  RoBERTa's begin after its padding."""
    size = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.module.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and module.num_embeddings == size
            and name.endswith(("position_embeddings", "wpe", "embed_positions"))
        ):
            return int(size - (0 if module.padding_idx is None else module.padding_idx + 1))
    return None
