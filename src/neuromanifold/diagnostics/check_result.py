"""What `nm.check` gives: a row for each estimator, and a verdict in words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from neuromanifold.estimators import Empirical, Estimator, SquaredBatchGradient
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.table import text_table

ROUNDING = 1e-4  # no error at all
GOOD = 0.1  # an entry off by ten per cent on average
_HEADER = ("estimator", "for F", "passes", "RelMAE", "trace", "rank corr.", "2 s.e.", "time")
_NOTES = (
    "passes: backward passes for each batch.  RelMAE: mean of |estimate - F|/F over positive entries.",
    "trace: over that of F.  2 s.e.: share of entries within two standard errors.  time: over forward + backward.",
)


@dataclass(frozen=True)
class CheckRow:
    """One estimator against the reference; errors are means over the rounds, times are medians."""

    name: str
    estimator: Estimator
    granularity: str
    target: str  #: what it is right for on average
    passes: float  #: backward passes for each batch
    relmae: float  #: the paper's: over all entries
    relmae_positive: float  #: over those where the reference is positive
    trace_ratio: float  #: Σ estimate/Σ reference
    rank_correlation: float
    coverage: float | None  #: share of entries within two of its standard errors; None: nothing is random
    time: float  #: over that of forward + ordinary backward
    rounds: int

    @property
    def unbiased(self) -> bool:
        """Whether it is right for F on average, and random."""
        return self.target == "unbiased"


@dataclass(frozen=True, eq=False)
class Check:
    """Every estimator against the exact diagonal, on one model and some of its data: what `nm.check` returns.

    Prints as a table, with notes and a verdict.

    Example:
        >>> result = nm.check(model, data, estimators=[nm.Hutchinson(), nm.Empirical()])
        >>> result.is_exact, [row.target for row in result.rows]
        (True, ['exact', 'unbiased', "biased (given labels instead of the model's)"])
    """

    rows: tuple[CheckRow, ...]
    exact: DiagonalFisher  #: or, where `is_exact` is False, a good estimate
    is_exact: bool
    verdict: str
    notes: tuple[str, ...]  #: about the model, and about how the reference was made
    repeats: bool  #: whether two evaluations agree
    apart: bool | None  #: whether samples leave each other alone; None: not known
    zero: tuple[str, ...]  #: parameters whose Fisher information is zero in every entry
    granularity: dict[str, str]  #: how random probes do each parameter by default: per "sample" or per "batch"
    reasons: dict[str, str]  #: why, for those that are done per batch
    verified: int  #: batches on which per-sample gradients were compared with autograd's
    backward_seconds: float  #: of forward + ordinary backward over the batches

    def __str__(self) -> str:
        p, count = self.exact.provenance, f"{self.exact.count} samples in {self.exact.provenance.batches} batches"
        title = f"Check of {p.model} on {count}; forward + backward take {1e3 * self.backward_seconds:.3g} ms"
        table = text_table(_HEADER, [_check_cells(row) for row in self.rows], left=2)
        lines = [line for note in (*self.notes, self.verdict) for line in textwrap.wrap(note, 110)]
        return "\n".join([title, table, *_NOTES, "", *lines])

    __repr__ = __str__


def verdict(rows: Sequence[CheckRow], reference_error: float) -> str:
    """What to use, and what not to.

    Recommended is an unbiased estimator that takes a single pass, if it is within ten per cent; else whatever has the
    smallest time·error², the price of a given accuracy, with errors below one per cent counted as one; or the exact
    value where that takes hardly longer.
    """
    if math.isnan(rows[0].trace_ratio):
        return "The Fisher information is zero in every entry: the model's outputs do not depend on these parameters."
    sentences = [*_recommendation(rows, reference_error), *_per_sample_or_batch(rows)]
    sentences += [text for row in rows if (text := _warning(row))]
    return " ".join([*sentences, *_error_bars(rows)])


def _recommendation(rows: Sequence[CheckRow], reference_error: float) -> list[str]:
    exact, random = rows[0], [row for row in rows[1:] if row.unbiased]
    if not random:
        return []
    single = _cheapest([row for row in random if row.passes <= 1])
    good = single is not None and single.relmae_positive <= GOOD
    best = single if good else _cheapest(random)
    assert best is not None
    sentences = []
    if exact.target == "exact" and exact.time <= 1.5 * best.time:
        sentences.append(f"{exact.name} takes {_times(exact)} here: use it.")
        best = exact
    elif best.relmae_positive < ROUNDING:
        sentences.append(f"{best.name} is exact here, at {_times(best)}: use it.")
    else:
        sentences.append(_within(best, reference_error) + (": use it." if best.relmae_positive <= GOOD else "."))
    if single is not None and single is not best and not good:
        sentences.append(f"In a single pass, {_within(single, reference_error)}.")
    if single is not None and not good:
        sentences.append("Over m times as many batches that is 1/√m as much.")
    return sentences


def _cheapest(rows: Sequence[CheckRow]) -> CheckRow | None:
    """The smallest time·error²; where others are as good but for chance, the first of them."""
    prices = [row.time * max(row.relmae_positive, 0.01) ** 2 for row in rows]
    return next((row for row, price in zip(rows, prices, strict=True) if price <= 1.2 * min(prices)), None)


def _within(row: CheckRow, reference_error: float) -> str:
    known = f"reference (itself known to {_percent(reference_error)})" if reference_error else "exact diagonal"
    return f"{row.name} is within {_percent(row.relmae_positive)} of the {known} at {_times(row)}"


def _per_sample_or_batch(rows: Sequence[CheckRow]) -> list[str]:
    """What squares of whole batches' gradients cost in accuracy."""
    for batch in rows:
        for sample in rows:
            same = sample.estimator == batch.estimator and batch.granularity == "batch" != sample.granularity
            if same and sample.relmae_positive < batch.relmae_positive:
                pair = f"{_percent(batch.relmae_positive)} instead of {_percent(sample.relmae_positive)}"
                return [f"Per batch, {sample.name} is off by {pair}."]
    return []


