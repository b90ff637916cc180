"""The metric tensor of a neural network, its Fisher information, with known accuracy."""

from neuromanifold._version import __version__
from neuromanifold.bounds import NetworkBounds, batches_needed
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
from neuromanifold.reports import methods as _methods  # noqa: F401 (what results draw with)
from neuromanifold.results import (
    Comparison,
    DiagonalFisher,
    FileError,
    FisherFactors,
    FisherMatrix,
    TraceEstimate,
    load,
)
from neuromanifold.results.metric import NotConvergedWarning
from neuromanifold.run.bounds import fisher_bounds
from neuromanifold.run.check import check
from neuromanifold.run.check_result import Check
from neuromanifold.run.checkpoint import Checkpoint
from neuromanifold.run.factors import fisher_factors
from neuromanifold.run.fisher import fisher_diagonal, fisher_trace
from neuromanifold.run.forecast import Forecast, forecast
from neuromanifold.run.geometry import path_length
from neuromanifold.run.granularity import SlowPathWarning
from neuromanifold.run.matrix import fisher_matrix
from neuromanifold.run.operator import FisherOperator, fisher_operator
from neuromanifold.run.replay import NotReplayedWarning
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
    "Checkpoint",
    "NotReplayedWarning",
    "RunningFisher",
    "SlowPathWarning",
    "fisher_bounds",
    "fisher_diagonal",
    "fisher_factors",
    "fisher_matrix",
    "fisher_operator",
    "fisher_trace",
    "path_length",
    # rules of layers
    "check_rule",
    "rule",
    # before the run
    "Check",
    "Forecast",
    "batches_needed",
    "check",
    "forecast",
    # results
    "Comparison",
    "DiagonalFisher",
    "FileError",
    "FisherFactors",
    "FisherMatrix",
    "FisherOperator",
    "NetworkBounds",
    "NotConvergedWarning",
    "TraceEstimate",
    "load",
    # version
    "__version__",
]
