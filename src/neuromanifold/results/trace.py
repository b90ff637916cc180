"""The trace of the Fisher information: one number with its standard error."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from neuromanifold.core.checks import Reduction, check_reduction
from neuromanifold.results.files import reads, save_json
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.scaling import Scalable


@dataclass(frozen=True)
class TraceEstimate(Scalable):
    """tr F with its standard error (of the probes' noise; the data are taken as given): what every `.trace` returns.

    What is stored is the sum over samples and their number; `reduction` chooses what `value` and `stderr` show, "mean"
    (per sample) or "sum".  It converts to a float, and formats as one: f"{fim.trace:.3f}".
    """

    sum: float  # over the samples
    noise: float  # standard error of the sum
    count: int  # samples
    provenance: Provenance
    reduction: Reduction = "mean"

    @property
    def value(self) -> float:
        """tr F: per sample, or the sum over samples if `reduction` says so."""
        return self.sum / self.count if self.reduction == "mean" else self.sum

    @property
    def stderr(self) -> float:
        """The standard error of `value`."""
        return self.noise / self.count if self.reduction == "mean" else self.noise

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __str__(self) -> str:
        per = "per sample" if self.reduction == "mean" else "in all"
        error = f" ± {self.stderr:.2g} (standard error)" if self.noise else " (not random)"
        return f"tr F = {self.value:.6g}{error} {per}; {self.count} samples, {self.provenance.estimator}"

    def __add__(self, other: TraceEstimate) -> TraceEstimate:
        if not isinstance(other, TraceEstimate):
            return NotImplemented
        provenance = self.provenance.plus(other.provenance)
        shared = self.noise * other.noise > 0 and self.provenance.shares_noise_with(other.provenance)
        return replace(
            self,
            sum=self.sum + other.sum,
            noise=self.noise + other.noise if shared else math.hypot(self.noise, other.noise),
            count=self.count + other.count,
            provenance=provenance,
        )

    def _times(self, factor: float) -> TraceEstimate:
        scaled = self.provenance.times(factor)
        return replace(self, sum=factor * self.sum, noise=factor * self.noise, provenance=scaled)

    def save(self, path: str | Path) -> None:
        """Write to a JSON file, all or nothing; `nm.load` reads it."""
        save_json(path, "trace", asdict(self))


@reads("trace")
def trace_from_file(tensors: dict[str, Tensor], head: dict[str, Any]) -> TraceEstimate:
    """The trace that `TraceEstimate.save` wrote."""
    del tensors
    total, noise, count = float(head["sum"]), float(head["noise"]), int(head["count"])
    return TraceEstimate(
        total, noise, count, Provenance.from_dict(head["provenance"]), check_reduction(head["reduction"])
    )
