"""What an estimate's error will be: exact variances, and how many batches a given accuracy takes."""

from neuromanifold.bounds.sample_size import batches_needed, expected_confidence, expected_rtol
from neuromanifold.bounds.variance import (
    CV_BOUND,
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
    "batches_needed",
    "cantelli",
    "deflated_variance",
    "expected_confidence",
    "expected_rtol",
    "hutchinson_variance",
    "lower_variance",
    "minibatch_variance_bound",
    "monte_carlo_variance",
    "orthogonal_probe_variance",
    "orthogonal_variance",
    "probe_variance",
    "upper_variance",
]
