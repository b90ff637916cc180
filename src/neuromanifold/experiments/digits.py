"""A small convolutional network on scikit-learn's handwritten digits, trained in seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuromanifold.core.checks import integer_in_range
from neuromanifold.experiments import one_thread
from neuromanifold.problem.progress import tracked

TRAINING = 1408  # images that the network is trained on; the other 389 test it
BATCH = 64


@dataclass(frozen=True)
class TrainedDigits:
    """A trained network, how good it is, and a part of its training data in batches."""

    model: nn.Sequential
    batches: list[tuple[Tensor, Tensor]]  # images [64, 1, 8, 8] and labels [64]
    training_accuracy: float
    test_accuracy: float

    @property
    def parameters(self) -> int:
        """How many parameters the network has."""
        return sum(parameter.numel() for parameter in self.model.parameters())


@one_thread()
def train_digits(samples: int = TRAINING, seed: int = 0, epochs: int = 12, progress: bool = False) -> TrainedDigits:
    """Train the network; returns it with the first `samples` of its (shuffled) training images.

    The same seed on the same machine gives the same network; the global random state is neither used nor changed.
    """
    integer_in_range(samples, "samples", 1, TRAINING, "the images that the network is trained on")
    integer_in_range(epochs, "epochs", 0, 10**6, "passes over the training images")
    generator = torch.Generator().manual_seed(seed)
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=generator)
    images, labels = images[order], labels[order]
    model = digits_network(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in tracked(range(epochs), "Training") if progress else range(epochs):
        order = torch.randperm(TRAINING, generator=generator)
        for batch in (order[i : i + BATCH] for i in range(0, TRAINING, BATCH)):
            optimiser.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    optimiser.zero_grad()
    ends = [*range(0, samples, BATCH), samples]
    batches = [(images[i:j], labels[i:j]) for i, j in pairwise(ends)]
    with torch.no_grad():
        correct = (model(images).argmax(-1) == labels).double()
    return TrainedDigits(model, batches, float(correct[:TRAINING].mean()), float(correct[TRAINING:].mean()))


def digits_network(seed: int = 0) -> nn.Sequential:
    """Two convolutions and a linear layer, as initialised by PyTorch from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
        layers = OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            relu1=nn.ReLU(),  # [n, 16, 8, 8]
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),  # [n, 32, 4, 4]
            flat=nn.Flatten(),
            linear=nn.Linear(512, 10),
        )
    return nn.Sequential(layers)


def load_digits() -> tuple[Tensor, Tensor]:
    """1797 images [n, 1, 8, 8] with pixels from 0 to 1, and their labels [n]; part of scikit-learn, no download."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        text = "The digits come with scikit-learn, which is missing: pip install 'neuromanifold[demo]'."
        raise ModuleNotFoundError(text, name=error.name) from error
    digits = datasets.load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images, torch.as_tensor(digits.target, dtype=torch.int64)
