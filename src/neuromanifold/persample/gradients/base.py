"""What every form can do, and the gradients themselves as the simplest one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from neuromanifold.core.checks import message, promoted
from neuromanifold.kernels.values import Accumulators

# How many numbers of single samples' gradients are held at a time: of several samples, what stays in a CPU's nearer
# cache; of one sample, what stays in the large one; on a GPU, what keeps it busy.
CPU_TILE, CPU_ROWS, GPU_TILE = 2**20, 2**22, 2**25


class Form(ABC):
    """The gradients of some samples with respect to one parameter."""

    samples: int
    shape: torch.Size
    """Of the parameter."""

    thins: ClassVar[bool] = True
    """Whether fourth powers cost so much that they should be taken now and then only."""

    @abstractmethod
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Those of a few samples, [stop - start, *shape], as a new tensor."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """About how large the gradients are."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are."""

    def add_squares(self, to: Accumulators) -> None:
        """Σ_n g_n², and fourth powers."""
        for start, stop in self.pieces():
            to.add(self.gradients(start, stop, to.squares.dtype).mul_(to.factor))

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """‖g_n‖², [n]."""
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
        """Ranges of samples whose gradients together make about one tile."""
        step = max(1, tile_size(self.device) // max(1, self.shape.numel()))
        return ((start, min(start + step, self.samples)) for start in range(0, self.samples, step))


def tile_size(device: torch.device) -> int:
    """How many numbers make a tile."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def row_limit(device: torch.device) -> int:
    """How many numbers of a single sample make a tile."""
    return max(CPU_TILE, CPU_ROWS) if device.type == "cpu" else GPU_TILE


@dataclass
class Dense(Form):
    """The gradients themselves, [n, *shape]."""

    values: Tensor
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.samples, self.shape = self.values.shape[0], self.values.shape[1:]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.values.device

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """A part of them."""
        return self.values[start:stop].to(dtype, copy=True)

    def values_for(self, parameter: Tensor) -> Tensor:
        """In the parameter's shape, and in float32, or float64 if it has that."""
        if self.shape.numel() != parameter.shape.numel():
            got = f"{list(self.shape)} for each sample"
            advice = "A rule's Dense has the samples first, then the parameter's shape."
            raise ValueError(message("gradients", f"of the parameter's shape {list(parameter.shape)}", got, advice))
        dtype = promoted(parameter.dtype)
        values = self.values if self.shape == parameter.shape else self.values.reshape(self.samples, *parameter.shape)
        return values if values.dtype == dtype else values.to(dtype)

    def magnitude(self) -> Tensor:
        """Their root mean square."""
        return root_mean_square(self.values)


def root_mean_square(values: Tensor) -> Tensor:
    """In float32 or better; 0 for nothing."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    values = values if values.dtype == torch.float64 else values.float()
    if values.device.type == "cpu" and values.is_contiguous():
        norm = torch.dot(values.view(-1), values.view(-1)).sqrt_()  # several times as fast
    else:
        norm = torch.linalg.vector_norm(values)
    size: Tensor = norm / values.numel() ** 0.5
    return size
