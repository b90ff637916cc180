"""One estimator's runs on the same batches against one reference: seconds, errors, coverage."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from statistics import fmean, median
from typing import Any, TypeVar

import torch
from torch import Tensor

from neuromanifold.diagnostics.check_result import CheckRow
from neuromanifold.estimators import Estimator
from neuromanifold.problem.suspicions import SuspiciousInputWarning
from neuromanifold.results import Comparison, DiagonalFisher
from neuromanifold.run.methods import SlowPathWarning
from neuromanifold.run.settings import Granularity

EPSILON = 1e-12  # the paper's, added to the exact value that an error is divided by

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """One run, without its result."""

    seconds: float
    error: Comparison
    relative_error: float  # that the result reports of itself
    coverage: float | None  # share of entries within two standard errors; None: nothing is random
    passes_per_batch: float  # backward passes


@dataclass
class Runs:
    """The runs of one estimator; of their results only the first is kept, and only if asked for."""

    name: str
    estimator: Estimator
    granularity: Granularity = "auto"
    keep: bool = False
    first: DiagonalFisher | None = None
    measured: list[Measurement] = field(default_factory=list)

    def add(
        self, estimate: Callable[[], DiagonalFisher], device: torch.device, reference: DiagonalFisher | None = None
    ) -> DiagonalFisher:
        """Run once more, and compare the result with a reference, or else with itself; returns the result."""
        result, seconds = timed(device, estimate)
        truth, p = result if reference is None else reference, result.provenance
        covered = coverage(result, truth) if self.estimator.noise_factor else None
        error = result.sum.compare(truth.sum, EPSILON)
        self.measured.append(Measurement(seconds, error, result.relative_error, covered, p.passes / p.batches))
        if self.keep and self.first is None:
            self.first = result
        return result

    @property
    def seconds(self) -> float:
        """The median over the runs."""
        return median(one.seconds for one in self.measured)

    def row(self, backward: float) -> CheckRow:
        """Return the means of the errors, and the median time over that of forward + backward."""
        covered = [one.coverage for one in self.measured if one.coverage is not None]
        return CheckRow(
            name=self.name,
            estimator=self.estimator,
            granularity=self.granularity,
            target=self.estimator.target,
            passes=self.measured[0].passes_per_batch,
            relmae=self.mean("relmae"),
            relmae_positive=self.mean("relmae_positive"),
            trace_ratio=self.mean("mean_ratio"),
            rank_correlation=self.mean("rank_correlation"),
            coverage=fmean(covered) if covered else None,
            time=self.seconds / backward,
            rounds=len(self.measured),
        )

    def mean(self, quantity: str) -> float:
        """The mean over the runs of a field of the comparisons."""
        return fmean(getattr(one.error, quantity) for one in self.measured)


def coverage(result: DiagonalFisher, reference: DiagonalFisher) -> float:
    """The share of positive entries within two standard errors of the reference (whose own error counts, too)."""
    inside, entries = 0.0, 0
    for name, truth in reference.sums.items():
        error = (result.sums[name] - truth).abs()
        allowed = 2 * torch.hypot(result.noise[name], reference.noise[name]) + _rounding(truth) * truth
        inside += float(((error <= allowed) & (truth > 0)).sum())
        entries += int((truth > 0).sum())
    return inside / entries if entries else 1.0


@contextmanager
def expected_warnings_ignored() -> Iterator[None]:
    """Ignore warnings of slow paths and suspicious inputs: the run they are for is to be measured, not done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        warnings.simplefilter("ignore", SuspiciousInputWarning)
        yield


def timed(device: torch.device, job: Callable[[], T]) -> tuple[T, float]:
    """What a job gives, and its seconds; a GPU computes while Python goes on, and is waited for."""
    start = time.perf_counter()
    result = job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
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
