"""A problem: a model, a batch, and what the outputs mean; and a way to write a model down in one line."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
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
    rest: tuple[str, ...] = ()  # patterns of the parameters that need not be done per sample; all others must be
    rtol: float = 1e-10  # some models work in float32 whatever they get

    @property
    def data(self) -> list[Any]:
        """Two batches, of three samples and of one."""
        return [self._part(slice(0, 3)), self._part(slice(3, 4))]

    def _part(self, rows: slice) -> Any:
        cut, labels = self._cut(self.inputs, rows), self._cut(self.labels, rows)
        return {**cut, "labels": labels} if isinstance(cut, dict) else (cut, labels)

    def _cut(self, inputs: Any, rows: slice) -> Any:
        if isinstance(inputs, dict):
            return {key: self._cut(value, rows) for key, value in inputs.items()}
        return inputs[:, rows] if self.options.get("batch_dim") and inputs.ndim > 1 else inputs[rows]

    def forward(self, model: nn.Module) -> Tensor:
        """Logits [B, ..., C] of all samples, evaluated batch by batch."""
        parts = [self._cut(self.inputs, rows) for rows in (slice(0, 3), slice(3, 4))]
        return torch.cat([self._logits(model(**part) if isinstance(part, dict) else model(part)) for part in parts])

    def _logits(self, output: Any) -> Tensor:
        logits = output.logits if hasattr(output, "logits") else output
        logits = logits["logits"] if isinstance(logits, dict) else logits
        logits = logits[0] if isinstance(logits, tuple) else logits
        logits = logits.movedim(self.options.get("class_dim", -1), -1)
        return logits.movedim(1, 0) if self.options.get("batch_dim") and logits.ndim > 2 else logits

    @property
    def labels_by_sample(self) -> Tensor:
        """[B, ...]."""
        return self.labels.movedim(1, 0) if self.options.get("batch_dim") and self.labels.ndim > 1 else self.labels

    def by_rule(self, name: str) -> bool:
        """Whether a parameter must be done by a rule, sample by sample."""
        return not any(fnmatch(name, pattern) for pattern in self.rest)


class Net(nn.Module):
    """Named parts, and a function of them and of the input."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.run(self, *args, **options)


def in_float64(problems: dict[str, Problem]) -> dict[str, Problem]:
    """The same in float64 and in training mode."""
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
