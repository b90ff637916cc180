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


class Viewed:
    """A sum over samples, and what it is divided by: the samples, or their positions, such as a sequence's tokens."""

    count: int  # samples
    positions: int  # output distributions
    provenance: Provenance
    reduction: Reduction

    @property
    def divisor(self) -> int:
        """What the sums are divided by in this view."""
        return {"mean": self.count, "sum": 1, "token": self.positions}[self.reduction]

    @property
    def unit(self) -> str:
        """The view in words: "per sample", "per sequence", "per token", "summed over samples"."""
        p = self.provenance
        return {"mean": f"per {p.unit}", "sum": f"summed over {p.unit}s", "token": f"per {p.position}"}[self.reduction]

    @property
    def seen(self) -> str:
        """How many samples there were, and how many positions if these are others."""
        p, several = self.provenance, self.positions and self.positions != self.count
        return f"{self.count:,} {p.unit}s" + (f", {self.positions:,} {p.position}s" if several else "")


@dataclass(frozen=True)
class TraceEstimate(Scalable, Viewed):
    """tr F with its standard error: what `nm.fisher_trace` and every `.trace` return.

    What is stored is the sum over samples and their number; `reduction` chooses what `value` and `stderr` show, "mean"
    (per sample), "sum" or "token" (per position that counts).  The standard error is that of the probes' noise; the
    data are taken as given.  It converts to a float, and formats as one.

    Example:
        >>> trace = nm.fisher_diagonal(model, data, nm.Exact()).trace
        >>> f"{trace:.2f}", trace.stderr
        ('2.51', 0.0)
    """

    sum: float  #: over the samples
    noise: float  #: standard error of the sum
    count: int  #: samples
    provenance: Provenance
    reduction: Reduction = "mean"
    positions: int = 0  #: output distributions, such as tokens; 0: not known

    @property
    def value(self) -> float:
        """tr F: per sample, or what `reduction` says."""
        return self.sum / self.divisor

    @property
    def stderr(self) -> float:
        """The standard error of `value`."""
        return self.noise / self.divisor

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __str__(self) -> str:
        error = f" ± {self.stderr:.2g} (standard error)" if self.noise else " (not random)"
        error = " (no error bars)" if math.isnan(self.noise) else error
        return f"tr F = {self.value:.6g}{error} {self.unit}; {self.seen}, {self.provenance.estimator}"

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
            positions=self.positions + other.positions,
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
    total, noise, count, positions = (head.get(key, 0) for key in ("sum", "noise", "count", "positions"))
    provenance, reduction = Provenance.from_dict(head["provenance"]), check_reduction(head["reduction"], tokens=True)
    return TraceEstimate(float(total), float(noise), int(count), provenance, reduction, int(positions))
