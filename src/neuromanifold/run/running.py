"""A Fisher diagonal along the path of training, at the price of one more backward pass a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import message, random_seed
from neuromanifold.estimators import Estimator, Hutchinson
from neuromanifold.persample.accumulate.base import zero_sums
from neuromanifold.persample.backward import BatchBackward, involves_half
from neuromanifold.problem.batches import model_device
from neuromanifold.problem.cotangents import batch_seed
from neuromanifold.problem.model import Selection, check_whole, select_parameters
from neuromanifold.results import DiagonalFisher, Provenance
from neuromanifold.run.methods import choose_granularity


class RunningFisher:
    """An exponential moving average of batch-wise estimates, F̄ <- decay·F̄ + (1 - decay)·(Σ_passes g²)/B.

    Call `step(logits)` inside the training loop, after the forward pass and before the loss's backward: it sends one
    cotangent through the graph that is there anyway and leaves .grad and the graph alone::

        running = nm.RunningFisher(model, decay=0.99)
        for inputs, labels in loader:
            logits = model(inputs)
            running.step(logits)
            loss(logits, labels).backward()
            ...
        fim = running.diagonal()

    Averaging over steps lowers the noise of a single probe by about √((1 - decay)/(1 + decay)), as long as the
    parameters move little in 1/(1 - decay) steps (end of section 4.2 of the paper).
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.99,
        estimator: Estimator | None = None,
        likelihood: Callable[[Tensor], Core] = Categorical,
        parameters: Selection = None,
        seed: int = 0,
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ValueError(message("decay", "a number in [0, 1)", repr(decay)))
        self.estimator = Hutchinson() if estimator is None else estimator
        choose_granularity(self.estimator, "batch")  # refuses what cannot be squared per batch
        self.estimator = self.estimator.for_batches()
        self.decay, self.likelihood = float(decay), likelihood
        self._chosen = select_parameters(model, parameters)
        check_whole(model, self._chosen)
        half = involves_half(model.parameters(), model_device(model))
        self._backward = BatchBackward(list(self._chosen.values()), half)
        seed = random_seed(seed)
        self._generator = torch.Generator(model_device(model))
        self._means = [zero_sums(parameter) for parameter in self._chosen.values()]
        self._noise = [zero_sums(parameter) for parameter in self._chosen.values()]
        self._model, self._seed = type(model).__name__, seed
        self.steps = self.samples = self.positions = self.passes = 0

    def step(self, logits: Tensor, labels: Tensor | None = None) -> None:
        """Take one batch: logits [B, ..., C] that are part of the training graph."""
        if not isinstance(logits, Tensor) or not logits.requires_grad:
            advice = "Call step before the loss's backward, and not under torch.no_grad()."
            raise ValueError(message("logits", "part of a graph", "a tensor without one", advice))
        if logits.ndim < 2 or not logits.shape[0]:
            raise ValueError(message("logits", "of shape [B, ..., C] with B >= 1", f"shape {list(logits.shape)}"))
        flat = logits.detach().reshape(-1, logits.shape[-1])
        if self.estimator.needs_labels and labels is None:
            raise ValueError(message("labels", f"given for {self.estimator}", "None"))
        core, batch = self.likelihood(flat), logits.shape[0]
        squares: list[Tensor] = [torch.zeros_like(mean) for mean in self._means]
        noise: list[Tensor] = [torch.zeros_like(mean) for mean in self._means]
        rows = None if labels is None else labels.reshape(len(flat), *labels.shape[logits.ndim - 1 :])
        self._generator.manual_seed(batch_seed(self._seed, self.steps))
        for u in self.estimator.cotangents(core, rows, self._generator):
            gradients, scale = self._backward(logits, u.view(logits.shape), keep_graph=True)
            self.passes += 1
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    square = (gradient.to(squares[i].dtype) / scale).square_().div_(batch)
                    squares[i] += square
                    noise[i] = noise[i].hypot(square * self.estimator.noise_factor**0.5)
        for i, square in enumerate(squares):
            self._means[i].mul_(self.decay).add_(square, alpha=1 - self.decay)
            self._noise[i] = (self.decay * self._noise[i]).hypot((1 - self.decay) * noise[i])
        self.steps += 1
        self.samples += batch
        self.positions += len(flat)

    def diagonal(self) -> DiagonalFisher:
        """The average so far, corrected for its start at zero, with the standard error of the probes' noise."""
        if not self.steps:
            raise ValueError("RunningFisher has seen no batch yet: call step(logits) in the training loop first.")
        correction = self.samples / (1 - self.decay**self.steps)
        provenance = Provenance(
            estimator=repr(self.estimator),
            target=f"{self.estimator.target}, moving average with decay {self.decay:g} along the path of training",
            likelihood=getattr(self.likelihood, "__name__", repr(self.likelihood)),
            granularity=dict.fromkeys(self._chosen, "batch"),
            seeds=[self._seed],
            batches=self.steps,
            passes=self.passes,
            model=self._model,
            draws=[[self._seed, 0, self.steps, 1]],
        )
        return DiagonalFisher(
            {name: mean * correction for name, mean in zip(self._chosen, self._means, strict=True)},
            {name: noise * correction for name, noise in zip(self._chosen, self._noise, strict=True)},
            self.samples,
            self.positions,
            provenance,
        )
