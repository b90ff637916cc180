"""What is squared: the gradient of each sample, or that of a whole batch."""

from __future__ import annotations

from typing import Literal

from neuromanifold.core.checks import message, one_of
from neuromanifold.estimators import Estimator, SquaredBatchGradient

Granularity = Literal["auto", "batch", "sample"]


class SlowPathWarning(UserWarning):
    """The answer is right, but for some parameters it takes a backward pass for each sample."""


def choose_granularity(estimator: Estimator, granularity: str) -> Granularity:
    """Refuse what would not be a Fisher information, and `nm.SquaredBatchGradient` by anything but batches."""
    if not isinstance(estimator, Estimator):
        advice = "Make one, such as nm.Hutchinson()."
        raise TypeError(message("estimator", "an estimator", repr(estimator), advice))
    one_of(granularity, "granularity", "auto", "batch", "sample")
    whole = isinstance(estimator, SquaredBatchGradient)
    if granularity == "sample" and whole:
        raise ValueError(message("granularity", "'auto' or 'batch' for SquaredBatchGradient", "'sample'"))
    if granularity == "batch" and not (estimator.centred or whole):
        advice = (
            "The gradients of different samples do not cancel on average, so the square of their sum is not a Fisher "
        )
        advice += "information. Use granularity='sample', or nm.SquaredBatchGradient() if that is the number you want."
        raise ValueError(message("granularity", f"'auto' or 'sample' for {estimator}", "'batch'", advice))
    return "batch" if whole else granularity  # type: ignore[return-value]
