"""The covariance that a Gaussian over parameters gives to a network's linearised outputs: J Σ Jᵀ for each sample.

for batch in data:
    forms of J_nᵀe_c = one backward pass for each output c           run/loop.py with nm.Exact(): its columns are e_c
    covariance[n] += (Σ^½ J_nᵀe_c)ᵀ (Σ^½ J_nᵀe_d)                    block by block, a tile of samples at a time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from neuromanifold.core import Gaussian
from neuromanifold.core.checks import promoted
from neuromanifold.estimators import Exact
from neuromanifold.persample.accumulate import GradientSums, Pass
from neuromanifold.persample.gradients import Dense, Form
from neuromanifold.problem.batches import read_batch
from neuromanifold.problem.problem import Problem
from neuromanifold.run.loop import run
from neuromanifold.run.settings import Settings
from neuromanifold.uses.laplace.curvature import Block

Root = Callable[[Block, Sequence[Tensor]], Tensor]
"""From a block and vectors [n, *shape] for each of its parameters to Σ^½ times them, in its own basis: [n, ...]."""


def output_covariances(
    problem: Problem, root: Root, blocks: Mapping[Block, Sequence[str]], *, full: bool = True
) -> list[Tensor | None]:
    """Return J Σ Jᵀ for each batch of logits [B, C], as [B, C, C], or without `full` its diagonal [B, C].

    `blocks`: those of Σ, and the names that their parameters have in the problem.

    None stands for a batch without samples.  Costs C backward passes; gradients of single samples are held a tile at a
    time, and never for a whole batch.  `problem` has unlabelled data, so that all samples count.
    """
    sums = CovarianceSums(problem, root, blocks, full)
    run(replace(problem, likelihood=Gaussian), Settings.of(Exact(), "auto", 0), sums)  # whose columns are unit vectors
    return sums.batches


def unlabelled(item: object, label_key: str) -> object:
    """Return a batch without its labels."""
    batch = read_batch(item, 0, label_key)
    return batch.kwargs or (batch.args,)


class CovarianceSums(GradientSums):
    """Accumulates J Σ Jᵀ of every sample from the gradients of one backward pass for each output."""

    def __init__(self, problem: Problem, root: Root, blocks: Mapping[Block, Sequence[str]], full: bool) -> None:
        self.batches: list[Tensor | None] = []
        names = list(problem.parameters)
        self._parameters, self._root, self._full = list(problem.parameters.values()), root, full
        self._blocks = {block: [names.index(name) for name in members] for block, members in blocks.items()}
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
        for block, numbers in self._blocks.items():
            forms = [[one.get(i) for i in numbers] for one in passes]
            some = next((form for one in forms for form in one if form is not None), None)
            if some is not None:
                added = self._of_block(block, forms, some[0].samples, some[0].device)
                total = added if total is None else total + added.to(total.device)
        self.batches.append(total)

    def _of_block(
        self, block: Block, forms: list[list[tuple[Form, float] | None]], samples: int, device: torch.device
    ) -> Tensor:
        """Return what one block adds to the covariances, [n, C, C] or [n, C]."""
        members = [self._parameters[i] for i in self._blocks[block]]
        dtype, size = promoted(members[0].dtype), max(1, sum(one.numel() for one in members))
        step, tiles = max(1, 2**20 // (size * (len(forms) if self._full else 1))), []
        for start in range(0, samples, step):
            stop = min(start + step, samples)
            rows = (self._rows(block, one, members, start, stop, dtype) for one in forms)
            if self._full:
                zeros = torch.zeros(stop - start, 1, dtype=dtype, device=device)
                found = list(rows)
                width = next(row.shape[1] for row in found if row is not None)
                stacked = torch.stack([zeros.expand(-1, width) if row is None else row for row in found], 1)
                tiles.append(stacked @ stacked.mT)  # [n, C, C]
            else:
                nothing = torch.zeros(stop - start, dtype=dtype, device=device)
                tiles.append(torch.stack([nothing if row is None else row.square().sum(1) for row in rows], 1))
        return torch.cat(tiles)

    def _rows(
        self,
        block: Block,
        forms: list[tuple[Form, float] | None],
        members: list[nn.Parameter],
        start: int,
        stop: int,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """Return Σ^½ Jᵀe of one output for a few samples, [n, ·]; None where no gradient came."""
        if not any(form is not None for form in forms):
            return None
        values = []
        for form, parameter in zip(forms, members, strict=True):
            if form is None:
                values.append(parameter.new_zeros(stop - start, *parameter.shape, dtype=dtype))
            else:
                gradients, scale = form
                values.append(gradients.gradients(start, stop, dtype).view(stop - start, *parameter.shape) / scale)
        return self._root(block, values).flatten(1)
