"""What lies between F and its two bounds, as columns of its own (Prop. 5): three diagonals in C passes.

    F - F^LR(k) = Σ_x Jᵀ (Σ_i λ_i v_i v_iᵀ) J over the eigenpairs below the k-th        F^DG - F = Σ_x Jᵀ p pᵀ J

Both are sums of squares, so that adding them up keeps the order F^LR <= F <= F^DG of the diagonals, rounding included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.sums import square_root
from neuromanifold.estimators.exact import Exact


@dataclass(frozen=True)
class BelowRank(Exact):
    """F - F^LR(rank): C - 1 - rank passes."""

    rank: int = 1

    def passes(self, core: Core) -> int:
        """The eigenpairs that are left."""
        return core.rank - self.rank

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """√λ_i v_i."""
        del labels, generator
        values, vectors = core.spectrum(core.rank)
        scaled = square_root(values)[..., None] * vectors
        return iter(scaled[..., self.rank :, :].unbind(-2))


@dataclass(frozen=True)
class AboveFull(Exact):
    """F^DG - F for a categorical core: one pass."""

    def passes(self, core: Core) -> int:
        """Rank one."""
        del core
        return 1

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """The probabilities."""
        del labels, generator
        assert isinstance(core, Categorical)
        return iter([core.probs])
