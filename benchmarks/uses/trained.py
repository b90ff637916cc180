"""What the studies of training share: digits in three parts, small networks, scores, and tables of mean ± error."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, keep, setting
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss, one_hot

from neuromanifold.experiments.digits import load_digits

IMAGES = Path(__file__).parents[2] / "docs" / "images"
BATCH = 64


class Split(NamedTuple):
    """Images or features and their labels, of one part of the data."""

    x: Tensor
    y: Tensor

    def batches(self, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
        """Cut it into batches."""
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


def digits(seed: int, training: int, validation: int) -> tuple[Split, Split, Split]:
    """Shuffle scikit-learn's digits and return parts for training, for validation, and the rest for the test."""
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order.split([training, validation, len(labels) - training - validation])
    first, second, third = (Split(images[part], labels[part]) for part in parts)
    return first, second, third


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network as PyTorch initialises it from a seed."""
    torch.manual_seed(seed)
    return make()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def shuffled(part: Split, seed: int, epochs: int, size: int = BATCH) -> Iterable[tuple[Tensor, Tensor]]:
    """The batches of several epochs, in an order that depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(part.y), generator=generator).split(size):
            yield part.x[index], part.y[index]


class Scores(NamedTuple):
    """Of probabilities [N, C]: mean negative log-likelihood, expected calibration error, and accuracy."""

    nll: float
    ece: float
    accuracy: float


def scores(probs: Tensor, y: Tensor, bins: int = 15) -> Scores:
    """Score probabilities; the calibration error is that of the likeliest class, in bins of equal width."""
    probs = probs.double()
    confidence, guess = probs.max(-1)
    right = (guess == y).double()
    which = (confidence * bins).long().clamp(max=bins - 1)
    member = one_hot(which, bins).double()  # [N, bins]
    ece = ((member * (right - confidence)[:, None]).sum(0).abs() / len(y)).sum()
    return Scores(float(nll_loss(probs.clamp(min=1e-12).log(), y)), float(ece), float(right.mean()))


@torch.no_grad()
def mean_loss(model: nn.Module, part: Split) -> float:
    return float(cross_entropy(model(part.x), part.y))


@torch.no_grad()
def accuracy(model: nn.Module, part: Split) -> float:
    return float((model(part.x).argmax(-1) == part.y).double().mean())


def plus_minus(values: Sequence[float], digits: int = 3, factor: float = 1.0) -> str:
    """Mean ± standard error over seeds."""
    values = [factor * value for value in values]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def write(name: str, title: str, command: str, body: str, numbers: Mapping[str, Any]) -> None:
    """Write benchmarks/results/NAME.md with date, command and versions at its head, and the numbers as JSON."""
    head = setting(command, torch.device("cpu"))
    keep(name, f"# {title}\n\n{head}\n\n{body}")
    (RESULTS / f"{name}.json").write_text(json.dumps({"setting": head, **numbers}, indent=1) + "\n")
