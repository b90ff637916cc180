"""What lies between F and its two bounds, as columns of its own (Prop. 5): three diagonals in C passes.

    F - F^LR(k) = Σ_x Jᵀ (Σ_i λ_i v_i v_iᵀ) J over the eigenpairs below the k-th        F^DG - F = Σ_x Jᵀ p pᵀ J

Both are sums of squares, so that adding them up keeps the order F^LR <= F <= F^DG of the diagonals, rounding included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core import Categorical, Core
from neuromanifold.estimators.exact import Exact


@dataclass(frozen=True)
class BelowRank(Exact):
    """F - F^LR(rank) from the columns √λ_i v_i of the eigenpairs below: C - 1 - rank passes."""

    rank: int = 1

    @override
    def passes(self, core: Core) -> int:
        return core.rank - self.rank

    @override
    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        del labels, generator
        return iter(core.spectrum(core.rank).factor()[..., self.rank :, :].unbind(-2))


@dataclass(frozen=True)
class AboveFull(Exact):
    """F^DG - F for a categorical core, whose only column is p: one pass."""

    @override
    def passes(self, core: Core) -> int:
        del core
        return 1

    @override
    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        del labels, generator
        assert isinstance(core, Categorical)
        return iter([core.probs])
