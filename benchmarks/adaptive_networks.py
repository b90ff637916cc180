"""Trained networks and their data, for the benchmarks of adaptive passes and of intervals.

digits           a convolutional network on scikit-learn's digits
small_network    two small networks on CIFAR-10 images of half their size, trained in a minute or two on a CPU
trained_images   two larger ones, trained in seconds on a GPU, with images that they were not trained on
text             a folder with model/ and data.csv, as the tools for real data write it
packed_texts     such texts from the small files of `adaptive_pack.py`; the model is trained first
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Case(NamedTuple):
    """A trained network and data; `rare` marks entries to which at most two samples contribute."""

    name: str
    model: nn.Module
    batches: list[Any]
    embeddings: tuple[str, ...] = ()
    rare: Mapping[str, Tensor] = {}


def digits(size: int = 512) -> list[Case]:
    """A convolutional network on scikit-learn's digits, after 0, 6 and 40 epochs, with its training images."""
    from neuromanifold.experiments.digits import TRAINING, load_digits

    images, labels = load_digits()
    images, labels = images[:TRAINING], labels[:TRAINING]
    cases = []
    for epochs in (0, 6, 40):
        torch.manual_seed(0)
        convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10))
        train(model, images, labels, epochs, batch=32)
        cases.append(Case(f"digits, {epochs} epochs", model, batches_of(images, labels, TRAINING, size)))
    return cases


def batches_of(images: Tensor, labels: Tensor, samples: int, size: int = 64) -> list[Any]:
    """The first samples in batches."""
    return [(images[i : i + size], labels[i : i + size]) for i in range(0, samples, size)]


class Residual(nn.Module):
    """Convolutions with identity around them, as in a small ResNet; 0.9 M parameters."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.first = _convolution(3, width)
        stages, channels = [], width
        for stage in range(3):
            outs = width * 2**stage
            stages += [nn.Sequential(_convolution(channels, outs, 2 if stage else 1), nn.ReLU())]
            stages += [
                _Identity(nn.Sequential(_convolution(outs, outs), nn.ReLU(), _convolution(outs, outs)))
                for _ in range(blocks - 1)
            ]
            channels = outs
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        logits: Tensor = self.head(self.stages(self.first(x).relu()).mean((2, 3)))
        return logits


class _Identity(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.inner(x)).relu()


def _convolution(ins: int, outs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs))


def vgg() -> nn.Module:
    """Thirteen convolutions and a linear layer; 14.7 M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for outs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512):
        layers += [_convolution(channels, outs), nn.ReLU()] if outs else [nn.MaxPool2d(2)]
        channels = outs or channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def small_residual(width: int = 24) -> nn.Module:
    """Fourteen convolutions with identities around pairs of them; 0.5 M parameters."""
    layers: list[nn.Module] = [_convolution(3, width, 2), nn.ReLU()]
    channels = width
    for stage in range(3):
        outs = width * 2**stage
        layers += [_convolution(channels, outs, 2 if stage else 1), nn.ReLU()]
        layers += [
            _Identity(nn.Sequential(_convolution(outs, outs), nn.ReLU(), _convolution(outs, outs))) for _ in "ab"
        ]
        channels = outs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def small_vgg() -> nn.Module:
    """Seven convolutions and a linear layer; 1.2 M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for outs in (32, 0, 64, 64, 0, 128, 128, 0, 256, 256):
        layers += [*_convolution(channels, outs), nn.ReLU()] if outs else [nn.MaxPool2d(2)]
        channels = outs or channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


SMALL: dict[str, tuple[Callable[[], nn.Module], int, float]] = {  # network, epochs, learning rate
    "residual": (small_residual, 48, 0.1),
    "vgg": (small_vgg, 40, 0.05),
}


def small_network(name: str, path: Path, weights: Path, samples: int, size: int) -> list[Case]:
    """A network that is trained on 2,048 images of 16 × 16 pixels until it knows them.

    With `samples` of these, and with as many others.
    """
    every, all_labels = images_and_labels(path)
    every = nn.functional.avg_pool2d(every, 2)
    images, labels = every[:2048], all_labels[:2048]
    torch.manual_seed(0)
    make, epochs, rate = SMALL[name]
    model, file = make(), weights / f"{name}.safetensors"
    if not file.exists():
        train(model, images, labels, epochs, batch=64, rate=rate, shift=False)
        save_file(model.state_dict(), file)
    model.load_state_dict(load_file(file))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    right = confidence(model.eval(), every[2048 : 2048 + samples], all_labels[2048 : 2048 + samples])[1]
    title = f"small {name} network, {millions:.2f} M, {samples} "
    return [
        Case(title + "of the 2,048 images that it was trained on", model, batches_of(images, labels, samples, size)),
        Case(
            title + f"other images (accuracy {right:.3f})",
            model,
            batches_of(every[2048:], all_labels[2048:], samples, size),
        ),
    ]


def images_and_labels(path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32], about standardised, and labels [N], of a data.npz or of what `pack_images` wrote."""
    import numpy as np
    from adaptive_pack import unpack_images

    if path.is_dir():
        images, labels = unpack_images(path)
    else:
        data = np.load(path)
        images, labels = data["images"], data["labels"]
    x = torch.as_tensor(images).permute(0, 3, 1, 2).float().div_(255).sub_(0.47).div_(0.25)
    return x, torch.as_tensor(labels).long()


