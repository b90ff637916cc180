"""Core spaces with a diagonal metric: independent outputs."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from neuromanifold.core import checks, empirical
from neuromanifold.core.base import Core
from neuromanifold.core.empirical import ScoreVariance
from neuromanifold.core.spectrum import Spectrum
from neuromanifold.core.sums import square_root


class DiagonalCore(Core):
    """A core with M = diag(ζ).  It is its own upper envelope, and its eigenvectors are the unit vectors."""

    @property
    @abstractmethod
    def diagonal(self) -> Tensor:
        """ζ [..., C]: the Fisher information of each output on its own."""

    @abstractmethod
    def _variance_of_squared_score(self) -> Tensor:
        """The variance Var(s_i²) of each squared entry of the score, [..., C]."""

    def fisher(self) -> Tensor:
        """M = diag(ζ), dense [..., C, C].  O(C²)."""
        return torch.diag_embed(self.diagonal)

    def matvec(self, v: Tensor) -> Tensor:
        """ζ∘v for v [..., C].  O(C)."""
        return self.diagonal * self._vector(v, "v")

    def factor(self, xi: Tensor) -> Tensor:
        """√ζ∘ξ for ξ [..., C].  O(C)."""
        return square_root(self.diagonal) * self._vector(xi, "xi")

    def factor_transpose(self, v: Tensor) -> Tensor:
        """√ζ∘v for v [..., C]: S is symmetric.  O(C)."""
        return square_root(self.diagonal) * self._vector(v, "v")

    def factor_matrix(self) -> Tensor:
        """S = diag(√ζ), dense [..., C, C].  O(C²)."""
        return torch.diag_embed(square_root(self.diagonal))

    @property
    def rank(self) -> int:
        """As many columns as outputs."""
        return self.dim

    def column(self, i: int) -> Tensor:
        """√ζ_i e_i for 0 <= i < C.  O(C)."""
        i = checks.integer_in_range(i, "i", 0, self.dim - 1, f"the rank is {self.dim}")
        unit = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        unit[i] = 1
        return square_root(self.diagonal) * unit

    def trace(self) -> Tensor:
        """tr M = Σ_i ζ_i, [...].  O(C)."""
        return self.diagonal.sum(-1)

    def squared_norm(self) -> Tensor:
        """‖M‖_F² = Σ_i ζ_i², [...].  O(C)."""
        return self.diagonal.square().sum(-1)

    def spectrum(self, k: int) -> Spectrum:
        """The k largest ζ_i, descending, and their unit vectors.  O(C log k), and O(kC) to write the vectors."""
        values, index = self.diagonal.topk(self._rank(k), dim=-1)
        return Spectrum(values, torch.nn.functional.one_hot(index, self.dim).to(self.dtype))

    def upper_envelope(self) -> Tensor:
        """ζ [..., C]: the metric itself, without error.  O(C)."""
        return self.diagonal

    def score_variance(self) -> ScoreVariance:
        """Var(R_ij) for R(y) = s(y) s(y)ᵀ with independent s_i, and its coefficient of variation.  O(C²)."""
        return empirical.independent_score_variance(self.diagonal, self._variance_of_squared_score())
