"""What an estimate's error will be, before the run; and how far the paper's bounds of F are from F."""

from neuromanifold.bounds.matrix_variance import matrix_variance
from neuromanifold.bounds.network import Terms
from neuromanifold.bounds.result import Diagonals, NetworkBounds
from neuromanifold.bounds.sample_size import batches_needed, expected_confidence, expected_rtol
from neuromanifold.bounds.variance import (
    CV_BOUND,
    adaptive_variance,
    cantelli,
    deflated_variance,
    hutchinson_variance,
    lower_variance,
    minibatch_variance_bound,
    monte_carlo_variance,
    orthogonal_probe_variance,
    orthogonal_variance,
    probe_variance,
    upper_variance,
)

__all__ = [
    "CV_BOUND",
    "Diagonals",
    "NetworkBounds",
    "Terms",
    "adaptive_variance",
    "batches_needed",
    "cantelli",
    "deflated_variance",
    "expected_confidence",
    "expected_rtol",
    "hutchinson_variance",
    "lower_variance",
    "matrix_variance",
    "minibatch_variance_bound",
    "monte_carlo_variance",
    "orthogonal_probe_variance",
    "orthogonal_variance",
    "probe_variance",
    "upper_variance",
]
