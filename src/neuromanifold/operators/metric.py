"""The Fisher information as a metric tensor: all that follows from its products with vectors.

A subclass defines F B for a block of columns.  Products, lengths and angles, eigenpairs, solutions, natural gradients
and estimates of trace, diagonal and log-determinant follow from that; subclasses that store F override some of them.
"""

from __future__ import annotations

import copy
import json
import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import (
    Reduction,
    check_reduction,
    finite_number,
    integer_in_range,
    message,
    promoted,
    random_seed,
    warn,
)
from neuromanifold.operators.krylov import Eigenpairs, conjugate_gradients, top_eigenpairs
from neuromanifold.operators.layout import ParameterLayout, V, Vector
from neuromanifold.operators.stochastic import (
    Estimate,
    SpectralDensity,
    check_method,
    exchangeable_diagonal,
    spectral_density,
    stochastic_diagonal,
    stochastic_log_determinant,
    stochastic_trace,
)
from neuromanifold.results.files import save_tensors
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.scaling import Reducible, Scalable
from neuromanifold.results.trace import TraceEstimate


class NotConvergedWarning(UserWarning):
    """An iteration ended before it reached its tolerance; the result says how accurate it is.

    Raise `maxiter`, or use a larger `damping` or `tol`.
    """


class Solution(NamedTuple, Generic[V]):
    """x of (F + damping I) x = rhs, of the kind that rhs had, and the largest ‖b - Ax‖/‖b‖ of all columns.

    The residual is that of the iteration, or of x in float64: rounding x to float32 adds up to 1e-7 λ_1 ‖x‖/‖b‖.
    """

    x: V
    residual: float
    iterations: int = 0  # of conjugate gradients; 0: in closed form


