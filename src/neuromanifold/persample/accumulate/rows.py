"""Accumulators that keep gradients instead of their squares: as rows [n, P], or in the form in which they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuromanifold.persample.accumulate.base import GradientSums, Pass
from neuromanifold.persample.gradients import Form


class GradientRows(GradientSums):
    """Passes the gradients of each backward pass on as rows [n, P]: of n samples, or of the whole batch (n = 1).

    Parameters without a per-sample rule have one gradient for each sample, one after the other.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        take: Callable[[Tensor], None],
        reserve: Callable[[int], None],
        after_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """`dtype` of the rows: float32 or float64.  `reserve` is called with their number before they are allocated."""
        ends = torch.tensor([parameter.numel() for parameter in parameters]).cumsum(0).tolist()
        self._columns = [slice(end - p.numel(), end) for p, end in zip(parameters, ends, strict=True)]
        self._size, self._dtype, self._take, self._reserve = ends[-1], dtype, take, reserve
        self._rows: Tensor | None = None  # of samples, by rules
        self._alone: list[list[tuple[int, Tensor]]] = []  # of batches, or of samples one by one
        self._after_batch = after_batch

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add one row, of a batch or of the next sample; None stands for zero."""
        values = [(i, g.reshape(-1).to(self._dtype) / made_by.scale) for i, g in enumerate(gradients) if g is not None]
        self._alone.append(values)

    @torch.no_grad()
    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add the per-sample gradients of parameter number i to its columns of the samples' rows."""
        if self._rows is None:
            self._reserve(form.samples)
            self._rows = torch.zeros(form.samples, self._size, dtype=self._dtype, device=form.device)
        columns = self._rows[:, self._columns[i]]
        columns.add_(form.gradients(0, form.samples, self._dtype).reshape(columns.shape), alpha=1 / made_by.scale)

    @torch.no_grad()
    def end_pass(self) -> None:
        """Pass the rows of this backward pass on to `take`."""
        rows, alone = self._rows, self._alone
        self._rows, self._alone = None, []
        if rows is None:
            self._reserve(len(alone))
            devices = [value.device for values in alone for _, value in values[:1]] or [torch.device("cpu")]
            rows = torch.zeros(len(alone), self._size, dtype=self._dtype, device=devices[0])
        for n, values in enumerate(alone):
            for i, value in values:
                rows[n, self._columns[i]] += value.to(rows.device)
        if len(rows):
            self._take(rows)

    def end_batch(self) -> None:
        """Call `after_batch`, which may raise if rows take too much memory."""
        self._after_batch()


class KeptForms:
    """Keeps the per-sample gradients of one backward pass in the form in which they come."""

    def __init__(self) -> None:
        self.forms: dict[int, Form] = {}

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Keep the form of parameter number i."""
        del made_by
        self.forms[i] = form

    def end_pass(self) -> None:
        """Do nothing: forms are kept at once."""
