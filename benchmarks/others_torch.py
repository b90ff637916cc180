"""The diagonal of a Fisher information by PyTorch alone: a loop over samples, and torch.func.

An adapter gets (model, inputs, labels, classes), prepares what a user would prepare once, and returns the function
that does the work: a dict of name -> tensor.  Models map one tensor to logits (`tensor_model` wraps those that do not).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from models import Task
from torch import Tensor, nn
from torch.nn.functional import log_softmax

Diagonal = dict[str, Tensor]
Work = Callable[[], Diagonal]
Adapter = Callable[[nn.Module, Tensor, Tensor, int], Work]


class Wrapped(nn.Module):
    """A Hugging Face classifier as a function of token ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.model(input_ids=ids).logits


def tensor_model(task: Task) -> tuple[nn.Module, Tensor]:
    """A model that maps one tensor to logits, which all tools take, and that tensor.  The model is a copy."""
    model = copy.deepcopy(task.model)
    return (Wrapped(model), task.inputs["input_ids"]) if isinstance(task.inputs, dict) else (model, task.inputs)


def loop(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int, samples: int | None = None) -> Work:
    """One backward pass for each sample; `samples`: only so many of them."""
    del classes
    return lambda: _loop(model, inputs[:samples], lambda scores, n: scores[labels[n]].unsqueeze(0))


def loop_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int, samples: int | None = None) -> Work:
    """One backward pass for each sample and class; `samples`: only so many of them."""
    del labels, classes
    return lambda: _loop(model, inputs[:samples], lambda scores, n: scores * (scores.detach() / 2).exp())  # noqa: ARG005


def _loop(model: nn.Module, inputs: Tensor, targets: Callable[[Tensor, int], Tensor]) -> Diagonal:
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for n in range(len(inputs)):
        values = targets(log_softmax(model(inputs[n : n + 1]), -1)[0], n)
        for value in values:
            gradients = torch.autograd.grad(value, list(named.values()), retain_graph=True)
            for name, gradient in zip(named, gradients, strict=True):
                total[name].addcmul_(gradient, gradient)
    return total


def func(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """torch.func: vmap(grad) over samples, which holds a gradient for each of them."""
    chosen = nn.functional.one_hot(labels, classes)  # [B, C]; inside vmap a label could not be an index
    return lambda: _squares(model, inputs, chosen, lambda scores, one_hot: (scores * one_hot).sum())


def func_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int, first: int | None = None) -> Work:
    """torch.func: vmap(grad) over samples, for one class after the other; `first`: only so many of them."""
    del labels

    def target(scores: Tensor, one_hot: Tensor) -> Tensor:
        return (scores * (scores.detach() / 2).exp() * one_hot).sum()

    def work() -> Diagonal:
        total: Diagonal = {}
        for row in torch.eye(classes)[:first]:
            part = _squares(model, inputs, row.expand(len(inputs), -1), target)
            total = {name: total[name] + value for name, value in part.items()} if total else part
        return total

    return work


def _squares(model: nn.Module, inputs: Tensor, chosen: Tensor, target: Callable[[Tensor, Tensor], Tensor]) -> Diagonal:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def score(parameters: Diagonal, x: Tensor, one_hot: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, (parameters, buffers), (x.unsqueeze(0),))
        return target(log_softmax(logits[0], -1), one_hot)

    gradients = torch.func.vmap(torch.func.grad(score), (None, 0, 0))(parameters, inputs, chosen)
    return {name: gradient.square().sum(0) for name, gradient in gradients.items()}
