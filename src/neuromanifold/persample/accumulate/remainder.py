"""Accumulator for parameters whose gradients are no sums of outer products: dense blocks of F, or its diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.persample.accumulate.base import Pass, Reducer, named, part_of
from neuromanifold.persample.accumulate.diagonal import DiagonalSums
from neuromanifold.persample.gradients import Form


class RemainderSums:
    """Σ g gᵀ of a whole parameter where it has at most `limit` entries, else of each of its rows, else Σ g².

    Norms, biases without a layer of their own, position tables, parameters of modules without a rule.  Rows are those
    of the first dimension, as for depthwise convolutions; they get blocks if these have `limit`² numbers at most.
    """

    def __init__(self, parameters: Sequence[Tensor], limit: int, diagonal: DiagonalSums) -> None:
        self._parameters, self._limit, self._diagonal = parameters, limit, diagonal
        self.blocks: dict[int, Tensor] = {}  # [rows, w, w], one row for a whole parameter
        self.numbers: set[int] = set()
        """The parameters that have come, those with a diagonal alone included."""

    def block_of(self, i: int) -> Tensor | None:
        """Return the block of parameter number i, zero if nothing has come yet; None if it has only a diagonal."""
        parameter = self._parameters[i]
        self.numbers.add(i)
        if i not in self.blocks:
            size, rows = parameter.numel(), parameter.shape[0] if parameter.ndim > 1 else 1
            rows = 1 if size <= self._limit else rows
            width = size // max(1, rows)
            if rows * width**2 > self._limit**2:
                return None
            dtype = promoted(parameter.dtype)
            self.blocks[i] = torch.zeros(rows, width, width, dtype=dtype, device=parameter.device)
        return self.blocks[i]

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add the outer products of each sample's gradient."""
        block = self.block_of(i)
        if block is None:
            self._diagonal.add_samples(i, form, made_by)
            return
        for start, stop in form.pieces():
            self._add_outer(block, form.gradients(start, stop, block.dtype), made_by)

    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add the outer products of gradients summed over a batch, or of those of one sample; None stands for zero."""
        alone: list[Tensor | None] = [None] * len(gradients)
        for i, g in enumerate(gradients):
            block = None if g is None else self.block_of(i)
            if g is not None and block is not None:
                self._add_outer(block, g[None].to(block.dtype), made_by)
            else:
                alone[i] = g
        self._diagonal.add(alone, made_by)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all blocks and squares, and which parameters have come."""
        squares, values = self._diagonal.state()
        tensors = {f"block.{i}": block for i, block in self.blocks.items()} | named(squares, "diagonal")
        return tensors, {"diagonal": values, "others": sorted(self.numbers)}

    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._diagonal.set_state(part_of(tensors, "diagonal"), values["diagonal"])
        self.blocks, self.numbers = {}, set(values["others"])
        self._add_blocks(tensors)

    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Add what `state` returned for other batches."""
        self._diagonal.merge(part_of(tensors, "diagonal"), values["diagonal"])
        self.numbers |= set(values["others"])
        self._add_blocks(tensors)

    def reduce(self, processes: Reducer) -> None:
        """Add up the sums of all processes."""
        self.numbers = {i for numbers in processes.gather("others", sorted(self.numbers)) for i in numbers}
        for i in sorted(self.numbers):
            if (block := self.block_of(i)) is not None:
                processes.add(block)
        self._diagonal.reduce(processes)

    def _add_blocks(self, tensors: dict[str, Tensor]) -> None:
        for i, value in part_of(tensors, "block").items():
            block = self.block_of(int(i))
            assert block is not None
            block += value.to(block.device)

    @staticmethod
    def _add_outer(block: Tensor, g: Tensor, made_by: Pass) -> None:
        rows, width = block.shape[:2]
        g = g.reshape(len(g), rows, width).transpose(0, 1) / made_by.scale  # [rows, n, w]
        block.baddbmm_(g.mT, g)
