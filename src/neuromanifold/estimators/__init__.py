"""Estimators: from a core to cotangents on the logits."""

from neuromanifold.estimators.base import Estimator
from neuromanifold.estimators.exact import Exact
from neuromanifold.estimators.hutchinson import Hutchinson
from neuromanifold.estimators.labels import Empirical, MonteCarlo, SquaredBatchGradient
from neuromanifold.estimators.parts import Full, Lower, Upper

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
