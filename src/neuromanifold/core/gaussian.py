"""Regression: y ~ N(z, variance), the network predicts the mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuromanifold.core import checks
from neuromanifold.core.diagonal import DiagonalCore


class Gaussian(DiagonalCore):
    """Independent Gaussians with mean [..., D] (the network's output) and known variance, with metric diag(1/variance).

    With variance 1 the network's Fisher information is the Gauss-Newton matrix of half the squared error.  Pass the
    class as `likelihood=nm.Gaussian`, or a function for another variance.  All methods take O(D) for each distribution.

    Args:
        mean: real numbers [..., D].
        variance: positive, a number or a tensor that broadcasts against `mean`.
        validate: search for NaN and for variances that are not positive, which on a GPU waits for the device.

    Raises:
        TypeError, ValueError: `mean` or `variance` is not a number or tensor of that kind.

    Example:
        >>> quarter = lambda mean: nm.Gaussian(mean, variance=0.25)
        >>> fim = nm.fisher_diagonal(model, list(inputs.split(8)), likelihood=quarter)
        >>> f"{fim['2.bias'][0]:.0f}"
        '4'
    """

    def __init__(self, mean: Tensor, variance: float | Tensor = 1.0, *, validate: bool = True) -> None:
        mean = checks.batch_of_vectors(mean, "mean", least=1, noun="outputs")
        if validate and not mean.is_meta and not bool(torch.isfinite(mean).all()):
            raise ValueError(checks.message("mean", "finite", "NaN or infinity"))
        super().__init__(mean)
        self.mean = mean
        self.variance: Tensor = self._variance(variance, validate)

    def _variance(self, variance: float | Tensor, validate: bool) -> Tensor:
        """Check the variance and give it the shape of the mean."""
        if isinstance(variance, Tensor):
            variance = checks.float_tensor(variance, "variance").to(self.mean)
        elif isinstance(variance, bool) or not isinstance(variance, (int, float)):
            raise TypeError(checks.message("variance", "a positive number or a tensor", type(variance).__name__))
        else:
            variance = self.mean.new_tensor(float(variance))
        tiny = torch.finfo(self.dtype).tiny  # the inverse of anything smaller overflows
        usable = validate and variance.numel() and not variance.is_meta
        if usable and not bool(((variance >= tiny) & (variance < math.inf)).all()):
            raise ValueError(checks.message("variance", f"positive (>= {tiny:.0e}) and finite", "a value that is not"))
        try:
            return variance.expand(self.mean.shape)
        except RuntimeError:
            expected = f"a number or a tensor that broadcasts to the mean's shape {list(self.mean.shape)}"
            raise ValueError(checks.message("variance", expected, f"shape {list(variance.shape)}")) from None

    @property
    def diagonal(self) -> Tensor:
        """ζ = 1/variance, [..., D].  O(D)."""
        return 1 / self.variance

    def sample(self, generator: torch.Generator | None = None, shape: tuple[int, ...] = ()) -> Tensor:
        """Targets y ~ N(mean, variance) [..., D], `shape` in front of the batch.  O(D) each."""
        full = (*checks.sample_shape(generator, shape), *self.mean.shape)
        with torch.no_grad():
            noise = torch.randn(full, generator=generator, dtype=self.dtype, device=self.device)
            return self.mean + self.variance.sqrt() * noise

    def score(self, y: Tensor) -> Tensor:
        """(y - mean)/variance for targets y, [..., D].  O(D)."""
        return (self._vector(y, "y") - self.mean) / self.variance

    def _variance_of_squared_score(self) -> Tensor:
        return 2 * self.diagonal.square()
