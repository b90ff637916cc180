"""Encoders: from the values of some rows to the model's inputs, by the model's own processor."""

from __future__ import annotations

import hashlib
import inspect
import io
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.hf.columns import LabelReader
from neuromanifold.hf.errors import LoadError, hub_error, require, short
from neuromanifold.hf.models import LoadedModel, Task

IGNORED = -100  # the label of positions that do not count
_LONGEST = 512  # tokens, unless told otherwise or the model takes fewer
_UINT16_SCALE = 257  # 65535 / 255

Values = dict[str, list[Any]]  # by role: text, image, label, ...
Encode = Callable[[Values, list[int]], dict[str, Tensor]]
"""From the values of some rows, and the rows' numbers for messages, to the model's inputs."""

_PROCESSORS = {  # named by module: some versions export the second one only where torchvision is installed
    "tokenizer": ("tokenization_auto", "AutoTokenizer"),
    "image processor": ("image_processing_auto", "AutoImageProcessor"),
    "feature extractor": ("feature_extraction_auto", "AutoFeatureExtractor"),
}


def load_processor(model: LoadedModel, noun: str) -> Any:
    """Load the model's tokenizer, image processor or feature extractor by the Auto class of transformers."""
    require("transformers", "hf", f"A model's {noun}")
    module, auto = _PROCESSORS[noun]
    advice = "Save one there with save_pretrained, or name its folder with --processor."
    if model.processor is None:
        raise LoadError(f"No {noun} is known for {model.about}. Name its folder with --processor.")
    try:
        loader = getattr(import_module(f"transformers.models.auto.{module}"), auto)
        return loader.from_pretrained(model.processor, revision=model.revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        if isinstance(error, OSError) and not Path(model.processor).is_dir():
            raise hub_error("processor", model.processor, error) from error
        raise LoadError(f"No {noun} could be loaded from {model.processor} ({short(error)}). {advice}") from error


def text_encoder(model: LoadedModel, max_length: int | None, mask: float, seed: int, classes: LabelReader) -> Encode:
    """Tokenize texts, pairs of texts or words for any of the text tasks; padded to the longest text of the batch."""
    tokenizer = _tokenizer(model)
    length = _max_tokens(tokenizer, model, max_length)
    options = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}
    if model.task is Task.TOKENS:
        return _word_encoder(tokenizer, options, classes)
    if model.task is Task.CAUSAL:
        return _causal_encoder(tokenizer, options)
    if model.task is Task.MASKED:
        return _masked_encoder(tokenizer, options, mask, seed, model.module)

    def encode(values: Values, rows: list[int]) -> dict[str, Tensor]:
        texts = [_texts(values[role], rows) for role in ("text", "text_pair") if role in values]
        batch = dict(tokenizer(*texts, **options))
        _check_tokens(batch, rows, length)
        if model.task is Task.SEQ2SEQ:
            target = tokenizer(text_target=_texts(values["target"], rows), **options)
            batch["labels"] = torch.where(target["attention_mask"].bool(), target["input_ids"], IGNORED)
        return batch

    return encode


def _causal_encoder(tokenizer: Any, options: dict[str, Any]) -> Encode:
    """Tokenize texts, or prompts followed by completions; labels are the tokens, but for padding and prompts.

    They stand at their own token, as transformers wants them: the run shifts them to the position before.  A prompt
    ends with the last token that has nothing of the completion.
    """

    def encode(values: Values, rows: list[int]) -> dict[str, Tensor]:
        texts = _texts(values["completion" if "completion" in values else "text"], rows)
        prompts = _texts(values["prompt"], rows) if "prompt" in values else [""] * len(rows)
        whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        if any(prompts):
            _check_fast(tokenizer, "says where the prompt ends")
        batch = dict(tokenizer(whole, return_offsets_mapping=any(prompts), **options))
        _check_tokens(batch, rows, options["max_length"])
        batch.pop("token_type_ids", None)
        counts = batch["attention_mask"].bool() if "attention_mask" in batch else batch["input_ids"] >= 0
        if "offset_mapping" in batch:
            lengths = torch.tensor([[len(prompt)] for prompt in prompts])
            begun = batch.pop("offset_mapping")[..., 1] > lengths
            counts = counts & (begun | ~lengths.bool()).cummax(1).values
        batch["labels"] = torch.where(counts, batch["input_ids"], IGNORED)
        return batch

    return encode


