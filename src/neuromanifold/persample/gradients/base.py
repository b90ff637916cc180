"""The interface of forms of per-sample gradients, and the simplest form: the gradients themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import message, promoted
from neuromanifold.kernels.values import Accumulators

# How many numbers of single samples' gradients are held at a time: of several samples, what stays in a CPU's nearer
# cache; of one sample, what stays in the large one; on a GPU, what keeps it busy.
CPU_TILE, CPU_ROWS, GPU_TILE = 2**20, 2**22, 2**25


class Form(ABC):
    """The gradients g_n of some samples with respect to one parameter."""

    samples: int
    shape: torch.Size  # of the parameter
    device: torch.device

    thins: ClassVar[bool] = True
    """Whether fourth powers cost so much that only some batches take them."""

    @abstractmethod
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the gradients of the samples `start` to `stop - 1`, [stop - start, *shape], as a new tensor."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """Return about the root mean square of the gradients: right to a power of two or so."""

    def add_squares(self, to: Accumulators) -> None:
        """Add Σ_n g_n² to the sums, and fourth powers where they are kept."""
        for start, stop in self.pieces():
            to.add(self.gradients(start, stop, to.squares.dtype).mul_(to.factor))

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """Return ‖g_n‖² for each sample, [n]."""
        norms = [
            self.gradients(start, stop, dtype).reshape(stop - start, self.shape.numel()).square().sum(1)
            for start, stop in self.pieces()
        ]
        return torch.cat(norms) if norms else torch.zeros(0, dtype=dtype, device=self.device)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n for weights c [n], in their precision."""
        total = torch.zeros(self.shape, dtype=weights.dtype, device=self.device)
        for start, stop in self.pieces():
            total += torch.tensordot(weights[start:stop], self.gradients(start, stop, weights.dtype), 1)
        return total

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Return ranges of samples whose gradients together make about one tile."""
        return ranges(self.samples, tile_size(self.device) // max(1, self.shape.numel()))


def ranges(samples: int, step: int) -> Iterator[tuple[int, int]]:
    """Return the ranges (start, stop) of `step` samples each, at least one, that make up all samples."""
    step = max(1, step)
    return ((start, min(start + step, samples)) for start in range(0, samples, step))


def tile_size(device: torch.device) -> int:
    """Return how many numbers of several samples are held at a time."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def row_limit(device: torch.device) -> int:
    """Return how many numbers of a single sample are held at a time."""
    return max(CPU_TILE, CPU_ROWS) if device.type == "cpu" else GPU_TILE


@dataclass
class Dense(Form):
    """The gradients themselves, [n, *shape]."""

    values: Tensor
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.samples, self.shape, self.device = self.values.shape[0], self.values.shape[1:], self.values.device

    @override
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self.values[start:stop].to(dtype, copy=True)

    def values_for(self, parameter: Tensor) -> Tensor:
        """Return the gradients in the parameter's shape, in float64 if it has that, else in float32."""
        if self.shape.numel() != parameter.shape.numel():
            got = f"{list(self.shape)} for each sample"
            advice = "A rule's Dense has the samples first, then the parameter's shape."
            raise ValueError(message("gradients", f"of the parameter's shape {list(parameter.shape)}", got, advice))
        dtype = promoted(parameter.dtype)
        values = self.values if self.shape == parameter.shape else self.values.reshape(self.samples, *parameter.shape)
        return values if values.dtype == dtype else values.to(dtype)

    @override
    def magnitude(self) -> Tensor:
        return root_mean_square(self.values)


def root_mean_square(values: Tensor) -> Tensor:
    """Return √(mean of squares), evaluated in float32 or better; 0 for an empty tensor."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    values = values.to(promoted(values.dtype))
    if values.device.type == "cpu" and values.is_contiguous():
        norm = torch.dot(values.view(-1), values.view(-1)).sqrt_()  # several times as fast
    else:
        norm = torch.linalg.vector_norm(values)
    size: Tensor = norm / values.numel() ** 0.5
    return size
