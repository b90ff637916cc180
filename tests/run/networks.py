"""Small networks as data: every kind of module that a Fisher information must be right for, with readable names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import neuromanifold as nm


@dataclass
class Problem:
    """A model in float64, a batch of four samples as the data would yield it, and what the outputs mean."""

    model: nn.Module
    inputs: Any  # a tensor, or a dict of keyword arguments
    labels: Tensor
    likelihood: Callable[[Tensor], nm.Core] = nm.Categorical
    options: dict[str, Any] = field(default_factory=dict)  # for fisher_diagonal

    @property
    def data(self) -> list[Any]:
        """Two batches, of three samples and of one."""
        return [self._part(slice(0, 3)), self._part(slice(3, 4))]

    def _part(self, rows: slice) -> Any:
        cut = _cut(self.inputs, rows)
        return {**cut, "labels": self.labels[rows]} if isinstance(cut, dict) else (cut, self.labels[rows])

    def forward(self, model: nn.Module) -> Tensor:
        """Logits [B, ..., C] of all samples at once."""
        output = model(**self.inputs) if isinstance(self.inputs, dict) else model(self.inputs)
        logits = output.logits if hasattr(output, "logits") else output[0] if isinstance(output, tuple) else output
        return logits.movedim(self.options.get("class_dim", -1), -1)


def _cut(inputs: Any, rows: slice) -> Any:
    return {key: _cut(value, rows) for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


class ConvWithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 4)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu_().mean((-2, -1)))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth, self.point = nn.Conv1d(3, 6, 3, groups=3, padding=1), nn.Conv1d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(torch.tanh(self.depth(x))).amax(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.head(self.lstm(x)[0][:, -1]), "a second output"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


class Tied(nn.Module):
    """One matrix as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(ids)).sum(1))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, features: dict[str, Tensor], scale: Tensor) -> Tensor:
        return (self.a(features["left"]) + torch.sigmoid(self.b(features["right"]))) * scale


class FrozenAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x))))


def _hugging_face() -> dict[str, Problem]:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    ids = torch.tensor([[1, 4, 0], [3, 3, 1], [2, 0, 0], [4, 1, 4]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
    small = {"vocab_size": 5, "max_position_embeddings": 6, "n_layers": 1, "n_heads": 2, "dim": 4, "hidden_dim": 6}
    bert = DistilBertForSequenceClassification(DistilBertConfig(**small, num_labels=3, dropout=0.5))
    sizes = {"vocab_size": 5, "n_positions": 4, "n_layer": 1, "n_head": 2, "n_embd": 4}
    gpt = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return {
        "DistilBERT": Problem(bert, {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 2, 1, 1])),
        "GPT-2 (tokens, tied)": Problem(gpt, {"input_ids": ids}, ids.roll(-1, 1)),
    }


def make_problems() -> dict[str, Problem]:
    """All problems, seeded, without touching the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.tensor([0, 2, 1, 1])
        features = {"features": {"left": torch.randn(4, 3), "right": torch.randn(4, 2)}, "scale": torch.rand(4, 1)}
        problems = {
            "MLP": Problem(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 5), labels),
            "CNN with BatchNorm": Problem(ConvWithBatchNorm(), torch.randn(4, 2, 5, 5), labels),
            "depthwise conv": Problem(Depthwise(), torch.randn(4, 3, 6), labels),
            "LSTM": Problem(Recurrent(), torch.randn(4, 5, 3), labels),
            "transformer encoder": Problem(Encoder(), torch.randn(4, 3, 4), labels),
            "tied embeddings": Problem(Tied(), torch.randint(0, 5, (4, 3)), labels),
            "a module called twice": Problem(CalledTwice(), torch.randn(4, 4), labels),
            "nested dict inputs": Problem(NestedInputs(), features, labels),
            "frozen and unused": Problem(FrozenAndUnused(), torch.randn(4, 3), labels),
            "two classes": Problem(nn.Linear(3, 2), torch.randn(4, 3), labels.clamp(max=1)),
            "segmentation, class_dim=1": Problem(
                nn.Conv2d(2, 3, 3, padding=1),
                torch.randn(4, 2, 2, 2),
                torch.randint(0, 3, (4, 2, 2)),
                options={"class_dim": 1},
            ),
            "multi-label": Problem(nn.Linear(3, 4), torch.randn(4, 3), torch.ones(4, 4), nm.Bernoulli),
            "regression": Problem(nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2), nm.Gaussian),
            **_hugging_face(),
        }
    for problem in problems.values():
        problem.model.double().train()  # estimates must switch to eval by themselves, and back
        problem.inputs = _double(problem.inputs)
        if problem.labels.is_floating_point():
            problem.labels = problem.labels.double()
    return problems


def _double(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {key: _double(value) for key, value in inputs.items()}
    return inputs.double() if inputs.is_floating_point() else inputs


PROBLEMS = make_problems()
