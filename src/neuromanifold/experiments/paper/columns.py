"""The columns of the table: the paper's estimators as the paper runs them, ours, and the curve over probes."""

from __future__ import annotations

from dataclasses import dataclass

from neuromanifold.estimators import (
    Empirical,
    Estimator,
    Exact,
    Hutchinson,
    Lower,
    MonteCarlo,
    SquaredBatchGradient,
    Upper,
)
from neuromanifold.run.granularity import Granularity


@dataclass(frozen=True)
class Column:
    """An estimator, its granularity, and its heading in tables."""

    key: str  # in files
    text: str
    latex: str
    estimator: Estimator
    granularity: Granularity  # "batch", or "auto": per sample

    @property
    def per(self) -> str:
        """Whether the gradient of each "batch" or of each "sample" is squared."""
        return "batch" if self.granularity == "batch" else "sample"


EXACT = Column("exact", "exact", "F", Exact(), "auto")

PAPER = (
    # One backward for each batch can only give the squared gradient of the batch; the text defines the one after it.
    Column("squared_batch_gradient", "eFIM (table)", r"\hat F^{\mathrm{table}}", SquaredBatchGradient(), "batch"),
    Column("empirical", "eFIM (text)", r"\hat F^{\mathrm{text}}", Empirical(), "auto"),
    Column("hutchinson_by_batches", "𝔽", r"\mathbb F", Hutchinson(deflate=0), "batch"),
    Column("upper_by_batches", "𝔽^DG", r"\mathbb F^{\mathrm{DG}}", Hutchinson(envelope=Upper()), "batch"),
    Column("lower_by_batches", "𝔽^LR", r"\mathbb F^{\mathrm{LR}}", Hutchinson(envelope=Lower(1)), "batch"),
    Column("lower2_by_batches", "𝔽^LR(2)", r"\mathbb F^{\mathrm{LR}(2)}", Hutchinson(envelope=Lower(2)), "batch"),
)
OURS = (
    Column("monte_carlo", "Monte Carlo", r"\mathrm{MC}", MonteCarlo(), "auto"),
    Column("hutchinson", "𝔽", r"\mathbb F", Hutchinson(deflate=0), "auto"),
    Column("deflated", "deflated", r"\mathbb F^{\mathrm{defl.}}", Hutchinson(), "auto"),
)
COLUMNS = (*PAPER, *OURS)
BASELINE = PAPER[0]  # what the paper's speed factors are relative to


def curve(classes: int, most: int | None = None) -> list[Column]:
    """probes = 1, 2, 4, ... C - 1, where nothing random is left; the first one is a column of the table.

    `most` leaves out those that take more passes.
    """
    powers = [2**k for k in range(1, 40) if 2**k < classes - 1]
    rest = [*powers, classes - 1] if classes > 2 else []
    return [OURS[-1], *(_probes(m) for m in rest if most is None or m <= most)]


def _probes(m: int) -> Column:
    name = f"deflated, {m} probes"
    return Column(f"probes_{m}", name, rf"m = {m}", Hutchinson(probes=m), "auto")
