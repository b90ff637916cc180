"""Gradients summed over a batch: g = Σ_x Jᵀu(x) by one ordinary backward pass, for any module.

The square of g is unbiased for Σ_x E[(Jᵀu(x))²] if the u(x) are centred and independent over the samples, because then
the cross terms between samples vanish on average.  They do contribute variance, about that of the square itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neuromanifold.persample.backward import dense
from neuromanifold.persample.scaling import HalfPrecisionScale


class BatchBackward:
    """Vector-Jacobian products of logits with respect to parameters, in half precision without underflow."""

    def __init__(self, parameters: Sequence[Tensor], half: bool = False) -> None:
        """`half`: float16 is involved somewhere, even if neither these parameters nor the logits have it."""
        self.parameters = list(parameters)
        self.scale = HalfPrecisionScale(half or any(parameter.dtype == torch.float16 for parameter in parameters))

    def __call__(self, logits: Tensor, cotangent: Tensor, keep_graph: bool) -> tuple[list[Tensor | None], float]:
        """Return the gradients of Σ cotangent·logits, None where there are none, and a factor they have too much."""

        def attempt(scaled: Tensor, checked: bool) -> list[Tensor | None] | None:
            gradients = torch.autograd.grad(
                logits, self.parameters, scaled.to(logits.dtype), retain_graph=keep_graph or checked, allow_unused=True
            )
            found: list[Tensor | None] = [dense(g) for g in gradients]
            if checked:
                sums = torch.stack([g.float().sum() for g in found if g is not None] or [torch.zeros(())])
                if not bool(torch.isfinite(sums).all()):
                    return None
            return found

        return self.scale.fit(logits, cotangent, attempt)