def _warning(row: CheckRow) -> str:
    """What speaks against an estimator."""
    ratio = row.trace_ratio
    if isinstance(row.estimator, SquaredBatchGradient):
        off = f"{row.name} is off by {_percent(row.relmae_positive)} and would be another number with other batches"
        return f"{off}: do not take it for F."
    if isinstance(row.estimator, Empirical):
        if not 0.8 <= ratio <= 1.25:
            factor = max(ratio, 1 / ratio) if ratio else math.inf
            off = f"{row.name} is off by a factor {factor:.2g} (its trace is {ratio:.2g} times that of F)"
            return f"{off}: labels and model disagree; do not take it for F."
        trace, entries = _percent(abs(ratio - 1)), _percent(row.relmae_positive)
        return f"{row.name} has the trace of F within {trace}, its entries within {entries}."
    return ""


def _error_bars(rows: Sequence[CheckRow]) -> list[str]:
    """Which estimators' error bars are too small."""
    small = [
        f"{row.name} ({_percent(row.coverage)})" for row in rows if row.coverage is not None and row.coverage < 0.85
    ]
    if not small:
        return []
    text = f"Two standard errors cover less than 85 % of the entries for {', '.join(small)}: few squares contribute to "
    return [text + "each of them. Over more data error bars get better."]


def _check_cells(row: CheckRow) -> tuple[str, ...]:
    target = row.target.split(" (")[0]
    short = "biased" if target.endswith("biased for F") else {"not a Fisher information": "not F"}.get(target, target)
    covered = "-" if row.coverage is None else f"{100 * row.coverage:.0f} %"
    numbers = (f"{row.passes:.4g}", f"{row.relmae_positive:.3g}", f"{row.trace_ratio:.3g}")
    return (
        row.name,
        short,
        *numbers,
        f"{row.rank_correlation:.3f}",
        covered,
        f"{row.time:.2f}" if row.time < 10 else f"{row.time:.0f}",
    )


def _times(row: CheckRow) -> str:
    return f"{row.time:.2g} times forward + backward"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 1 else f"a factor {1 + value:.2g}"
