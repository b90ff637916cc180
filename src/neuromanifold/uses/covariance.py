"""The covariance that a Gaussian over parameters gives to a network's linearised outputs: J Σ Jᵀ for each sample.

for batch in data:
    forms of J_nᵀe_c = one backward pass for each output c           run/loop.py with nm.Exact(): its columns are e_c
    covariance[n] += (Σ^½ J_nᵀe_c)ᵀ (Σ^½ J_nᵀe_d)                    parameter by parameter, a tile of samples at a time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from neuromanifold.core import Gaussian
from neuromanifold.core.checks import promoted
from neuromanifold.estimators import Exact
from neuromanifold.persample.accumulate.base import Pass
from neuromanifold.persample.gradients import Dense, Form
from neuromanifold.problem.batches import read_batch
from neuromanifold.problem.problem import Problem
from neuromanifold.run.loop import run
from neuromanifold.run.step import Settings

Root = Callable[[str, Tensor], Tensor]
"""From a parameter's name and vectors [n, *shape] to Σ^½ times them, in its own basis: [n, ...]."""


def output_covariances(problem: Problem, root: Root, *, full: bool = True) -> list[Tensor | None]:
    """Return J Σ Jᵀ for each batch of logits [B, C], as [B, C, C], or without `full` its diagonal [B, C].

    None stands for a batch without samples.  Costs C backward passes; gradients of single samples are held a tile at a
    time, and never for a whole batch.  `problem` has unlabelled data, so that all samples count.
    """
    sums = CovarianceSums(problem, root, full)
    run(replace(problem, likelihood=Gaussian), Settings.of(Exact(), "auto", 0), sums)  # whose columns are unit vectors
    return sums.batches


def unlabelled(item: object, label_key: str) -> object:
    """Return a batch without its labels."""
    batch = read_batch(item, 0, label_key)
    return batch.kwargs or (batch.args,)


class CovarianceSums:
    """Accumulates J Σ Jᵀ of every sample from the gradients of one backward pass for each output."""

    def __init__(self, problem: Problem, root: Root, full: bool) -> None:
        self.batches: list[Tensor | None] = []
        self._names, self._root, self._full = list(problem.parameters), root, full
        self._dtypes = [promoted(parameter.dtype) for parameter in problem.parameters.values()]
        self._passes: list[dict[int, tuple[Form, float]]] = [{}]  # of the batch: gradients and their scale
        self._alone: list[dict[int, Tensor]] = []  # of the pass: those of one sample after the other, without a rule

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Take the gradients of the next sample, of parameters without a per-sample rule."""
        self._alone.append({i: g.detach() / made_by.scale for i, g in enumerate(gradients) if g is not None})

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take the per-sample gradients of parameter number i."""
        self._passes[-1][i] = form, made_by.scale

    @torch.no_grad()
    def end_pass(self) -> None:
        """End the pass of one output."""
        for i in {i for one in self._alone for i in one}:
            like = next(one[i] for one in self._alone if i in one)
            rows = [one.get(i, torch.zeros_like(like)) for one in self._alone]
            self._passes[-1][i] = Dense(torch.stack(rows)), 1.0
        self._alone = []
        self._passes.append({})

    @torch.no_grad()
    def end_batch(self) -> None:
        """Add up the covariances of the batch's samples over parameters."""
        passes, self._passes = self._passes[:-1], [{}]
        total: Tensor | None = None
        for i, name in enumerate(self._names):
            forms = [one.get(i) for one in passes]
            some = next((form for form in forms if form is not None), None)
            if some is not None:
                added = self._of_parameter(name, forms, some[0], self._dtypes[i])
                total = added if total is None else total + added.to(total.device)
        self.batches.append(total)

    def synchronize(self) -> None:
        """Do nothing: covariances stay on the device."""

    def _of_parameter(
        self, name: str, forms: list[tuple[Form, float] | None], like: Form, dtype: torch.dtype
    ) -> Tensor:
        """Return what one parameter adds to the covariances, [n, C, C] or [n, C]."""
        size, tiles = max(1, like.shape.numel()), []
        step = max(1, 2**20 // (size * (len(forms) if self._full else 1)))
        for start in range(0, like.samples, step):
            stop = min(start + step, like.samples)
            rows = (self._rows(name, form, start, stop, dtype) for form in forms)
            if self._full:
                zeros = torch.zeros(stop - start, 1, dtype=dtype, device=like.device)
                found = list(rows)
                width = next(row.shape[1] for row in found if row is not None)
                stacked = torch.stack([zeros.expand(-1, width) if row is None else row for row in found], 1)
                tiles.append(stacked @ stacked.mT)  # [n, C, C]
            else:
                nothing = torch.zeros(stop - start, dtype=dtype, device=like.device)
                tiles.append(torch.stack([nothing if row is None else row.square().sum(1) for row in rows], 1))
        return torch.cat(tiles)

    def _rows(
        self, name: str, form: tuple[Form, float] | None, start: int, stop: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return Σ^½ Jᵀe of one output for a few samples, [n, ·]."""
        if form is None:
            return None
        gradients, scale = form
        values = gradients.gradients(start, stop, dtype).view(stop - start, *gradients.shape) / scale
        return self._root(name, values).flatten(1)
