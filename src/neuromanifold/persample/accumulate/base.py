"""What every accumulator takes: the gradients of one backward pass after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.persample.gradients import Form


class Pass(NamedTuple):
    """One backward pass: how many times too large its gradients are, and c with Var(g²) <= c E[g⁴].

    The constant may be smaller for squares of single samples than for those of batches; 0: nothing is random.
    """

    scale: float = 1.0
    noise: float = 0.0
    sample_noise: float = 0.0
    independent: bool = False  # of the other passes of the batch
    more: bool = False  # further passes of the batch follow


class GradientSums(Protocol):
    """Takes the gradients of one pass after the other."""

    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Take gradients summed over a batch, or those of one sample; None stands for zero."""

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take the per-sample gradients of parameter number i; autograd must not be recording."""

    def end_pass(self) -> None:
        """All gradients of a pass have been added."""

    def end_batch(self) -> None:
        """All passes of a batch have been added."""

    def synchronize(self) -> None:
        """Between batches: read back what is needed, and decide what is kept of the next one."""


@runtime_checkable
class StatefulSums(GradientSums, Protocol):
    """Sums whose state can be written to a checkpoint between batches, as tensors and numbers, and restored."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the rest of a run depends on."""

    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore it."""


def zero_sums(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape on its device, in float32 or better: where squares of gradients are added."""
    return torch.zeros(parameter.shape, dtype=promoted(parameter.dtype), device=parameter.device)