def _word_encoder(tokenizer: Any, options: dict[str, Any], classes: LabelReader) -> Encode:
    """Label each word at its first token; the other tokens do not count.  Without labels, class 0 marks positions."""
    _check_fast(tokenizer, "aligns words with tokens")

    def encode(values: Values, rows: list[int]) -> dict[str, Tensor]:
        words = [_split(value, row) for value, row in zip(values["words"], rows, strict=True)]
        given = values.get("label", [[0] * len(sentence) for sentence in words])
        tags = [_split(value, row) for value, row in zip(given, rows, strict=True)]
        tokens = tokenizer(words, is_split_into_words=True, **options)
        _check_tokens(tokens, [], options["max_length"])
        aligned = torch.full(tokens["input_ids"].shape, IGNORED)
        for i, row in enumerate(rows):
            if len(tags[i]) != len(words[i]):
                got = f"{len(tags[i])} for {len(words[i])} words in row {row}"
                raise LoadError(message("labels", "as many as words", got))
            positions = tokens.word_ids(i)
            for position, word in enumerate(positions):
                first = word is not None and (position == 0 or positions[position - 1] != word)
                if first and tags[i][word] not in (IGNORED, str(IGNORED)):
                    aligned[i, position] = classes.index(tags[i][word], row) if "label" in values else 0
        return {**tokens, "labels": aligned}

    return encode


def _masked_encoder(tokenizer: Any, options: dict[str, Any], share: float, seed: int, module: nn.Module) -> Encode:
    """Mask a share of each text's tokens, chosen by seed and row alone; only these count."""
    if not 0 < share <= 1:
        raise LoadError(message("mask", "a share of the tokens between 0 and 1", str(share)))
    if tokenizer.mask_token_id is None:
        raise LoadError(message("model", "one whose tokenizer has a mask token", type(tokenizer).__name__))
    shift = getattr(module, "prepare_decoder_input_ids_from_labels", None)

    def encode(values: Values, rows: list[int]) -> dict[str, Tensor]:
        batch = dict(tokenizer(_texts(values["text"], rows), return_special_tokens_mask=True, **options))
        _check_tokens(batch, [], options["max_length"])
        maskable = ~batch.pop("special_tokens_mask").bool() & batch["attention_mask"].bool()
        chosen = torch.zeros_like(maskable)
        for i, row in enumerate(rows):
            places = maskable[i].nonzero().flatten()
            digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            order = torch.randperm(len(places), generator=generator)
            chosen[i, places[order[: max(1, round(share * len(places)))]]] = True
        if shift is not None:  # an encoder-decoder model predicts the whole text, not only what is masked
            whole = torch.where(batch["attention_mask"].bool(), batch["input_ids"], IGNORED)
            batch["decoder_input_ids"] = shift(labels=whole)
        batch["labels"] = torch.where(chosen, batch["input_ids"], IGNORED)
        batch["input_ids"] = torch.where(chosen, tokenizer.mask_token_id, batch["input_ids"])
        return batch

    return encode


