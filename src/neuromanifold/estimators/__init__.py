"""Estimators: from a core to cotangents on the logits."""

from neuromanifold.estimators.adaptive import Adaptive
from neuromanifold.estimators.base import Estimator, NoiseFactors
from neuromanifold.estimators.envelopes import Lower, Upper
from neuromanifold.estimators.exact import Exact
from neuromanifold.estimators.hutchinson import Hutchinson
from neuromanifold.estimators.labels import Empirical, MonteCarlo, SquaredBatchGradient

__all__ = [
    "Adaptive",
    "Empirical",
    "Estimator",
    "Exact",
    "Hutchinson",
    "Lower",
    "MonteCarlo",
    "NoiseFactors",
    "SquaredBatchGradient",
    "Upper",
]