class Metric(Reducible):
    """F over some parameters, per sample (`reduction="mean"`) or as the sum over samples (`"sum"`).

    Vectors are tensors or numpy arrays [P], blocks of columns [P, m], or dicts from parameter name to tensor; what
    comes back is of the same kind.  It has what scipy asks of a linear operator, so that `scipy.sparse.linalg.eigsh`
    and `cg` take it as it is.
    """

    layout: ParameterLayout
    precision: torch.dtype  #: of vectors: float32 or float64
    device: torch.device
    __array_ufunc__ = None  # numpy's arrays leave v @ F to F

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of samples that F is a sum over."""

    @abstractmethod
    def _product(self, block: Tensor) -> Tensor:
        """F B as a sum over samples, for columns B [P, m] of this precision on this device."""

    @property
    def shape(self) -> tuple[int, int]:
        """[P, P] for P parameters, as scipy asks for."""
        return self.layout.size, self.layout.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """`precision` as a numpy type, for scipy."""
        return np.dtype(str(self.precision).removeprefix("torch."))

    # ------------------------------------------------------------------------------------------------ products

    def matvec(self, v: V) -> V:
        """F v, for one vector or for each column of a block."""
        block, back = self._read(v, "v")
        return back(self._scaled(block))

    matmat = rmatvec = matvec  # scipy's names: for a block of columns, and Fᵀ v = F v

    def __matmul__(self, v: V) -> V:
        return self.matvec(v)

    def __rmatmul__(self, v: V) -> V:
        """vᵀ F for a vector [P], a list or dict of tensors, or each row of [m, P]: F is symmetric."""
        if isinstance(v, (Tensor, np.ndarray)) and v.ndim == 2:
            return self.matvec(v.T).T  # type: ignore[return-value]
        return self.matvec(v)

    @property
    def T(self) -> Self:  # noqa: N802 (numpy's name)
        """Fᵀ = F, under numpy's name."""
        return self

    def scipy(self) -> Any:
        """A scipy LinearOperator, which multiplies blocks at once; `pip install neuromanifold[scipy]`."""
        try:
            from scipy.sparse.linalg import LinearOperator
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("`.scipy()` needs scipy: pip install neuromanifold[scipy]") from error
        names = ("matvec", "matmat", "rmatvec", "rmatmat")
        return LinearOperator(self.shape, dtype=self.dtype, **dict.fromkeys(names, self.matvec))

    # ------------------------------------------------------------------------------------------------ geometry

    def inner(self, u: Vector, v: Vector) -> float:
        """⟨u, v⟩ = uᵀ F v."""
        return self._inner(self._one(u, "u"), self._one(v, "v"))

    def length(self, step: Vector) -> float:
        """√(dθᵀ F dθ): with reduction "sum", ½ length² is the step's Kullback-Leibler divergence, to second order."""
        column = self._one(step, "step")
        return math.sqrt(max(0.0, self._inner(column, column)))

    def angle(self, u: Vector, v: Vector) -> float:
        """The angle between two directions in radians, arccos ⟨u, v⟩/(‖u‖‖v‖): π/2 if they do not interact."""
        a, b = self._one(u, "u"), self._one(v, "v")
        images = self._scaled(torch.cat([a, b], 1)).double()
        gram = torch.cat([a, b], 1).double().mT @ images
        if not (gram[0, 0] > 0 and gram[1, 1] > 0):
            which = "u" if not gram[0, 0] > 0 else "v"
            advice = "The outputs do not change along it, so it has no angle."
            raise ValueError(message(which, "a direction of positive length", "one of length 0", advice))
        cosine = (gram[0, 1] + gram[1, 0]) / 2 / (gram[0, 0] * gram[1, 1]).sqrt()
        return math.acos(max(-1.0, min(1.0, float(cosine))))

    # ------------------------------------------------------------------------------------------------ spectrum

    def eigenpairs(self, k: int = 1, tol: float | None = None, maxiter: int = 100, seed: int = 0) -> Eigenpairs:
        """The k largest eigenvalues, their vectors [P, k] and residuals ‖Fv - λv‖, by a block Krylov method.

        It ends when all residuals are below tol λ_1 (√eps unless given); an eigenvalue is as accurate as its residual,
        and twice as many digits where the next one is far.  Each iteration is one product with a block, that is one
        pass over the data for an operator.
        """
        k = integer_in_range(k, "k", 1, self.layout.size, f"there are {self.layout.size} parameters")
        maxiter = integer_in_range(maxiter, "maxiter", 1, 10**9, "products with a block")
        tol = self._tolerance(tol)
        generator = torch.Generator(self.device).manual_seed(random_seed(seed))
        columns = min(k + 2, self.layout.size)
        start = torch.randn(self.layout.size, columns, generator=generator, dtype=self.precision, device=self.device)
        found = top_eigenpairs(self._scaled, start, k, tol, maxiter)
        worst, allowed = float(found.residuals.max()), tol * float(found.values[0])
        if worst > max(allowed, 1e3 * torch.finfo(self.precision).eps * float(found.values[0])):
            text = f"Eigenpairs: after {maxiter} iterations a residual is {worst:.2g}, more than {allowed:.2g}. "
            advice = "Use a larger maxiter, fewer pairs, or a larger tol."
            warn(text + advice, NotConvergedWarning)
        return found

    @property
    def trace(self) -> TraceEstimate:
        """tr F with its standard error: by Hutch++ from 30 products, unless the numbers of F are stored."""
        return self.estimate_trace()

    def estimate_trace(self, method: str = "hutch++", products: int = 30, seed: int = 0) -> TraceEstimate:
        """tr F from products with random vectors, by "hutchinson", "hutch++" or "xtrace", with its standard error.

        For comparison: `nm.fisher_trace` has its probes on the outputs, and needs one backward pass over the data.
        """
        if method == "xtrace":
            found = stochastic_trace(self._scaled, self._like(), self._halves(method, products), random_seed(seed))
        else:
            found = self._stochastic(method, products, seed)[1]
        value, stderr = (float(number) * self._divisor for number in found)
        provenance = Provenance(f"{method} with {products} products", "unbiased", seeds=[seed])
        return TraceEstimate(value, stderr, self.count, provenance, self.reduction)

    def estimate_diagonal(self, method: str = "hutch++", products: int = 30, seed: int = 0) -> Estimate:
        """diag F [P] from products with random vectors, by "hutchinson", "hutch++" or "xdiag".

        For comparison: `nm.fisher_diagonal` has its probes on the outputs.
        """
        if method == "xdiag":
            return exchangeable_diagonal(self._scaled, self._like(), self._halves(method, products), random_seed(seed))
        return self._stochastic(method, products, seed)[0]

    def spectral_density(self, probes: int = 8, steps: int = 30, seed: int = 0) -> SpectralDensity:
        """Return where the eigenvalues are, by Lanczos quadrature: `steps` products with a block of `probes` columns.

        `density.values` and `density.weights` [probes, steps]; `density(points, width)` is smoothed.
        """
        probes = integer_in_range(probes, "probes", 1, 10**9, "random vectors")
        steps = min(integer_in_range(steps, "steps", 1, 10**9, "products with a block"), self.layout.size)
        return spectral_density(self._scaled, self._like(), probes, steps, random_seed(seed))

    def estimate_log_determinant(self, damping: float, probes: int = 8, steps: int = 30, seed: int = 0) -> Estimate:
        """log det(F + damping I) by Lanczos quadrature: `steps` products with a block of `probes` columns.

        The standard error is that of the probes; few steps have an error of their own, which it does not show.
        """
        damping = finite_number(damping, "damping", positive=True)
        probes = integer_in_range(probes, "probes", 2, 10**9, "two or more have a spread")
        steps = min(integer_in_range(steps, "steps", 1, 10**9, "products with a block"), self.layout.size)
        seed = random_seed(seed)
        return stochastic_log_determinant(self._scaled, self._like(), damping, probes, steps, seed)

    # ------------------------------------------------------------------------------------------------ solutions

    def solve(self, rhs: V, damping: float = 0.0, tol: float = 1e-5, maxiter: int = 1000) -> Solution[V]:
        """x with (F + damping I) x = rhs, by conjugate gradients: one product for each iteration.

        F is singular as a rule, so without damping rhs should be in its range, as gradients of log-likelihoods are.  If
        it is not, the iteration ends where only the part in F's kernel is left.
        """
        damping, tol = finite_number(damping, "damping"), self._tolerance(tol)
        maxiter = integer_in_range(maxiter, "maxiter", 1, 10**9, "products with a block")
        block, back = self._read(rhs, "rhs")
        x, residuals, iterations = conjugate_gradients(self._scaled, block, damping, tol, maxiter)
        return self._solution(back(x), residuals, tol, iterations)

    def natural_gradient(self, gradient: V, damping: float = 1e-3) -> V:
        """(F + damping I)⁻¹ gradient: the direction of steepest descent under the metric."""
        return self.solve(gradient, damping).x

    # ------------------------------------------------------------------------------------------------ inside

    def _scaled(self, block: Tensor) -> Tensor:
        """Return F B for columns B [P, m], in this view."""
        product = self._product(block)  # before _divisor: an operator learns its count from a product
        return product / self._divisor

    @property
    def _divisor(self) -> int:
        return self.count if self.reduction == "mean" else 1

    def _inner(self, u: Tensor, v: Tensor) -> float:
        return float((u * self._scaled(v)).sum(dtype=torch.float64))

    def _read(self, v: V, argument: str) -> tuple[Tensor, Callable[[Tensor], V]]:
        return self.layout.read(v, argument, self.precision, self.device)

    def _one(self, v: Vector, argument: str) -> Tensor:
        """Return a single vector as a column [P, 1]; a block of several is an error."""
        block: Tensor = self._read(v, argument)[0]
        if block.shape[1] != 1:
            raise ValueError(message(argument, "one vector", f"a block of {block.shape[1]}"))
        return block

    def _solution(self, x: V, residuals: Tensor, tol: float, iterations: int = 0) -> Solution[V]:
        """Return the solution, with a warning if its residual exceeds the tolerance."""
        residual = float(residuals.max()) if residuals.numel() else 0.0
        if not residual <= tol:
            how = f"after {iterations} iterations of conjugate gradients" if iterations else "in closed form"
            advice = "Use more damping" + (", a larger maxiter" if iterations else "") + " or a larger tol."
            text = f"The residual is {residual:.2g} > {tol:.2g} {how}. {advice}"
            warn(text, NotConvergedWarning)
        return Solution(x, residual, iterations)

    @override
    def _view(self, reduction: Reduction) -> Self:
        view = copy.copy(self)
        view.reduction = reduction
        return view

    def _eigenpairs(self, values: Tensor, vectors: Tensor, products: int) -> Eigenpairs:
        """Return eigenvalues of the sum over samples and their vectors, in this view and with their residuals."""
        scaled = (values / self._divisor).to(self.precision)
        residuals = torch.linalg.vector_norm(self._scaled(vectors) - vectors * scaled, dim=0)
        return Eigenpairs(scaled, vectors, residuals, products)

    def _residuals(self, x: Tensor, rhs: Tensor, damping: float) -> Tensor:
        """Return ‖b - Ax‖/‖b‖ for A = F + damping I and each column b of rhs."""
        residuals: Tensor = torch.linalg.vector_norm(rhs - self._scaled(x) - damping * x, dim=0)
        residuals /= torch.linalg.vector_norm(rhs, dim=0).clamp(min=torch.finfo(rhs.dtype).tiny)
        return residuals

    def _stochastic(self, method: str, products: int, seed: int) -> tuple[Estimate, Estimate]:
        products = check_method(method, products)
        seed = random_seed(seed)
        return stochastic_diagonal(self._scaled, self._like(), method, products, seed)

    def _halves(self, method: str, products: int) -> int:
        """Return the number of products of a method that takes half of them for a basis."""
        least = f"{method} takes at least 4"
        return min(integer_in_range(products, "products", 4, 10**9, least), 2 * self.layout.size)

    def _like(self) -> Tensor:
        return torch.empty(self.layout.size, 1, dtype=self.precision, device=self.device)

    def _tolerance(self, tol: float | None) -> float:
        if tol is None:
            return math.sqrt(torch.finfo(self.precision).eps)
        return finite_number(tol, "tol")


