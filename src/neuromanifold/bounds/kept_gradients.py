"""Gradients of all classes, kept for inner products between samples while they fit into memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.persample.gradients.stacks import Flat, Stack, gram

_ROWS = 3000  # N·C: a Gram matrix of 72 MB
_NUMBERS = 2**26  # of gradients, in the forms that layers have them in


class Chunk(NamedTuple):
    """Gradients of some distributions of one batch."""

    rows: Tensor  # their numbers among all, [n]
    stacks: dict[int, Stack]  # by parameter
    scale: float  # gradients are so many times too large


class KeptGradients:
    """Keeps the gradients of all samples up to a limit; beyond it, none."""

    def __init__(self, keeps: bool, limited: bool) -> None:
        self.keeps, self._limited = keeps, limited
        self._chunks: list[Chunk] = []
        self._rows = 0
        self.numbers = 0
        """How many numbers are kept."""

    def add(self, i: int, one: Stack, index: Tensor, chunk: Chunk) -> None:
        """Keep the gradients of the samples `index` of a stack."""
        if not self.keeps or not len(index):
            return
        self.numbers += one.numbers * len(index) // max(1, one.samples)
        if self._limited and self.numbers > _NUMBERS:
            self.give_up()
            chunk.stacks.clear()
            return
        taken = one.take(index.to(one.device))
        before = chunk.stacks.get(i)
        chunk.stacks[i] = taken if before is None else _joined(before, taken)

    def end_chunk(self, chunk: Chunk, classes: int) -> None:
        """Keep a chunk: the gradients of all of its parameters have been added."""
        self._rows += len(chunk.rows) * classes
        if self._limited and self._rows > _ROWS:
            self.give_up()
        if self.keeps and len(chunk.rows):
            self._chunks.append(chunk)

    def give_up(self) -> None:
        """Drop all gradients, and keep no more."""
        self.keeps, self._chunks = False, []

    def gram(self, classes: int) -> Tensor:
        """⟨∂z_c(x)/∂θ, ∂z_d(x')/∂θ⟩ for all x and classes, [N·C, N·C] in float64, x in the order of the data."""
        sizes = [len(chunk.rows) for chunk in self._chunks]
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        total = torch.zeros(starts[-1] * classes, starts[-1] * classes, dtype=torch.float64)
        for i in sorted({i for chunk in self._chunks for i in chunk.stacks}):
            have = [k for k, chunk in enumerate(self._chunks) if i in chunk.stacks]
            index = torch.cat([torch.arange(starts[k] * classes, starts[k + 1] * classes) for k in have])
            total[index[:, None], index] += gram([self._chunks[k].stacks[i] for k in have]).cpu()
        scales = torch.tensor([chunk.scale for chunk in self._chunks], dtype=torch.float64)
        scales = scales.repeat_interleave(torch.tensor(sizes) * classes)
        order = torch.argsort(torch.cat([chunk.rows for chunk in self._chunks]))
        places = (order[:, None] * classes + torch.arange(classes)).flatten()
        return (total / (scales[:, None] * scales))[places[:, None], places]


def _joined(a: Stack, b: Stack) -> Stack:
    """Return the samples of two stacks as one: those of parameters without a rule come one by one."""
    assert isinstance(a, Flat)
    assert isinstance(b, Flat)
    values = [
        None
        if x is None and y is None
        else torch.cat([_no_gradients(y, a) if x is None else x, _no_gradients(x, b) if y is None else y])
        for x, y in zip(a.values, b.values, strict=True)
    ]
    return Flat(values, a.shape)


def _no_gradients(like: Tensor | None, stack: Stack) -> Tensor:
    assert like is not None
    return like.new_zeros(stack.samples, *like.shape[1:])
