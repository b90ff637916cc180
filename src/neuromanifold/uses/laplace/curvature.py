"""Forms of N F that a Laplace posterior can have: each block of parameters in a basis in which it is diagonal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.operators.kronecker import KroneckerFisher
from neuromanifold.operators.layout import ParameterLayout
from neuromanifold.results import DiagonalFisher
from neuromanifold.uses.matching import check_diagonal, finite_mean

Block = tuple[str, ...]
"""Names of parameters that share eigenvectors: one alone, or a weight with its bias."""


class Curvature(Protocol):
    """N F, a block of parameters after the other, in the basis of eigenvectors: all that a posterior needs of it."""

    blocks: Sequence[Block]
    """Each parameter once."""

    def eigenvalues(self, block: Block) -> Tensor:
        """Return the eigenvalues of a block, in the shape [...] that `rotate` gives."""

    def rotate(self, block: Block, values: Sequence[Tensor]) -> Tensor:
        """Return n vectors, `[n, *shape]` for each parameter of a block, in the basis of eigenvectors, [n, ...]."""

    def rotate_back(self, block: Block, values: Tensor) -> list[Tensor]:
        """Return vectors of that basis in the parameters' shapes, `[n, *shape]` each: the inverse of `rotate`."""


class DiagonalCurvature:
    """The diagonal of F, summed over `samples` samples: the entries are the eigenvalues."""

    def __init__(self, fim: DiagonalFisher, samples: int) -> None:
        for name in fim.sums:
            finite_mean(fim, name)
        self._fim, self._factor = fim, samples / fim.count
        self.blocks: Sequence[Block] = [(name,) for name in fim.sums]

    def eigenvalues(self, block: Block) -> Tensor:
        """Return N F of one parameter."""
        return self._fim.sums[block[0]] * self._factor

    def rotate(self, block: Block, values: Sequence[Tensor]) -> Tensor:
        """Return the vectors as they are, since parameters are the basis."""
        del block
        return values[0]

    def rotate_back(self, block: Block, values: Tensor) -> list[Tensor]:
        """Return the vectors as they are."""
        del block
        return [values]


class KroneckerCurvature:
    """F in Kronecker form: W ↦ Uᵀ W V for the weight and bias of a layer as one matrix W [L, R]."""

    def __init__(self, fim: KroneckerFisher, samples: int) -> None:
        for one in fim.blocks.values():
            if not bool(((one.eigenvalues >= 0) & (one.eigenvalues < math.inf)).all()):
                advice = "Were outputs finite on all data?"
                where = f"other eigenvalues for {one.names[0]!r}"
                raise ValueError(message("fim", "finite and not negative", where, advice))
        self._fim, self._factor = fim, samples / fim.count
        self._of = {one.names: one for one in fim.blocks.values()}
        self.blocks: Sequence[Block] = list(self._of)

    def eigenvalues(self, block: Block) -> Tensor:
        """Return N E, [G, L, R]."""
        return self._of[block].eigenvalues * self._factor

    def rotate(self, block: Block, values: Sequence[Tensor]) -> Tensor:
        """Return Uᵀ W V, [n, G, L, R]."""
        one = self._of[block]
        columns = torch.cat([value.flatten(1).to(one.eigenvalues) for value in values], 1).mT
        return one.rotated(one.gather(columns, self._places(block)))

    def rotate_back(self, block: Block, values: Tensor) -> list[Tensor]:
        """Return U W Vᵀ as the layer's parameters."""
        one, places, shapes = self._of[block], self._places(block), self._fim.layout.shapes
        columns = values.new_empty(sum(shapes[name].numel() for name in block), len(values))
        one.scatter(one.back(values), columns, places)
        return [columns[places[name]].mT.reshape(len(values), *shapes[name]) for name in block]

    def _places(self, block: Block) -> dict[str, slice]:
        """Where each parameter of a block is among the entries of all of them."""
        return ParameterLayout({name: self._fim.layout.shapes[name] for name in block}).slices


def curvature_of(fim: DiagonalFisher | KroneckerFisher, samples: int) -> Curvature:
    """Return the curvature of a result, of so many training samples."""
    return (KroneckerCurvature if isinstance(fim, KroneckerFisher) else DiagonalCurvature)(fim, samples)  # type: ignore[arg-type]


def shapes_of(fim: object) -> dict[str, torch.Size]:
    """Return the shapes of a result's parameters; anything but a diagonal or a Kronecker form is refused."""
    if isinstance(fim, KroneckerFisher):
        return dict(fim.layout.shapes)
    if not isinstance(fim, DiagonalFisher):
        advice = "Make one with nm.fisher_diagonal(model, data) or nm.fisher_kronecker(model, data)."
        raise TypeError(message("fim", "an nm.DiagonalFisher or nm.KroneckerFisher", type(fim).__name__, advice))
    return {name: value.shape for name, value in check_diagonal(fim).sums.items()}
