"""The columns of the table: the paper's estimators as the paper runs them, ours, and the curve over probes."""

from __future__ import annotations

from dataclasses import dataclass

from neuromanifold import estimators as nm
from neuromanifold.run.settings import Granularity


@dataclass(frozen=True)
class Column:
    """An estimator, its granularity, and its heading in tables."""

    key: str  # in files
    text: str
    latex: str
    estimator: nm.Estimator
    granularity: Granularity  # "batch", or "auto": per sample

    @property
    def per(self) -> str:
        """Whether the gradient of each "batch" or of each "sample" is squared."""
        return "batch" if self.granularity == "batch" else "sample"


EXACT = Column("exact", "exact", "F", nm.Exact(), "auto")

PAPER = (
    # One backward for each batch can only give the squared gradient of the batch; the text defines the one after it.
    Column("squared_batch_gradient", "eFIM (table)", r"\hat F^{\mathrm{table}}", nm.SquaredBatchGradient(), "batch"),
    Column("empirical", "eFIM (text)", r"\hat F^{\mathrm{text}}", nm.Empirical(), "auto"),
    Column("hutchinson_per_batch", "𝔽", r"\mathbb F", nm.Hutchinson(deflate=0), "batch"),
    Column("upper_per_batch", "𝔽^DG", r"\mathbb F^{\mathrm{DG}}", nm.Hutchinson(envelope=nm.Upper()), "batch"),
    Column("lower_per_batch", "𝔽^LR", r"\mathbb F^{\mathrm{LR}}", nm.Hutchinson(envelope=nm.Lower(1)), "batch"),
    Column("lower2_per_batch", "𝔽^LR(2)", r"\mathbb F^{\mathrm{LR}(2)}", nm.Hutchinson(envelope=nm.Lower(2)), "batch"),
)
OURS = (
    Column("monte_carlo", "Monte Carlo", r"\mathrm{MC}", nm.MonteCarlo(), "auto"),
    Column("hutchinson", "𝔽", r"\mathbb F", nm.Hutchinson(deflate=0), "auto"),
    Column("deflated", "deflated", r"\mathbb F^{\mathrm{defl.}}", nm.Hutchinson(), "auto"),
)
COLUMNS = (*PAPER, *OURS)
BASELINE = PAPER[0]  # what the paper's speed factors are relative to


def curve(classes: int, most: int | None = None) -> list[Column]:
    """probes = 1, 2, 4, ... C - 1, where nothing random is left; the first one is a column of the table.

    `most` leaves out those that take more passes.
    """
    powers = [2**k for k in range(1, 40) if 2**k < classes - 1]
    wanted = [m for m in (*powers, classes - 1) if m > 1 and (most is None or m <= most)]
    names = {m: (f"probes_{m}", f"deflated, {m} probes", f"m = {m}") for m in wanted}
    return [OURS[-1], *(Column(*names[m], nm.Hutchinson(probes=m), "auto") for m in wanted)]
