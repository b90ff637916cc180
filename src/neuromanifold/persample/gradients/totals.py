"""A parameter that is used several times: its gradients are added before they are squared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.kernels import dispatch
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.gradients.forms import Dense, Form, Product, ranges
from neuromanifold.persample.gradients.rows import Routed, Rows, joined_rows


@dataclass
class Sum(Form):
    """The sum of the forms of a parameter that is used several times."""

    parts: Sequence[Form]

    def __post_init__(self) -> None:
        first = self.parts[0]
        self.samples, self.shape, self.device = first.samples, first.shape, first.device

    @override
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        total = self.parts[0].gradients(start, stop, dtype)
        for part in self.parts[1:]:
            total += part.gradients(start, stop, dtype).view_as(total)
        return total

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n of all parts."""
        total = self.parts[0].weighted_sum(weights)
        for part in self.parts[1:]:
            total += part.weighted_sum(weights).view_as(total)
        return total

    @override
    def product_of(self, start: int, stop: int) -> Product | None:
        parts = [part.product_of(start, stop) for part in self.parts]
        products = [part for part in parts if part is not None]
        return joined(products) if len(products) == len(parts) else None

    @override
    def product_pieces(self) -> Iterator[tuple[int, int]]:
        steps = [stop - start for part in self.parts for start, stop in islice(part.product_pieces(), 1)]
        return ranges(self.samples, min(steps, default=1))

    def magnitude(self) -> Tensor:
        """Return the magnitude of the largest part."""
        return torch.stack([part.magnitude() for part in self.parts]).amax()


@dataclass
class Tied(Sum):
    """An embedding whose weight is also that of the last layer: the sum of a product and of rows."""

    product: Product
    rows: Rows

    def add_squares(self, to: PowerSums) -> None:
        """Add the product's squares without the rows that a sample looks up, if a kernel can, and then those rows'."""
        ids, left, right = self.rows.ids, self.product.left, self.product.right
        if not dispatch.add_squares_of_products(left, right, to, skip=ids):
            super().add_squares(to)
            return
        same = ids[:, :, None] == ids[:, None, :]  # [n, s, s]
        again = (same & torch.ones_like(same[0]).tril(-1)).any(-1)  # [n, s]  the row has been looked up before
        left_there = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1)).float()  # [n, t, s]
        gradients = left_there.mT @ right.float() + same.float() @ self.rows.values.float()  # [n, s, d]
        squares = gradients.mul_(to.factor).masked_fill_(again[..., None], 0.0).square_().flatten(0, 1)
        to.add_to_rows(ids.flatten(), squares)


def joined(products: Sequence[Product]) -> Product | None:
    """Return one product over the positions of all of them; None if their factors have other sizes or roles."""
    if len({(p.left.shape[1:-2], p.left.shape[-1], p.right.shape[-1], p.shape, p.turned) for p in products}) != 1:
        return None
    left, right = (torch.cat([getattr(p, side) for p in products], -2) for side in ("left", "right"))
    return replace(products[0], left=left, right=right)


def add(forms: Sequence[Form]) -> Form:
    """Return the sum of forms; products of the same shape become one product over the positions of all of them."""
    if len(forms) == 1:
        return forms[0]
    kinds = {type(form) for form in forms}
    if kinds == {Product}:
        one = joined([form for form in forms if isinstance(form, Product)])
        if one is not None:
            return one
    if kinds == {Rows}:
        tables = [form for form in forms if isinstance(form, Rows)]
        values, ids = torch.cat([t.values for t in tables], 1), torch.cat([t.ids for t in tables], 1)
        return Rows(values, ids, tables[0].rows)
    if kinds == {Routed}:
        return joined_rows([form for form in forms if isinstance(form, Routed)])
    if kinds == {Dense}:
        return Dense(torch.stack([form.values for form in forms if isinstance(form, Dense)]).sum(0))
    if kinds == {Product, Rows}:
        product, rows = (add([form for form in forms if isinstance(form, kind)]) for kind in (Product, Rows))
        if isinstance(product, Product) and isinstance(rows, Rows) and product.shape == rows.shape:
            return Tied([product, rows], product, rows)
    return Sum(forms)
