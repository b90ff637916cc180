"""The interface of accumulators, which take the gradients of one backward pass after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.persample.gradients import Form


class Pass(NamedTuple):
    """What an accumulator has to know of a backward pass: the scale of its gradients, and how noisy their squares are.

    Noise is the constant c with Var(g²) <= c E[g⁴], which may be smaller for squares of single samples than for those
    of batches, and for those of single positions; 0: nothing is random.
    """

    scale: float = 1.0  # gradients are so many times too large
    noise: float = 0.0  # c of the square of a whole batch's gradient
    sample_noise: float = 0.0  # c of the square of a sample's
    independent: bool = False  # of the other passes of the batch
    more: bool = False  # further passes of the batch follow
    token_noise: float = 0.0  # c of the square of a token's
    weights: Tensor | None = None  # [n] how many samples each stands for, where others have no pass


class Tally(NamedTuple):
    """Numbers of samples: seen and with fourth powers taken, for each parameter; and those of the last batch."""

    seen: list[int]
    taken: list[int]
    of_batch: int

    def since(self, before: Tally) -> Tally:
        """Return the counts that came after `before`."""
        seen, taken = ([b - a for a, b in zip(*pair, strict=True)] for pair in zip(before[:2], self[:2], strict=True))
        return Tally(seen, taken, self.of_batch)

    def plus(self, more: Tally) -> Tally:
        """Return these counts and those of a further batch together."""
        seen, taken = ([a + b for a, b in zip(*pair, strict=True)] for pair in zip(self[:2], more[:2], strict=True))
        return Tally(seen, taken, more.of_batch)


class TakesForms(Protocol):
    """Takes the per-sample gradients of one backward pass after the other."""

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take the per-sample gradients of parameter number i; autograd must not be recording."""

    def end_pass(self) -> None:
        """End a pass: all of its gradients have been added."""


class Reducer(Protocol):
    """Several processes with sums of their own, all of which call the same methods in the same order."""

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes, which JSON can hold, in the order of their ranks."""

    def add(self, tensor: Tensor) -> None:
        """Overwrite a tensor with its sum over all processes."""


class GradientSums(TakesForms, Protocol):
    """An accumulator: takes the gradients of one pass after the other, and keeps sums of them."""

    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Take gradients summed over a batch, or those of one sample; None stands for zero."""

    def end_batch(self) -> None:
        """End a batch: all of its passes have been added."""

    def synchronize(self) -> None:
        """Read back values from the device between batches, and decide what is kept of the next batch."""


@runtime_checkable
class StatefulSums(GradientSums, Protocol):
    """Sums whose state can be written to a checkpoint between batches, as tensors and numbers, and restored."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the rest of a run depends on, as tensors and as values that JSON can hold."""

    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what `state` returned, in this process or in another."""


@runtime_checkable
class SharedSums(StatefulSums, Protocol):
    """Sums that several processes can share, or take up from several checkpoints."""

    def copy(self) -> SharedSums:
        """Return the same sums, which go on by themselves."""

    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Add what `state` returned for other batches."""

    def reduce(self, processes: Reducer) -> None:
        """Add up the sums of all processes: all of them then have the whole."""


def read_back(numbers: Sequence[Tensor | None]) -> list[float]:
    """Return the values of tensors with one number each, None as 0; in one transfer where they are on one device."""
    given = [number.double() for number in numbers if number is not None]
    one_device = len({number.device for number in given}) == 1
    read = iter(torch.stack(given).tolist() if one_device else [float(number) for number in given])
    return [0.0 if number is None else next(read) for number in numbers]


def zero_sums(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape on its device, in float32 or better: where squares of gradients are added."""
    return torch.zeros(parameter.shape, dtype=promoted(parameter.dtype), device=parameter.device)


def power_of_two_near(rms: float) -> float:
    """Return the unit of fourth powers, whose own fourth power is in float32's range; 0 for a gradient of zero."""
    return 2.0 ** min(40, max(-40, round(math.log2(rms)))) if 0 < rms < math.inf else 0.0
