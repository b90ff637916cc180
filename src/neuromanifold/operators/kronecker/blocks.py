"""One block of F in the basis of its eigenvectors: U ⊗ V of Kronecker factors, U of a dense block, or none.

The parameters of a block are read as matrices W [G, L, R], one for each of G groups.  With eigenvectors U [G, L, L] and
V [G, R, R] as columns and eigenvalues E [G, L, R], every function of F acts as  W ↦ U (f(E) ∘ (Uᵀ W V)) Vᵀ.
A dense block has R = 1; a diagonal has no eigenvectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.operators.krylov import times

Kind = Literal["kronecker", "table", "tied table", "dense", "dense rows", "diagonal", "unused"]


@dataclass(frozen=True, eq=False)
class EigenBlock:
    """Eigenvalues, as sums over samples, and eigenvectors of one block of F."""

    names: tuple[str, ...]  #: a weight, perhaps with the bias that is a further column (or row) of its matrix
    kind: Kind
    eigenvalues: Tensor  #: E [G, L, R]
    left: Tensor | None = None  #: U [G, L, L]; None: the identity
    right: Tensor | None = None  #: V [G, R, R]
    factor_values: tuple[Tensor, ...] | None = None  #: eigenvalues [G, L] and [G, R] of the factors' sums
    terms: float = 1.0  #: F ≈ L ⊗ R/terms
    stderr: Tensor | None = None  #: of E, if it was corrected
    turned: bool = False  #: the bias is a row

    @property
    def is_product(self) -> bool:
        """Whether the block comes from Kronecker factors."""
        return self.factor_values is not None

    @property
    def is_corrected(self) -> bool:
        """Whether the eigenvalues are not the products of those of the factors."""
        return self.stderr is not None

    @property
    def how(self) -> str:
        """The kind in words, with the sizes of its factors."""
        groups, left, right = self.eigenvalues.shape
        if self.is_product:
            sides = [f"diag {n}" if u is None else str(n) for n, u in ((left, self.left), (right, self.right))]
            return f"Kronecker {' x '.join(sides)}" + (f", {groups} groups" if groups > 1 else "")
        return f"dense, {groups} rows of {left}" if self.kind == "dense rows" else self.kind

    # ------------------------------------------------------------------------------------------------ vectors

    def gather(self, block: Tensor, places: Mapping[str, slice]) -> Tensor:
        """Return the block's rows of columns [P, m] as matrices [m, G, L, R]."""
        groups, left, right = self.eigenvalues.shape
        columns = block.shape[1]
        if len(self.names) == 1:
            return block[places[self.names[0]]].mT.reshape(columns, groups, left, right)
        weight, bias = (block[places[name]].mT for name in self.names)
        if self.turned:
            parts = [weight.reshape(columns, groups, left - 1, right), bias.reshape(columns, groups, 1, right)]
            return torch.cat(parts, -2)
        parts = [weight.reshape(columns, groups, left, right - 1), bias.reshape(columns, groups, left, 1)]
        return torch.cat(parts, -1)

    def scatter(self, matrices: Tensor, block: Tensor, places: Mapping[str, slice]) -> None:
        """Write matrices [m, G, L, R] to the block's rows of columns [P, m]."""
        if len(self.names) == 1:
            block[places[self.names[0]]] = matrices.flatten(1).mT
            return
        dim = -2 if self.turned else -1
        last = matrices.shape[dim] - 1
        for name, part in zip(self.names, torch.split(matrices, [last, 1], dim), strict=True):
            block[places[name]] = part.flatten(1).mT

    def rotated(self, matrices: Tensor) -> Tensor:
        """Return Uᵀ W V for matrices [..., G, L, R]."""
        matrices = matrices if self.left is None else times(self.left.mT, matrices)
        return matrices if self.right is None else times(matrices, self.right)

    def back(self, matrices: Tensor) -> Tensor:
        """Return U W Vᵀ for matrices [..., G, L, R]."""
        matrices = matrices if self.left is None else times(self.left, matrices)
        return matrices if self.right is None else times(matrices, self.right.mT)

    def diagonal(self) -> Tensor:
        """Return the diagonal of the block as a matrix [G, L, R]: U² E (V²)ᵀ."""
        values = self.eigenvalues if self.left is None else times(self.left.square(), self.eigenvalues)
        return values if self.right is None else times(values, self.right.square().mT)

    # ------------------------------------------------------------------------------------------------ values

    def uncorrected(self) -> EigenBlock:
        """Return the block with the products of the factors' eigenvalues."""
        if self.factor_values is None:
            return self
        left, right = self.factor_values
        return replace(self, eigenvalues=left[:, :, None] * right[:, None] / self.terms, stderr=None)

    def times(self, factor: float) -> EigenBlock:
        """Return the block multiplied by a number."""
        values = None if self.factor_values is None else (self.factor_values[0] * factor, self.factor_values[1])
        stderr = None if self.stderr is None else self.stderr * factor
        return replace(self, eigenvalues=self.eigenvalues * factor, factor_values=values, stderr=stderr)

    def plus(self, other: EigenBlock, shared_noise: bool) -> EigenBlock:
        """Return the block of the sum over the data of both: factors add, corrected eigenvalues in one basis add."""
        if other.kind == "unused" or self.kind == "unused":
            return self if other.kind == "unused" else other
        shapes = [(one.names, one.kind, one.eigenvalues.shape, one.is_corrected, one.turned) for one in (self, other)]
        if shapes[0] != shapes[1]:
            text = [f"{one.how} of {' and '.join(one.names)}" for one in (self, other)]
            raise ValueError(message("other", f"a result with the block {text[0]}", text[1]))
        if self.stderr is not None and other.stderr is not None:
            if not (_same(self.left, other.left) and _same(self.right, other.right)):
                advice = "First add nm.fisher_kronecker(..., eigenvalues='kronecker') of all parts, whose factors add; "
                advice += "then give the sum to each part's run as `basis`."
                got = f"others for {self.names[0]}"
                raise ValueError(message("other", "a result whose eigenvalues have the same basis", got, advice))
            errors = self.stderr + other.stderr if shared_noise else torch.hypot(self.stderr, other.stderr)
            return replace(self, eigenvalues=self.eigenvalues + other.eigenvalues, stderr=errors)
        if self.factor_values is None:
            if self.left is None:
                return replace(self, eigenvalues=self.eigenvalues + other.eigenvalues)
            return dense_block(self.names, self.matrices() + other.matrices(), self.kind)
        ours, theirs = self.factors(), other.factors()
        if self.kind == "tied table":
            return product_block(self, *nearest([(*ours, self.terms), (*theirs, other.terms)]), 1.0)
        left, right = (a + b.to(a) for a, b in zip(ours, theirs, strict=True))
        return product_block(self, left, right, self.terms + other.terms)

    def matrices(self) -> Tensor:
        """Return the dense block, or the blocks of its rows, [rows, w, w]."""
        assert self.left is not None
        return (self.left * self.eigenvalues.mT) @ self.left.mT

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the sums of both factors, [G, d, d], or [G, d] of a diagonal one."""
        assert self.factor_values is not None
        pairs = zip(self.factor_values, (self.left, self.right), strict=True)
        left, right = (v if basis is None else (basis * v[:, None]) @ basis.mT for v, basis in pairs)
        return left, right

    def to(self, target: torch.device | torch.dtype | str) -> EigenBlock:
        """Return the block on another device, or in another precision."""
        left, right, stderr = (None if t is None else t.to(target) for t in (self.left, self.right, self.stderr))
        values = None if self.factor_values is None else tuple(value.to(target) for value in self.factor_values)
        eigenvalues = self.eigenvalues.to(target)
        return replace(self, eigenvalues=eigenvalues, left=left, right=right, stderr=stderr, factor_values=values)


def dense_block(names: tuple[str, ...], matrices: Tensor, kind: Kind) -> EigenBlock:
    """Return the block of a dense matrix, or of the dense matrices of rows, [rows, w, w]."""
    left, values = eigenvectors(matrices)
    return EigenBlock(names, kind, values[..., None], left)


Eigenvectors = tuple[Tensor | None, Tensor]


def product_block(
    like: EigenBlock, left: Tensor, right: Tensor, terms: float, known: dict[int, Eigenvectors] | None = None
) -> EigenBlock:
    """Return the block L ⊗ R/terms, where `like` gives names and kind; a factor [G, d] is a diagonal one.

    `known`: by the identity of a factor what its eigenvectors are, where several blocks have one in common.
    """
    known = {} if known is None else known
    for factor in (left, right):
        if id(factor) not in known:
            known[id(factor)] = eigenvectors(factor)
    (u, left_values), (v, right_values) = known[id(left)], known[id(right)]
    return replace(like, left=u, right=v, factor_values=(left_values, right_values), terms=terms).uncorrected()


def eigenvectors(factor: Tensor) -> Eigenvectors:
    """Return the eigenvectors [G, d, d] of a factor, None of a diagonal one, and its eigenvalues [G, d].

    Of a factor, only the lower triangle is read.
    """
    if factor.ndim == 2:
        return None, factor
    try:
        values, vectors = torch.linalg.eigh(factor)
    except RuntimeError:  # float32 may not converge where many eigenvalues are equal
        values, vectors = (t.to(factor.dtype) for t in torch.linalg.eigh(factor.double()))
    return vectors, values.clamp(min=0)


def nearest(parts: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    """Return L and R with L ⊗ R nearest to Σ_u L_u ⊗ R_u/t_u, in Frobenius norm, for one group and parts (L, R, t).

    Both are sums of the parts with weights x and A x/(xᵀAx), for x the leading eigenvector of B A with the Gram
    matrices A of the L_u and B of the R_u (Van Loan and Pitsianis 1993), whose entries are positive: so is the result.
    """
    lefts = [left.double() / t for left, _, t in parts]
    rights = [right.double() for _, right, _ in parts]
    a, b = (torch.tensor([[float((p * q).sum()) for q in side] for p in side]) for side in (lefts, rights))
    a, b = a.double(), b.double()
    scale = b.diagonal().clamp(min=torch.finfo(b.dtype).tiny).sqrt()  # so that no part is small by its units
    b, a = b / scale[:, None] / scale, a * scale[:, None] * scale
    x = torch.ones(len(parts), dtype=torch.float64)
    for _ in range(200):
        x = b @ (a @ x)
        size = float(x.norm())
        if not size:
            x = torch.ones_like(x)
            break
        x = x / size
    norm = float(x @ a @ x)
    y = (a @ x) / norm if norm else x
    left, right = ([float(w) for w in weights] for weights in (x * scale, y / scale))
    total = [sum(w * part for w, part in zip(ws, side, strict=True)) for ws, side in ((left, lefts), (right, rights))]
    dtype = parts[0][0].dtype
    return torch.as_tensor(total[0]).to(dtype), torch.as_tensor(total[1]).to(dtype)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(a, b.to(a))
