"""The interface of accumulators, which take the gradients of one backward pass after the other.

for batch in data:
    sums.begin_batch(index, samples)
    for cotangent in batch:                                 one backward pass
        sums.add_samples(i, form, made_by)                  per-sample gradients of each parameter with a rule
        sums.add(gradients, made_by)                        of the others, summed over the batch or of single samples
        sums.end_pass()
    sums.end_batch()
    sums.synchronize()                                      reads back from a GPU
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.estimators import NoiseFactors
from neuromanifold.persample.gradients import Form


class Pass(NamedTuple):
    """What an accumulator has to know of the backward pass that gradients were made by (`made_by` in its methods)."""

    scale: float = 1.0  # the factor by which gradients are too large, in float16
    noise_factors: NoiseFactors = NoiseFactors()  # of the squares
    independent: bool = False  # of the other passes of the batch
    more: bool = False  # further passes of the batch follow
    weights: Tensor | None = None  # [n] how many samples each one stands for, if others were left out

    @property
    def of_one_sample(self) -> Pass:
        """The same pass where the "batch" is a single sample."""
        factors = self.noise_factors
        return self._replace(noise_factors=factors._replace(batch=factors.sample))

    @property
    def of_tokens(self) -> Pass:
        """The same pass where the "samples" are single tokens."""
        factors = self.noise_factors
        return self._replace(noise_factors=factors._replace(sample=factors.token))


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


class GradientSums(ABC):
    """An accumulator: takes the gradients of one pass after the other, and keeps sums of them."""

    takes_tokens: ClassVar[bool] = False
    """Whether squares of single tokens are taken, too, where they are unbiased; else there is one gradient a sample."""

    fourth_powers: bool | Literal["rows"] = False
    """What fourth powers are kept of, for error bars: each entry, or the norm of each row of a weight."""

    def begin_batch(self, index: int, samples: int) -> None:  # noqa: B027 (nothing to do for most)
        """Begin a batch with so many samples; `index`: how many batches of the shard come before it."""

    @abstractmethod
    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take the per-sample gradients of parameter number i; autograd must not be recording."""

    @abstractmethod
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Take gradients summed over a batch, or those of one sample; None stands for zero."""

    def end_pass(self) -> None:  # noqa: B027
        """End a pass: all of its gradients have been added."""

    def end_batch(self) -> None:  # noqa: B027
        """End a batch: all of its passes have been added."""

    def synchronize(self) -> None:  # noqa: B027
        """Read back values from the device, between batches."""

    def note_traces(self, traces: Tensor) -> None:  # noqa: B027
        """Take the traces tr M of some samples' metrics, [n], which say how many samples contribute to F."""


class SharedSums(GradientSums):
    """Sums with a state between batches, which checkpoints keep and several processes share."""

    @abstractmethod
    def empty(self) -> Self:
        """Return an accumulator like this one, to which nothing has been added."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the rest of a run depends on, as tensors and as values that JSON can hold."""

    @abstractmethod
    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what `state` returned, in this process or in another."""

    @abstractmethod
    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Add what `state` returned for other batches."""

    @abstractmethod
    def reduce(self, processes: Reducer) -> None:
        """Add up the sums of all processes: all of them then have the whole."""

    def copy(self) -> Self:
        """Return the same sums, which go on by themselves."""
        copied = self.empty()
        copied.set_state(*self.state())
        return copied


def part_of(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of a state whose names begin with `name` and a dot, without that."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def named(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of a state under names that begin with `name` and a dot."""
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def read_back(numbers: Sequence[Tensor | None]) -> list[float]:
    """Return the values of tensors with one number each, None as 0; from a GPU in one transfer."""
    devices = {number.device for number in numbers if number is not None}
    if len(devices) != 1 or next(iter(devices)).type == "cpu":
        return [0.0 if number is None else float(number) for number in numbers]
    read = iter(torch.stack([number.double() for number in numbers if number is not None]).tolist())
    return [0.0 if number is None else next(read) for number in numbers]


def zero_sums(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape on its device, in float32 or better: where squares of gradients are added."""
    return torch.zeros(parameter.shape, dtype=promoted(parameter.dtype), device=parameter.device)


def power_of_two_near(rms: float, most: int = 40) -> float:
    """Return the unit of fourth powers, from 2^-most to 2^most; 0 for a gradient of zero."""
    return 2.0 ** min(most, max(-most, round(math.log2(rms)))) if 0 < rms < math.inf else 0.0
