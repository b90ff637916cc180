"""Accumulator for the diagonal of a model in FSDP2: each process keeps the sums of its part of every parameter.

Squares of a layer are added up over the samples of the local batch at full size, then over processes (`shards.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.accumulate.base import GradientSums, Pass, power_of_two_near, zero_sums
from neuromanifold.persample.gradients import Form, root_mean_square
from neuromanifold.persample.shards import Shards

_EARLY = 8  # batches in which gradients may become much larger than before


class ShardedSums(GradientSums):
    """Σ g² for each entry of this process's parts, and Σ c g⁴ of all samples, in float32 or better.

    Fourth powers of small numbers underflow: those of a batch are kept in units of a power of two, and so are sums.
    Processes exchange them in float64, since each has units of its own.
    """

    takes_tokens: ClassVar[bool] = True

    def __init__(self, shards: Shards, fourth_powers: bool) -> None:
        count = len(shards.whole)
        self._shards, self.fourth_powers = shards, fourth_powers
        self._squares: list[Tensor | None] = [None] * count
        self._fourths: list[Tensor | None] = [None] * count
        self._units = [0.0] * count  # of the sums
        self._sizes = [0.0] * count  # of this process's gradients
        self._batches = 0
        self._layers = shards.sums(self._take)

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add Σ_n (g_n/scale)² and the squares of its terms."""
        if not form.samples or not form.shape.numel():
            return
        like = self._shards.squared(i)
        squares = torch.zeros(like.shape, dtype=promoted(like.dtype), device=like.device)
        scale, c = made_by.scale, made_by.noise_factors.sample
        if not (self.fourth_powers and c > 0):
            form.add_squares(PowerSums(squares, scale=scale))
            self._layers.put(i, "squares", squares)
            return
        size = self._size(i, form.magnitude)
        fourths = torch.zeros_like(squares)
        form.add_squares(PowerSums(squares, fourths, size, c, scale))
        self._layers.put(i, "squares", squares)
        self._layers.put(i, "fourths", fourths.double().mul_(size**4))

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add (g/scale)² and its square for gradients of the local batch; None stands for zero."""
        c = made_by.noise_factors.batch
        for i, g in enumerate(gradients):
            if g is None or not g.numel():
                continue
            values = g.to(promoted(g.dtype)) / made_by.scale
            self._layers.put(i, "squares", values.square())
            if self.fourth_powers and c:
                size = self._size(i, lambda values=values: root_mean_square(values))
                fourths = (values / size).square_().square_().double()
                self._layers.put(i, "fourths", fourths.mul_(c * size**4))

    def end_pass(self) -> None:
        """Add up the last layer over processes."""
        self._layers.flush()

    def end_batch(self) -> None:
        """Count the batch."""
        self._batches += 1

    def _size(self, i: int, measure: Any) -> float:
        """Return a power of two near the size of a parameter's gradients, measured now and then: it waits for a GPU."""
        if not self._sizes[i] or self._batches < _EARLY or self._batches & (self._batches - 1) == 0:
            self._sizes[i] = max(self._sizes[i], power_of_two_near(float(measure())))
        return self._sizes[i] or 1.0

    def _take(self, i: int, kind: str, part: Tensor) -> None:
        """Add this process's part of a sum over all samples of a pass."""
        like = self._shards.part(i)
        if kind == "squares":
            kept = self._squares[i]
            self._squares[i] = part if kept is None else kept.add_(part)
            return
        if not self._units[i]:
            self._units[i] = power_of_two_near(float(part.mean()) ** 0.25 if part.numel() else 0.0)
            if not self._units[i]:
                return
        kept = self._fourths[i]
        kept = self._fourths[i] = zero_sums(like) if kept is None else kept
        kept.add_((part * self._units[i] ** -4).to(kept.dtype))

    def state(self) -> dict[str, Any]:
        """Return the sums so far and their standard errors, as distributed tensors."""
        found = {f"squares/{i}": one for i, one in enumerate(self.squares)}
        errors = self.standard_errors() if self.fourth_powers else ()
        return found | {f"standard_errors/{i}": one for i, one in enumerate(errors)}

    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned, in any number of processes, from whole tensors of which each takes its part.

        Fourth powers are those of the standard errors, but for rounding.
        """
        for i in range(len(self._squares)):
            self._squares[i] = self._shards.part_of(i, tensors[f"squares/{i}"])
            if self.fourth_powers:
                error = self._shards.part_of(i, tensors[f"standard_errors/{i}"])
                size = power_of_two_near(math.sqrt(float(error.mean())) if error.numel() else 0.0)
                if size:
                    self._units[i], self._fourths[i] = size, (error / size**2).square_()

    @property
    def squares(self) -> list[Any]:
        """Σ g² of each parameter, as distributed tensors."""
        parts = [zero_sums(self._shards.part(i)) if part is None else part for i, part in enumerate(self._squares)]
        return [self._shards.as_whole(i, part) for i, part in enumerate(parts)]

    def standard_errors(self) -> list[Any]:
        """Return √(Σ c g⁴), the standard error of each Σ g², as distributed tensors."""
        return [self._shards.as_whole(i, self._standard_error(i)) for i in range(len(self._fourths))]

    def _standard_error(self, i: int) -> Tensor:
        fourths = self._fourths[i]
        return zero_sums(self._shards.part(i)) if fourths is None else fourths.sqrt().mul_(self._units[i] ** 2)

    def relative_error(self) -> float | None:
        """Return Σ stderr / Σ F so far, of all processes, which must come here together; None while F is zero."""
        mine = [i for i in range(len(self._squares)) if self._shards.is_counted(i)]
        total = sum(float(part.double().sum()) for i in mine if (part := self._squares[i]) is not None)
        error = sum(float(self._standard_error(i).double().sum()) for i in mine)
        totals, errors = zip(*self._shards.processes.gather("relative error", [total, error]), strict=True)
        return math.fsum(errors) / math.fsum(totals) if any(totals) else None
