"""Scale cotangents where float16 is involved: gradients below 6e-8 would vanish there, those above 65,504 overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

_LARGEST = 2.0**15
_LEAST_EXPONENT = -24
T = TypeVar("T")


class HalfPrecisionScale:
    """The power of two by which cotangents are multiplied: as large as no gradient overflows.

    The caller divides gradients by it in float32.  It is kept from pass to pass.
    """

    def __init__(self, half: bool) -> None:
        """`half`: float16 is involved somewhere, even if the logits do not have it."""
        self._half = half
        self.exponent: int | None = None

    def fit(self, logits: Tensor, cotangent: Tensor, attempt: Callable[[Tensor, bool], T | None]) -> tuple[T, float]:
        """Return what `attempt` makes of the scaled cotangent, and the scale.

        `attempt(scaled, checked)` returns None if gradients overflow, and must look for that if `checked`.
        """
        largest = largest_scale(cotangent) if self.is_needed(logits) else None
        scale = 1.0
        if largest is not None:
            if self.exponent is None:
                self.exponent = round(math.log2(largest))
            while True:
                scale = min(2.0**self.exponent, largest)
                found = attempt(cotangent * scale, True)
                if found is not None:
                    return found, scale
                if self.exponent < _LEAST_EXPONENT:
                    break  # not an overflow: the gradient itself is not a number, and the result shows it
                self.exponent -= 4
        found = attempt(cotangent if scale == 1.0 else cotangent * scale, False)
        assert found is not None
        return found, scale

    def is_needed(self, logits: Tensor) -> bool:
        """Return whether float16 is involved in these logits."""
        return self._half or logits.dtype == torch.float16


def largest_scale(cotangent: Tensor) -> float | None:
    """Return the largest power of two by which a cotangent may be multiplied in float16; None if it is zero."""
    largest = float(cotangent.abs().amax()) if cotangent.numel() else 0.0
    return 2.0 ** math.floor(math.log2(_LARGEST / largest)) if largest else None


def involves_half(parameters: Iterable[Tensor], device: torch.device) -> bool:
    """Return whether float16 is used: by a parameter, or by autocast."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    return autocast or any(parameter.dtype == torch.float16 for parameter in parameters)
