"""The result of `fisher_bounds`: every statement of section 3 with its bounds and the actual value, as one table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.bounds.network import Terms
from neuromanifold.bounds.norms import Norm
from neuromanifold.core.checks import Reduction, check_reduction, integer_in_range
from neuromanifold.results import DiagonalFisher, Provenance
from neuromanifold.results.files import reads, save_tensors
from neuromanifold.results.scaling import Reducible
from neuromanifold.results.table import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Row(NamedTuple):
    """One line of the table: lower <= actual <= upper, None where there is no such bound or it is not known."""

    statement: str
    quantity: str
    lower: float | None
    actual: float | None
    upper: float | None
    error: float = 0.0  # of the actual value: a standard error, or a residual

    @property
    def tightness(self) -> tuple[float | None, float | None]:
        """lower/actual and actual/upper: 1 is an equality."""
        return _ratio(self.lower, self.actual), _ratio(self.actual, self.upper)

    def scaled(self, factor: float) -> Row:
        """Return the row times a factor: every quantity is of the first degree in F."""
        lower, actual, upper = (None if value is None else value * factor for value in self[2:5])
        return self._replace(lower=lower, actual=actual, upper=upper, error=self.error * factor)


class Cost(NamedTuple):
    """The cost of one part of a run."""

    part: str
    passes: int  # backward passes over a batch, or over one sample where there is no rule
    seconds: float


class Diagonals(NamedTuple):
    """diag F^LR(k) <= diag F <= diag F^DG (Prop. 5)."""

    lower: DiagonalFisher
    actual: DiagonalFisher
    upper: DiagonalFisher


@dataclass(frozen=True)
class Actual:
    """Norms of sums over all x, which single x do not determine; empty where they were not computed."""

    upper_error: Norm | None = None  # ‖F^DG - F‖_F
    lower_errors: dict[int, Norm] = field(default_factory=dict)  # ‖F - F^LR(k)‖_F by rank
    empirical_error: Norm | None = None  # ‖F - F^emp‖_σ
    how: str = "not computed"
    upper_spectral: Norm | None = None  # ‖F^DG - F‖_σ


@dataclass(frozen=True, eq=False)
class NetworkBounds(Reducible):
    """Propositions 5 to 10 and Corollary 6 for one network and its data: what `nm.fisher_bounds` returns.

    `terms` has what each distribution x contributes, in the order of the data; positions of a sequence are
    distributions of their own.  What is stored are sums; `reduction` only chooses the view, per sample ("mean") or
    "sum".

    Example:
        >>> bounds = nm.fisher_bounds(model, data)
        >>> row = bounds.rows[0]
        >>> row.lower <= row.actual <= row.upper
        True
    """

    terms: Terms
    actual: Actual
    diagonals: Diagonals | None
    count: int  #: samples
    classes: int
    rank: int
    costs: tuple[Cost, ...]
    provenance: Provenance
    has_labels: bool = True
    reduction: Reduction = "mean"

    @property
    def positions(self) -> int:
        """The number of distributions x: as many as samples, or positions of sequences."""
        return len(self.terms.trace)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The statements in the paper's order; "centred" and "by x" are sharper forms of ours."""
        t = self.terms
        below = {
            f"Prop. 5, rank {self.rank}": t.lower_trace[:, self.rank - 1],
            "Cor. 6, first": t.smallest,
            "Cor. 6, second": t.paired,
            "  first, centred": t.smallest_centred,
            "  second, centred": t.paired_centred,
        }
        trace, above = _total(t.trace), _total(t.upper_trace)
        traces = [Row(name, "tr F", _total(bound), trace, above) for name, bound in below.items()]
        rows = (*traces, *self._upper(), *self._lower(self.rank), *self._eFIM())
        return tuple(row.scaled(self._factor) for row in rows)

    def lower_error(self, rank: int) -> tuple[Row, ...]:
        """Prop. 8 for any rank from 1 to C - 1: its bound, the relaxed form, and ours."""
        rank = integer_in_range(rank, "rank", 1, self.classes - 1, f"there are {self.classes} classes")
        return tuple(row.scaled(self._factor) for row in self._lower(rank))

    def lower_trace(self, rank: int) -> float:
        """tr F^LR(k), which is tr F for k = C - 1."""
        rank = integer_in_range(rank, "rank", 1, self.classes - 1, f"there are {self.classes} classes")
        return _total(self.terms.lower_trace[:, rank - 1]) * self._factor

    @property
    def ranks(self) -> tuple[Row, ...]:
        """Prop. 8 for every rank."""
        return tuple(self.lower_error(rank)[0] for rank in range(1, self.classes))

    def __str__(self) -> str:
        header = ("statement", "of", "lower", "actual", "upper", "lower/actual", "actual/upper")
        table = text_table(header, [_statement_cells(row) for row in self.rows], left=2)
        where = f"{self.count} samples" + (f", {self.positions} positions" if self.positions != self.count else "")
        title = f"{type(self).__name__} ({self.reduction}): {where}, {self.classes} classes"
        costs = "; ".join(f"{cost.part} {cost.passes} passes, {cost.seconds:.3g} s" for cost in self.costs)
        notes = [f"norms of sums: {self.actual.how}", f"cost: {costs}"]
        if not self.has_labels:
            notes.insert(0, "Prop. 9 needs the label of every sample, which the data do not have")
        return "\n".join([title, table, *notes])

    __repr__ = __str__

    def plot(self) -> Figure:
        """Every statement as an interval around the actual value, on a logarithmic axis."""
        from neuromanifold.bounds.plot import plot_rows

        return plot_rows(self.rows)

    def save(self, path: str | Path) -> None:
        """Write all but the diagonals (which have a `save` of their own) to a safetensors file; `nm.load` reads it."""
        actual = {one.name: getattr(self.actual, one.name) for one in fields(self.actual)}  # not recursively: tuples
        texts = {
            "actual": json.dumps(actual),
            "numbers": json.dumps([self.count, self.classes, self.rank, self.has_labels, self.reduction]),
            "costs": json.dumps(self.costs),
            "provenance": self.provenance.to_json(),
        }
        save_tensors(path, self.terms._asdict(), "bounds", texts)

    def to_dict(self) -> dict[str, object]:
        """The table and its cost as values that JSON can hold."""
        rows = [{**row._asdict(), "tightness": row.tightness} for row in self.rows]
        numbers = {"count": self.count, "positions": self.positions, "classes": self.classes, "rank": self.rank}
        costs = [cost._asdict() for cost in self.costs]
        more = {"how": self.actual.how, "costs": costs, "provenance": asdict(self.provenance)}
        return {"rows": rows, "reduction": self.reduction, **numbers, **more}

    @property
    def _factor(self) -> float:
        return 1 / self.count if self.reduction == "mean" else 1.0

    @override
    def _view(self, reduction: Reduction) -> NetworkBounds:
        diagonals = self.diagonals
        if diagonals is not None:
            diagonals = Diagonals(*(d.mean if reduction == "mean" else d.sum for d in diagonals))
        return replace(self, reduction=reduction, diagonals=diagonals)

    def _upper(self) -> list[Row]:
        """Prop. 7: terms are positive matrices, so that the norm of their sum is at least that of orthogonal ones.

        In the spectral norm that is the largest of the terms' own norms ‖Jᵀp‖², and the bound from above is the same.
        """
        t, found = self.terms, []
        norms = (
            ("Prop. 7", "‖F^DG - F‖_F", math.sqrt(_total(t.upper_error.square())), self.actual.upper_error),
            ("Prop. 7, spectral", "‖F^DG - F‖_σ", float(t.upper_error.max()), self.actual.upper_spectral),
        )
        for name, quantity, lower, norm in norms:
            actual, error = _value_and_error(norm)
            for statement, bound in ((name, t.upper_bound), ("  by x", t.upper_error)):
                found.append(Row(statement, quantity, lower, actual, _total(bound), error))
        return found

    def _lower(self, rank: int) -> list[Row]:
        """Prop. 8; the lower bound is that of Prop. 7's proof, for these terms."""
        t, k, quantity = self.terms, rank - 1, f"‖F - F^LR({rank})‖_F"
        actual, error = _value_and_error(self.actual.lower_errors.get(rank))
        own = math.sqrt(_total(t.lower_error[:, k].square()))
        return [
            Row(f"Prop. 8, rank {rank}", quantity, None, actual, _total(t.lower_bound[:, k]), error),
            Row("  relaxed", quantity, None, actual, _total(t.lower_relaxed[:, k]), error),
            Row("  centred", quantity, None, actual, _total(t.lower_centred[:, k]), error),
            Row("  by x", quantity, own, actual, _total(t.lower_error[:, k]), error),
        ]

    def _eFIM(self) -> list[Row]:  # noqa: N802
        t, found = self.terms, []
        if self.has_labels:
            actual, error = _value_and_error(self.actual.empirical_error)
            for name, bound in (
                ("Prop. 9", t.empirical_bound),
                ("  centred", t.empirical_centred),
                ("  by x", t.empirical_error),
            ):
                found.append(Row(name, "‖F - F^emp‖_σ", None, actual, _total(bound), error))
        worst = _total(t.worst_error)
        found.append(Row("Prop. 10", "Σ_x worst ‖F - F^emp‖_σ", _total(t.worst_bound), worst, None))
        found.append(Row("  centred", "Σ_x worst ‖F - F^emp‖_σ", _total(t.worst_centred), worst, None))
        return found


