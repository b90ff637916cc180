"""The metric tensor of a neural network, its Fisher information, with known accuracy."""

from neuromanifold._version import __version__
from neuromanifold.bounds import batches_needed
from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian, Spectrum
from neuromanifold.estimators import (
    Empirical,
    Estimator,
    Exact,
    Full,
    Hutchinson,
    Lower,
    MonteCarlo,
    SquaredBatchGradient,
    Upper,
)
from neuromanifold.pullback.rules import rule
from neuromanifold.pullback.rules.check import check_rule
from neuromanifold.results import Comparison, DiagonalFisher, FileError, TraceEstimate, load
from neuromanifold.run.check import check
from neuromanifold.run.check_result import Check
from neuromanifold.run.fisher import fisher_diagonal, fisher_trace
from neuromanifold.run.granularity import SlowPathWarning
from neuromanifold.run.running import RunningFisher

__all__ = [  # noqa: RUF022 (grouped by stage)
    # core space
    "Bernoulli",
    "Categorical",
    "Core",
    "Gaussian",
    "Spectrum",
    # estimators
    "Empirical",
    "Estimator",
    "Exact",
    "Full",
    "Hutchinson",
    "Lower",
    "MonteCarlo",
    "SquaredBatchGradient",
    "Upper",
    # the network's metric tensor
    "RunningFisher",
    "SlowPathWarning",
    "fisher_diagonal",
    "fisher_trace",
    # rules of layers
    "check_rule",
    "rule",
    # before the run
    "Check",
    "batches_needed",
    "check",
    # results
    "Comparison",
    "DiagonalFisher",
    "FileError",
    "TraceEstimate",
    "load",
    # version
    "__version__",
]
