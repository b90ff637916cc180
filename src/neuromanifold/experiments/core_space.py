"""The core space along a path from uniform to one-hot predictions: the paper's section 2 in numbers and plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuromanifold.core import Categorical

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CorePath:
    """Everything that section 2 says about the distributions along a path, [points] each (or [points, ranks])."""

    classes: int
    largest_probability: Tensor  # the abscissa: 1/C at uniform, 1 at one-hot
    eigenvalue: Tensor  # λ_C
    eigenvalue_lower: Tensor  # Theorem 1
    eigenvalue_upper: Tensor
    upper_error: Tensor  # Lemma 3: ‖F - diag(p)‖
    ranks: tuple[int, ...]
    lower_error: Tensor  # Lemma 3: ‖F - F^LR(k)‖ for each k of ranks, exact
    lower_error_bound: Tensor  # and bounded
    metric_norm: Tensor  # ‖F‖, to compare the errors with
    empirical_error: Tensor  # Lemma 4: ‖R(y) - F‖ at the worst label
    empirical_bound: Tensor
    empirical_simple_bound: Tensor


@dataclass(frozen=True)
class Tightness:
    """How far Theorem 1's bounds are from λ_C over random distributions: quantiles of bound/λ_C."""

    classes: int
    scale: float  # standard deviation of the logits
    lower_median: float
    lower_worst: float  # the smallest lower/λ_C
    upper_median: float
    upper_worst: float  # the largest upper/λ_C


def core_path(classes: int = 10, points: int = 241, ranks: tuple[int, ...] = (1, 2, 3)) -> CorePath:
    """Evaluate section 2 along p ∝ i^(-β), i = 1..C, as β grows from 0 (uniform) to where p is one-hot to 1e-6."""
    beta = torch.linspace(0, 1, points, dtype=torch.float64).square() * 20
    core = Categorical(-beta[:, None] * torch.arange(1, classes + 1, dtype=torch.float64).log())
    bounds, worst = core.largest_eigenvalue_bounds(), core.empirical_error_bound()
    errors = [core.envelope_errors(rank) for rank in ranks]
    return CorePath(
        classes=classes,
        largest_probability=core.probs.amax(-1),
        eigenvalue=core.largest_eigenvalue(),
        eigenvalue_lower=bounds.lower,
        eigenvalue_upper=bounds.upper,
        upper_error=errors[0].upper,
        ranks=ranks,
        lower_error=torch.stack([error.lower for error in errors], dim=-1),
        lower_error_bound=torch.stack([error.lower_bound for error in errors], dim=-1),
        metric_norm=torch.linalg.matrix_norm(core.fisher()),
        empirical_error=worst.actual,
        empirical_bound=worst.bound,
        empirical_simple_bound=worst.simple_bound,
    )


def tightness(classes: int, scale: float, samples: int = 2000, seed: int = 0) -> Tightness:
    """Measure Theorem 1's bounds on softmax(scale·N(0, 1)) with `classes` classes."""
    generator = torch.Generator().manual_seed(seed)
    core = Categorical(scale * torch.randn(samples, classes, generator=generator, dtype=torch.float64))
    bounds, exact = core.largest_eigenvalue_bounds(), core.largest_eigenvalue()
    lower, upper = bounds.lower / exact, bounds.upper / exact
    found = (lower.median(), lower.min(), upper.median(), upper.max())
    return Tightness(classes, scale, *(value.item() for value in found))


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
    axes.fill_between(x, path.eigenvalue_lower, path.eigenvalue_upper, color="C0", alpha=0.25, label="Theorem 1")
    axes.plot(x, path.eigenvalue, color="C0", label="$\\lambda_C$, exact")
    _label_axes(axes, path, "Largest eigenvalue of the metric", "$\\lambda_C$")


def draw_envelopes(axes: Axes, path: CorePath) -> None:
    """Lemma 3: errors of the upper envelope and of the lower one for a few ranks, each with its bound dashed."""
    x = path.largest_probability
    axes.plot(x, path.metric_norm, color="0.6", label="$\\Vert F\\Vert$ itself")
    axes.plot(x, path.upper_error, color="C3", label="upper, diag($p$)")
    for i, rank in enumerate(path.ranks):
        axes.plot(x, path.lower_error[:, i], color=f"C{i}", label=f"lower, rank {rank}")
        axes.plot(x, path.lower_error_bound[:, i], color=f"C{i}", linestyle="--", linewidth=1)
    _label_axes(axes, path, "Error of the envelopes (dashed: Lemma 3)", "Frobenius norm")


def draw_empirical(axes: Axes, path: CorePath) -> None:
    """Lemma 4: the empirical Fisher at the worst label, with both lower bounds."""
    x = path.largest_probability
    axes.plot(x, path.empirical_error, color="C1", label="$\\Vert R(y)-F\\Vert$, worst $y$")
    axes.plot(x, path.empirical_bound, color="C1", linestyle="--", label="Lemma 4")
    axes.plot(x, path.empirical_simple_bound, color="C1", linestyle=":", label="Lemma 4, simple form")
    axes.plot(x, path.metric_norm, color="0.6", label="$\\Vert F\\Vert$ itself")
    _label_axes(axes, path, "Empirical Fisher, adversarial label", "Frobenius norm")


def _label_axes(axes: Axes, path: CorePath, title: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(f"largest probability (uniform: 1/{path.classes}, one-hot: 1)")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