def _tokenizer(model: LoadedModel) -> Any:
    tokenizer = load_processor(model, "tokenizer")
    advice = "tokenizer.save_pretrained(folder) writes one; or name another folder with --processor."
    if len(tokenizer) - len(set(tokenizer.all_special_ids)) <= 2:  # what transformers makes where there is no file
        raise LoadError(f"The tokenizer of {model.processor} has no vocabulary. {advice}")
    padding = getattr(model.config, "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < len(tokenizer):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)  # decoders find the last token by it
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked
    if tokenizer.pad_token_id is None:
        raise LoadError(f"The tokenizer of {model.processor} has no padding token. Set pad_token and save it.")
    reads_last = model.task is Task.TEXT and getattr(model.config, "summary_type", None) == "last"  # XLNet
    tokenizer.padding_side = "left" if reads_last else "right"
    return tokenizer


def _check_fast(tokenizer: Any, what: str) -> None:
    if not tokenizer.is_fast:
        raise LoadError(message("model", f"one with a fast tokenizer, which {what}", type(tokenizer).__name__))


def _max_tokens(tokenizer: Any, model: LoadedModel, max_length: int | None) -> int:
    """Return `max_length`, or what tokenizer and model take, at most 512."""
    size = getattr(model.config, "max_position_embeddings", None)
    positions = None  # rows of a table of position embeddings; RoBERTa's begin after its padding
    for name, module in model.module.named_modules():
        table = isinstance(module, nn.Embedding) and name.endswith(("position_embeddings", "wpe", "embed_positions"))
        if table and module.num_embeddings == size:
            positions = int(size - (0 if module.padding_idx is None else module.padding_idx + 1))
    if max_length is not None:
        integer_in_range(max_length, "max_length", 1, 10**7, "tokens")
        if positions is not None and max_length > positions:
            raise LoadError(message("max_length", f"at most {positions}, the model's positions", str(max_length)))
        return max_length
    limit = positions or size or _LONGEST
    return int(min(_LONGEST, tokenizer.model_max_length, limit if limit > 0 else _LONGEST))  # XLNet has -1: no limit


def _check_tokens(batch: Any, rows: list[int], length: int) -> None:
    """Check that tokenization kept to `length`, which it may silently not, and left each of `rows` a token."""
    found = batch["input_ids"].shape[1]
    if found > length:
        advice = "They are added to every text, and cannot be cut."
        raise LoadError(message("max_length", f"at least {found}, the number of special tokens", str(length), advice))
    mask = batch.get("attention_mask")  # a few models take none
    counts = [found] * len(rows) if mask is None else mask.sum(1).tolist()
    empty = next((row for row, count in zip(rows, counts, strict=False) if not count), None)
    if empty is not None:
        raise LoadError(f"The text of row {empty} has no tokens. Remove the row.")


def _texts(values: list[Any], rows: list[int]) -> list[str]:
    for value, row in zip(values, rows, strict=True):
        if value is None:
            raise LoadError(f"The text of row {row} is missing. Fill it in or remove the row.")
        if not isinstance(value, str):
            got = f"{type(value).__name__} in row {row}"
            raise LoadError(f"The text column does not hold text: got {got}. Name the right one: --columns text=NAME.")
    return [str(value) for value in values]


def _split(value: Any, row: int) -> list[Any]:
    """Return a list of words or labels; in a CSV file they stand in one cell with spaces between."""
    if isinstance(value, str):
        return value.split()
    if isinstance(value, (list, np.ndarray)) and not any(entry is None for entry in value):
        return list(value)
    got = "a missing one" if isinstance(value, list) else type(value).__name__
    raise LoadError(f"Words and their labels must be lists, or text with spaces between: got {got} in row {row}.")


def image_encoder(model: LoadedModel) -> Encode:
    """Open images (arrays, paths or bytes) and apply the model's image processor."""
    require("PIL.Image", "hf", "An image")
    processor = load_processor(model, "image processor")
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"

    def encode(values: Values, rows: list[int]) -> dict[str, Tensor]:
        images = [_open_image(image, mode, row) for image, row in zip(values["image"], rows, strict=True)]
        try:
            return dict(processor(images=images, return_tensors="pt"))
        except ValueError as error:
            raise LoadError(f"Images of rows {rows[:4]} ... cannot be processed together ({short(error)}).") from error

    return encode


def _open_image(image: Any, mode: str, row: int) -> Any:
    pillow = require("PIL.Image", "hf", "An image")
    try:
        if isinstance(image, np.ndarray):
            opened = pillow.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
        else:
            decoder = require("datasets", "hf", "An image file").Image()
            opened = decoder.decode_example(_file(image))  # rotates photos as their EXIF data say
        if opened.mode.startswith("I;16"):
            opened = pillow.fromarray((np.asarray(opened) / _UINT16_SCALE).round().astype(np.uint8))
        if opened.mode in ("I", "F"):
            raise ValueError("neither 8 nor 16 bits")  # its white value is unknown, and pillow would clip at 255
        return opened.convert(mode)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        if isinstance(image, np.ndarray):
            got = f"{image.dtype} of shape {list(image.shape)}"
            raise LoadError(
                f"Row {row} is no image: expected uint8 of shape [H, W, 3], got {got} ({error})."
            ) from error
        raise LoadError(f"{_name(image, row)} cannot be read as an image ({short(error)}). Remove it.") from error


def audio_encoder(model: LoadedModel, max_length: int | None) -> Encode:
    """Read clips (arrays at the model's rate, paths or bytes), cut to `max_length`, and apply the feature extractor."""
    extractor = load_processor(model, "feature extractor")
    rate = int(extractor.sampling_rate)
    padding = inspect.signature(extractor.__call__).parameters.get("padding")
    fixed = padding is None or padding.default == "max_length"  # the model takes clips of one length
    options = {"sampling_rate": rate, "return_tensors": "pt"} | ({} if fixed else {"padding": True})

    def encode(values: Values, rows: list[int]) -> dict[str, Tensor]:
        clips = [_read_audio(clip, rate, row)[:max_length] for clip, row in zip(values["audio"], rows, strict=True)]
        for clip, row in zip(clips, rows, strict=True):
            if not len(clip):
                raise LoadError(f"The audio of row {row} has length zero. Remove it.")
        return dict(extractor(clips, **options))

    return encode


def _read_audio(clip: Any, rate: int, row: int) -> NDArray[np.float32]:
    """Return one channel at the model's sampling rate; integers are scaled to [-1, 1) as audio files are."""
    if isinstance(clip, np.ndarray):
        if np.issubdtype(clip.dtype, np.signedinteger):
            return clip.astype(np.float32) / -np.float32(np.iinfo(clip.dtype).min)
        if not np.issubdtype(clip.dtype, np.floating) or clip.ndim != 1:
            got = f"{clip.dtype} of shape {list(clip.shape)}"
            raise LoadError(f"Row {row} is no audio: expected floats or signed integers [samples], got {got}.")
        return clip.astype(np.float32, copy=False)
    soundfile, file = require("soundfile", "hf", "An audio file"), _file(clip)
    try:
        stored = file["path"] if file["bytes"] is None else io.BytesIO(file["bytes"])
        values, found = soundfile.read(stored, dtype="float32")
    except (RuntimeError, OSError, TypeError) as error:
        raise LoadError(f"{_name(clip, row)} cannot be read as audio ({short(error)}). Remove it.") from error
    values = values.mean(1) if values.ndim > 1 else values
    if found != rate:
        signal = require("scipy.signal", "hf", f"Audio at {found} Hz for a model at {rate} Hz")
        common = math.gcd(found, rate)
        values = signal.resample_poly(values, rate // common, found // common)
    return np.asarray(values, dtype=np.float32)


def _file(value: Any) -> dict[str, Any]:
    """Return {"path", "bytes"} of a file as a table stores it: such a dict, a path, or bytes."""
    if isinstance(value, dict):
        return {"path": value.get("path"), "bytes": value.get("bytes")}
    return {"path": None, "bytes": value} if isinstance(value, bytes) else {"path": value, "bytes": None}


def _name(value: Any, row: int) -> str:
    path = _file(value)["path"]
    return f"{path} (row {row})" if path else f"Row {row}"


def number_encoder(label: str | None) -> Encode:
    """Stack 'inputs' as they are, or all columns but the label's as features [B, columns]."""

    def encode(values: Values, rows: list[int]) -> dict[str, Tensor]:
        if "inputs" in values:
            return {"inputs": torch.from_numpy(np.stack(values["inputs"]))}
        features = {name: column for name, column in values.items() if name not in ("label", label)}
        try:
            numbers = [[float(value) for value in column] for column in features.values()]
        except (TypeError, ValueError) as error:
            advice = "For text, give --task; anything else goes by module:function."
            raise LoadError(f"Rows {rows[:4]} ... are not numbers ({error}). {advice}") from error
        return {"inputs": torch.tensor(numbers).T.contiguous()}

    return encode
