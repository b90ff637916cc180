"""What is done with one batch: one forward pass, and for each cotangent a backward pass that is squared and added."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuromanifold.core import Core
from neuromanifold.core.checks import message
from neuromanifold.estimators import Estimator
from neuromanifold.persample.sums import GradientSums
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.cotangents import cotangents
from neuromanifold.problem.noise import batch_seed
from neuromanifold.problem.outputs import Outputs, read_outputs
from neuromanifold.problem.validation import LateValidation
from neuromanifold.run.granularity import Granularity
from neuromanifold.run.squares import make_squares


@dataclass(frozen=True)
class Settings:
    """Everything about a run but the model and the data."""

    estimator: Estimator
    likelihood: Callable[[Tensor], Core]
    granularity: Granularity = "auto"
    seed: int = 0
    class_dim: int = -1
    batch_dim: int = 0
    ignore_index: int = -100
    progress: bool = False
    replay: bool = False
    shard: tuple[int, int] = (0, 1)
    """Of every so many batches, the one with this number."""


class Step:
    """All that a batch needs."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        settings: Settings,
        sums: GradientSums,
        device: torch.device,
    ) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.generator = torch.Generator(device)
        self.validation = LateValidation(settings.likelihood)
        estimator, granularity = settings.estimator, settings.granularity
        self.squares = make_squares(model, parameters, sums, estimator, granularity, settings.batch_dim)
        self.around_model: Callable[[], AbstractContextManager[None]] = nullcontext
        """What the model is called inside of."""

    def __call__(self, batch: Batch, number: int) -> Outputs:
        """Batch number so-and-so."""
        outputs = self.forward(batch, number)
        self.seed(number)
        self.backward(outputs)
        return outputs

    def seed(self, number: int) -> None:
        """Set the generator to the noise of batch number so-and-so."""
        self.generator.manual_seed(batch_seed(self.settings.seed, number))

    def forward(self, batch: Batch, number: int) -> Outputs:
        """With whatever the squares need of it."""

        def evaluate() -> Outputs:
            outputs = self.outputs(batch)
            check_outputs(outputs, self.settings.estimator, number)
            return outputs

        return self.squares.forward(evaluate)

    def outputs(self, batch: Batch) -> Outputs:
        """What the model says."""
        with self.around_model():
            output = self.model(*batch.args, **batch.kwargs)
        s = self.settings
        return read_outputs(output, batch, s.class_dim, s.ignore_index, s.batch_dim)

    def backward(self, outputs: Outputs) -> None:
        """All cotangents."""
        columns = cotangents(outputs, self.settings.estimator, self.generator, self.validation)
        self.squares.add_all(outputs, columns)
        self.squares.end_batch()


def check_outputs(outputs: Outputs, estimator: Estimator, number: int) -> None:
    """Errors that only a batch can show."""
    if not outputs.logits.requires_grad:
        advice = "Look for torch.no_grad(), .detach() or a non-differentiable step in its forward."
        raise ValueError(message("model", "differentiable", "logits that do not depend on any parameter", advice))
    if estimator.needs_labels and outputs.labels is None:
        advice = "Yield (inputs, labels) or a dict with 'labels', or choose an estimator without labels."
        where = f"Batch {number} of `data`: "
        raise ValueError(where + message("labels", f"given for {estimator}", "none", advice))
    if estimator.needs_labels and outputs.labels is not None and outputs.labels_fit is False:
        shapes = f"{list(outputs.logits.shape[:-1])} (class labels) or {list(outputs.logits.shape)} (targets)"
        got = f"shape {list(outputs.labels.shape)}"
        raise ValueError(f"Batch {number} of `data`: " + message("labels", f"of shape {shapes}", got))
