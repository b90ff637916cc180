"""The two ways from cotangents to squares, behind one interface: of whole batches, or of single samples."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.estimators import Estimator, Exact
from neuromanifold.persample.batch import BatchPullback, involves_half, largest_scale
from neuromanifold.persample.samples import SamplePullback
from neuromanifold.persample.sums import GradientSums, Pass
from neuromanifold.persample.watch import Watch
from neuromanifold.problem.batches import model_device
from neuromanifold.problem.cotangents import Cotangent, by_position, by_sample
from neuromanifold.problem.outputs import Outputs
from neuromanifold.run.granularity import Granularity, SlowPathWarning, callers_level

Evaluate = Callable[[], Outputs]


class Squares(ABC):
    """Takes batches, and the cotangents of each."""

    passes = 0
    """Backward passes so far."""

    watch: Watch | None = None
    """For gradients where a trial has seen none."""

    @abstractmethod
    def attached(self) -> AbstractContextManager[None]:
        """Whatever has to be done to the model, for as long as it lasts."""

    @abstractmethod
    def forward(self, evaluate: Evaluate) -> Outputs:
        """Evaluate the model on a batch."""

    @abstractmethod
    def add(self, outputs: Outputs, cotangent: Cotangent) -> None:
        """Send a cotangent back, square, and add."""

    def add_all(self, outputs: Outputs, cotangents: Iterator[Cotangent]) -> None:
        """All cotangents of a batch."""
        for cotangent in cotangents:
            self.add(outputs, cotangent)

    @abstractmethod
    def end_batch(self) -> None:
        """All cotangents of a batch have been added."""

    @abstractmethod
    def ways(self) -> list[str]:
        """How each parameter was done."""

    def state(self) -> dict[str, Any]:
        """Between batches, all that the rest of a run depends on, as JSON can hold it."""
        return {"passes": self.passes}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.passes = state["passes"]


class BatchSquares(Squares):
    """(Σ_x Jᵀu(x))²: any module, one ordinary backward."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], sums: GradientSums) -> None:
        self.sums, self._count = sums, len(parameters)
        self._pullback = BatchPullback(parameters, involves_half(model.parameters(), model_device(model)))

    def attached(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def forward(self, evaluate: Evaluate) -> Outputs:
        """Once."""
        return evaluate()

    def add(self, outputs: Outputs, cotangent: Cotangent) -> None:
        """One pass."""
        gradients, scale = self._pullback(outputs.logits, cotangent.values, keep_graph=cotangent.left > 1)
        self.sums.add(gradients, Pass(scale, cotangent.noise))
        self.sums.end_pass()
        self.passes += 1

    def end_batch(self) -> None:
        """Tell the sums."""
        self.sums.end_batch()

    def ways(self) -> list[str]:
        """All by batches."""
        return ["batch"] * self._count

    def state(self) -> dict[str, Any]:
        """With the scale that float16 needs."""
        return {**super().state(), "exponent": self._pullback.exponent}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().set_state(state)
        self._pullback.exponent = state["exponent"]


class SampleSquares(Squares):
    """Σ_x (Jᵀu(x))² where modules have a rule.

    The other parameters: the square of the same backward's whole gradient, where the probe is centred and
    `granularity` is "auto"; else one backward pass for each sample, with one warning that names them.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        sums: GradientSums,
        estimator: Estimator,
        granularity: Granularity,
        batch_dim: int,
    ) -> None:
        self.sums, self.names = sums, list(parameters)
        self._half = involves_half(model.parameters(), model_device(model))
        self._pullback = SamplePullback(model, list(parameters.values()), batch_dim)
        self.watch = self._pullback.plan.watch
        self._positions_apart = isinstance(estimator, Exact)
        self._independent = estimator.independent_passes
        self._mixes = estimator.centred and granularity == "auto"
        self._scale: float | None = None
        self._warned: set[int] = set()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Taps on the modules; compiled ones run as they were written, since a compiled graph has no modules."""
        with torch.compiler.set_stance("force_eager"), self._pullback.attached():
            yield

    def forward(self, evaluate: Evaluate) -> Outputs:
        """Until it is clear which parameters rules can do."""
        outputs = self._pullback.forward(evaluate, lambda outputs: outputs.logits)
        if not self._mixes:
            self._warn(self._pullback.rest())
        return outputs

    def add_all(self, outputs: Outputs, cotangents: Iterator[Cotangent]) -> None:
        """Several at once where they are small and the model allows it."""
        logits = outputs.logits
        if not len(logits):
            return  # an empty batch, of which nothing can be learnt
        apart = self._half or logits.dtype == torch.float16 or (self._positions_apart and logits.ndim > 2)
        while group := list(islice(cotangents, 1)):
            left = group[0].left
            several = 1 if apart else self._pullback.several(logits, self.sums, left)
            group.extend(islice(cotangents, several - 1))
            passes = [Pass(1.0, one.noise, one.sample_noise, self._independent) for one in group]
            together = len(group) > 1 and self._pullback.add_several(
                logits, torch.stack([one.values for one in group]), self.sums, passes
            )
            if together:
                self.passes += len(group)
            else:
                for one in group:
                    self.add(outputs, one)

    def add(self, outputs: Outputs, cotangent: Cotangent) -> None:
        """One pass; for fixed columns one for each position, and for each sample where there is no rule."""
        logits, rest = outputs.logits, [] if self._mixes else self._pullback.rest()
        pieces = by_position(cotangent.values, outputs.valid) if self._positions_apart else iter([cotangent.values])
        for piece in pieces:
            keep = cotangent.left > 1 or self._positions_apart or bool(rest)
            scale = self._scale_for(logits, piece)
            made_by = Pass(scale, cotangent.noise, cotangent.sample_noise, self._independent)
            values = piece if made_by.scale == 1.0 else piece * made_by.scale
            gradients = self._pullback(logits, values, keep, self.sums, made_by, waits=cotangent.left > 1)
            if self._mixes:
                self.sums.add(gradients, made_by)
            self.passes += 1
            for one in by_sample(values) if rest else ():
                self.sums.add(self._pullback.plain_gradients(logits, one, rest), made_by)
                self.passes += 1
            self.sums.end_pass()

    def end_batch(self) -> None:
        """Add what waited for the last cotangent."""
        self._pullback.finish(self.sums)
        self.sums.end_batch()

    def ways(self) -> list[str]:
        """By rule, by batches, or one sample at a time."""
        rest = set(self._pullback.rest())
        other = "batch" if self._mixes else "sample, one by one"
        return [other if i in rest else "sample" for i in range(len(self.names))]

    def state(self) -> dict[str, Any]:
        """With what is known about the model, and the scale that float16 needs."""
        return {**super().state(), "pullback": self._pullback.state(), "scale": self._scale}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().set_state(state)
        self._pullback.set_state(state["pullback"])
        self._scale = state["scale"]

    def _warn(self, rest: list[int]) -> None:
        new = [self.names[i] for i in rest if i not in self._warned]
        if not new:
            return
        self._warned.update(rest)
        shown = ", ".join(new[:8]) + (f" and {len(new) - 8} more" if len(new) > 8 else "")
        text = f"No rule covers {shown}: these take one backward pass for each sample, which is right, but slow. "
        text += "Leave them out with `parameters`, write a rule (nm.rule), or take an estimator with random probes."
        warnings.warn(text, SlowPathWarning, stacklevel=callers_level())

    def _scale_for(self, logits: Tensor, cotangent: Tensor) -> float:
        """With float16, gradients below 6e-8 would vanish: as large a power of two as nothing overflows with."""
        if not (self._half or logits.dtype == torch.float16):
            return 1.0
        largest = largest_scale(cotangent)
        if largest is None:
            return 1.0
        scale = largest if self._scale is None else min(self._scale, largest)
        while not self._pullback.finite(logits, cotangent * scale):
            if scale < 2.0**-24:
                break  # not an overflow: the gradient itself is not a number, and the result shows it
            scale /= 16
        self._scale = scale
        return scale


def make_squares(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    sums: GradientSums,
    estimator: Estimator,
    granularity: Granularity,
    batch_dim: int,
) -> Squares:
    """Whole batches if asked for, else single samples."""
    if granularity == "batch":
        return BatchSquares(model, list(parameters.values()), sums)
    return SampleSquares(model, parameters, sums, estimator, granularity, batch_dim)
