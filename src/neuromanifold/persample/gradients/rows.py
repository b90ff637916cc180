"""Gradients of embeddings: rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from neuromanifold.kernels.values import BOUND, Accumulators
from neuromanifold.persample.gradients.base import Form, root_mean_square


@dataclass
class Rows(Form):
    """Σ_t g[n, t] into row ids[n, t] of a table [rows, d]."""

    values: Tensor  # [n, t, d]
    ids: Tensor  # [n, t]
    rows: int
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.samples, self.device = self.values.shape[0], self.values.device
        self.shape = torch.Size((self.rows, self.values.shape[2]))

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return whole tables for a few samples, zero in the rows that a sample does not look up."""
        table = torch.zeros(stop - start, *self.shape, dtype=dtype, device=self.device)
        ids = self.ids[start:stop, :, None].expand_as(self.values[start:stop])
        return table.scatter_add_(1, ids, self.values[start:stop].to(dtype))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n, added into the rows that are looked up."""
        values = self.values.to(weights.dtype) * weights[:, None, None]
        total = torch.zeros(self.shape, dtype=weights.dtype, device=self.device)
        return total.index_add_(0, self.ids.flatten(), values.flatten(0, 1))

    def magnitude(self) -> Tensor:
        """Return the root mean square of the rows that are looked up, as if each were looked up once."""
        return root_mean_square(self.values)

    def add_squares(self, to: Accumulators) -> None:
        """Sum each sample's gradients for a row, square the sum, and add it to that row alone."""
        sums, rows, _ = self._touched(to.squares.dtype)
        squares = sums.mul_(to.factor).square_()
        to.squares.index_add_(0, rows, squares, alpha=to.unit**2)
        if to.fourths is not None:
            to.fourths.index_add_(0, rows, squares.clamp_(max=BOUND).square_(), alpha=to.weight)

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """Return ‖g_n‖² from the rows that a sample looks up."""
        sums, _, owners = self._touched(dtype)
        return torch.zeros(self.samples, dtype=dtype, device=self.device).index_add_(0, owners, sums.square().sum(1))

    def _touched(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each pair of a sample and a row it looks up, the sum [pairs, d], the row, and the sample.

        As many as there are positions, those at the end zero: counting them would wait for a GPU.
        """
        ids, order = self.ids.sort(1)
        first = torch.ones_like(ids, dtype=torch.bool)  # whether no position before has looked up the same row
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        pair = torch.empty_like(ids).scatter_(1, order, (first.flatten().cumsum(0) - 1).view_as(ids)).flatten()  # [n·t]
        values = self.values.flatten(0, 1).to(dtype)
        samples = torch.arange(self.samples, device=self.device)[:, None].expand_as(ids)
        rows, owners = (torch.zeros_like(pair).index_copy_(0, pair, one.flatten()) for one in (self.ids, samples))
        return torch.zeros_like(values).index_add_(0, pair, values), rows, owners
