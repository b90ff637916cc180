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
    """The exact F = Σ_x Σ_r (Jᵀ S_r)(Jᵀ S_r)ᵀ, over the columns S_r of a factor of M.

    Deterministic and without error.  Cost: C - 1 backward passes for each batch with C classes (one for two classes); C
    for the upper envelope, k for the lower one.  The columns are not centred, so gradients must be squared per sample.

    Args:
        envelope: None for F itself; `nm.Upper()` for F^DG and `nm.Lower(k)` for F^LR(k) of Prop. 5.

    Example:
        >>> exact = nm.fisher_diagonal(model, data, nm.Exact())
        >>> exact.relative_error, exact.provenance.target
        (0.0, 'exact')
        >>> upper = nm.fisher_diagonal(model, data, nm.Exact(nm.Upper()))
        >>> bool((upper["2.bias"] >= exact["2.bias"]).all())
        True
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
