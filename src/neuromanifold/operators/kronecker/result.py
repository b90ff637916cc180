"""The result of `fisher_kronecker`: all that follows from eigenvectors and eigenvalues of the blocks of F."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import Reduction, finite_number, integer_in_range, message, random_seed
from neuromanifold.operators.kronecker.blocks import EigenBlock
from neuromanifold.operators.krylov import Eigenpairs
from neuromanifold.operators.layout import ParameterLayout, V
from neuromanifold.operators.metric import Solution, StoredMetric, stored_fields
from neuromanifold.persample.accumulate import WeightSharing
from neuromanifold.results.files import reads
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.table import WIDTH, text_table
from neuromanifold.results.trace import TraceEstimate

_SIDES = ("eigenvalues", "left", "right", "stderr")


class KroneckerFisher(StoredMetric):
    """F as a block-diagonal matrix with known eigenvectors and eigenvalues: what `nm.fisher_kronecker` returns.

    The block of a layer is (U ⊗ V) diag(E) (U ⊗ V)ᵀ, with the eigenvectors of its two Kronecker factors.  E are the
    products of the factors' eigenvalues (KFAC), or, `corrected`, the diagonal of F itself in that basis (EKFAC), which
    is nearest to F for these eigenvectors.  `structure` says how each parameter was done.

    Example:
        >>> F = nm.fisher_kronecker(model, data)
        >>> F.eigenvalues().shape, F.corrected
        (torch.Size([67]), True)
        >>> F.sample(damping=1.0)["2.bias"].shape  # from N(0, (F + damping I)⁻¹)
        torch.Size([1, 3])
    """

    def __init__(
        self,
        blocks: Sequence[EigenBlock],
        layout: ParameterLayout,
        count: int,
        provenance: Provenance,
        reduction: Reduction = "mean",
        positions: int = 0,
        weight_sharing: WeightSharing = "expand",
    ) -> None:
        """`blocks`: sums over samples; together they have each parameter of the layout once."""
        self.blocks = {block.names[0]: block for block in blocks}
        self.weight_sharing = weight_sharing
        super().__init__(blocks[0].eigenvalues, layout, count, provenance, reduction, positions)

    @property
    def corrected(self) -> bool:
        """Whether the eigenvalues of layers are the diagonal of F in the basis of the factors' eigenvectors."""
        return any(block.is_corrected for block in self.blocks.values())

    @property
    def structure(self) -> dict[str, str]:
        """How each parameter was done: the factors of its block, "dense", "diagonal", "unused" (no gradient came)."""
        how = {name: block.how for block in self.blocks.values() for name in block.names}
        return {name: how[name] for name in self.layout.shapes}

    @property
    def kronecker(self) -> KroneckerFisher:
        """The same with the products of the factors' eigenvalues in place of the corrected ones."""
        return self._with([block.uncorrected() for block in self.blocks.values()])

    def layer(self, name: str) -> KroneckerFisher:
        """Return the metric of one layer alone, by the module's name."""
        layers = self.layout.layers()
        if name not in layers:
            raise ValueError(message("name", f"one of {list(layers)[:4]} ...", repr(name)))
        kept = ParameterLayout({parameter: self.layout.shapes[parameter] for parameter in layers[name]})
        blocks = [block for block in self.blocks.values() if block.names[0] in kept.shapes]
        fields = self.count, self.provenance, self.reduction, self.positions, self.weight_sharing
        return KroneckerFisher(blocks, kept, *fields)

    def dense(self) -> Tensor:
        """Return F as one matrix [P, P], with zeros between blocks: for small models and for tests."""
        return self._scaled(torch.eye(self.layout.size, dtype=self.precision, device=self.device))

    # ------------------------------------------------------------------------------------------------ spectrum

    @property
    def trace(self) -> TraceEstimate:
        """tr F = Σ E.  With corrected eigenvalues it is unbiased, and its standard error an upper bound: their sum.

        Without correction, or with an estimator that is not random, no error is known, and 0 is shown.
        """
        total = sum(float(block.eigenvalues.sum(dtype=torch.float64)) for block in self.blocks.values())
        errors = [block.stderr for block in self.blocks.values() if block.stderr is not None]
        noise = sum(float(error.sum(dtype=torch.float64)) for error in errors)
        return TraceEstimate(total, noise, self.count, self.provenance, self.reduction, self.positions)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal entries F_ii by parameter name."""
        flat = torch.empty(self.layout.size, 1, dtype=self.precision, device=self.device)
        for block in self.blocks.values():
            block.scatter(block.diagonal()[None], flat, self.layout.slices)
        return self.layout.split(flat[:, 0] / self._divisor)

    @property
    @override
    def frobenius_norm(self) -> float:
        norms = [float(torch.linalg.vector_norm(block.eigenvalues)) for block in self.blocks.values()]
        return math.hypot(*norms) / self._divisor

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, descending, [P]."""
        return self._all_eigenvalues.sort(descending=True).values / self._divisor

    def eigenpairs(self, k: int = 1, tol: float | None = None, maxiter: int = 100, seed: int = 0) -> Eigenpairs:
        """The k largest eigenvalues, their vectors [P, k] and residuals, in closed form."""
        del tol, maxiter, seed
        k = integer_in_range(k, "k", 1, self.layout.size, f"there are {self.layout.size} parameters")
        values = self._all_eigenvalues
        chosen = values.topk(k).indices
        vectors = torch.zeros(self.layout.size, k, dtype=self.precision, device=self.device)
        start = 0  # of the block's eigenvalues among all of them
        for block in self.blocks.values():
            size = block.eigenvalues.numel()
            own = ((chosen >= start) & (chosen < start + size)).nonzero().flatten()
            unit = vectors.new_zeros(len(own), size)
            unit[torch.arange(len(own), device=self.device), chosen[own] - start] = 1.0
            columns = vectors.new_zeros(self.layout.size, len(own))
            block.scatter(block.back(unit.view(-1, *block.eigenvalues.shape)), columns, self.layout.slices)
            vectors[:, own] = columns
            start += size
        return self._eigenpairs(values[chosen], vectors, 0)

    def log_determinant(self, damping: float) -> float:
        """log det(F + damping I) = Σ log(E + damping); half of it is the log volume element."""
        damping = finite_number(damping, "damping", positive=True)
        values = self._all_eigenvalues.double() / self._divisor
        return float((values + damping).log().sum())

    # ------------------------------------------------------------------------------------------------ functions of F

    def solve(self, rhs: V, damping: float = 0.0, tol: float = 1e-5, maxiter: int = 1000) -> Solution[V]:
        """x with (F + damping I) x = rhs, in closed form.

        Without damping every block must be regular, which few are; the error names one that is not.
        """
        del maxiter
        tol = self._tolerance(tol)
        block, back = self._read(rhs, "rhs")
        x = self._apply(block, self._powers(damping, -1.0))
        return self._solution(back(x), self._residuals(x, block, damping), tol)

    def inverse_square_root(self, v: V, damping: float = 0.0) -> V:
        """(F + damping I)^(-½) v: ‖result‖² = vᵀ (F + damping I)⁻¹ v."""
        block, back = self._read(v, "v")
        return back(self._apply(block, self._powers(damping, -0.5)))

    def sample(self, count: int = 1, damping: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
        """Draw from N(0, (F + damping I)⁻¹): with `count` rows for each parameter.

        With `.sum`, and the precision of a Gaussian prior as damping, added to trained parameters these are draws from
        the Laplace posterior.
        """
        count = integer_in_range(count, "count", 1, 10**9, "draws")
        generator = torch.Generator(self.device).manual_seed(random_seed(seed))
        shape = (self.layout.size, count)
        noise = torch.randn(shape, generator=generator, dtype=self.precision, device=self.device)
        draws = self._apply(noise, self._powers(damping, -0.5))
        return {name: value.movedim(-1, 0) for name, value in self.layout.split(draws).items()}

    def _powers(self, damping: float, power: float) -> Callable[[EigenBlock], Tensor]:
        """Return the function from a block to (E + damping)^power, which raises if that is singular."""
        damping = finite_number(damping, "damping")

        def values(block: EigenBlock) -> Tensor:
            values = block.eigenvalues.clamp(min=0) / self._divisor
            largest = float(values.amax()) if values.numel() else 0.0
            rounding = torch.finfo(values.dtype).eps * max(values.shape[1:]) * largest
            if not damping and values.numel() and float(values.amin()) <= rounding:
                got = f"0, where {int((values <= rounding).sum()):,} of {values.numel():,} eigenvalues of "
                got += f"{' and '.join(block.names)} ({block.how}) are zero"
                raise ValueError(
                    message("damping", "a number > 0 for a singular F", got, "Try 1e-3 times the largest.")
                )
            return (values + damping).pow(power)

        return values

    def _apply(self, block: Tensor, values: Callable[[EigenBlock], Tensor]) -> Tensor:
        """Return f(F) B for columns B [P, m], with f(E) given by `values`."""
        found = torch.empty_like(block)
        for one in self.blocks.values():
            matrices = one.rotated(one.gather(block, self.layout.slices))
            one.scatter(one.back(matrices * values(one)), found, self.layout.slices)
        return found

    def _product(self, block: Tensor) -> Tensor:
        return self._apply(block, lambda one: one.eigenvalues)

    @cached_property
    def _all_eigenvalues(self) -> Tensor:
        return torch.cat([block.eigenvalues.flatten() for block in self.blocks.values()])

    # ------------------------------------------------------------------------------------------------ as a value

    def __add__(self, other: KroneckerFisher) -> KroneckerFisher:
        """Add results over disjoint data: factors add, and so do corrected eigenvalues if they have the same basis."""
        if not isinstance(other, KroneckerFisher):
            return NotImplemented
        self.provenance.check_like(other.provenance)
        if self.layout != other.layout or list(self.blocks) != list(other.blocks):
            raise ValueError(message("other", "a result of the same parameters", "one of other ones"))
        if self.weight_sharing != other.weight_sharing:
            expected = f"a result with weight_sharing={self.weight_sharing!r}"
            raise ValueError(message("other", expected, repr(other.weight_sharing)))
        provenance = self.provenance.plus(other.provenance)
        shared = self.corrected and self.provenance.shares_noise_with(other.provenance)
        pairs = zip(self.blocks.values(), other.blocks.values(), strict=True)
        blocks = [mine.plus(theirs.to(self.device), shared) for mine, theirs in pairs]
        counts = self.count + other.count, self.positions + other.positions
        return self._with(blocks, counts, provenance)

    def _times(self, factor: float) -> KroneckerFisher:
        provenance = self.provenance.times(factor)
        return self._with([block.times(factor) for block in self.blocks.values()], provenance=provenance)

    def _with(
        self, blocks: list[EigenBlock], counts: tuple[int, int] | None = None, provenance: Provenance | None = None
    ) -> KroneckerFisher:
        count, positions = counts or (self.count, self.positions)
        provenance = provenance or self.provenance
        return KroneckerFisher(blocks, self.layout, count, provenance, self.reduction, positions, self.weight_sharing)

    def to(self, target: torch.device | torch.dtype | str) -> KroneckerFisher:
        """The result on another device, or in another floating-point type (float32 or float64)."""
        return self._with([block.to(target) for block in self.blocks.values()])

    def __repr__(self) -> str:
        kind = "corrected" if self.corrected else "of the factors"
        what = f"{self.layout.size:,} parameters in {len(self.blocks)} blocks, eigenvalues {kind}"
        return f"{type(self).__name__}({self.reduction}): {what}, {self.count} samples, {self.provenance.estimator}"

    def __str__(self) -> str:
        """A table with a row for each block, after what `repr` says."""
        rows = []
        for block in self.blocks.values():
            values = block.eigenvalues / self._divisor
            largest = f"{float(values.amax()):.3g}" if values.numel() else "-"
            name = "+".join([block.names[0], *(other.rpartition(".")[2] for other in block.names[1:])])
            rows.append([name, block.how, f"{values.numel():,}", f"{float(values.sum()):.3g}", largest])
        header = ["block", "how", "parameters", "trace", "largest"]
        return f"{self!r}\n{text_table(header, rows, left=2, width=WIDTH)}"

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file with its provenance, all or nothing; `nm.load` reads it."""
        tensors: dict[str, Tensor] = {}
        heads = []
        for i, block in enumerate(self.blocks.values()):
            tensors |= {f"{i}/{side}": value for side in _SIDES if (value := getattr(block, side)) is not None}
            for side, values in zip(("left", "right"), block.factor_values or (), strict=False):
                tensors[f"{i}/{side}_values"] = values
            heads.append({"names": block.names, "kind": block.kind, "terms": block.terms, "turned": block.turned})
        first: dict[int, str] = {}  # layers with the same inputs have one factor, which is written once
        same = {name: first.setdefault(id(value), name) for name, value in tensors.items()}
        tensors = {name: tensors[name] for name in first.values()}
        again = {name: other for name, other in same.items() if name != other}
        texts = {"blocks": json.dumps(heads), "same": json.dumps(again), "weight_sharing": self.weight_sharing}
        self._save(path, "kronecker", tensors, **texts)


@reads("kronecker")
def kronecker_from_file(tensors: Mapping[str, Tensor], head: dict[str, Any]) -> KroneckerFisher:
    """The result that `KroneckerFisher.save` wrote."""
    blocks, tensors = [], dict(tensors)
    tensors |= {name: tensors[other] for name, other in json.loads(head.get("same", "{}")).items()}
    for i, one in enumerate(json.loads(head["blocks"])):
        left, right, stderr = (tensors.get(f"{i}/{side}") for side in _SIDES[1:])
        values = tuple(tensors[f"{i}/{side}_values"] for side in ("left", "right") if f"{i}/{side}_values" in tensors)
        numbers = values or None, one["terms"], stderr, one["turned"]
        blocks.append(EigenBlock(tuple(one["names"]), one["kind"], tensors[f"{i}/eigenvalues"], left, right, *numbers))
    return KroneckerFisher(blocks, *stored_fields(head), head["weight_sharing"])
