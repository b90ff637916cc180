"""Networks of realistic shape for the benchmarks, with random weights and inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Case(NamedTuple):
    """A model and a batch."""

    model: nn.Module
    batch: dict[str, Tensor] | Tensor
    samples: int


class Block(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions and a skip connection."""
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.skip(x)).relu()


def mlp(classes: int, large: bool) -> Case:
    """784-1024-1024-C, a batch of 256 (large: 8192)."""
    samples = 8192 if large else 256
    layers = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, classes))
    return Case(nn.Sequential(*layers), torch.randn(samples, 784), samples)


def resnet(classes: int, large: bool) -> Case:
    """ResNet-18-like at 64x64, a batch of 16 (large: 512)."""
    samples = 512 if large else 16
    blocks = [Block(a, b, s) for a, b, s in ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1))]
    blocks += [Block(a, b, s) for a, b, s in ((128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))]
    stem = (nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    return Case(nn.Sequential(*stem, *blocks, *head), torch.randn(samples, 3, 64, 64), samples)


def distilbert(classes: int, large: bool) -> Case:
    """DistilBERT (66 M parameters), a batch of 8 sequences of 64 tokens (large: 64 of 128)."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    model = DistilBertForSequenceClassification(DistilBertConfig(num_labels=classes))
    samples, tokens = (64, 128) if large else (8, 64)
    return Case(model, {"input_ids": torch.randint(0, 30000, (samples, tokens))}, samples)


CASES = {"MLP": mlp, "ResNet-18-like": resnet, "DistilBERT": distilbert}
