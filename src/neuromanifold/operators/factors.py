"""`fisher_factors`: the gradients of probes themselves, F = Σ_r g_r g_rᵀ: low rank, and everything in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import (
    Reduction,
    check_reduction,
    finite_number,
    integer_in_range,
    message,
    one_of,
    promoted,
)
from neuromanifold.estimators import Estimator, Hutchinson
from neuromanifold.operators.krylov import Eigenpairs, times
from neuromanifold.operators.layout import ParameterLayout, V
from neuromanifold.operators.metric import Solution, StoredMetric, stored_fields
from neuromanifold.persample.accumulate import GradientRows
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.problem import Problem, refuse_a_part
from neuromanifold.problem.progress import number_of_batches
from neuromanifold.results.files import reads
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.trace import TraceEstimate
from neuromanifold.run.fisher import make_provenance
from neuromanifold.run.loop import run
from neuromanifold.run.settings import LoopOptions, Settings

GIB = 2**30
_PIECE = 2**24  # numbers that are converted at a time


@torch.inference_mode(mode=False)
def fisher_factors(
    model: nn.Module,
    data: Iterable[object],
    estimator: Estimator | None = None,
    granularity: Literal["batch", "sample"] = "batch",
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    max_bytes: int = 4 * GIB,
    seed: int = 0,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
) -> FisherFactors:
    """Return the stack G of the gradients g of probes, with E[GᵀG] = F: a low-rank estimate of the whole matrix.

    Cost: one backward pass for each batch and probe, and memory for the rows that are kept.  Arguments that are not
    listed are those of `fisher_diagonal`.

    Args:
        granularity: "batch" keeps a gradient for each batch and probe, by one ordinary backward pass.  "sample" keeps
            one for each sample and probe: less noise, more memory, and needed for `nm.Exact()` and `nm.Empirical()`.
        dtype: of the rows that are kept: float32, float64, bfloat16 or float16.
        device: of the rows that are kept; the model's unless given.
        max_bytes: refuse to keep more than that, as soon as it can be told.

    Returns:
        A `FisherFactors`: F as an operator with products, spectrum and damped solutions.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected, or the rows take more than `max_bytes`.

    Example:
        >>> F = nm.fisher_factors(model, data, nm.Exact(), granularity="sample")
        >>> F.rank, F.eigenpairs(2).values.shape
        (64, torch.Size([2]))
    """
    estimator = Hutchinson() if estimator is None else estimator
    one_of(granularity, "granularity", "batch", "sample")
    refuse_a_part(data, "fisher_factors")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    settings, view = Settings.of(estimator, granularity, seed), check_reduction(reduction)
    layout = ParameterLayout.of(problem.parameters)
    device = problem.device if device is None else device
    one_of(dtype, "dtype", torch.float32, torch.float64, torch.bfloat16, torch.float16)
    stack = _KeptRows(layout.size, dtype, device, data, max_bytes)
    tensors = list(problem.parameters.values())
    rows = GradientRows(tensors, promoted(dtype), stack.take, stack.reserve, stack.after_batch)
    counts = run(problem, settings, rows, LoopOptions(progress))
    return FisherFactors(
        stack.whole(), layout, counts.samples, make_provenance(problem, settings, counts), view, counts.positions
    )


class _KeptRows:
    """Keeps rows, and raises before they take more memory than allowed."""

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device | str, data: Iterable[object], max_bytes: int
    ) -> None:
        self._rows = [torch.zeros(0, size, dtype=dtype, device=device)]  # parameters that are not used have none
        self._row_bytes = size * dtype.itemsize
        self._limit = integer_in_range(max_bytes, "max_bytes", 1, 2**63, "memory for all rows")
        self._batches = number_of_batches(data)
        self._count = self._seen = 0

    def reserve(self, count: int) -> None:
        """Raise if `count` more rows would take too much memory."""
        self._check(self._count + count, "so far")

    def take(self, rows: Tensor) -> None:
        """Keep rows [n, P], in the wanted dtype."""
        self._count += len(rows)
        self._rows.append(_in_range(rows.to(self._rows[0]), rows))

    def whole(self) -> Tensor:
        """Return all rows as one tensor [r, P]."""
        return torch.cat(self._rows)

    def after_batch(self) -> None:
        """Raise after the first batch if all batches together would take too much memory."""
        self._seen += 1
        if self._seen == 1 and self._batches is not None:
            self._check(self._count * self._batches, f"for {self._batches} batches like the first")

    def _check(self, count: int, when: str) -> None:
        if count * self._row_bytes <= self._limit:
            return
        got = f"{count * self._row_bytes / GIB:.3g} GiB {when} ({count:,} gradients of {self._row_bytes:,} bytes)"
        advice = "Take fewer samples or parameters, granularity='batch', a smaller dtype, a device with room and a "
        advice += "higher limit, or nm.fisher_operator, which keeps none."
        raise ValueError(message("max_bytes", "enough for all rows", got, advice))


def _in_range(converted: Tensor, rows: Tensor, factor: float = 1.0) -> Tensor:
    """Return converted rows; raise if float16, of 6e-8 to 65,504, has lost a hundredth of `factor` times `rows`."""
    if converted.dtype != torch.float16 or (rows.dtype == torch.float16 and factor == 1.0):
        return converted
    size = lost = 0.0
    step = max(1, _PIECE // max(1, rows.shape[1]))
    for new, old in zip(torch.split(converted, step), torch.split(rows, step), strict=True):
        exact = factor * old.float()
        size = math.hypot(size, float(torch.linalg.vector_norm(exact)))
        lost = math.hypot(lost, float(torch.linalg.vector_norm(exact - new.to(exact.device))))
    if not lost <= 0.01 * size:
        got = f"torch.float16, which loses {lost:.3g} of gradients of length {size:.3g}"
        raise ValueError(message("dtype", "one that can hold the gradients", got, "Use torch.bfloat16."))
    return converted


class FisherFactors(StoredMetric):
    """F = Gᵀ G over samples, with the gradients g of probes as the rows of G [r, P]: what `nm.fisher_factors` returns.

    With unbiased probes E[F] is the Fisher information, though its rank is r; with `nm.Exact()` and a row for each
    sample it is the Fisher information itself.  Products, entries, norms, the spectrum and damped solutions come from G
    and from the small r×r matrix G Gᵀ, which is stored in float64.

    Example:
        >>> F = nm.fisher_factors(model, data, granularity="sample")
        >>> F.shape, F.rank
        ((67, 67), 32)
        >>> F.block("2.bias").shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        rows: Tensor,
        layout: ParameterLayout,
        count: int,
        provenance: Provenance,
        reduction: Reduction = "mean",
        positions: int = 0,
    ) -> None:
        self.rows = rows
        super().__init__(rows, layout, count, provenance, reduction, positions)

    @property
    def rank(self) -> int:
        """r, the number of gradients: F has at most this rank."""
        return len(self.rows)

    # ------------------------------------------------------------------------------------------------ parts of F

    def entries(self, i: Tensor, j: Tensor) -> Tensor:
        """F_ij for flat indices i and j of the same shape (`layout.slices` says where each parameter lies)."""
        if i.shape != j.shape:
            raise ValueError(message("j", f"of i's shape {list(i.shape)}", f"shape {list(j.shape)}"))
        for index, name in ((i, "i"), (j, "j")):
            if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.layout.size):
                raise ValueError(message(name, f"between 0 and {self.layout.size - 1}", "indices outside of that"))
        left, right = (self.rows[:, index.to(self.device).flatten()].to(self.precision) for index in (i, j))
        return ((left * right).sum(0) / self._divisor).view(i.shape)

    def block(self, name: str, other: str | None = None) -> Tensor:
        """The dense block [P_name, P_other] of F, a diagonal block unless `other` is given."""
        left, right = (self._columns(n).to(self.precision) for n in (name, name if other is None else other))
        return times(left.mT, right) / self._divisor

    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal entries F_ii by parameter name."""
        total = torch.zeros(self.layout.size, dtype=self.precision, device=self.device)
        for _, piece in self._pieces(self.precision):
            total += piece.square().sum(0)
        return self.layout.split(total / self._divisor)

    def filter(self, *patterns: str) -> FisherFactors:
        """F over the parameters whose names match one of the patterns, such as "encoder.*"."""
        names = [name for name in self.layout.shapes if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not names:
            some = ", ".join(list(self.layout.shapes)[:3])
            raise ValueError(message("patterns", f"matched by a parameter, such as {some}", str(patterns)))
        rows = torch.cat([self._columns(name) for name in names], 1)
        layout = ParameterLayout({name: self.layout.shapes[name] for name in names})
        return FisherFactors(rows, layout, self.count, self.provenance, self.reduction, self.positions)

    # ------------------------------------------------------------------------------------------------ spectrum

    @property
    def trace(self) -> TraceEstimate:
        """tr F = Σ_r ‖g_r‖².  Its standard error is an upper bound, √(c Σ_r ‖g_r‖⁴), c = `provenance.noise_factor`."""
        squares = [piece.square().sum(1) for _, piece in self._pieces(torch.float64)]
        total, fourth = (sum(float((value**power).sum()) for value in squares) for power in (1, 2))
        noise = math.sqrt(self.provenance.noise_factor * fourth) if self.provenance.seeds else 0.0
        return TraceEstimate(total, noise, self.count, self.provenance, self.reduction, self.positions)

    @property
    def frobenius_norm(self) -> float:
        """The Frobenius norm of F, which is that of G Gᵀ."""
        return float(torch.linalg.vector_norm(self._spectrum)) / self._divisor

    def eigenpairs(self, k: int = 1, tol: float | None = None, maxiter: int = 100, seed: int = 0) -> Eigenpairs:
        """The k largest eigenvalues, their vectors [P, k] and residuals: v = Gᵀu/√λ for eigenvectors u of G Gᵀ.

        Beyond the rank of G, where these say nothing, by the iteration of `Metric.eigenpairs`.
        """
        k = integer_in_range(k, "k", 1, self.layout.size, f"there are {self.layout.size} parameters")
        if self.rank > self.layout.size or k > self.rank:
            return super().eigenpairs(k, tol, maxiter, seed)
        values, left = self._pairs[0][:k], self._pairs[1][:, :k]
        if not float(values[-1]) > 1e3 * torch.finfo(self.precision).eps * float(values[0]):
            return super().eigenpairs(k, tol, maxiter, seed)
        vectors = self._transposed((left / values.sqrt()).to(self.precision))
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=0)
        return self._eigenpairs(values, vectors, k)

    def log_determinant(self, damping: float) -> float:
        """log det(F + damping I) = P log(damping) + log det(I + G Gᵀ/damping); half of it is the log volume element."""
        damping = finite_number(damping, "damping", positive=True)
        values = self._spectrum / self._divisor
        return float((values / damping).log1p().sum()) + self.layout.size * math.log(damping)

    def solve(self, rhs: V, damping: float = 0.0, tol: float = 1e-5, maxiter: int = 1000) -> Solution[V]:
        """x with (F + damping I) x = rhs: (rhs - Gᵀ (damping I + G Gᵀ)⁻¹ G rhs)/damping (Woodbury), refined once.

        In float64, with (damping I + G Gᵀ)⁻¹ from the spectrum of G Gᵀ.  Without damping, or with more rows than
        parameters, by conjugate gradients with `tol` and `maxiter`.
        """
        damping = finite_number(damping, "damping")
        if not damping or self.rank > self.layout.size:
            return super().solve(rhs, damping, tol, maxiter)
        tol = self._tolerance(tol)
        block, back = self._read(rhs, "rhs")
        values, left = self._pairs
        shrunk = 1 / (values.clamp(min=0) + damping * self._divisor)[:, None]

        def woodbury(b: Tensor) -> Tensor:
            return (b - self._transposed(left @ (shrunk * (left.mT @ self._multiplied(b))))) / damping

        exact = block.double()  # the difference below is mostly much smaller than b
        x = woodbury(exact)
        x = x + woodbury(exact - self._scaled(x) - damping * x)
        return self._solution(back(x.to(self.precision)), self._residuals(x, exact, damping), tol)

    # ------------------------------------------------------------------------------------------------ as a value

    def __add__(self, other: FisherFactors) -> FisherFactors:
        if not isinstance(other, FisherFactors):
            return NotImplemented
        self.provenance.check_like(other.provenance)
        if self.layout != other.layout:
            raise ValueError(message("other", "factors of the same parameters", "factors of other ones"))
        provenance = self.provenance.plus(other.provenance)
        rows = torch.cat([self.rows, other.rows.to(self.device)])  # in the wider of both dtypes
        counts = self.count + other.count, self.positions + other.positions
        return FisherFactors(rows, self.layout, counts[0], provenance, self.reduction, counts[1])

    def _times(self, factor: float) -> FisherFactors:
        root, provenance = math.sqrt(factor), self.provenance.times(factor)
        rows = _in_range(self.rows * root, self.rows, root)
        return FisherFactors(rows, self.layout, self.count, provenance, self.reduction, self.positions)

    def __repr__(self) -> str:
        size = self.rows.numel() * self.rows.element_size() / 2**20
        kept = f"{self.rank} gradients of {self.layout.size:,} parameters ({size:.1f} MiB)"
        return f"{type(self).__name__}({self.reduction}): {kept}, {self.count} samples, {self.provenance.estimator}"

    def to(self, target: torch.device | torch.dtype | str) -> FisherFactors:
        """The factors on another device, or in another floating-point type."""
        rows = _in_range(self.rows.to(target), self.rows)
        return FisherFactors(rows, self.layout, self.count, self.provenance, self.reduction, self.positions)

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file with its provenance, all or nothing; `nm.load` reads it."""
        self._save(path, "factors", {"rows": self.rows})

    # ------------------------------------------------------------------------------------------------ inside

    def _columns(self, name: str) -> Tensor:
        return self.rows[:, self.layout.slices[self.provenance.find(name, self.layout.shapes)]]

    def _pieces(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows at a time, converted to `dtype`, and their range."""
        step = max(1, _PIECE // max(1, self.layout.size))
        for start in range(0, self.rank, step):
            rows = slice(start, start + step)
            yield rows, self.rows[rows].to(dtype)

    def _multiplied(self, block: Tensor) -> Tensor:
        """Return G B [r, m] for B [P, m]."""
        if not self.rank:
            return block.new_zeros(0, block.shape[1])
        return torch.cat([times(piece, block) for _, piece in self._pieces(block.dtype)])

    def _transposed(self, block: Tensor) -> Tensor:
        """Return Gᵀ B [P, m] for B [r, m]."""
        total = block.new_zeros(self.layout.size, block.shape[1])
        for rows, piece in self._pieces(block.dtype):
            total += times(piece.mT, block[rows])
        return total

    def _product(self, block: Tensor) -> Tensor:
        return self._transposed(self._multiplied(block))

    @cached_property
    def _gram(self) -> Tensor:
        """G Gᵀ, or Gᵀ G if that is smaller, in float64; both have the same eigenvalues but for zeros."""
        if self.rank > self.layout.size:
            return sum((piece.mT @ piece for _, piece in self._pieces(torch.float64)), self._zeros(self.layout.size))
        total, step = self._zeros(self.rank), max(1, _PIECE // max(1, self.rank))
        for start in range(0, self.layout.size, step):
            piece = self.rows[:, start : start + step].double()
            total += piece @ piece.mT
        return total

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, size, dtype=torch.float64, device=self.device)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of `_gram`, descending, and eigenvectors as columns."""
        values, vectors = torch.linalg.eigh(self._gram)
        return values.flip(0), vectors.flip(1)

    @cached_property
    def _spectrum(self) -> Tensor:
        """The min(r, P) largest eigenvalues of the sum over samples, in float64; all others are zero."""
        values: Tensor = torch.linalg.eigvalsh(self._gram)
        return values.clamp(min=0)


@reads("factors")
def factors_from_file(tensors: dict[str, Tensor], head: dict[str, Any]) -> FisherFactors:
    """The factors that `FisherFactors.save` wrote."""
    return FisherFactors(tensors["rows"], *stored_fields(head))
