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
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()  # modules, once each, for the tools that can only read modules
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions and a skip connection."""
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.skip(x))


class Layer(nn.Module):
    """A layer of a transformer, normalised before attention and before its two-layer network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, width]."""
        y = self.norm1(x)
        parts = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(*parts)  # [B, heads, T, width/heads]
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids to logits: embedding, learned positions (looked up with ids [1, T]), layers, mean over positions."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T]."""
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)  # [1, T]
        x = self.tokens(ids) + self.positions(positions)
        return self.head(self.norm(self.layers(x)).mean(1))


def mlp(classes: int, large: bool) -> Case:
    """784-1024-1024-C, a batch of 256 (large: 8192)."""
    samples = 8192 if large else 256
    return Case(perceptron(784, 1024, classes), torch.randn(samples, 784), samples)


def perceptron(inputs: int, width: int, classes: int) -> nn.Sequential:
    """Two hidden layers."""
    hidden = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def resnet(classes: int, large: bool) -> Case:
    """ResNet-18-like at 64x64, a batch of 16 (large: 512)."""
    samples = 512 if large else 16
    return Case(residual(64, classes), torch.randn(samples, 3, 64, 64), samples)


def residual(width: int, classes: int) -> nn.Sequential:
    """The eight blocks of ResNet-18; its channels are width, 2, 4 and 8 times width."""
    shapes = ((1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1))
    blocks = [Block(a * width, b * width, stride) for a, b, stride in shapes]
    stem = (nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))
    return nn.Sequential(*stem, *blocks, *head)


def distilbert(classes: int, large: bool) -> Case:
    """DistilBERT (66 M parameters), a batch of 8 sequences of 64 tokens (large: 64 of 128)."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    model = DistilBertForSequenceClassification(DistilBertConfig(num_labels=classes))
    samples, tokens = (64, 128) if large else (8, 64)
    return Case(model, {"input_ids": torch.randint(0, 30000, (samples, tokens))}, samples)


CASES = {"MLP": mlp, "ResNet-18-like": resnet, "DistilBERT": distilbert}


class Task(NamedTuple):
    """A model in eval mode, a batch of inputs, and a label for each sample."""

    model: nn.Module
    inputs: dict[str, Tensor] | Tensor
    labels: Tensor
    classes: int

    @property
    def batch(self) -> object:
        """Inputs and labels, as the library takes them."""
        return {**self.inputs, "labels": self.labels} if isinstance(self.inputs, dict) else (self.inputs, self.labels)


def small_networks() -> dict[str, tuple[nn.Module, tuple[Tensor, Tensor]]]:
    """Networks whose batches take a millisecond or a few, each with a batch: what Python takes shows there."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)]
    cnn = nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    transformer = Transformer(vocabulary=1000, tokens=32, width=64, layers=2, heads=4, classes=4)
    return {
        "two-layer MLP, B=64": (mlp, (torch.randn(64, 784), torch.randint(0, 10, (64,)))),
        "two-layer MLP, B=1": (mlp, (torch.randn(1, 784), torch.randint(0, 10, (1,)))),
        "small CNN, B=32": (cnn, (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))),
        "small transformer, B=16": (transformer, (torch.randint(0, 1000, (16, 32)), torch.randint(0, 4, (16,)))),
    }


NETWORKS = ("MLP", "transformer", "ResNet-18-like", "DistilBERT")


def task(name: str, small: bool = False) -> Task:
    """A network of the sample-wise benchmark; small: the same architecture in a size for slow references.

    Norms get random statistics, weights and biases, and tokens repeat, so that a rule which forgets them shows.
    """
    torch.manual_seed(0)
    if name == "MLP":
        samples, classes = (6, 5) if small else (64, 10)
        model = perceptron(*((12, 16) if small else (784, 1024)), classes)
        inputs = torch.randn(samples, 12 if small else 784)
    elif name == "transformer":
        vocabulary, tokens, width, layers, heads = (20, 8, 16, 2, 2) if small else (10000, 64, 256, 4, 4)
        samples, classes = (5, 3) if small else (16, 3)
        model = Transformer(vocabulary, tokens, width, layers, heads, classes)
        inputs = torch.randint(0, vocabulary, (samples, tokens))
    elif name == "ResNet-18-like":
        samples, classes, width, pixels = (4, 5, 4, 32) if small else (16, 100, 64, 64)
        model, inputs = residual(width, classes), torch.randn(samples, 3, pixels, pixels)
    else:
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 8}
        sizes = {**sizes, "vocab_size": 20} if small else {}
        samples, tokens, classes = (5, 8, 2) if small else (8, 64, 2)
        config = DistilBertConfig(num_labels=classes, **sizes)
        model = DistilBertForSequenceClassification(config)
        inputs = {"input_ids": torch.randint(0, config.vocab_size, (samples, tokens))}
    for module in model.modules():
        if small and isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()  # DistilBERT begins with weights so small that attention hardly matters
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    return Task(model.eval(), inputs, torch.randint(0, classes, (samples,)), classes)
