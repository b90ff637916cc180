"""The metric tensor of a neural network, its Fisher information, with known accuracy."""

from neuromanifold._version import __version__
from neuromanifold.bounds import NetworkBounds, batches_needed
from neuromanifold.bounds.gram import GramMatrix, fisher_gram
from neuromanifold.bounds.run import fisher_bounds
from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian, Spectrum
from neuromanifold.diagnostics.check import check
from neuromanifold.diagnostics.check_result import Check
from neuromanifold.diagnostics.forecast import Forecast, forecast
from neuromanifold.estimators import (
    Adaptive,
    Empirical,
    Estimator,
    Exact,
    Hutchinson,
    Lower,
    MonteCarlo,
    SquaredBatchGradient,
    Upper,
)
from neuromanifold.hf import load_data, load_model
from neuromanifold.operators import FisherFactors, FisherMatrix
from neuromanifold.operators.factors import fisher_factors
from neuromanifold.operators.kronecker import KroneckerFisher, fisher_kronecker
from neuromanifold.operators.matrix import fisher_matrix
from neuromanifold.operators.metric import NotConvergedWarning
from neuromanifold.operators.operator import FisherOperator, fisher_operator
from neuromanifold.operators.path_length import path_length
from neuromanifold.persample.checking.check import check_rule
from neuromanifold.persample.engine import VerificationError
from neuromanifold.persample.rules import rule
from neuromanifold.problem.suspicions import SamplesMixWarning, SuspiciousInputWarning
from neuromanifold.report import page as _page
from neuromanifold.report import plots as _plots
from neuromanifold.results import Comparison, DiagonalFisher, FileError, Provenance, TraceEstimate, load
from neuromanifold.results.drawing import draw_with as _draw_with
from neuromanifold.run.fisher import ToleranceNotReachedWarning, fisher_diagonal, fisher_trace
from neuromanifold.run.graphs import NotCapturedWarning
from neuromanifold.run.methods import SlowPathWarning
from neuromanifold.run.running import RunningFisher
from neuromanifold.run.settings import Checkpoint
from neuromanifold.uses.consolidation import Consolidation
from neuromanifold.uses.influence import influence
from neuromanifold.uses.laplace import Laplace
from neuromanifold.uses.merging.merge import merge
from neuromanifold.uses.pruning import plan_pruning
from neuromanifold.uses.quantization import quantization_sensitivity
from neuromanifold.uses.similarity import task_distance
from neuromanifold.uses.training import optim
from neuromanifold.uses.training.preconditioner import KroneckerPreconditioner
from neuromanifold.uses.training.trace_penalty import trace_penalty
from neuromanifold.uses.tuning import plan_lora, plan_tuning

_draw_with(plot=_plots.plot, report=_page.write_page, html=_page.notebook)

__all__ = [  # noqa: RUF022 (grouped by stage)
    # core space
    "Bernoulli",
    "Categorical",
    "Core",
    "Gaussian",
    "Spectrum",
    # estimators
    "Adaptive",
    "Empirical",
    "Estimator",
    "Exact",
    "Hutchinson",
    "Lower",
    "MonteCarlo",
    "SquaredBatchGradient",
    "Upper",
    # the network's metric tensor
    "Checkpoint",
    "NotCapturedWarning",
    "RunningFisher",
    "SamplesMixWarning",
    "SlowPathWarning",
    "SuspiciousInputWarning",
    "ToleranceNotReachedWarning",
    "VerificationError",
    "fisher_bounds",
    "fisher_diagonal",
    "fisher_factors",
    "fisher_gram",
    "fisher_kronecker",
    "fisher_matrix",
    "fisher_operator",
    "fisher_trace",
    "path_length",
    # models and data
    "load_data",
    "load_model",
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
    "GramMatrix",
    "KroneckerFisher",
    "NetworkBounds",
    "NotConvergedWarning",
    "Provenance",
    "TraceEstimate",
    "load",
    # uses
    "Consolidation",
    "KroneckerPreconditioner",
    "Laplace",
    "influence",
    "merge",
    "optim",
    "plan_lora",
    "plan_pruning",
    "plan_tuning",
    "quantization_sensitivity",
    "task_distance",
    "trace_penalty",
    # version
    "__version__",
]
