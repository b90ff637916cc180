"""The core space along a path from uniform to one-hot predictions: the paper's section 2 in numbers and plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Categorical
from neuromanifold.core.eigenvalue_bounds import EigenvalueBounds
from neuromanifold.core.empirical import EmpiricalError
from neuromanifold.core.envelopes import EnvelopeErrors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CorePath:
    """Everything that section 2 says about the distributions along a path, [points] each."""

    classes: int
    largest_probability: Tensor  # the abscissa: 1/C at uniform, 1 at one-hot
    eigenvalue: Tensor  # λ_C
    eigenvalue_bounds: EigenvalueBounds  # Theorem 1
    envelope_errors: dict[int, EnvelopeErrors]  # Lemma 3, by rank
    empirical: EmpiricalError  # Lemma 4: ‖R(y) - F‖ at the worst label
    metric_norm: Tensor  # ‖F‖, to compare the errors with


class Tightness(NamedTuple):
    """Theorem 1's bounds over λ_C for random distributions: medians, and the values furthest from 1."""

    lower_median: float
    lower_worst: float
    upper_median: float
    upper_worst: float


def core_path(classes: int = 10, points: int = 241) -> CorePath:
    """Evaluate section 2 along p ∝ i^(-β), i = 1..C, as β grows from 0 (uniform) to where p is one-hot to 1e-6."""
    beta = torch.linspace(0, 1, points, dtype=torch.float64).square() * 20
    core = Categorical(-beta[:, None] * torch.arange(1, classes + 1, dtype=torch.float64).log())
    return CorePath(
        classes=classes,
        largest_probability=core.probs.amax(-1),
        eigenvalue=core.largest_eigenvalue(),
        eigenvalue_bounds=core.largest_eigenvalue_bounds(),
        envelope_errors={rank: core.envelope_errors(rank) for rank in (1, 2, 3)},
        empirical=core.empirical_error_bound(),
        metric_norm=torch.linalg.matrix_norm(core.fisher()),
    )


def tightness(classes: int, scale: float, samples: int = 2000) -> Tightness:
    """Measure Theorem 1's bounds on softmax(scale·N(0, 1)) with `classes` classes."""
    generator = torch.Generator().manual_seed(0)
    core = Categorical(scale * torch.randn(samples, classes, generator=generator, dtype=torch.float64))
    lower, upper = (bound / core.largest_eigenvalue() for bound in core.largest_eigenvalue_bounds())
    return Tightness(*(value.item() for value in (lower.median(), lower.min(), upper.median(), upper.max())))


def plot_core_path(path: CorePath) -> Figure:
    """A figure of three panels: λ_C, the envelopes, the worst label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for axes, draw in zip(figure.subplots(1, 3), (draw_eigenvalue, draw_envelopes, draw_empirical), strict=True):
        draw(axes, path)
    return figure


def draw_eigenvalue(axes: Axes, path: CorePath) -> None:
    """Theorem 1: λ_C between its bounds."""
    x = path.largest_probability
    axes.fill_between(x, *path.eigenvalue_bounds, color="C0", alpha=0.25, label="Theorem 1")
    axes.plot(x, path.eigenvalue, color="C0", label="$\\lambda_C$, exact")
    _label_axes(axes, path, "Largest eigenvalue of the metric", "$\\lambda_C$")


def draw_envelopes(axes: Axes, path: CorePath) -> None:
    """Lemma 3: errors of the upper envelope and of the lower one for a few ranks, each with its bound dashed."""
    x, errors = path.largest_probability, path.envelope_errors
    axes.plot(x, path.metric_norm, color="0.6", label="$\\Vert F\\Vert$ itself")
    axes.plot(x, next(iter(errors.values())).upper, color="C3", label="upper, diag($p$)")
    for i, (rank, error) in enumerate(errors.items()):
        axes.plot(x, error.lower, color=f"C{i}", label=f"lower, rank {rank}")
        axes.plot(x, error.lower_bound, color=f"C{i}", linestyle="--", linewidth=1)
    _label_axes(axes, path, "Error of the envelopes (dashed: Lemma 3)", "Frobenius norm")


def draw_empirical(axes: Axes, path: CorePath) -> None:
    """Lemma 4: the empirical Fisher at the worst label, with both lower bounds."""
    x, error = path.largest_probability, path.empirical
    axes.plot(x, error.actual, color="C1", label="$\\Vert R(y)-F\\Vert$, worst $y$")
    axes.plot(x, error.bound, color="C1", linestyle="--", label="Lemma 4")
    axes.plot(x, error.simple_bound, color="C1", linestyle=":", label="Lemma 4, simple form")
    axes.plot(x, path.metric_norm, color="0.6", label="$\\Vert F\\Vert$ itself")
    _label_axes(axes, path, "Empirical Fisher, adversarial label", "Frobenius norm")


def _label_axes(axes: Axes, path: CorePath, title: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(f"largest probability (uniform: 1/{path.classes}, one-hot: 1)")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
