"""Tests of random things: z-scores with a stated false-alarm rate."""

import math

import torch

import neuromanifold as nm


def worst_z_score(samples: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |mean - expected| in standard errors, over the entries of samples [n, ...]."""
    n = samples.shape[0]
    error = (samples.mean(0) - expected).abs()
    spread = samples.std(0) / math.sqrt(n)
    constant = spread < 1e-12 * (1 + expected.abs())  # entries without randomness must agree outright
    return float(torch.where(constant, torch.where(error < 1e-9, 0.0, math.inf), error / spread).max())


def mean_ratios(samples: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each sample [n, ...], the mean of found/expected over the entries that are more than rounding errors.

    If all entries are too large by a fifth, it is, too; and it has far less noise than any of them.
    """
    large = expected > 1e-9 * expected.amax()
    return (samples[:, large] / expected[large]).mean(1)


def assert_right_trace(found: nm.DiagonalFisher, exact: nm.DiagonalFisher) -> None:
    """Within five of its standard errors, and with a fifth too much it would not be: false-alarm rate 6e-7."""
    truth = float(exact.trace)
    assert abs(float(found.trace) - truth) < 5 * found.trace.stderr
    assert abs(1.2 * float(found.trace) - truth) > 5 * found.trace.stderr


def allowed_z_score(entries: int, false_alarms: float = 1e-6) -> float:
    """The |z| that the worst of so many normal entries exceeds with at most this probability (union bound)."""
    return -math.sqrt(2) * float(torch.erfinv(torch.tensor(false_alarms / entries - 1, dtype=torch.float64)))
