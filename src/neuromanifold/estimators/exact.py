"""The exact Fisher information, or that of an envelope: every column of the factor in a pass of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.estimators.base import Estimator
from neuromanifold.estimators.envelopes import Full, Part, check_part


@dataclass(frozen=True)
class Exact(Estimator):
    """F = Σ_x Σ_r (Jᵀ S_r)(Jᵀ S_r)ᵀ over the columns of a factor; F^DG with Upper(), F^LR(k) with Lower(k) (Prop. 5).

    Deterministic and without error.  C - 1 passes for the full core of C classes, C for the upper envelope, k for the
    lower one.  The columns are fixed and not centred, so each sample must be squared on its own.
    """

    core: Part = field(default_factory=Full)

    centred: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_part(self.core)

    @property
    def target(self) -> str:  # type: ignore[override]
        """Exact for F, or for the envelope that was asked for."""
        return "exact" if isinstance(self.core, Full) else f"exact for the envelope {self.core}, biased for F"

    def passes(self, core: Core) -> int:
        """The rank of the factor."""
        return self.core.size(core)

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """The columns of the factor."""
        del labels, generator
        return self.core.columns(core)
