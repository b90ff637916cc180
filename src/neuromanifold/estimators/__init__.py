"""Estimators: from a core to cotangents on the logits."""

from neuromanifold.estimators.base import Estimator
from neuromanifold.estimators.envelopes import Full, Lower, Upper
from neuromanifold.estimators.exact import Exact
from neuromanifold.estimators.hutchinson import Hutchinson
from neuromanifold.estimators.labels import Empirical, MonteCarlo, SquaredBatchGradient

__all__ = [
    "Empirical",
    "Estimator",
    "Exact",
    "Full",
    "Hutchinson",
    "Lower",
    "MonteCarlo",
    "SquaredBatchGradient",
    "Upper",
]
