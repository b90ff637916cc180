"""Real networks with real inputs: folders that shared/realdata/prepare.py makes, smaller exports of them, and digits.

TASK/model/, TASK/task.json, TASK/data.csv or data.npz     as prepared (see shared/realdata/README.md)
EXPORT/config.json, model.safetensors, inputs.safetensors, task.json      a few inputs, and weights in less space

An export is for a machine that the whole task does not fit onto.  Inputs are token ids or uint8 images.  Rows of the
word embedding that these inputs do not look up are left out (and are zero when read: nothing depends on them), and a
matrix with at most 256 values is a table of these values and a byte for each entry.  That loses nothing.  If it is not
enough, the other matrices are rounded to float16; task.json says so.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

Inputs = dict[str, Tensor]
LIMIT = 60e6  # bytes of an export


class RealTask(NamedTuple):
    """A network in eval mode, batches {inputs, "labels"} on its device, and what is known of it."""

    name: str
    model: nn.Module
    batches: list[Inputs] | list[tuple[Tensor, Tensor]]
    classes: int
    about: str  # where it comes from, in a line
    provenance: list[dict[str, str]]


def load(folder: str, samples: int, size: int, device: torch.device, dtype: torch.dtype, pixels: int = 0) -> RealTask:
    """`samples` random inputs (the same ones every time) in batches of `size`; images of `pixels` by `pixels`."""
    if folder == "digits":
        return _digits(samples, size, device, dtype)
    home = Path(folder)
    facts = json.loads((home / "task.json").read_text(encoding="utf-8"))
    rows = _rows(facts["rows"], samples)
    exported = (home / "inputs.safetensors").exists()
    raw = _exported(home, samples) if exported else _raw(home, facts, rows)
    model = _model(home if exported else home / "model", facts["kind"], exported).to(device, dtype)
    parts = [{key: value[i : i + size] for key, value in raw.items()} for i in range(0, len(raw["labels"]), size)]
    batches = [_ready(part, facts, device, dtype, pixels) for part in parts]
    return RealTask(facts["task"], model, batches, facts["classes"], _about(facts), facts["provenance"])


def export(folder: str, target: str, samples: int) -> None:
    """Write a smaller task: the same `samples` inputs that `load` takes."""
    from safetensors.torch import load_file, save_file

    home, out = Path(folder), Path(target)
    out.mkdir(parents=True, exist_ok=True)
    facts = json.loads((home / "task.json").read_text(encoding="utf-8"))
    inputs = _raw(home, facts, _rows(facts["rows"], samples))
    weights = _packed(load_file(home / "model" / "model.safetensors"), inputs)
    note = "weights unchanged, but for words that do not occur"
    if sum(value.numel() * value.element_size() for value in weights.values()) > LIMIT:
        matrices = {key for key, value in weights.items() if value.ndim > 1 and value.is_floating_point()}
        weights = {key: value.half() if key in matrices else value for key, value in weights.items()}
        note = "matrices rounded to float16"
    save_file({key: value.contiguous() for key, value in weights.items()}, out / "model.safetensors")
    save_file(inputs, out / "inputs.safetensors")
    (out / "config.json").write_text((home / "model" / "config.json").read_text())
    (out / "task.json").write_text(json.dumps({**facts, "exported": note}, indent=2))
    total = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {samples} inputs, {total / 1e6:.1f} MB ({note})" + (": MORE THAN 60 MB" if total > LIMIT else ""))


def _packed(weights: Inputs, inputs: Inputs) -> Inputs:
    """NAME, or NAME:codes (bytes) and NAME:values; and NAME:rows where only some rows are kept."""
    made: Inputs = {}
    for name, value in weights.items():
        if name.endswith("word_embeddings.weight"):
            made[f"{name}:rows"] = rows = inputs["input_ids"].unique()
            value = value[rows]
        made[name] = value
        if value.ndim > 1 and len(value.flatten()[:4096].unique()) <= 256:  # a glance first
            values, codes = value.unique(return_inverse=True)
            if len(values) <= 256:
                made[f"{name}:codes"], made[f"{name}:values"] = codes.to(torch.uint8), values
                del made[name]
    return made


def _unpacked(packed: Inputs, shapes: dict[str, torch.Size]) -> Inputs:
    """What `_packed` made, in float32; rows that were left out are zero."""
    made: Inputs = {}
    for name, shape in shapes.items():
        codes = packed.get(f"{name}:codes")
        value = packed[name] if codes is None else packed[f"{name}:values"][codes.long()]
        rows = packed.get(f"{name}:rows")
        value = value.float() if value.is_floating_point() else value
        made[name] = value if rows is None else value.new_zeros(shape).index_copy(0, rows, value)
    return made


def _rows(rows: int, samples: int) -> Tensor:
    """A fixed random order: a smaller subset is the beginning of a larger one."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:samples]


