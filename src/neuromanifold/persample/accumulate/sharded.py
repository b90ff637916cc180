"""Accumulator for the diagonal of a model in parts: each process keeps the sums of its part of every parameter.

In FSDP2, squares of a layer are added up over the samples of the local batch at full size, then over processes; in
tensor parallelism, each process has those of its part (`persample/shards/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.accumulate.base import GradientSums, Pass, power_of_two_near, zero_sums
from neuromanifold.persample.accumulate.whole import add_whole
from neuromanifold.persample.gradients import Form, root_mean_square
from neuromanifold.persample.shards import Shards

_EARLY = 8  # batches in which gradients may become much larger than before


class ShardedSums(GradientSums):
    """Σ g² for each entry of this process's parts, and Σ c g⁴ or Σ c ‖row‖⁴ of all samples, in float32 or better.

    Fourth powers of small numbers underflow: those of a batch are kept in units of a power of two, and so are sums.
    Processes exchange them in float64, since each has units of its own.  Squares that are not random (c = 0) have sums
    of their own beside fourth powers of entries, as in `DiagonalSums`.
    """

    takes_tokens: ClassVar[bool] = True

    def __init__(self, shards: Shards, fourth_powers: bool | Literal["rows"]) -> None:
        """`fourth_powers`: of each entry, of the norms of a weight's rows, or none."""
        count = len(shards.whole)
        self._shards, self.fourth_powers = shards, fourth_powers
        self._squares: list[Tensor | None] = [None] * count
        self._noiseless: list[Tensor | None] = [None] * count  # where c = 0
        self._fourths: list[Tensor | None] = [None] * count
        self._units = [0.0] * count  # of the sums
        self._sizes = [0.0] * count  # of this process's gradients
        self._batches = 0
        self._layers = shards.sums(self._take)

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add Σ_n (g_n/scale)² and the squares of its terms, or of their sums over rows."""
        if not form.samples or not form.shape.numel():
            return
        self._put(i, made_by.noise_factors.sample, made_by.scale, form.magnitude, form.add_squares)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add (g/scale)² and its square for gradients of the local batch; None stands for zero."""
        for i, g in enumerate(gradients):
            if g is not None and g.numel():
                measure, add_to = partial(root_mean_square, g), partial(_add_one, g)
                self._put(i, made_by.noise_factors.batch, made_by.scale, measure, add_to)

    def _put(
        self,
        i: int,
        c: float,
        scale: float,
        measure: Callable[[], Tensor],
        add_to: Callable[[PowerSums], None],
    ) -> None:
        """Square the gradients of one parameter at full size, and hand the sums over to be added up."""
        like, by_row = self._shards.squared(i), self._by_row(i)
        squares = torch.zeros(like.shape, dtype=promoted(like.dtype), device=like.device)
        if not (self.fourth_powers and c > 0):
            add_to(PowerSums(squares, scale=scale))
            self._layers.put(i, "noiseless" if self.fourth_powers and not by_row else "squares", squares)
            return
        size = self._size(i, measure, scale)
        fourths = squares.new_zeros(like.shape[:1] if by_row else like.shape)
        add_to(PowerSums(squares, None if by_row else fourths, size, c, scale, fourths if by_row else None))
        self._layers.put(i, "squares", squares)
        self._layers.put(i, "fourths", fourths.double().mul_(size**4))

    def pass_over(self, i: int) -> None:
        """Add nothing to a parameter, in a pass of other processes."""
        if self._shards.held[i].numel():
            self._layers.reach(i)

    def _by_row(self, i: int) -> bool:
        return self.fourth_powers == "rows" and self._shards.held[i].ndim > 1

    def end_pass(self) -> None:
        """Add up the last layer over processes."""
        self._layers.flush()

    def end_batch(self) -> None:
        """Count the batch."""
        self._batches += 1

    def _size(self, i: int, measure: Callable[[], Tensor], scale: float) -> float:
        """Return a power of two near the size of a parameter's gradients, measured now and then: it waits for a GPU."""
        if not self._sizes[i] or self._batches < _EARLY or self._batches & (self._batches - 1) == 0:
            self._sizes[i] = max(self._sizes[i], power_of_two_near(float(measure()) / scale))
        return self._sizes[i] or 1.0

    def _take(self, i: int, kind: str, part: Tensor) -> None:
        """Add this process's part of a sum over all samples of a pass."""
        if kind != "fourths":
            kept = self._squares if kind == "squares" else self._noiseless
            before = kept[i]
            kept[i] = part if before is None else before.add_(part)
            return
        if not self._units[i]:
            self._units[i] = power_of_two_near(float(part.mean()) ** 0.25 if part.numel() else 0.0)
        if self._units[i]:
            fourths = self._fourths[i]
            fourths = self._fourths[i] = self._zero_errors(i) if fourths is None else fourths
            fourths.add_((part * self._units[i] ** -4).to(fourths.dtype))

    def state(self) -> dict[str, Any]:
        """Return the sums so far and their standard errors, as distributed tensors."""
        found = {f"squares/{i}": one for i, one in enumerate(self._whole(self._squares))}
        errors = self.standard_errors() if self.fourth_powers else ()
        found |= {f"noiseless/{i}": one for i, one in enumerate(self.noiseless)}
        return found | {f"standard_errors/{i}": one for i, one in enumerate(errors)}

    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned, in any number of processes, from whole tensors of which each takes its part.

        Fourth powers are those of the standard errors, but for rounding.
        """
        for i in range(len(self._squares)):
            self._squares[i] = self._shards.part_of(i, tensors[f"squares/{i}"])
            if f"noiseless/{i}" in tensors:
                self._noiseless[i] = self._shards.part_of(i, tensors[f"noiseless/{i}"])
            if self.fourth_powers:
                error = self._shards.part_of(i, tensors[f"standard_errors/{i}"])
                size = power_of_two_near(math.sqrt(float(error.mean())) if error.numel() else 0.0)
                if size:
                    self._units[i], self._fourths[i] = size, (error / size**2).square_()

    @property
    def squares(self) -> list[Any]:
        """Σ g² of each parameter, as distributed tensors."""
        both = zip(self._squares, self._noiseless, strict=True)
        return self._whole([b if a is None else a if b is None else a + b for a, b in both])

    @property
    def noiseless(self) -> list[Any]:
        """The part of Σ g² in which nothing is random, of each parameter; none if all or nothing is.

        All processes must come here together.
        """
        mine = [any(part is not None for part in parts) for parts in (self._noiseless, self._fourths)]
        some = [any(has) for has in zip(*self._shards.processes.gather("noiseless", mine), strict=True)]
        return self._whole(self._noiseless) if all(some) else []

    def standard_errors(self) -> list[Any]:
        """Return √(Σ c g⁴), the standard error of each Σ g² (or of each row's), as distributed tensors."""
        return [self._shards.as_whole(i, self._standard_error(i)) for i in range(len(self._fourths))]

    def _standard_error(self, i: int) -> Tensor:
        fourths = self._fourths[i]
        return self._zero_errors(i) if fourths is None else fourths.sqrt().mul_(self._units[i] ** 2)

    def _zero_errors(self, i: int) -> Tensor:
        part = self._shards.part(i)
        if not self._by_row(i):
            return zero_sums(part)
        return self._shards.part_of(i, torch.zeros(self._shards.held[i].shape[0], dtype=promoted(part.dtype)))

    def _whole(self, parts: Sequence[Tensor | None]) -> list[Any]:
        """Return parts of each parameter as distributed tensors; None stands for zero."""
        there = [zero_sums(self._shards.part(i)) if part is None else part for i, part in enumerate(parts)]
        return [self._shards.as_whole(i, part) for i, part in enumerate(there)]

    def relative_error(self) -> float | None:
        """Return Σ stderr / Σ F so far, of all processes, which must come here together; None while F is zero."""
        mine = [i for i in range(len(self._squares)) if self._shards.is_counted(i)]
        parts = [part for i in mine for part in (self._squares[i], self._noiseless[i]) if part is not None]
        total = sum(float(part.double().sum()) for part in parts)
        error = sum(float(self._standard_error(i).double().sum()) for i in mine)
        totals, errors = zip(*self._shards.processes.gather("relative error", [total, error]), strict=True)
        return math.fsum(errors) / math.fsum(totals) if any(totals) else None


def _add_one(g: Tensor, sums: PowerSums) -> None:
    add_whole([g], [sums])
