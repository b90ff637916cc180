"""The exact Fisher information, or that of an envelope: every column of the factor in a pass of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core import Core
from neuromanifold.estimators.base import Estimator
from neuromanifold.estimators.envelopes import Envelope, check_envelope, factor_columns


@dataclass(frozen=True)
class Exact(Estimator):
    """F = Σ_x Σ_r (Jᵀ S_r)(Jᵀ S_r)ᵀ over the columns of a factor; F^DG with Upper(), F^LR(k) with Lower(k) (Prop. 5).

    Deterministic and without error.  C - 1 passes for F itself with C classes, C for the upper envelope, k for the
    lower one.  The columns are fixed and not centred, so gradients must be squared per sample.
    """

    envelope: Envelope | None = None

    centred: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_envelope(self.envelope)

    @property
    def target(self) -> str:  # type: ignore[override]
        """Exact for F, or for the envelope that was asked for."""
        return "exact" if self.envelope is None else f"exact for the envelope {self.envelope}, biased for F"

    @override
    def passes(self, core: Core) -> int:
        return core.rank if self.envelope is None else self.envelope.size(core)

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """Return the columns of the factor, one for each pass."""
        del labels, generator
        return factor_columns(core, self.envelope)
