"""Accumulator for corrected eigenvalues: the diagonal of F in the basis of Kronecker factors' eigenvectors.

With G_n = Σ_t l_nt r_ntᵀ the gradient of a weight, the diagonal in the basis U ⊗ V is Σ_n (Uᵀ G_n V)², and UᵀG_nV is
the product of the rotated factors Uᵀl and Vᵀr: the squares of a sample's gradient, as for the diagonal of F.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from neuromanifold.core.checks import message
from neuromanifold.persample.accumulate.base import Pass, Reducer
from neuromanifold.persample.accumulate.diagonal import DiagonalSums
from neuromanifold.persample.accumulate.pairs import FactorShape, KroneckerSums
from neuromanifold.persample.gradients import Dense, Form, PowerSums, Product, Routed, Rows
from neuromanifold.persample.gradients.totals import Tied
from neuromanifold.problem.fingerprint import fingerprint


class Basis(NamedTuple):
    """Eigenvectors [G, d, d] of both factors, as columns; None for a diagonal factor, whose basis is the identity."""

    shape: FactorShape
    left: Tensor | None
    right: Tensor | None


@dataclass
class Rotated(Form):
    """The gradients Uᵀ G_n V of a form whose factors are made in pieces, such as windows of an image."""

    inner: Form
    basis: Basis

    def __post_init__(self) -> None:
        self.samples, self.shape, self.device = self.inner.samples, self.basis.shape.shape, self.inner.device

    @override
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._rotated(start, stop).gradients(0, stop - start, dtype)

    def magnitude(self) -> Tensor:
        """Return the magnitude of the inner form, which a rotation does not change."""
        return self.inner.magnitude()

    @override
    def add_squares(self, to: PowerSums) -> None:
        for start, stop in self.pieces():
            self._rotated(start, stop).add_squares(to)

    @override
    def pieces(self) -> Iterator[tuple[int, int]]:
        return self.inner.product_pieces()

    def _rotated(self, start: int, stop: int) -> Product:
        if self.basis.right is not None:
            with_ones = self.basis.shape.bias is not None and not self.basis.shape.turned
            matrix, constant = _rows_of(self.basis.right, with_ones)
            known = self.inner.product_with(start, stop, matrix, constant)
            if known is not None:
                return _product(self.basis, _turn_left(known, self.basis), known.right)
        product = self.inner.product_of(start, stop)
        assert product is not None
        return _product(self.basis, _turn_left(product, self.basis), _turn_right(product, self.basis))


class EigenvalueSums(KroneckerSums):
    """Σ_n (Uᵀ G_n V)² of all layers with their error bars, and blocks or diagonals of the other parameters."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        bases: Mapping[int, Basis],
        max_block: int,
        fourth_powers: bool,
        similar_batches: bool = True,
    ) -> None:
        """`bases`: by the number of the weight; other arguments as for `DiagonalSums`."""
        self._bases, self._arguments = bases, (parameters, bases, max_block, fourth_powers, similar_batches)
        shapes = {i: basis.shape for i, basis in bases.items()}
        pairs = {i: shape.bias for i, shape in shapes.items() if shape.bias is not None}
        like = [
            p.new_empty(()).expand(shapes[i].shape if i in shapes else p.shape)
            for i, p in enumerate(parameters.values())
        ]
        super().__init__(parameters, pairs, shapes, max_block, DiagonalSums(like, fourth_powers, similar_batches))
        self._rotated: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        """Inputs of a batch, before and after, by their place in memory and their basis: layers may share both."""

    @override
    def end_batch(self) -> None:
        self._rotated = {}  # the next batch has other inputs
        super().end_batch()

    @override
    def empty(self) -> EigenvalueSums:
        return EigenvalueSums(*self._arguments)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all sums, and a fingerprint of the basis that they are in."""
        tensors, values = self.remainder.state()
        return tensors, {**values, "basis": self._fingerprint()}

    @override
    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self._check_basis(values["basis"])
        self.remainder.set_state(tensors, values)

    @override
    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self._check_basis(values["basis"])
        self.remainder.merge(tensors, values)

    @override
    def reduce(self, processes: Reducer) -> None:
        self.remainder.reduce(processes)

    def _check_basis(self, theirs: str) -> None:
        if theirs != self._fingerprint():
            advice = "Eigenvectors are not the same on other machines: begin afresh, or give a saved result as `basis`."
            raise ValueError(message("checkpoint", "of eigenvalues in the same basis", "one of another", advice))

    def _fingerprint(self) -> str:
        sides = [(f"{i}", [side for side in basis[1:] if side is not None]) for i, basis in self._bases.items()]
        return fingerprint(*sides, most=2**12)

    @override
    def _add_alone(self, i: int, form: Form, bias: None, made_by: Pass) -> None:
        raise _other(self._names[i], f"a {type(form).__name__} without its weight or bias")

    @override
    def _add(self, i: int, form: Form, bias: Form | None, made_by: Pass) -> None:
        basis = self._bases.get(i)
        if basis is None:
            self.remainder.add_samples(i, form, made_by)
            return
        if (bias is None) != (basis.shape.bias is None) or not _fits(form, basis.shape):
            got = f"a {type(form).__name__} of shape {list(form.shape)}" + (" with a bias" if bias else "")
            raise _other(self._names[i], got)
        self.diagonal.add_samples(i, self._rotate(form, basis), made_by)

    def _rotate(self, form: Form, basis: Basis) -> Form:
        if isinstance(form, Rows):
            return replace(form, values=_turn(form.values, basis.right))
        if isinstance(form, Tied):
            product = replace(form.product, right=_turn(form.product.right, basis.right))
            rows = replace(form.rows, values=_turn(form.rows.values, basis.right))
            return Tied([product, rows], product, rows)
        if not isinstance(form, Product):
            return Rotated(form, basis)
        inputs = form.left if form.turned else form.right
        side = basis.left if form.turned else basis.right
        place = inputs.data_ptr(), inputs.shape, inputs.stride(), id(side), basis.shape.bias is not None
        if side is None or place not in self._rotated:
            turned = _turn_left(form, basis) if form.turned else _turn_right(form, basis)
            self._rotated[place] = inputs, turned
        rotated = self._rotated[place][1]
        if form.turned:
            return _product(basis, rotated, _turn_right(form, basis))
        return _product(basis, _turn_left(form, basis), rotated)


def _fits(form: Form, shape: FactorShape) -> bool:
    if shape.tables:
        return isinstance(form, Tied if shape.tables == 2 else Rows) and form.shape == shape.shape
    extra = 0 if shape.bias is None else shape.groups * (shape.right if shape.turned else shape.left)
    return not isinstance(form, (Dense, Routed)) and form.shape.numel() + extra == shape.shape.numel()


def _turn_left(product: Product, basis: Basis) -> Tensor:
    return _turn(product.left, basis.left, with_ones=basis.shape.bias is not None and product.turned)


def _turn_right(product: Product, basis: Basis) -> Tensor:
    return _turn(product.right, basis.right, with_ones=basis.shape.bias is not None and not product.turned)


def _turn(values: Tensor, basis: Tensor | None, with_ones: bool = False) -> Tensor:
    """Return values [n, t, d] or [n, G, t, d] in a basis [G, d, d]; perhaps with a last one that is always 1."""
    if basis is None:
        return functional.pad(values, (0, 1), value=1.0) if with_ones else values
    values = values.to(basis.dtype)
    if values.ndim == 4:
        return values @ basis[:, :-1] + basis[:, -1:] if with_ones else values @ basis
    turned, (matrix, constant) = values.flatten(0, 1), _rows_of(basis, with_ones)
    turned = turned @ matrix if constant is None else torch.addmm(constant, turned, matrix)
    return turned.view(*values.shape[:2], -1)


def _rows_of(basis: Tensor, with_ones: bool) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvectors of a single group, the entry of the bias apart."""
    return (basis[0, :-1], basis[0, -1]) if with_ones else (basis[0], None)


def _product(basis: Basis, left: Tensor, right: Tensor) -> Product:
    return Product(left, right, basis.shape.shape, basis.shape.turned)


def _other(name: str, got: str) -> ValueError:
    advice = "The model treats batches differently, or the basis is of another model."
    return ValueError(message(f"gradients of {name}", "of the kind that the basis is for", got, advice))