class StoredMetric(Metric, Scalable):
    """A metric whose numbers are stored, so that it adds, scales and saves."""

    provenance: Provenance
    positions: int
    """Output distributions, such as tokens; 0: not known."""

    def __init__(
        self,
        like: Tensor,
        layout: ParameterLayout,
        count: int,
        provenance: Provenance,
        reduction: Reduction,
        positions: int,
    ) -> None:
        self.layout, self.provenance, self.reduction, self.positions = layout, provenance, reduction, positions
        self.precision, self.device = promoted(like.dtype), like.device
        self._count = count

    @property
    @override
    def count(self) -> int:
        return self._count

    @property
    @abstractmethod
    def frobenius_norm(self) -> float:
        """The Frobenius norm √(Σ F_ij²)."""

    @property
    def effective_rank(self) -> float:
        """(tr F)²/‖F‖²: how many equal eigenvalues would have the same trace and norm."""
        norm = self.frobenius_norm
        return (self.trace.value / norm) ** 2 if norm else 0.0

    def _save(self, path: str | Path, kind: str, tensors: dict[str, Tensor], **more: str) -> None:
        shapes = json.dumps({name: list(shape) for name, shape in self.layout.shapes.items()})
        counts = {"count": str(self.count), "positions": str(self.positions)}
        head = {"shapes": shapes, **counts, "reduction": self.reduction, **more}
        save_tensors(path, tensors, kind, {**head, "provenance": self.provenance.to_json()})


def stored_fields(head: dict[str, Any]) -> tuple[ParameterLayout, int, Provenance, Reduction, int]:
    """The layout, count, provenance, reduction and positions that `StoredMetric` wrote to a file's header."""
    layout = ParameterLayout({name: torch.Size(shape) for name, shape in json.loads(head["shapes"]).items()})
    provenance, reduction = Provenance.from_json(head["provenance"]), check_reduction(head["reduction"])
    return layout, int(head["count"]), provenance, reduction, int(head.get("positions", 0))
