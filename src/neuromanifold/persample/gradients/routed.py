"""Gradients of rows that the data send to matrices: tokens to experts, whose weights are stored as one [E, o, i].

For the rows r of a sample, each of which went through the matrix e_r, the gradient of matrix e is Σ left_r ⊗ right_r
over those with e_r = e.  The rows of each matrix are put in the order of their samples; samples that have about as many
rows there are one `Product`, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import promoted
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.gradients.forms import Dense, Form, Product, root_mean_square


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
    def select(self, rows: Tensor) -> Routed:
        numbers = torch.full((self.samples,), -1, device=self.device)
        numbers[rows] = torch.arange(len(rows), device=self.device)
        owners = numbers[self.owners]
        here = owners >= 0
        sides = self.left[here], self.right[here], owners[here], self.experts[here]
        return Routed(*sides, len(rows), self.shape, self.turned)

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
