"""`fisher_matrix`: F itself, dense or in blocks, for small models and single layers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from neuromanifold.core import Categorical
from neuromanifold.core.checks import Reduction, check_reduction, finite_number, integer_in_range, message, one_of
from neuromanifold.estimators import Estimator, Exact
from neuromanifold.operators.factors import GIB
from neuromanifold.operators.krylov import Eigenpairs, times
from neuromanifold.operators.layout import ParameterLayout, V
from neuromanifold.operators.metric import Solution, StoredMetric, stored_fields
from neuromanifold.operators.stochastic import warn_below_rounding
from neuromanifold.persample.accumulate import GradientRows
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.problem import Problem, refuse_a_part
from neuromanifold.results.files import reads
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.trace import TraceEstimate
from neuromanifold.run.fisher import make_provenance
from neuromanifold.run.loop import run
from neuromanifold.run.settings import LoopOptions, Settings


@torch.inference_mode(mode=False)
def fisher_matrix(
    model: nn.Module,
    data: Iterable[object],
    estimator: Estimator | None = None,
    blocks: Literal["layer"] | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    max_bytes: int = 4 * GIB,
    seed: int = 0,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
) -> FisherMatrix:
    """Return F = Σ_x Jᵀ M(x) J as a dense matrix [P, P], or as dense blocks, one for the parameters of each layer.

    For small models and single layers.  Cost: C - 1 backward passes for each batch with the default `nm.Exact()`, and
    the gradients [B, P] of the samples of a batch at a time.  Arguments that are not listed are those of
    `fisher_diagonal`.

    Args:
        estimator: `nm.Exact()` unless given; any other is squared per sample, too.
        blocks: None for all of F, "layer" for the diagonal blocks of modules.
        dtype: float32 or float64; that of the parameters unless given.
        max_bytes: refuse if the matrix takes more than that.

    Returns:
        A `FisherMatrix`, whose `.dense()` is the tensor.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected, or the matrix takes more than
            `max_bytes`.

    Example:
        >>> F = nm.fisher_matrix(model, data)
        >>> F.dense().shape
        torch.Size([67, 67])
        >>> list(nm.fisher_matrix(model, data, blocks="layer"))
        ['0', '2']
    """
    estimator = Exact() if estimator is None else estimator
    if blocks not in (None, "layer"):
        raise ValueError(message("blocks", "None (all of F) or 'layer'", repr(blocks)))
    refuse_a_part(data, "fisher_matrix")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    settings, view = Settings.of(estimator, "sample", seed), check_reduction(reduction)
    chosen, layout = problem.parameters, ParameterLayout.of(problem.parameters)
    exact = any(parameter.dtype == torch.float64 for parameter in chosen.values())
    dtype = (torch.float64 if exact else torch.float32) if dtype is None else dtype
    one_of(dtype, "dtype", torch.float32, torch.float64)
    indices = layout.layer_indices(problem.device) if blocks else {"": slice(None)}
    layers = layout.layers() if blocks else {"": list(layout.shapes)}
    sizes = {layer: sum(layout.shapes[name].numel() for name in names) for layer, names in layers.items()}
    _check_size(sizes, dtype, blocks, integer_in_range(max_bytes, "max_bytes", 1, 2**63, "memory for the matrix"))
    sums = {name: torch.zeros(n, n, dtype=dtype, device=problem.device) for name, n in sizes.items()}

    def take(rows: Tensor) -> None:
        for name, total in sums.items():
            part = rows[:, indices[name]]
            total.addmm_(part.mT, part)

    def reserve(count: int) -> None:
        if (needed := count * layout.size * dtype.itemsize) > max_bytes:
            got = f"{needed / GIB:.3g} GiB for the gradients of a batch of {count} samples"
            raise ValueError(message("max_bytes", "enough for F", got, "Use smaller batches, or fewer `parameters`."))

    rows = GradientRows(list(chosen.values()), dtype, take, reserve)
    counts = run(problem, settings, rows, LoopOptions(progress))
    return FisherMatrix(
        sums, layout, counts.samples, make_provenance(problem, settings, counts), view, counts.positions
    )


def _check_size(sizes: dict[str, int], dtype: torch.dtype, blocks: str | None, limit: int) -> None:
    """Raise if blocks for so many parameters would take more bytes than `limit`, and say how many."""
    needed = dtype.itemsize * sum(size**2 for size in sizes.values())
    if needed <= limit:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    count = sizes[largest]
    whose = (
        f", most of it for the {count:,} parameters of {largest!r}" if blocks else f" ({count:,} parameters squared)"
    )
    advice = "Choose fewer `parameters`" + ("" if blocks else ", or blocks='layer'")
    advice += "; nm.fisher_operator and nm.fisher_factors need no matrix."
    raise ValueError(message("max_bytes", "enough for F", f"{needed / GIB:.3g} GiB{whose}", advice))


class FisherMatrix(StoredMetric, Mapping[str, Tensor]):
    """F as a dense matrix, or as dense blocks, one for each layer: what `nm.fisher_matrix` returns.

    As a mapping it gives the blocks by the module's name; a single block for all parameters is named "".  With several
    blocks, entries between layers are taken as zero.

    Example:
        >>> F = nm.fisher_matrix(model, data, blocks="layer")
        >>> F.layer("2").eigenvalues().shape
        torch.Size([27])
    """

    def __init__(
        self,
        blocks: dict[str, Tensor],
        layout: ParameterLayout,
        count: int,
        provenance: Provenance,
        reduction: Reduction = "mean",
        positions: int = 0,
    ) -> None:
        """`blocks`: sums over samples, of all parameters (under "") or of those of each layer."""
        self.blocks = blocks
        super().__init__(next(iter(blocks.values())), layout, count, provenance, reduction, positions)

    def __getitem__(self, name: str) -> Tensor:
        return self.blocks[name] / self._divisor

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def dense(self) -> Tensor:
        """Return all of F as one matrix [P, P], with zeros between blocks."""
        if self._is_whole:
            return self[""]
        whole = torch.zeros(self.shape, dtype=self.precision, device=self.device)
        for name, index in self._indices.items():
            rows = whole.new_zeros(len(self.blocks[name]), self.layout.size)
            rows[:, index] = self[name]
            whole[index] = rows
        return whole

    def layer(self, name: str) -> FisherMatrix:
        """Return the metric of one layer alone; "" is the whole matrix if there is only one block."""
        layers = {"": list(self.layout.shapes)} if self._is_whole and name == "" else self.layout.layers()
        if name not in layers:
            raise ValueError(message("name", f"one of {list(layers)[:4]} ...", repr(name)))
        kept = {parameter: self.layout.shapes[parameter] for parameter in layers[name]}
        if name in self.blocks:
            block = self.blocks[name]
        else:
            index = self.layout.layer_indices(self.device)[name]
            block = self.blocks[""][index][:, index]
        fields = self.count, self.provenance, self.reduction, self.positions
        return FisherMatrix({"": block}, ParameterLayout(kept), *fields)

    # ------------------------------------------------------------------------------------------------ spectrum

    @property
    def trace(self) -> TraceEstimate:
        """tr F.  Its standard error is an upper bound for random estimators: √c Σ ‖block‖, c as for factors.

        Var(Σ_r ‖g_r‖²) <= c Σ_r E‖g_r‖⁴, and ‖Σ_r g_r g_rᵀ‖² = Σ_rs (g_rᵀ g_s)² is at least Σ_r ‖g_r‖⁴; standard errors
        of blocks, which share their noise, add.
        """
        total = sum(float(block.diagonal().sum(dtype=torch.float64)) for block in self.blocks.values())
        bound = math.sqrt(self.provenance.noise_factor) * sum(self._norms()) if self.provenance.seeds else 0.0
        return TraceEstimate(total, bound, self.count, self.provenance, self.reduction, self.positions)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal entries F_ii by parameter name."""
        flat = torch.empty(self.layout.size, dtype=self.precision, device=self.device)
        for name, index in self._indices.items():
            flat[index] = self.blocks[name].diagonal()
        return self.layout.split(flat / self._divisor)

    @property
    @override
    def frobenius_norm(self) -> float:
        return math.hypot(*self._norms()) / self._divisor

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues of F, descending, [P]."""
        return torch.cat([values for values, _ in self._spectra.values()]).sort(descending=True).values / self._divisor

    def eigenpairs(self, k: int = 1, tol: float | None = None, maxiter: int = 100, seed: int = 0) -> Eigenpairs:
        """The k largest eigenvalues, their vectors [P, k] and residuals, by a dense eigensolver."""
        del tol, maxiter, seed
        k = integer_in_range(k, "k", 1, self.layout.size, f"there are {self.layout.size} parameters")
        values = torch.cat([values for values, _ in self._spectra.values()])
        chosen = values.topk(k).indices
        vectors = torch.zeros(self.layout.size, k, dtype=self.precision, device=self.device)
        start = 0  # of the block's eigenvalues among all of them
        for name, index in self._indices.items():
            stop = start + len(self.blocks[name])
            own = ((chosen >= start) & (chosen < stop)).nonzero().flatten()
            rows = vectors.new_zeros(stop - start, k)
            rows[:, own] = self._spectra[name][1][:, chosen[own] - start]
            vectors[index], start = rows, stop
        return self._eigenpairs(values[chosen], vectors, self.layout.size)

    def log_determinant(self, damping: float) -> float:
        """log det(F + damping I); half of it is the logarithm of the volume element √det."""
        damping = finite_number(damping, "damping", positive=True)
        values = self.eigenvalues().double().clamp(min=0)
        warn_below_rounding(damping, float(values[0]) if len(values) else 0.0, self.precision)
        return float((values + damping).log().sum())

    def solve(self, rhs: V, damping: float = 0.0, tol: float = 1e-5, maxiter: int = 1000) -> Solution[V]:
        """x with (F + damping I) x = rhs, from the spectrum; without damping the shortest x that fits best."""
        del tol, maxiter
        damping = finite_number(damping, "damping")
        block, back = self._read(rhs, "rhs")
        x = torch.empty_like(block)
        for name, index in self._indices.items():
            values, vectors = self._spectra[name]
            values = values.clamp(min=0) / self._divisor
            warn_below_rounding(damping, float(values.amax()) if len(values) else 0.0, self.precision)
            values = values + damping
            smallest = torch.finfo(values.dtype).eps * len(values) * values.amax() if values.numel() else 0.0
            inverse = torch.where(values > smallest, 1 / values, 0.0) if not damping else 1 / values
            x[index] = times(vectors, inverse[:, None] * times(vectors.mT, block[index]))
        return Solution(back(x), float(self._residuals(x, block, damping).max()) if block.numel() else 0.0)

    # ------------------------------------------------------------------------------------------------ as a value

    def __add__(self, other: FisherMatrix) -> FisherMatrix:
        if not isinstance(other, FisherMatrix):
            return NotImplemented
        self.provenance.check_like(other.provenance)
        if self.layout != other.layout or list(self) != list(other):
            raise ValueError(message("other", "a matrix of the same parameters and blocks", "one of other ones"))
        provenance = self.provenance.plus(other.provenance)
        blocks = {name: block + other.blocks[name].to(block) for name, block in self.blocks.items()}
        counts = self.count + other.count, self.positions + other.positions
        return FisherMatrix(blocks, self.layout, counts[0], provenance, self.reduction, counts[1])

    def _times(self, factor: float) -> FisherMatrix:
        blocks = {name: block * factor for name, block in self.blocks.items()}
        provenance = self.provenance.times(factor)
        return FisherMatrix(blocks, self.layout, self.count, provenance, self.reduction, self.positions)

    def __repr__(self) -> str:
        kind = "dense" if self._is_whole else f"{len(self)} blocks"
        what = f"{self.layout.size:,} parameters, {kind}, {self.count} samples, {self.provenance.estimator}"
        return f"{type(self).__name__}({self.reduction}): {what}"

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file with its provenance, all or nothing; `nm.load` reads it."""
        blocks = {f"block/{name}": block for name, block in self.blocks.items()}
        self._save(path, "matrix", blocks, blocks=json.dumps(list(self)))

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _is_whole(self) -> bool:
        return list(self.blocks) == [""]

    @cached_property
    def _indices(self) -> dict[str, slice | Tensor]:
        """Where each block's parameters are in the vector of all of them."""
        return {"": slice(None)} if self._is_whole else self.layout.layer_indices(self.device)

    @cached_property
    def _spectra(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Eigenvalues, ascending, and eigenvectors of each block of the sum over samples."""
        return {name: torch.linalg.eigh(block) for name, block in self.blocks.items()}

    def _norms(self) -> list[float]:
        return [float(torch.linalg.matrix_norm(block)) for block in self.blocks.values()]

    def _product(self, block: Tensor) -> Tensor:
        product = torch.empty_like(block)
        for name, index in self._indices.items():
            product[index] = times(self.blocks[name], block[index])
        return product


@reads("matrix")
def matrix_from_file(tensors: dict[str, Tensor], head: dict[str, Any]) -> FisherMatrix:
    """The matrix that `FisherMatrix.save` wrote."""
    blocks = {name: tensors[f"block/{name}"] for name in json.loads(head["blocks"])}
    return FisherMatrix(blocks, *stored_fields(head))
