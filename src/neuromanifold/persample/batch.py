"""The batch-wise pullback: g = Σ_x Jᵀu(x) by one ordinary backward pass, for any module.

Its square is unbiased for Σ_x E[(Jᵀu(x))²] if the u(x) are centred and independent over the samples, because then the
cross terms between samples vanish on average.  They do contribute variance: about that of the square of a batch's sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_LARGEST_HALF = 2.0**15


class BatchPullback:
    """Vector-Jacobian products of logits with respect to parameters, in half precision without underflow.

    Gradients in float16 below 6e-8 would vanish.  Where float16 is involved, the cotangent is multiplied by a power of
    two, as large as no gradient overflows, and the caller divides by it in float32.
    """

    def __init__(self, parameters: Sequence[Tensor], half: bool = False) -> None:
        """`half`: float16 is involved somewhere, even if neither these parameters nor the logits have it."""
        self.parameters = list(parameters)
        self._half = half or any(parameter.dtype == torch.float16 for parameter in parameters)
        self.exponent: int | None = None  # of the last scale

    def __call__(self, logits: Tensor, cotangent: Tensor, keep_graph: bool) -> tuple[list[Tensor | None], float]:
        """The gradients of Σ cotangent·logits, None where there is no dependence, and how many times too large."""
        if not (self._half or logits.dtype == torch.float16):
            return self._gradients(logits, cotangent, keep_graph), 1.0
        largest = largest_scale(cotangent)
        if largest is None:
            return self._gradients(logits, cotangent, keep_graph), 1.0
        if self.exponent is None:
            self.exponent = round(math.log2(largest))
        exponent = self.exponent
        while True:
            scale = min(2.0**exponent, largest)
            gradients = self._gradients(logits, cotangent * scale, keep_graph=True)
            sums = torch.stack([g.float().sum() for g in gradients if g is not None] or [torch.zeros(())])
            if bool(torch.isfinite(sums).all()):
                self.exponent = exponent
                return gradients, scale
            if exponent < -24:  # not an overflow: the gradient itself is not a number, and the result shows it
                return gradients, scale
            exponent -= 4

    def _gradients(self, logits: Tensor, cotangent: Tensor, keep_graph: bool) -> list[Tensor | None]:
        gradients = torch.autograd.grad(
            logits, self.parameters, cotangent.to(logits.dtype), retain_graph=keep_graph, allow_unused=True
        )
        return [g.to_dense() if g is not None and g.layout != torch.strided else g for g in gradients]


def largest_scale(cotangent: Tensor) -> float | None:
    """The largest power of two by which a cotangent may be multiplied in float16; None if it is zero."""
    largest = float(cotangent.abs().amax()) if cotangent.numel() else 0.0
    return 2.0 ** math.floor(math.log2(_LARGEST_HALF / largest)) if largest else None


def involves_half(parameters: Iterable[Tensor], device: torch.device) -> bool:
    """Whether float16 is used: by a parameter, or by autocast."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    return autocast or any(parameter.dtype == torch.float16 for parameter in parameters)