LARGE: dict[str, Callable[[], nn.Module]] = {"residual": Residual, "vgg": vgg}
CONFIDENT = 0.98  # mean largest probability


def trained_images(
    name: str, path: Path, device: torch.device, epochs: int, until: Callable[[], bool], samples: int, size: int
) -> Case:
    """A network trained until its predictions for other images are confident, with `samples` of these in batches.

    First with shifts and mirror images, then without them at ever higher temperatures: the loss is that of logits/T.
    """
    images, labels = (one.to(device) for one in images_and_labels(path))
    torch.manual_seed(0)
    make = LARGE[name]
    if device.type == "cpu":  # to see that everything runs
        make = SMALL[name][0]
    model, held = make().to(device), min(4096, len(images) // 2)
    own, others = (images[:-held], labels[:-held]), (images[-held:], labels[-held:])
    train(model, *own, epochs, batch=256)
    temperature, (peak, right) = 1.0, confidence(model, *others)
    while peak < CONFIDENT and epochs and not until():
        train(model, *own, max(1, epochs // 8), batch=256, rate=0.02, shift=False, temperature=temperature, decay=0)
        temperature, (peak, right) = 1.5 * temperature, confidence(model, *others)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    title = f"{name} network, {millions:.2f} M, trained on {len(own[0])} images, {samples} of {held} other images"
    title += f" (accuracy {right:.3f})" + (" and their mirror images" if samples > held else "")
    x, y = torch.cat([others[0], others[0].flip(-1)]), others[1].repeat(2)
    return Case(title, model, batches_of(x[:samples], y[:samples], samples, size))


@torch.no_grad()
def confidence(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """The mean largest probability, and the accuracy."""
    probabilities = torch.cat([model(part).softmax(-1) for part in images.split(1024)])
    return float(probabilities.amax(-1).mean()), float((probabilities.argmax(-1) == labels).float().mean())


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    batch: int = 128,
    rate: float | None = None,
    shift: bool = True,
    temperature: float = 1.0,
    decay: float = 5e-4,
) -> None:
    """Stochastic gradient descent with momentum, one cycle; images are shifted by up to an eighth, and mirrored."""
    size, rate = images.shape[-1], rate or (0.1 if images.shape[1] == 3 else 0.02)
    steps = epochs * (len(labels) // batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(1, steps))
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), device=labels.device).split(batch):
            if len(rows) < batch:
                continue
            x = images[rows]
            if images.shape[1] == 3:
                if shift:
                    x = nn.functional.pad(x, (size // 8,) * 4)
                    i, j = torch.randint(0, size // 4 + 1, (2,)).tolist()
                    x = x[..., i : i + size, j : j + size]
                x = x.flip(-1) if bool(torch.rand(()) < 0.5) else x
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                logits = model(x).float()
            nn.functional.cross_entropy(logits / temperature, labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()


def text(path: Path, device: torch.device, samples: int, size: int, multiple: int = 1) -> list[Case]:
    """A sentence classifier and its data, in batches padded to their longest text, rounded up to a multiple."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path / "model", dtype=torch.float32).to(device).eval()
    rows = tokenized(path, samples)
    return [text_case(path.name, model, *rows, device, size, multiple)]


def tokenized(path: Path, samples: int, longest: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and token types [N, T], 0 and -1 where there is no token, and labels [N]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    with (path / "data.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:samples]
    pairs = [[row["text"] for row in rows]] + ([[row["text_pair"] for row in rows]] if "text_pair" in rows[0] else [])
    made = tokenizer(
        *pairs, padding=True, truncation=True, max_length=longest, return_tensors="pt", return_token_type_ids=True
    )
    types = torch.where(made["attention_mask"] > 0, made["token_type_ids"], -1)
    return made["input_ids"], types, torch.tensor([int(row["label"]) for row in rows])


def text_case(
    name: str,
    model: Any,
    ids: Tensor,
    types: Tensor,
    labels: Tensor,
    device: torch.device,
    size: int,
    multiple: int,
) -> Case:
    """Batches of texts, with the words that one or two of them have."""
    batches = []
    for some, their_types, own in zip(ids.split(size), types.split(size), labels.split(size), strict=True):
        longest = -(-int((their_types >= 0).sum(-1).max()) // multiple) * multiple
        some, their_types = (one[:, :longest].to(device).long() for one in (some, their_types))
        batch = {"input_ids": some, "attention_mask": (their_types >= 0).long(), "labels": own.to(device)}
        if getattr(model.config, "type_vocab_size", 0) > 1:
            batch["token_type_ids"] = their_types.clamp(min=0)
        batches.append(batch)
    words = torch.zeros(model.get_input_embeddings().num_embeddings, device=device)
    for batch in batches:
        for row in batch["input_ids"]:
            words[row.unique()] += 1
    names = [own for own, _ in model.named_parameters()]
    rare = {own: ((words > 0) & (words <= 2))[:, None] for own in names if "word_embeddings" in own}
    everywhere = tuple(own for own in names if "embeddings" in own)
    return Case(f"{name}, {len(labels)} texts", model, batches, everywhere, rare)


def packed_texts(path: Path, device: torch.device, samples: int, size: int, epochs: int) -> Case:
    """What `pack_texts` wrote; the last three layers, the pooler and the head are trained on the same texts first."""
    from adaptive_pack import LONGEST, unpack_texts

    model, ids, types, labels = unpack_texts(path, samples)
    model = model.to(device)
    case = text_case(path.name, model, ids, types, labels, device, size, LONGEST)
    if epochs:
        train_text(model, ids.to(device), types.to(device), labels.to(device), epochs)
    return case._replace(model=model.eval())


def train_text(model: Any, ids: Tensor, types: Tensor, labels: Tensor, epochs: int, size: int = 64) -> None:
    """AdamW on the upper half of the layers, the pooler and the head."""
    torch.manual_seed(0)
    layers = len(model.bert.encoder.layer)
    lower = [model.bert.embeddings, *model.bert.encoder.layer[: layers - layers // 2]]
    trained = [p for p in model.parameters() if not any(p is q for module in lower for q in module.parameters())]
    optimizer = torch.optim.AdamW(trained, lr=4e-4, weight_decay=0.01)
    steps = max(1, epochs * (len(labels) // size))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, total_steps=steps, pct_start=0.1)
    lengths = (types >= 0).sum(-1)
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), device=labels.device).split(size):
            if len(rows) < size:
                continue
            longest = int(lengths[rows].max())
            some = types[rows, :longest]
            found = model(
                input_ids=ids[rows, :longest], attention_mask=(some >= 0).long(), token_type_ids=some.clamp(min=0)
            )
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(found.logits, labels[rows]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
    model.requires_grad_(True)
    model.eval()
