"""Accumulator for the trace: squared norms of gradients instead of their squares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.persample.accumulate.base import Pass, Reducer, SharedSums
from neuromanifold.persample.gradients import Form
from neuromanifold.persample.shards import Shards


class TraceSums(SharedSums):
    """Σ ‖g‖² of each pass of each batch, and of single samples: no tensor of a parameter's size."""

    def __init__(self, noise_factor: float) -> None:
        """`noise_factor`: c with Var(g²) <= c E[g⁴] for one pass; 0 if nothing is random."""
        self._noise_factor = noise_factor
        self.batches: list[list[float]] = []  # passes of whole batches
        self.samples = 0.0  # Σ_n ‖g_n‖² over all passes
        self.samples_variance = 0.0  # Σ c ‖g_n‖⁴
        self._passes: list[float] = []
        self._whole: list[Tensor] = []
        self._single: list[Tensor] = []
        self._norms: list[Tensor] = []  # [n] of each pass of a batch
        self._made_by: list[Pass] = []

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add ‖g/scale‖² of gradients summed over a batch."""
        used = [g.float() if g.dtype.itemsize < 4 else g for g in gradients if g is not None and g.numel()]
        norms = torch._foreach_norm(used) if used else []
        self._whole.extend(norm.double().square() / made_by.scale**2 for norm in norms)

    @override
    def empty(self) -> TraceSums:
        return TraceSums(self._noise_factor)

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add ‖g_n/scale‖² of one parameter to the squared norm of sample n."""
        del i
        norms = form.squared_norms(torch.float64) / made_by.scale**2
        if not self._single:
            self._made_by.append(made_by)
        self._single.append(norms.to(self._single[0].device) if self._single else norms)

    def end_pass(self) -> None:
        """Add up the squared norms of all parameters for this pass."""
        if self._whole:
            self._passes.append(float(torch.stack(self._whole).sum()))
        if self._single:
            self._norms.append(torch.stack(self._single).sum(0))
        self._whole, self._single = [], []

    def end_batch(self) -> None:
        """Append this batch's passes, and add the squared norms of its samples and their variance."""
        if self._passes:
            self.batches.append(self._passes)
        if self._norms:
            self._add_samples_of_batch(torch.stack(self._norms))
        self._passes, self._norms, self._made_by = [], [], []

    def _add_samples_of_batch(self, norms: Tensor) -> None:
        """Add ‖g_n‖² [k, n] of k passes; their noise is the spread of independent passes, or at most Σ c ‖g_n‖⁴."""
        self.samples += float(norms.sum())
        if len(norms) > 1 and all(one.independent for one in self._made_by):
            self.samples_variance += len(norms) * float(norms.var(0).sum())
        else:
            for one, squares in zip(self._made_by, norms.square(), strict=True):
                self.samples_variance += one.noise_factors.sample * float(squares.sum())

    def total_and_standard_error(self) -> tuple[float, float]:
        """Return Σ ‖g‖² over passes of whole batches and over samples, and its standard error from the run itself.

        Of samples, Σ c ‖g‖⁴ is the variance or more, as for a single entry.  Several passes of a batch are independent
        copies of each other, so their spread is unbiased.  With one pass for each batch the spread between batches
        serves, which contains how much the batches differ and is never too small on average; with a single batch there
        is only E[T²] >= Var(T) left.  The two kinds share their probes, so that their errors add, and passes need not
        be copies.
        """
        batches, total = self.batches, sum(map(sum, self.batches))
        if not self._noise_factor:
            variance = 0.0
        elif self.samples:
            variance = self._noise_factor * sum(value**2 for passes in batches for value in passes)
        elif batches and min(len(passes) for passes in batches) > 1:
            variance = sum(len(passes) * statistics.variance(passes) for passes in batches)
        elif len(batches) > 1:
            variance = len(batches) * statistics.variance([sum(passes) for passes in batches])
        else:
            variance = self._noise_factor * total**2
        return total + self.samples, math.sqrt(variance) + math.sqrt(self.samples_variance)

    def relative_error(self) -> float | None:
        """Return the standard error over the trace so far; None while the trace is zero."""
        total, error = self.total_and_standard_error()
        return error / total if total else None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the sums so far, which are numbers and no tensors."""
        numbers = {"batches": self.batches, "samples": self.samples, "samples_variance": self.samples_variance}
        return {}, numbers

    @override
    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        del tensors
        self.batches, self.samples = values["batches"], values["samples"]
        self.samples_variance = values["samples_variance"]

    @override
    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        del tensors
        self.batches = [*self.batches, *values["batches"]]
        self.samples += values["samples"]
        self.samples_variance += values["samples_variance"]

    @override
    def reduce(self, processes: Reducer) -> None:
        of_all = processes.gather("sums", self.state()[1])
        self.set_state({}, of_all[0])
        for values in of_all[1:]:
            self.merge({}, values)


class TraceOfParts(TraceSums):
    """The same where each process has the gradients of its parts of the parameters, all of the same samples."""

    def __init__(self, noise_factor: float, shards: Shards) -> None:
        super().__init__(noise_factor)
        self._shards = shards

    @override
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        super().add([g if self._shards.is_counted(i) else None for i, g in enumerate(gradients)], made_by)

    @override
    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        super().add_samples(i, form, made_by)
        if not self._shards.is_counted(i):
            self._single[-1] = torch.zeros_like(self._single[-1])

    @override
    def end_pass(self) -> None:
        """Add up the squared norms of all processes, too, before they are squared for their variance."""
        whole = [float(torch.stack(self._whole).sum())] if self._whole else []
        single = torch.stack(self._single).sum(0).tolist() if self._single else []
        wholes, singles = zip(*self._shards.processes.gather("trace", [whole, single]), strict=True)
        self._whole = [torch.tensor(one, dtype=torch.float64).sum() for one in wholes if one]
        self._single = [torch.tensor(one, dtype=torch.float64) for one in singles if one]
        super().end_pass()

    @override
    def empty(self) -> TraceOfParts:
        return TraceOfParts(self._noise_factor, self._shards)

    @override
    def reduce(self, processes: Reducer) -> None:
        """Do nothing: all processes have the whole."""
