"""Distances between tasks: how differently two data sets use the parameters of one network.

With x and y the diagonals of two results for the same parameters, and p = x/Σx, q = y/Σy,

    cosine      1 − Σxy / √(Σx² Σy²)
    frechet     √(½ Σ(√p − √q)²) = √(1 − Σ√(pq)): Fréchet's distance of the Gaussians N(0, p), N(0, q), from 0 to 1
    task2vec    the cosine distance of x/(x + y) and y/(x + y), by which Task2Vec compares tasks

Each is a function of a few sums over entries.  What the probes' noise adds to the sums of the first two on average is
taken off (E x̂² = x² + σ², E √x̂ ≈ √x (1 − σ²/8x²)).  Errors are propagated to first order (delta method): |∂d/∂x_i| σ_i,
added up over entries, since entries share the noise of a sample.  Like that of a trace, this is an upper bound, and a
wide one.  With parts, results over disjoint data, the error is a jackknife's, and is that against other data as well.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.checks import message, one_of
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.error_bars import entry_noise
from neuromanifold.uses.matching import check_diagonal, finite_mean, matched_shapes


@dataclass(frozen=True)
class TaskDistance:
    """A distance with its standard error; it converts to a float."""

    value: float
    stderr: float
    metric: str

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        error = f" ± {self.stderr:.2g}" if self.stderr else ""
        return f"{self.metric} {self.value:.4g}{error}"


class _SumsDistance(NamedTuple):
    """Sums over entries of functions of (x, y, their variances), and the distance as a function of the sums."""

    sums: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    distance: Callable[[Tensor], Tensor]


def _cosine(x: Tensor, y: Tensor, vx: Tensor, vy: Tensor) -> Tensor:
    return torch.stack([(x * y).sum(), (x.square() - vx).sum(), (y.square() - vy).sum()])


def _frechet(x: Tensor, y: Tensor, vx: Tensor, vy: Tensor) -> Tensor:
    known = (x > 0) & (y > 0)
    x_, y_ = (torch.where(known, values, 1.0) for values in (x, y))
    lost = sum((v / values.square()).clamp(max=1) / 8 for v, values in ((vx, x_.detach()), (vy, y_.detach())))
    return torch.stack([((x_ * y_).sqrt() * (1 + lost) * known).sum(), x.sum(), y.sum()])


def _task2vec(x: Tensor, y: Tensor, _: Tensor, __: Tensor) -> Tensor:
    total = torch.where(x + y > 0, x + y, 1.0)
    a, b = x / total, y / total
    return torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()])


def _angle(sums: Tensor) -> Tensor:
    return 1 - sums[0] / (sums[1] * sums[2]).clamp(min=1e-300).sqrt()


METRICS = {
    "cosine": _SumsDistance(_cosine, _angle),
    "frechet": _SumsDistance(_frechet, _angle),  # its square
    "task2vec": _SumsDistance(_task2vec, _angle),
}


def task_distance(
    a: DiagonalFisher | Sequence[DiagonalFisher], b: DiagonalFisher | Sequence[DiagonalFisher], metric: str = "cosine"
) -> TaskDistance:
    """Return the distance between two results for the same parameters of one network, with its standard error.

    Their scale does not matter for "cosine" and "frechet"; "task2vec" compares means over samples.

    Args:
        a: the result of one task, such as `nm.fisher_diagonal(model, data_a)`; or parts of it that add up, over
            disjoint data: the standard error is then that of data and probes, by leaving out one part after the other.
        b: that of another, usually of the same weights; in parts if `a` is.
        metric: "cosine", "frechet" or "task2vec".

    Returns:
        A `TaskDistance`, with `.value` and `.stderr`.

    Raises:
        TypeError, ValueError: the results are for different parameters, or the metric is not known.

    Example:
        >>> a, b = nm.fisher_diagonal(model, data[:2]), nm.fisher_diagonal(model, data[2:], seed=1)
        >>> f"{nm.task_distance(a, b).value:.2f}"
        '0.01'
    """
    one_of(metric, "metric", *METRICS)
    if isinstance(a, DiagonalFisher) or isinstance(b, DiagonalFisher):
        return _distance(check_diagonal(a, "a"), check_diagonal(b, "b"), metric)
    if not isinstance(a, Sequence) or not isinstance(b, Sequence):
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise TypeError(message("a and b", "nm.DiagonalFishers, or lists of them", got))
    parts = [check_diagonal(one, "a") for one in a], [check_diagonal(one, "b") for one in b]
    if min(map(len, parts)) < 2:
        got = " and ".join(str(len(one)) for one in parts)
        raise ValueError(message("a and b", "a result each, or two or more parts each", got))
    first, second = (_total(one) for one in parts)
    variance = 0.0
    for k, one in enumerate(parts):
        others = [_total([*one[:i], *one[i + 1 :]]) for i in range(len(one))]
        found = [_distance(*((rest, second) if k == 0 else (first, rest)), metric).value for rest in others]
        variance += (len(one) - 1) ** 2 / len(one) * statistics.variance(found)
    return replace(_distance(first, second, metric), stderr=math.sqrt(variance))


def _total(parts: Sequence[DiagonalFisher]) -> DiagonalFisher:
    return reduce(operator.add, parts)


def _distance(a: DiagonalFisher, b: DiagonalFisher, metric: str) -> TaskDistance:
    """The distance of two results, its error by the delta method."""
    shapes, there = ({name: values.shape for name, values in one.sums.items()} for one in (a, b))
    advice = "Select those that both have with .filter(...); the network must be the same."
    names = matched_shapes(shapes, there, b.provenance.tied, "b", "a result of the same parameters as a", advice)
    if len(b) != len(a):
        extra = next(name for name in b if name not in names.values())
        raise ValueError(message("b", "a result of the same parameters as a", f"{extra} as well", advice))
    kind = METRICS[metric]
    sums = torch.zeros(3, dtype=torch.float64)
    for name, other in names.items():
        sums += kind.sums(*_entries(a, b, name, other)).cpu()
    if not bool((sums[1:] > 0).all()):
        advice = "Estimate with more samples or probes." if metric == "cosine" else ""
        raise ValueError(
            message("a and b", "results above zero and above their noise", f"sums {sums.tolist()}", advice)
        )
    with torch.enable_grad():
        leaves = sums.requires_grad_()
        value = kind.distance(leaves)
        (slopes,) = torch.autograd.grad(value, leaves)
    error = 0.0
    if any(bool(noise.any()) for one in (a, b) for noise in one.noise.values()):
        error = math.hypot(*_errors(a, b, names, kind, slopes))
    found = value.item()
    if metric == "frechet":
        root = math.sqrt(max(found, 0.0))
        return TaskDistance(root, min(error / (2 * root) if root else math.inf, math.sqrt(error)), metric)
    return TaskDistance(max(found, 0.0), error, metric)


def _errors(
    a: DiagonalFisher, b: DiagonalFisher, names: dict[str, str], kind: _SumsDistance, slopes: Tensor
) -> tuple[float, float]:
    """Σ_i |∂d/∂x_i| σ_i of either result."""
    errors = torch.zeros(2, dtype=torch.float64)
    for name, other in names.items():
        x, y, vx, vy = _entries(a, b, name, other)
        with torch.enable_grad():
            x, y = x.requires_grad_(), y.requires_grad_()
            gradients = torch.autograd.grad(kind.sums(x, y, vx, vy), (x, y), slopes.to(x.device))
        pairs = zip(gradients, (vx, vy), strict=True)
        errors += torch.stack([(g.abs() * v.sqrt()).sum() for g, v in pairs]).cpu()
    first, second = errors.tolist()
    return first, second


def _entries(a: DiagonalFisher, b: DiagonalFisher, name: str, other: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entries per sample in float64 and their variances, as large as these are on average."""
    x, y = finite_mean(a, name).double(), finite_mean(b, other).double()
    vx, vy = (
        (entry_noise(fim.noise, fim.sums, own) / fim.count * fim.provenance.noise_ratio).double().to(x.device).square()
        for fim, own in ((a, name), (b, other))
    )
    return x, y.to(x.device), vx, vy