def _raw(home: Path, facts: dict, rows: Tensor) -> Inputs:
    """Token ids padded to one length, or uint8 images [N, 3, h, w]; and labels."""
    if facts["kind"] == "image":
        import numpy as np

        with np.load(home / "data.npz") as data:
            images, labels = (torch.from_numpy(data[key][rows.numpy()]) for key in ("images", "labels"))
        return {"images": images.permute(0, 3, 1, 2).contiguous(), "labels": labels.long()}
    from transformers import AutoTokenizer

    with (home / "data.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    chosen = [table[i] for i in rows.tolist()]
    texts = [[row[column] for row in chosen] for column in ("text", "text_pair") if column in chosen[0]]
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    length = facts["preprocessing"]["max_length"]
    made = tokenizer(*texts, truncation=True, padding=True, max_length=length, return_tensors="pt")
    return {**made, "labels": torch.tensor([int(row["label"]) for row in chosen])}


def _exported(home: Path, samples: int) -> Inputs:
    from safetensors.torch import load_file

    raw = load_file(home / "inputs.safetensors")
    if len(raw["labels"]) < samples:
        raise SystemExit(f"{home} has {len(raw['labels'])} inputs, fewer than --samples {samples}: export more.")
    return {key: value[:samples] for key, value in raw.items()}


def _model(home: Path, kind: str, packed: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

    auto = {"text": AutoModelForSequenceClassification, "image": AutoModelForImageClassification}[kind]
    if not packed:
        return auto.from_pretrained(home, dtype=torch.float32).eval()
    from safetensors.torch import load_file

    model, stored = auto.from_config(AutoConfig.from_pretrained(home)).float(), load_file(home / "model.safetensors")
    model.load_state_dict(_unpacked(stored, {name: value.shape for name, value in model.state_dict().items()}))
    return model.eval()


def _ready(part: Inputs, facts: dict, device: torch.device, dtype: torch.dtype, pixels: int) -> Inputs:
    """One batch as the model takes it: padding down to the longest of the batch, or images resized and normalised."""
    if "images" not in part:
        longest = int(part["attention_mask"].sum(1).max())
        cut = {key: value if key == "labels" else value[:, :longest] for key, value in part.items()}
        return {key: value.to(device) for key, value in cut.items()}
    how = facts["preprocessing"]
    x = part["images"].to(device, dtype) * how["rescale"]
    x = interpolate(x, size=(pixels or how["resize"],) * 2, mode=how["interpolation"])
    mean, std = (torch.tensor(how[key], device=device, dtype=dtype)[:, None, None] for key in ("mean", "std"))
    return {"pixel_values": (x - mean) / std, "labels": part["labels"].to(device)}


def _about(facts: dict) -> str:
    parts = [facts["data"], f"head: {facts['head']}", facts.get("body", ""), facts.get("exported", "")]
    return ". ".join(part[0].upper() + part[1:] for part in parts if part) + "."


def provenance_line(entries: Iterable[dict[str, str]]) -> str:
    """Registry, package, version and licence of everything that a task was made from."""
    return "; ".join(f"{one['registry']} {one['package']} {one['version']} ({one['licence']})" for one in entries)


def _digits(samples: int, size: int, device: torch.device, dtype: torch.dtype) -> RealTask:
    from neuromanifold.experiments.digits import train_digits

    trained = train_digits(samples)
    images, labels = (torch.cat(column) for column in zip(*trained.batches, strict=True))
    images, labels = images.to(device, dtype), labels.to(device)
    batches = list(zip(images.split(size), labels.split(size), strict=True))
    accuracy = f"test accuracy {trained.test_accuracy:.3f}"
    about = f"The library's own small convolutional network on scikit-learn's digits, trained on the spot, {accuracy}."
    source = {"registry": "PyPI", "package": "scikit-learn", "version": _version("scikit-learn"), "licence": "BSD"}
    return RealTask("digits", trained.model.to(device, dtype).eval(), batches, 10, about, [source])


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