@reads("bounds")
def bounds_from_file(tensors: dict[str, Tensor], head: dict[str, Any]) -> NetworkBounds:
    """The bounds that `NetworkBounds.save` wrote, without diagonals."""
    values = json.loads(head["actual"])
    lower = {int(rank): Norm(*norm) for rank, norm in values["lower_errors"].items()}
    upper, empirical, spectral = (
        Norm(*values[name]) if values.get(name) else None
        for name in ("upper_error", "empirical_error", "upper_spectral")
    )
    count, classes, rank, has_labels, reduction = json.loads(head["numbers"])
    costs = tuple(Cost(*cost) for cost in json.loads(head["costs"]))
    terms, actual = Terms(**tensors), Actual(upper, lower, empirical, values["how"], spectral)
    provenance, view = Provenance.from_json(head["provenance"]), check_reduction(reduction)
    return NetworkBounds(terms, actual, None, count, classes, rank, costs, provenance, has_labels, view)


def _total(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def _value_and_error(norm: Norm | None) -> tuple[float | None, float]:
    return (None, 0.0) if norm is None else (norm.value, norm.error)


def _ratio(smaller: float | None, larger: float | None) -> float | None:
    if smaller is None or larger is None:
        return None
    return smaller / larger if larger else 1.0  # 0 <= 0


def _statement_cells(row: Row) -> tuple[str, ...]:
    actual, lower, upper, *ratios = map(_four_digits, (row.actual, row.lower, row.upper, *row.tightness))
    return row.statement, row.quantity, lower, actual + (f" ± {row.error:.1g}" if row.error else ""), upper, *ratios


def _four_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
