"""Several estimators on the same batches, each run several times against one reference: errors, times, coverage."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from statistics import fmean, median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from neuromanifold.estimators import Estimator
from neuromanifold.problem.batches import model_device
from neuromanifold.results import Comparison, DiagonalFisher
from neuromanifold.run.granularity import Granularity, SlowPathWarning

EPSILON = 1e-12  # the paper's, added to the exact value that an error is divided by

T = TypeVar("T")
Estimate = Callable[[Estimator, Granularity, int], DiagonalFisher]
"""Runs an estimator with a granularity and a seed."""


@dataclass
class Trial:
    """One estimator's runs: their times, and their errors against a reference; results are not kept but the first."""

    name: str
    estimator: Estimator
    granularity: Granularity = "auto"
    keep: bool = False
    results: list[DiagonalFisher] = field(default_factory=list)  # the first, if it is to be kept
    seconds: list[float] = field(default_factory=list)
    errors: list[Comparison] = field(default_factory=list)
    relative_errors: list[float] = field(default_factory=list)  # that results report of themselves
    coverages: list[float] = field(default_factory=list)
    passes: int = 0  # of one run
    batches: int = 0

    def add(self, model: nn.Module, estimate: Estimate, seed: int, reference: DiagonalFisher | None = None) -> None:
        """Run once more; without a reference, against itself."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowPathWarning)
            result, seconds = timed(model, lambda: estimate(self.estimator, self.granularity, seed))
        reference = result if reference is None else reference
        self.seconds.append(seconds)
        self.errors.append(result.sum.compare(reference.sum, EPSILON))
        self.relative_errors.append(result.relative_error)
        if self.estimator.noise_factor:
            self.coverages.append(coverage(result, reference))
        self.passes, self.batches = result.provenance.passes, result.provenance.batches
        if self.keep and not self.results:
            self.results.append(result)

    @property
    def first(self) -> DiagonalFisher:
        """The first result, if kept."""
        return self.results[0]

    @property
    def time(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)

    @property
    def passes_per_batch(self) -> float:
        """Backward passes."""
        return self.passes / self.batches

    def mean(self, quantity: str) -> float:
        """Of a field of the comparisons, over the runs."""
        return fmean(getattr(error, quantity) for error in self.errors)


def coverage(result: DiagonalFisher, reference: DiagonalFisher) -> float:
    """The share of positive entries within two standard errors of the reference (whose own error counts, too)."""
    inside, entries = 0.0, 0
    for name, truth in reference.sums.items():
        error = (result.sums[name] - truth).abs()
        allowed = 2 * torch.hypot(result.noise[name], reference.noise[name]) + _rounding(truth) * truth
        inside += float(((error <= allowed) & (truth > 0)).sum())
        entries += int((truth > 0).sum())
    return inside / entries if entries else 1.0


def timed(model: nn.Module, job: Callable[[], T]) -> tuple[T, float]:
    """What a job gives, and its seconds; a GPU computes while Python goes on, and is waited for."""
    start = time.perf_counter()
    result = job()
    if model_device(model).type == "cuda":
        torch.cuda.synchronize(model_device(model))
    return result, time.perf_counter() - start


def short_name(estimator: Estimator) -> str:
    """Return the code that makes an estimator, without the settings that it would have anyway."""
    if not hasattr(estimator, "__dataclass_fields__"):
        return repr(estimator)
    kind: Any = type(estimator)
    settings = {field.name: getattr(estimator, field.name) for field in fields(kind)}
    for name in list(settings):
        others = {key: value for key, value in settings.items() if key != name}
        settings = others if kind(**others) == estimator else settings
    return f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"


def _rounding(values: Tensor) -> float:
    return math.sqrt(torch.finfo(values.dtype).eps) / 4  # 9e-5 in float32: sums in another order
