"""Gradients that belong to rows: of a table that are looked up, or that the data send to one of several matrices.

Tokens go to experts, whose weights are stored as one [E, o, i].  For the rows r of a sample, each of which went through
the matrix e_r, the gradient of matrix e is Σ left_r ⊗ right_r over those with e_r = e.  The rows of each matrix are put
in the order of their samples; samples that have about as many rows there are one `Product`, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import promoted
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.gradients.forms import Dense, Form, Product, root_mean_square


@dataclass
class Rows(Form):
    """Σ_t g[n, t] into row ids[n, t] of a table [rows, d]."""

    values: Tensor  #: [n, t, d]
    ids: Tensor  #: [n, t]
    rows: int
    fourths_are_costly: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.samples, self.device = self.values.shape[0], self.values.device
        self.shape = torch.Size((self.rows, self.values.shape[2]))

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return whole tables for a few samples, zero in the rows that a sample does not look up."""
        table = torch.zeros(stop - start, *self.shape, dtype=dtype, device=self.device)
        ids = self.ids[start:stop, :, None].expand_as(self.values[start:stop])
        return table.scatter_add_(1, ids, self.values[start:stop].to(dtype))

    @override
    def part(self, dim: int, start: int, length: int) -> Form:
        if dim:
            return Rows(self.values.narrow(2, start, length), self.ids, self.rows)
        if not length:
            return Dense(self.values.new_zeros(self.samples, 0, self.shape[1]))
        own = (self.ids >= start) & (self.ids < start + length)
        values = torch.where(own[..., None], self.values, 0.0)
        return Rows(values, torch.where(own, self.ids - start, 0), length)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n, added into the rows that are looked up."""
        values = self.values.to(weights.dtype) * weights[:, None, None]
        total = torch.zeros(self.shape, dtype=weights.dtype, device=self.device)
        return total.index_add_(0, self.ids.flatten(), values.flatten(0, 1))

    def magnitude(self) -> Tensor:
        """Return the root mean square of the rows that are looked up, as if each were looked up once."""
        return root_mean_square(self.values)

    def add_squares(self, to: PowerSums) -> None:
        """Sum each sample's gradients for a row, square the sum, and add it to that row alone."""
        sums, rows, _ = self._touched(to.squares.dtype)
        to.add_to_rows(rows, sums.mul_(to.factor).square_())

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


@dataclass
class Routed(Form):
    """Σ_r left[r, o] right[r, i] over the rows r of each sample, into the matrices that they went through."""

    left: Tensor  #: [r, o]
    right: Tensor  #: [r, i]
    owners: Tensor  #: [r]  which sample a row belongs to
    experts: Tensor  #: [r]  which matrix it went through
    samples: int
    shape: torch.Size  #: of the parameter: [E, o, i], or anything as large
    turned: bool = False  #: gradients of outputs are on the right

    def __post_init__(self) -> None:
        self.device = self.left.device

    def blocks(self) -> Iterator[tuple[int, Tensor, Product]]:
        """Return products of several samples that have about as many rows of a matrix: its number, samples, product."""
        if not len(self.owners):
            return
        key, order = (self.experts * self.samples + self.owners).sort(stable=True)
        pairs, counts = torch.unique_consecutive(key, return_counts=True)
        starts, (numbers, sizes) = counts.cumsum(0) - counts, torch.stack([pairs // self.samples, counts]).tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for place, (expert, size) in enumerate(zip(numbers, sizes, strict=True)):
            groups.setdefault((expert, (size - 1).bit_length()), []).append(place)
        for (expert, _), places in groups.items():
            chosen = torch.tensor(places, device=self.device)
            longest = torch.arange(max(sizes[place] for place in places), device=self.device)
            inside = longest < counts[chosen, None]
            rows = order[(starts[chosen, None] + longest).clamp_(max=len(order) - 1)]  # [n, t]
            left, right = (torch.where(inside[..., None], side[rows], 0) for side in (self.left, self.right))
            yield expert, pairs[chosen] % self.samples, Product(left, right, turned=self.turned)

    @override
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        here = (self.owners >= start) & (self.owners < stop)
        sides = (self.left[here], self.right[here], self.owners[here] - start, self.experts[here])
        part = Routed(*sides, stop - start, self.shape, self.turned)
        sizes = self.left.shape[1], self.right.shape[1]
        found = torch.zeros(stop - start, self._matrices, *sizes, dtype=dtype, device=self.device)
        for expert, samples, product in part.blocks():
            found[samples, expert] = product.gradients(0, product.samples, dtype)
        return found.view(stop - start, *self.shape)

    @override
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n by one product for each matrix."""
        sizes = self.left.shape[1], self.right.shape[1]
        total = torch.zeros(self._matrices, *sizes, dtype=weights.dtype, device=self.device)
        order = self.experts.sort(stable=True)[1]
        counts = torch.bincount(self.experts, minlength=self._matrices).tolist()
        left, right = self.left[order].to(weights.dtype), self.right[order].to(weights.dtype)
        left = left * weights[self.owners[order], None]
        for expert, sides in enumerate(zip(torch.split(left, counts), torch.split(right, counts), strict=True)):
            torch.mm(sides[0].T, sides[1], out=total[expert])
        return total.view(self.shape)

    @override
    def magnitude(self) -> Tensor:
        """Return the root mean square that the gradients have if rows are uncorrelated."""
        share = len(self.owners) / max(1, self.samples * self._matrices)
        size: Tensor = root_mean_square(self.left) * root_mean_square(self.right) * share**0.5
        return size

    @override
    def add_squares(self, to: PowerSums) -> None:
        rows = len(to.squares) // max(1, self._matrices)  # of the parameter, in each matrix
        for expert, _, product in self.blocks():
            product.add_squares(to.narrow(expert * rows, (expert + 1) * rows))

    @override
    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        norms = torch.zeros(self.samples, dtype=dtype, device=self.device)
        for _, samples, product in self.blocks():
            norms.index_add_(0, samples, product.squared_norms(dtype))
        return norms

    @property
    def _matrices(self) -> int:
        return self.shape.numel() // max(1, self.left.shape[1] * self.right.shape[1])


def of_samples(form: Form, owners: Tensor, samples: int) -> Form:
    """Return the gradients of samples from those of rows, given which sample owns each row."""
    if isinstance(form, Product) and form.left.ndim == 3:
        if len(owners) == samples and torch.equal(owners.sort()[0], torch.arange(samples, device=owners.device)):
            order = owners.argsort()  # samples that were put in another order
            return replace(form, left=form.left[order], right=form.right[order])
        owners = owners.repeat_interleave(form.left.shape[1])
        left, right = form.left.flatten(0, 1), form.right.flatten(0, 1)
        return Routed(left, right, owners, torch.zeros_like(owners), samples, form.shape, form.turned)
    if isinstance(form, Dense):
        values = form.values.to(promoted(form.values.dtype))
        return Dense(values.new_zeros(samples, *form.shape).index_add_(0, owners, values))
    raise TypeError(f"Rows with gradients as {type(form).__name__} cannot be added to those of samples.")


def joined_rows(forms: list[Routed]) -> Routed:
    """Return one form with the rows of several, such as those of a loop over experts."""
    left, right, owners, experts = (
        torch.cat([getattr(form, side) for form in forms]) for side in ("left", "right", "owners", "experts")
    )
    return replace(forms[0], left=left, right=right, owners=owners, experts=experts)
