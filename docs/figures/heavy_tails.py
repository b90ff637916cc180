"""Section 4.1 of the paper in numbers and plots: which estimates can scatter without bound, and which cannot.

The single neuron z = θx + b for two labels, p = σ(z), at θ = 0: its metric for θ is F = Σ_x p(1-p) x².  Three different
things can be random, and each has a coefficient of variation (CV) of its own:

* the data, x drawn from a heavy-tailed distribution: the paper's section 4.1, without bound (`heavy_tails`);
* the labels, y drawn from the model at given data: without bound for rare labels (`label_noise`, appendix A);
* the probe, ξ drawn at given data: at most √2, always (both, Theorem 11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuromanifold.bounds.variance import CV_BOUND, hutchinson_variance, monte_carlo_variance
from neuromanifold.core import Bernoulli

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeavyTails:
    """CVs of estimates of F at p = ½ from m samples x ~ t(ν), by formula and by simulation, [points] each."""

    samples: int  # m
    degrees: Tensor  # ν
    data_cv: Tensor  # Σ x²/(4m) over data drawn anew, by formula
    data_cv_simulated: Tensor
    probe_cv: Tensor  # Hutchinson's estimate at one data set of each ν, by Theorem 11
    probe_cv_simulated: Tensor


@dataclass(frozen=True)
class LabelNoise:
    """CVs of estimates at one data set of m samples, as the label y = 1 becomes rare, [points] each."""

    samples: int  # m
    probability: Tensor  # p, the probability of y = 1, for every sample
    labels_cv: Tensor  # Monte Carlo: one label drawn for each sample, squared per batch
    labels_cv_per_sample: Tensor  # the same, squared per sample
    probe_cv: Tensor  # Hutchinson, squared per batch
    probe_cv_per_sample: Tensor  # the same, squared per sample: one output, so that nothing is random


def data_cv(degrees: Tensor, samples: int) -> Tensor:
    """Std/mean of Σ x²/(4m) for m samples x ~ t(ν), ν > 4: √((E x⁴/(E x²)² - 1)/m) = √(2(ν-1)/((ν-4)m)).

    With E x² = ν/(ν-2) and E x⁴ = 3ν²/((ν-2)(ν-4)) as in the paper.  Its variance is [E x⁴ - (E x²)²]/(16m); the paper
    prints 1/(4m), which forgets to square the ¼.
    """
    return (2 * (degrees - 1) / ((degrees - 4) * samples)).sqrt()


def student_t(degrees: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """x ~ t(ν) for each ν of degrees [points], from the same uniform numbers: [points, *shape].

    Bailey's (1994) polar form x = cos(2πV) √(ν(U^(-2/ν) - 1)), exact for every real ν > 0.
    """
    U = 1 - torch.rand(shape, generator=generator, dtype=torch.float64)  # in (0, 1]
    V = torch.rand(shape, generator=generator, dtype=torch.float64)
    nu = degrees.view(-1, *(1 for _ in shape))
    radius = (nu * torch.expm1(-2 / nu * U.log())).sqrt()
    return (2 * math.pi * V).cos() * radius


def heavy_tails(samples: int = 64, points: int = 25, repeats: int = 4000, seed: int = 0) -> HeavyTails:
    """Let ν fall from 30 to 4.01 and compare drawing new data with drawing new probes for one data set of each ν."""
    generator = torch.Generator().manual_seed(seed)
    degrees = 4 + torch.logspace(math.log10(26), -2, points, dtype=torch.float64)
    x = student_t(degrees, (repeats, samples), generator)
    signs = 2 * torch.randint(0, 2, (repeats, samples), generator=generator).double() - 1
    first = x[:, 0]  # [points, m]
    probes = (first @ signs.mT / 2).square()  # [points, repeats]
    return HeavyTails(
        samples=samples,
        degrees=degrees,
        data_cv=data_cv(degrees, samples),
        data_cv_simulated=_cv(x.square().mean(-1) / 4),
        probe_cv=torch.stack([_probe_cv(data) for data in first]),
        probe_cv_simulated=_cv(probes),
    )


def label_noise(samples: int = 64, points: int = 25, seed: int = 0) -> LabelNoise:
    """Let p fall from ½ to 1e-5 at one data set x ~ N(0, 1), by the formulas of `neuromanifold.bounds`."""
    x = torch.randn(samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = torch.logspace(math.log10(0.5), -5, points, dtype=torch.float64)
    core = Bernoulli(p.logit()[None, :].expand(samples, points))  # one neuron with a θ of its own for each p
    jacobian = x[:, None, None] * torch.eye(points, dtype=torch.float64)  # [m, points, points]
    fisher = (core.diagonal * x.square()[:, None]).sum(0)
    return LabelNoise(
        samples=samples,
        probability=p,
        labels_cv=monte_carlo_variance(core, jacobian).sqrt() / fisher,
        labels_cv_per_sample=monte_carlo_variance(core, jacobian, "sample").sqrt() / fisher,
        probe_cv=hutchinson_variance(core, jacobian).sqrt() / fisher,
        probe_cv_per_sample=hutchinson_variance(core, jacobian, granularity="sample").sqrt() / fisher,
    )


def plot_heavy_tails(tails: HeavyTails, labels: LabelNoise) -> Figure:
    """Draw both panels side by side: random data, random labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_heavy_tails(left, tails)
    draw_label_noise(right, labels)
    return figure


def draw_heavy_tails(axes: Axes, tails: HeavyTails) -> None:
    """Section 4.1: the CV over the data as ν falls to 4, and that of the probe at given data."""
    x = tails.degrees - 4
    axes.plot(x, tails.data_cv, color="C1", label="new data, formula")
    axes.plot(x, tails.data_cv_simulated, color="C1", marker=".", linestyle="none", label="new data, simulated")
    axes.plot(x, tails.probe_cv, color="C0", label="new probe, Theorem 11")
    axes.plot(x, tails.probe_cv_simulated, color="C0", marker=".", linestyle="none", label="new probe, simulated")
    axes.set_xlabel("$\\nu - 4$, degrees of freedom above 4")
    axes.invert_xaxis()
    _style_axes(axes, f"$m = {tails.samples}$ samples $x\\sim t(\\nu)$, $p = 1/2$")


def draw_label_noise(axes: Axes, labels: LabelNoise) -> None:
    """Appendix A at the parameter: the CV over drawn labels as one becomes rare, and that of the probe."""
    x = labels.probability
    axes.plot(x, labels.labels_cv, color="C1", label="drawn labels, per batch")
    axes.plot(x, labels.labels_cv_per_sample, color="C1", linestyle="--", label="drawn labels, per sample")
    axes.plot(x, labels.probe_cv, color="C0", label="Hutchinson, per batch")
    axes.set_xlabel("$p$, probability of the rarer label")
    axes.invert_xaxis()
    _style_axes(axes, f"given data, $m = {labels.samples}$ samples $x\\sim N(0, 1)$")


def _style_axes(axes: Axes, title: str) -> None:
    axes.axhline(CV_BOUND, color="0.6", linestyle=":", label="$\\sqrt{2}$")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.1)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel("coefficient of variation")
    axes.legend(fontsize=8, frameon=False)


def _probe_cv(x: Tensor) -> Tensor:
    """Theorem 11 for the neuron at p = ½ and data x [m], as a CV."""
    variance = hutchinson_variance(Bernoulli(torch.zeros_like(x)[:, None]), x[:, None, None])
    return variance[0].sqrt() / (x.square().sum() / 4)


def _cv(draws: Tensor) -> Tensor:
    """Std/mean over the last dimension."""
    return draws.std(-1) / draws.mean(-1)
