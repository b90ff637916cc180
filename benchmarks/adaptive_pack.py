"""Images and texts in small files, for a machine without a network: `benchmarks/adaptive.py gpu` reads them.

pack_images, unpack_images    lossless: differences from a prediction by neighbouring pixels, compressed
pack_texts, unpack_texts      a sentence classifier with the words that occur alone, rounded to 8 bits, and tokens
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LONGEST = 64  # tokens; one text in sixty is longer


def _predicted(left: Any, above: Any, corner: Any) -> Any:
    """The median of left, above and left + above - corner, as in lossless JPEG."""
    low, high = np.minimum(left, above), np.maximum(left, above)
    return np.where(corner >= high, low, np.where(corner <= low, high, left + above - corner))


def pack_images(path: Path, out: Path) -> None:
    """Write images uint8 [N, 32, 32, 3] and labels of a data.npz."""
    data = np.load(path)
    x = data["images"].astype(np.int16)
    planes = np.stack([x[..., 1], x[..., 0] - x[..., 1] + 128, x[..., 2] - x[..., 1] + 128]) & 255  # [3, N, 32, 32]
    before = np.pad(planes, ((0, 0), (0, 0), (1, 0), (1, 0)))
    rest = planes - _predicted(before[:, :, 1:, :-1], before[:, :, :-1, 1:], before[:, :, :-1, :-1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "images.xz").write_bytes(lzma.compress((rest & 255).astype(np.uint8).tobytes()))
    np.save(out / "labels.npy", data["labels"].astype(np.uint8))
    assert np.array_equal(unpack_images(out)[0], data["images"])


def unpack_images(path: Path) -> tuple[Any, Any]:
    """Images uint8 [N, 32, 32, 3] and labels [N]."""
    labels = np.load(path / "labels.npy")
    rest = np.frombuffer(lzma.decompress((path / "images.xz").read_bytes()), np.uint8)
    rest = rest.reshape(3, -1, 32, 32).transpose(2, 3, 0, 1).astype(np.int16, order="C")
    planes = np.zeros((33, 33, *rest.shape[2:]), np.int16)
    for i in range(32):
        for j in range(32):
            predicted = _predicted(planes[i + 1, j], planes[i, j + 1], planes[i, j])
            planes[i + 1, j + 1] = rest[i, j] + predicted & 255
    green, red, blue = planes[1:, 1:].transpose(2, 3, 0, 1)
    return np.stack([red + green - 128, green, blue + green - 128], -1).astype(np.uint8), labels


def pack_texts(path: Path, out: Path, samples: int) -> None:
    """Write a model and the first texts of its data."""
    from adaptive_networks import tokenized
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path / "model", dtype=torch.float32)
    pack_model(model, *tokenized(path, samples, LONGEST), out)


def pack_model(model: Any, ids: Tensor, types: Tensor, labels: Tensor, out: Path) -> None:
    """See `pack_texts`."""
    words = torch.cat([torch.zeros(1, dtype=ids.dtype), ids.flatten()]).unique()  # 0 stays the padding
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(embedding.weight.detach()[words].contiguous())
    model.config.vocab_size = embedding.num_embeddings = len(words)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    arrays = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        scale = value.abs().flatten(1).amax(1) if value.ndim > 1 else value.abs()
        if value.ndim > 1:
            scale = scale.clamp(min=1e-12) / 127
            arrays[f"q.{name}"] = (value / scale.view(-1, *[1] * (value.ndim - 1))).round().to(torch.int8).numpy()
            arrays[f"s.{name}"] = scale.numpy()
        else:
            arrays[f"v.{name}"] = value.numpy()
    np.savez_compressed(out / "model.npz", **arrays)
    tokens = {"ids": torch.searchsorted(words, ids), "types": types, "labels": labels}
    np.savez_compressed(out / "tokens.npz", **{key: value.to(torch.int16).numpy() for key, value in tokens.items()})


def unpack_texts(path: Path, samples: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The model, token ids and token types [N, T], and labels [N]."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = json.loads((path / "config.json").read_text())
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))
    state = {}
    for key, value in np.load(path / "model.npz").items():
        kind, name = key[0], key[2:]
        if kind == "v":
            state[name] = torch.as_tensor(value)
        elif kind == "q":
            state[name] = torch.as_tensor(value).float()
    for key, value in np.load(path / "model.npz").items():
        if key.startswith("s."):
            weight = state[key[2:]]
            state[key[2:]] = weight * torch.as_tensor(value).view(-1, *[1] * (weight.ndim - 1))
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert all("position_ids" in name or "token_type_ids" in name for name in missing), missing
    data = np.load(path / "tokens.npz")
    ids, types, labels = (torch.as_tensor(data[key])[:samples].long() for key in ("ids", "types", "labels"))
    return model.float(), ids, types, labels
