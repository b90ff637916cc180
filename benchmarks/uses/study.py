"""What the studies share: digits, small networks and their training, means over seeds, files of results, figures.

Each study is run as `PYTHONPATH=src:benchmarks python -m uses.NAME`; it writes benchmarks/results/uses-NAME.md, the
same numbers as .json, and docs/images/uses-NAME.png.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, keep, setting
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuromanifold.experiments.digits import load_digits

IMAGES = RESULTS.parents[1] / "docs" / "images"


def mlp(seed: int, classes: int = 10, width: int = 100) -> nn.Sequential:
    """Two hidden layers of rectified units on 64 pixels."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def transformer(seed: int, layers: int = 3, width: int = 32) -> nn.Module:
    """A ViT of transformers with four heads on four patches of four by four pixels, from images [n, 64] to logits."""
    import transformers

    class DigitsViT(transformers.ViTForImageClassification):  # type: ignore[misc]
        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = super().forward(pixel_values=images.view(-1, 1, 8, 8)).logits
            return logits

    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_attention_heads": 4, "num_labels": 10}
    model: nn.Module = DigitsViT(transformers.ViTConfig(**shape, **sizes)).eval()
    return model


def digits(seed: int, train: int = 1000, validation: int = 397) -> list[tuple[Tensor, Tensor]]:
    """Training, validation and test images [n, 64] with labels, shuffled; the same 400 are the test images always."""
    images, labels = load_digits()
    fixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    rest, test = fixed[:-400], fixed[-400:]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed + 1))]
    parts = rest[:train], rest[train : train + validation], test
    return [(images[part].flatten(1), labels[part]) for part in parts]


def train(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    epochs: int,
    seed: int,
    lr: float = 1e-3,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    batch: int = 32,
) -> nn.Module:
    """Adam on the mean cross-entropy, plus a penalty."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr, foreach=True)
    for _ in range(epochs):
        for part in torch.randperm(len(labels), generator=generator).split(batch):
            loss = cross_entropy(model(inputs[part]), labels[part])
            if penalty is not None:
                loss = loss + penalty(model)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    optimiser.zero_grad()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return float((model(inputs).argmax(-1) == labels).double().mean())


@torch.no_grad()
def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return float(cross_entropy(model(inputs).double(), labels))


def batches(inputs: Tensor, labels: Tensor, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), spread


def cell(values: Sequence[float], factor: float = 1.0, digits: int = 3) -> str:
    mean, error = mean_error([factor * value for value in values])
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def report(name: str, text: str, numbers: Any) -> None:
    """Write the Markdown result with its head, and the numbers behind it."""
    title, _, body = text.strip().partition("\n")
    command = " ".join(["python -m", f"uses.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    keep(f"uses-{name}", f"{title}\n\n{setting(command, torch.device('cpu'))}\n{body}")
    (RESULTS / f"uses-{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


def figure(name: str, panels: int, draw: Callable[[list[Any]], None], width: float = 4.0) -> Path:
    """Draw panels side by side into docs/images/uses-NAME.png."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(1, panels, figsize=(width * panels, 3.2), squeeze=False, layout="constrained")
    draw(list(axes[0]))
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    path = IMAGES / f"uses-{name}.png"
    drawing.savefig(path, dpi=80)
    plt.close(drawing)
    return path


def progress(text: str, items: Iterable[Any]) -> Iterable[Any]:
    """Name each item on standard error as it begins."""
    for item in items:
        print(f"{text}: {item}", file=sys.stderr, flush=True)
        yield item
