"""A Fisher diagonal along the path of training, at the price of one more backward pass a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import message, promoted, random_seed
from neuromanifold.estimators import Estimator, Hutchinson
from neuromanifold.persample.accumulate.base import zero_sums
from neuromanifold.persample.backward import BatchBackward
from neuromanifold.problem.batches import dtypes_in_use
from neuromanifold.problem.cotangents import LateValidation, Likelihood, batch_seed, cotangents
from neuromanifold.problem.model import Selection, check_whole, select_parameters
from neuromanifold.problem.outputs import Outputs
from neuromanifold.results import DiagonalFisher, Provenance
from neuromanifold.run.settings import choose_granularity


class TrainingProbes:
    """Sends an estimator's cotangents through graphs of training, which are kept, and squares whole batches' gradients.

    The squares of the passes add up to an unbiased estimate of the diagonal of F, summed over the batch.
    """

    def __init__(self, likelihood: Likelihood = Categorical, estimator: Estimator | None = None, seed: int = 0) -> None:
        self.estimator = Hutchinson() if estimator is None else estimator
        choose_granularity(self.estimator, "batch")  # refuses what cannot be squared per batch
        self.estimator = self.estimator.for_batches()
        self.likelihood, self.seed = likelihood, random_seed(seed)
        self._validation = LateValidation(likelihood)
        self._backward: BatchBackward | None = None

    def squares(
        self,
        logits: Tensor,
        parameters: Sequence[Tensor],
        number: int,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Iterator[list[Tensor | None]]:
        """Yield g² of each pass for logits [B, ..., C] of training step `number`, whose noise depends on it alone.

        `mask` [B, ...]: which positions count.  None stands for a parameter that the logits do not depend on.
        """
        check_graph(logits)
        if self.estimator.needs_labels and labels is None:
            raise ValueError(message("labels", f"given for {self.estimator}", "None"))
        labels = None if labels is None else labels.reshape(*logits.shape[:-1], *labels.shape[logits.ndim - 1 :])
        generator = torch.Generator(logits.device).manual_seed(batch_seed(self.seed, number))
        outputs, backward = Outputs(logits, labels, mask, number), self._through(parameters, logits.device)
        for cotangent in cotangents(outputs, self.estimator, generator, self._validation):
            gradients, scale = backward(logits, cotangent.values, keep_graph=True)
            yield [None if g is None else (g.to(promoted(g.dtype)) / scale).square_() for g in gradients]

    def _through(self, parameters: Sequence[Tensor], device: torch.device) -> BatchBackward:
        """The backward pass for these parameters, which keeps its scale for float16 from step to step."""
        before = self._backward
        same = before is not None and list(map(id, before.parameters)) == list(map(id, parameters))
        if before is None or not same:
            before = self._backward = BatchBackward(parameters)
        before.scale.half |= torch.float16 in dtypes_in_use(parameters, device)
        return before


def check_decay(value: object, argument: str) -> float:
    """Return the decay of a moving average, in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(message(argument, "a number in [0, 1)", repr(value)))
    return float(value)


def check_graph(logits: object) -> None:
    """Refuse logits through which no gradient can be sent back."""
    if not isinstance(logits, Tensor) or not logits.requires_grad:
        advice = "Call it before the loss's backward, and not under torch.no_grad()."
        raise ValueError(message("logits", "part of a graph", "a tensor without one", advice))
    if logits.ndim < 2 or not logits.shape[0]:
        raise ValueError(message("logits", "of shape [B, ..., C] with B >= 1", f"shape {list(logits.shape)}"))


def check_mask(mask: Tensor | None, logits: Tensor) -> None:
    """Refuse a mask that does not say of each position of the logits whether it counts, or leaves none."""
    if mask is not None and (mask.shape != logits.shape[:-1] or mask.dtype != torch.bool):
        got = f"{mask.dtype} of shape {list(mask.shape)}"
        raise ValueError(message("mask", f"bool of shape {list(logits.shape[:-1])}", got))
    if mask is not None and not bool(mask.any()):
        raise ValueError(message("mask", "True at one position or more", "False everywhere"))


class RunningFisher:
    """An exponential moving average of per-batch estimates, F̄ ← decay·F̄ + (1 - decay)·(Σ_passes g²)/B.

    Call `step(logits)` inside the training loop, after the forward pass and before the loss's backward pass: it sends
    one cotangent through the graph that is there anyway, and leaves `.grad` and the graph alone.  Averaging over steps
    lowers the noise of a single probe by about √((1 - decay)/(1 + decay)), as long as the parameters move little in
    1/(1 - decay) steps (end of section 4.2 of the paper).  Cost: one backward pass for each call of `step`.

    Args:
        model: the model in training.
        decay: weight of the past, 0 <= decay < 1.
        estimator: an unbiased one, squared per batch; `nm.Hutchinson()` unless given.
        likelihood: what the logits mean, as in `fisher_diagonal`.
        parameters: which ones to follow, as in `fisher_diagonal`.
        seed: random seed of the probes.

    Raises:
        TypeError, ValueError: an argument is not what is expected; in `step`, logits that are not part of a graph.

    Example:
        >>> running = nm.RunningFisher(model, decay=0.9)
        >>> for x, y in data:
        ...     logits = model(x)
        ...     running.step(logits)
        ...     nn.functional.cross_entropy(logits, y).backward()  # and a step of the optimizer
        >>> fim = running.diagonal()
        >>> fim["2.bias"].shape, fim.count
        (torch.Size([3]), 32)
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.99,
        estimator: Estimator | None = None,
        likelihood: Likelihood = Categorical,
        parameters: Selection = None,
        seed: int = 0,
    ) -> None:
        self._probes = TrainingProbes(likelihood, estimator, seed)
        self.estimator, self.likelihood = self._probes.estimator, likelihood
        self.decay = check_decay(decay, "decay")
        self._chosen = select_parameters(model, parameters)
        check_whole(model, self._chosen)
        self._parameters = list(self._chosen.values())
        self._means = [zero_sums(parameter) for parameter in self._parameters]
        self._noise = [zero_sums(parameter) for parameter in self._parameters]
        self._model, self._seed = type(model).__name__, self._probes.seed
        self.steps = self.samples = self.positions = self.passes = 0

    def step(self, logits: Tensor, labels: Tensor | None = None) -> None:
        """Take one batch: logits [B, ..., C] that are part of the training graph."""
        squares: list[Tensor] = [torch.zeros_like(mean) for mean in self._means]
        noise: list[Tensor] = [torch.zeros_like(mean) for mean in self._means]
        factor = self.estimator.noise_factor**0.5
        for found in self._probes.squares(logits, self._parameters, self.steps, labels):
            self.passes += 1
            for i, square in enumerate(found):
                if square is not None:
                    squares[i] += square.div_(len(logits))
                    noise[i] = noise[i].hypot(square * factor)
        for i, square in enumerate(squares):
            self._means[i].mul_(self.decay).add_(square, alpha=1 - self.decay)
            self._noise[i] = (self.decay * self._noise[i]).hypot((1 - self.decay) * noise[i])
        self.steps += 1
        self.samples += len(logits)
        self.positions += logits[..., 0].numel()

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
