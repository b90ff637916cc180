"""`fisher_factors`: the gradients of probes themselves, F = Σ g gᵀ."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import integer_in_range, message, one_of, promoted
from neuromanifold.estimators import Estimator, Hutchinson
from neuromanifold.operators.factors_result import FisherFactors
from neuromanifold.operators.layout import ParameterLayout
from neuromanifold.persample.accumulate import GradientRows
from neuromanifold.problem.parameters import Selection
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.validation import Likelihood
from neuromanifold.results.trace import check_reduction
from neuromanifold.run.fisher import make_provenance
from neuromanifold.run.loop import LoopOptions, run
from neuromanifold.run.step import Settings

GIB = 2**30


@torch.inference_mode(mode=False)
def fisher_factors(
    model: nn.Module,
    data: Iterable[object],
    estimator: Estimator | None = None,
    granularity: Literal["batch", "sample"] = "batch",
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    max_bytes: int = 4 * GIB,
    seed: int = 0,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
) -> FisherFactors:
    """Return the stack G of the gradients g of probes, with E[GᵀG] = F: a low-rank estimate of the whole matrix.

    Arguments as in `fisher_diagonal`, and:

    Args:
        model: nothing of it is changed.
        data: an iterable of batches.
        estimator: whose gradients; `nm.Hutchinson()` unless given.
        granularity: "batch" keeps a gradient for each batch and probe, by one ordinary backward pass.  "sample" keeps
            one for each sample and probe: less noise, more memory, and needed for `nm.Exact()` and `nm.Empirical()`.
        likelihood: what the outputs mean.
        parameters: which.
        reduction: "mean" (per sample) or "sum" (over samples): only a view.
        dtype: of the rows that are kept: float32, float64, bfloat16 or float16.
        device: where they are kept; the model's unless given.
        max_bytes: refuse to keep more than that, as soon as it can be told.
        seed: random seed of the probes.
        progress: show a progress bar on standard error.
        class_dim: which dimension of the logits holds the classes.
        batch_dim: which dimension of inputs and of logits holds the samples.
        ignore_index: positions with this label do not count, nor samples without any other.
        label_key: where a batch that is a dict has its labels.

    """
    estimator = Hutchinson() if estimator is None else estimator
    one_of(granularity, "granularity", "batch", "sample")
    problem = Problem.of(model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key)
    settings, view = Settings.of(estimator, granularity, seed), check_reduction(reduction)
    layout = ParameterLayout.of(problem.parameters)
    device = problem.device if device is None else device
    one_of(dtype, "dtype", torch.float32, torch.float64, torch.bfloat16, torch.float16)
    stack = _Stack(layout.size, dtype, device, data, max_bytes)
    tensors = list(problem.parameters.values())
    rows = GradientRows(tensors, promoted(dtype), stack.take, stack.reserve, stack.after_batch)
    counts = run(problem, settings, rows, LoopOptions(progress))
    return FisherFactors(stack.whole(), layout, counts.samples, make_provenance(problem, settings, counts), view)


class _Stack:
    """Keeps rows, and raises before they take more memory than allowed."""

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device | str, data: Iterable[object], max_bytes: int
    ) -> None:
        self._rows = [torch.zeros(0, size, dtype=dtype, device=device)]  # parameters that are not used have none
        self._row_bytes = size * dtype.itemsize
        self._limit = integer_in_range(max_bytes, "max_bytes", 1, 2**63, "memory for all rows")
        self._batches = None
        with suppress(TypeError):  # a DataLoader of an iterable data set has a __len__ that fails
            self._batches = len(data) if isinstance(data, Sized) else None
        self._count = self._seen = 0

    def reserve(self, count: int) -> None:
        """Raise if `count` more rows would take too much memory."""
        self._check(self._count + count, "so far")

    def take(self, rows: Tensor) -> None:
        """Keep rows [n, P], in the wanted dtype."""
        self._count += len(rows)
        kept = rows.to(self._rows[0])
        if kept.dtype == torch.float16:
            _check_range(rows, kept)
        self._rows.append(kept)

    def whole(self) -> Tensor:
        """Return all rows as one tensor [r, P]."""
        return torch.cat(self._rows)

    def after_batch(self) -> None:
        """Raise after the first batch if all batches together would take too much memory."""
        self._seen += 1
        if self._seen == 1 and self._batches is not None:
            self._check(self._count * self._batches, f"for {self._batches} batches like the first")

    def _check(self, count: int, when: str) -> None:
        if count * self._row_bytes <= self._limit:
            return
        got = f"{count * self._row_bytes / GIB:.3g} GiB {when} ({count:,} gradients of {self._row_bytes:,} bytes)"
        advice = "Take fewer samples or parameters, granularity='batch', a smaller dtype, a device with room and a "
        advice += "higher limit, or nm.fisher_operator, which keeps none."
        raise ValueError(message("max_bytes", "enough for all rows", got, advice))


def _check_range(rows: Tensor, kept: Tensor) -> None:
    """Raise if gradients leave the range of float16, which is about 1e-7 to 65,504."""
    before, after = (float(torch.linalg.vector_norm(values, dtype=torch.float32)) for values in (rows, kept))
    if not 0.99 * before <= after <= 1.01 * before:
        got = f"gradients of length {before:.3g} that are of length {after:.3g} in float16"
        raise ValueError(message("dtype", "one with room for the gradients", got, "Use torch.bfloat16."))
