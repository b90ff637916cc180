"""The hypercube 𝒞: C binary labels, independent given the input, p = σ(z).  Eq. (fimc) of the paper."""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.core import checks
from neuromanifold.core.diagonal import DiagonalCore


class Bernoulli(DiagonalCore):
    """Independent binary labels at logits [..., C], with metric diag(p(1-p)) = diag(σ'(z)): multi-label networks.

    Pass the class as `likelihood=nm.Bernoulli`; C = 1 is binary classification with a single logit.  All methods take
    O(C) for each distribution.

    Args:
        logits: real numbers [..., C], the log-odds of the labels.
        validate: search the logits for NaN, which on a GPU waits for the device.

    Raises:
        TypeError, ValueError: `logits` is not a floating-point tensor of such a shape, or has NaN in it.

    Example:
        >>> core = nm.Bernoulli(torch.zeros(2, 3))
        >>> core.diagonal
        tensor([[0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, logits: Tensor, *, validate: bool = True) -> None:
        logits = checks.batch_of_vectors(logits, "logits", least=1, noun="labels")
        if validate and not logits.is_meta and bool((logits.isnan() | (logits == torch.inf)).any()):
            raise ValueError(checks.message("logits", "free of NaN and +inf", "NaN or +inf"))
        super().__init__(logits)
        self.logits = logits
        self.probs: Tensor = logits.sigmoid()

    @property
    def complement(self) -> Tensor:
        """1 - p = σ(-z), accurate relatively.  O(C)."""
        return (-self.logits).sigmoid()

    @property
    def diagonal(self) -> Tensor:
        """ζ = p(1 - p), [..., C].  O(C)."""
        return self.probs * self.complement

    def sample(self, generator: torch.Generator | None = None, shape: tuple[int, ...] = ()) -> Tensor:
        """Labels y in {0, 1} as floats [..., C], `shape` in front of the batch.  O(C) each."""
        full = (*checks.sample_shape(generator, shape), *self.batch_shape, self.dim)
        with torch.no_grad():  # float64: uniform float32 numbers have no values below 2^-24 but zero
            return torch.bernoulli(self.probs.double().expand(full), generator=generator).to(self.dtype)

    def score(self, y: Tensor) -> Tensor:
        """y - p for labels y in {0, 1} (or in between: soft labels), [..., C].  O(C)."""
        if isinstance(y, Tensor) and not y.is_floating_point():
            y = y.to(self.dtype)
        y = self._vector(y, "y")
        if y.numel() and not 0 <= float(y.min()) <= float(y.max()) <= 1:
            got = f"values from {float(y.min()):g} to {float(y.max()):g}"
            raise ValueError(checks.message("y", "between 0 and 1", got, "One column for each binary label."))
        return y * self.complement - (1 - y) * self.probs

    def _variance_of_squared_score(self) -> Tensor:
        return self.diagonal * (self.complement - self.probs).square()
