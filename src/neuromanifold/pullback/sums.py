"""Accumulators: what is kept of the gradients of all passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# On a CPU, how many numbers are squared, added and raised to the fourth at a time: few enough to stay in the cache.
_CHUNK = 2**18


class GradientSums(Protocol):
    """Takes the gradients of one pass after the other."""

    def add(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Take the gradients of one pass, which are `scale` times too large; None stands for zero."""

    def end_batch(self) -> None:
        """All passes of a batch have been added."""


class DiagonalSums:
    """Σ g² for each entry, and Σ g⁴ for its error bar, in float32 or better whatever the model's precision.

    Fourth powers of small numbers underflow, so they are kept in units of a power of two near the root mean square of
    each parameter's first gradient; `noise` takes the unit out again.
    """

    def __init__(self, parameters: Sequence[Tensor], fourth_powers: bool) -> None:
        self.squares = [_zeros_like(parameter) for parameter in parameters]
        self.fourths = [_zeros_like(parameter) for parameter in parameters] if fourth_powers else []
        self._units = [0.0] * len(self.fourths)
        self._passes = 0

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Add (g/scale)² and its square; None is a parameter that the outputs do not depend on."""
        used = [i for i, g in enumerate(gradients) if g is not None and g.numel()]
        if not used:
            return
        values = [g.to(self.squares[i].dtype) for i in used if (g := gradients[i]) is not None]
        if scale != 1.0:
            values = list(torch._foreach_mul(values, 1 / scale))
        squares = [self.squares[i] for i in used]
        if not self.fourths:
            torch._foreach_addcmul_(squares, values, values)
            return
        self._passes += 1
        rare = self._passes & (self._passes - 1) == 0  # pass number 1, 2, 4, 8, ...: reading values back takes time
        if rare or not all(self._units[i] for i in used):
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(values)]).tolist()
            for i, value, norm in zip(used, values, norms, strict=True):
                self._raise_unit(i, _power_of_two_near(norm / math.sqrt(value.numel())))
        factors = [(self._units[i] or 1.0) ** -2 for i in used]
        add = _add_in_chunks if values[0].device.type == "cpu" else _add_at_once
        add(values, squares, [self.fourths[i] for i in used], factors)

    def _raise_unit(self, i: int, unit: float) -> None:
        """Take a larger unit if gradients have grown much, so that fourth powers do not overflow."""
        old = self._units[i]
        if unit > 16 * old:
            self.fourths[i].mul_((old / unit) ** 4)
            self._units[i] = unit

    def end_batch(self) -> None:
        """Nothing to do: entries know no batches."""

    def noise(self, factor: float) -> list[Tensor]:
        """√(factor Σ g⁴): the standard error of each Σ g², zero where nothing was kept."""
        if not self.fourths:
            return [torch.zeros_like(square) for square in self.squares]
        pairs = zip(self._units, self.fourths, strict=True)
        return [(unit or 1.0) ** 2 * (factor * fourth).sqrt() for unit, fourth in pairs]


class TraceSums:
    """Σ ‖g‖² of each pass of each batch: all that the trace needs, and no tensor of a parameter's size."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self._passes: list[float] = []

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Add ‖g/scale‖²."""
        used = [g.float() if g.dtype.itemsize < 4 else g for g in gradients if g is not None and g.numel()]
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(used)]) if used else torch.zeros(1)
        self._passes.append(float(norms.square().sum()) / scale**2)

    def end_batch(self) -> None:
        """Close the list of this batch's passes."""
        self.batches.append(self._passes)
        self._passes = []


def _zeros_like(parameter: Tensor) -> Tensor:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def _power_of_two_near(rms: float) -> float:
    """A unit for fourth powers; 0 while the gradient is zero."""
    return 2.0 ** round(math.log2(rms)) if 0 < rms < math.inf else 0.0


def _add_at_once(values: list[Tensor], squares: list[Tensor], fourths: list[Tensor], factors: list[float]) -> None:
    """A few kernel launches for all parameters together."""
    products = torch._foreach_mul(values, values)
    torch._foreach_add_(squares, products)
    torch._foreach_mul_(products, factors)
    torch._foreach_addcmul_(fourths, products, products)


def _add_in_chunks(values: list[Tensor], squares: list[Tensor], fourths: list[Tensor], factors: list[float]) -> None:
    """The same by pieces that stay in a CPU's cache: each number is read from and written to memory once."""
    for i, value in enumerate(values):
        pieces = (value.reshape(-1), squares[i].view(-1), fourths[i].view(-1))
        for g, square, fourth in zip(*(torch.split(piece, _CHUNK) for piece in pieces), strict=True):
            product = g * g
            square.add_(product)
            product.mul_(factors[i])
            fourth.addcmul_(product, product)
