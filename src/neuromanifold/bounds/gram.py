"""`fisher_gram`: J Jᵀ between all samples and classes (the empirical neural tangent kernel), without writing J out.

for batch in data:
    logits = model(batch)                                   one forward pass
    K(x) = J(x) J(x)ᵀ, and keep the gradients               C backward passes, in groups of layers (grams.py)
K(x, x') = J(x) J(x')ᵀ                                      inner products of what was kept, layer after layer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from neuromanifold.bounds.grams import ClassGradients
from neuromanifold.bounds.kept_gradients import Chunk, KeptGradients
from neuromanifold.bounds.splitting import split
from neuromanifold.core import Categorical
from neuromanifold.core.base import Core
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.estimators import Exact
from neuromanifold.operators.factors import GIB
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem, refuse_a_part
from neuromanifold.results import Provenance
from neuromanifold.run.counts import Counts
from neuromanifold.run.fisher import make_provenance
from neuromanifold.run.methods import PerSample
from neuromanifold.run.settings import Settings

Directions = Literal["classes", "fisher"] | Callable[[Core], Tensor]


@torch.inference_mode(mode=False)
def fisher_gram(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    directions: Directions = "classes",
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    max_bytes: int = 4 * GIB,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
) -> GramMatrix:
    """Return all inner products of the gradients of logits, U J (U J)ᵀ with J = ∂z/∂θ of all samples.

    For layers with per-sample rules these follow from the layers' inputs and output gradients, which are kept; J, with
    N·C rows of P numbers, is never written out.  Each output distribution is a sample of its own: in a sequence, every
    position that counts.  Cost: r backward passes for each batch, and products between all pairs of samples.  Arguments
    that are not listed are those of `fisher_diagonal`.

    Args:
        directions: the rows U(x) in logit space.  "classes": U = I, the empirical neural tangent kernel.  "fisher": U =
            Sᵀ with S Sᵀ = M(x), so that the nonzero eigenvalues are those of F (as a sum over samples), exactly and for
            any number of parameters.  Or a function from the distributions of a batch to directions [n, r, C].
        max_bytes: refuse if the matrix, or the gradients that are kept for it, take more than that.

    Returns:
        A `GramMatrix` with blocks [N, N, r, r] in float64.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected, or memory would exceed `max_bytes`.

    Example:
        >>> gram = nm.fisher_gram(model, data, directions="fisher")
        >>> exact = nm.fisher_trace(model, data, nm.Exact(), reduction="sum")
        >>> f"{gram.trace:.3f} {exact.value:.3f}"
        '80.327 80.327'
    """
    if directions not in ("classes", "fisher") and not callable(directions):
        expected = "'classes', 'fisher', or a function of the distributions"
        raise ValueError(message("directions", expected, repr(directions)))
    limit = integer_in_range(max_bytes, "max_bytes", 1, 2**63, "memory for the matrix")
    refuse_a_part(data, "fisher_gram")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    settings = Settings.of(Exact(), "sample", 0)
    work = _Grams(problem, settings, directions, limit)
    work.run(progress)
    return GramMatrix(work.matrix(), work.counts.samples, make_provenance(problem, settings, work.counts))


@dataclass(frozen=True, eq=False)
class GramMatrix:
    """Inner products between the gradients of all samples and directions, in float64: what `nm.fisher_gram` returns.

    Example:
        >>> gram = nm.fisher_gram(model, data)
        >>> gram.matrix.shape  # 32 samples, 3 classes
        torch.Size([96, 96])
    """

    blocks: Tensor  #: [N, r, N, r]: ⟨u_ra J(x_a), u_sb J(x_b)⟩, samples in the order of the data
    count: int
    provenance: Provenance

    @property
    def matrix(self) -> Tensor:
        """The same as a matrix [N·r, N·r], the directions of a sample one after the other."""
        rows = self.blocks.shape[0] * self.blocks.shape[1]
        return self.blocks.reshape(rows, rows)

    @property
    def positions(self) -> int:
        """The number of output distributions, N: in a sequence, every position that counts."""
        return len(self.blocks)

    @property
    def trace(self) -> float:
        """Σ_x ‖U(x) J(x)‖²: with directions="fisher" the trace of F, as a sum over samples."""
        return float(self.matrix.trace())

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, descending, [N·r]; with directions="fisher" those of F, as a sum over samples."""
        values: Tensor = torch.linalg.eigvalsh(self.matrix).flip(0)
        return values.clamp(min=0)

    def __repr__(self) -> str:
        samples, directions = self.blocks.shape[:2]
        shape = f"[{samples} x {directions}, {samples} x {directions}]"
        return f"{type(self).__name__}{shape}: {self.count} samples, trace {self.trace:.4g}, {self.provenance.model}"


class GramRun(ABC):
    """One run over the data that computes K = J Jᵀ of each distribution, and keeps gradients for those between them."""

    description = "Gram matrix"

    def __init__(self, problem: Problem, settings: Settings, kept: KeptGradients, max_bytes: int | None) -> None:
        """`max_bytes`: of the gradients of several classes at a time."""
        self.problem, self.settings, self.kept, self.max_bytes = problem, settings, kept, max_bytes
        self.counts, self._method = Counts(), PerSample(problem, settings)
        self._inspected = False
        self._passes = 0  # of Gram matrices and norms
        self._rows = 0  # distributions before this batch or part of one; `_add` counts on

    @abstractmethod
    def _add(self, outputs: Outputs, budget: int | None) -> None:
        """Add the distributions of a batch, or of a part of one, and count them in `counts` and `_rows`."""

    def run(self, progress: bool) -> None:
        """Go through the data once, and accumulate."""
        with self.problem.session(), self._method.attached():
            for batch in self.problem.batches(progress=progress, description=self.description):
                self._take(batch)
                self.counts.end_batch(batch.number + 1)
        self._method.validation.flush()
        self.counts.synchronize()
        self.counts.note(self._method, self._passes)
        if not self.counts.samples:
            advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
            got = f"{self.counts.batches} batches"
            raise ValueError(message("data", "an iterable with at least one sample", got, advice))

    def _take(self, batch: Batch) -> None:
        """Add one batch: at once, or a few samples at a time if the gradients of all classes would be too large."""
        outputs, budget = self._method.forward(batch), self.max_bytes
        if not self._inspected and batch.number & (batch.number - 1) == 0:
            self._inspected = self.problem.inspect(batch, outputs)
        logits, gradients = outputs.logits.detach(), self._class_gradients(outputs.logits)
        available = gradients.ordinary if budget is None else budget
        samples = max(1, len(logits) * available // max(1, logits.shape[-1] * gradients.outputs))
        if samples < len(logits) and self.problem.batch_dim == 0:
            del outputs, gradients
            self._method.release()
            if parts := split(self.problem, batch, logits, samples):
                for part in parts:
                    self._add(self._method.forward(part), available)
                return
            outputs = self._method.forward(batch)
        self._add(outputs, budget)

    def _class_gradients(self, logits: Tensor) -> ClassGradients:
        assert self._method.captured is not None
        vectorizes = bool(len(logits)) and self._method.engine.vectorizes(self._method.captured, logits)
        return ClassGradients(self._method.captured, vectorizes)

    def _grams(self, outputs: Outputs, budget: int | None) -> Tensor:
        """Return K of the valid distributions, [rows, C, C] in float64 on the CPU."""
        logits, valid, gradients = outputs.logits, outputs.valid, self._class_gradients(outputs.logits)
        places = logits.shape[1:-1].numel()
        counts = torch.ones(logits.shape[:-1], dtype=torch.bool) if valid is None else valid.cpu()
        counts = counts.reshape(len(logits), places)
        numbers = (counts.flatten().cumsum(0) - 1).view_as(counts) + self._rows
        K = torch.zeros(len(logits), places, logits.shape[-1], logits.shape[-1], dtype=torch.float64)
        for t in counts.any(0).nonzero().flatten().tolist():
            K[:, t] = self._grams_at(gradients, logits, t, counts[:, t].nonzero().flatten(), numbers[:, t], budget)
        self._passes += gradients.passes
        return K[counts]

    def _grams_at(
        self, gradients: ClassGradients, logits: Tensor, t: int, index: Tensor, numbers: Tensor, budget: int | None
    ) -> Tensor:
        """Return K at one position of every sample, [n, C, C]."""
        backward, device = self._method.captured, logits.device
        places, classes = logits.shape[1:-1].numel(), logits.shape[-1]
        assert backward is not None

        def cotangent(c: int) -> Tensor:
            one = torch.zeros(len(logits), places, classes, dtype=logits.dtype, device=device)
            one[:, t, c] = 1
            return one.view(logits.shape)

        scale = self._method.scale_of(logits, map(cotangent, range(classes)), backward)
        K = torch.zeros(len(logits), classes, classes, dtype=torch.float64, device=device)
        chunk = Chunk(numbers[index], {}, scale)
        for i, stack in gradients.stacks(logits, cotangent, scale, budget):
            K += stack.inner().to(device)
            self.kept.add(i, stack, index, chunk)
        for n in index.tolist() if backward.uses.remaining else ():
            for i, flat in gradients.remaining_stacks(logits, cotangent, n, backward.uses.remaining, scale).items():
                K[n] += flat.inner()[0].to(device)
                self.kept.add(i, flat, torch.tensor([0]), chunk)
        self.kept.end_chunk(chunk, classes)
        return K.cpu() / scale**2


class _Grams(GramRun):
    def __init__(self, problem: Problem, settings: Settings, directions: Directions, limit: int) -> None:
        super().__init__(problem, settings, KeptGradients(keeps=True, limited=False), None)
        self._directions, self._limit = directions, limit
        self._chosen: list[Tensor] = []  # [n, r, C]

    def matrix(self) -> Tensor:
        """Return U K Uᵀ, [N, r, N, r]."""
        chosen = torch.cat(self._chosen)
        samples, _, classes = chosen.shape
        K = self.kept.gram(classes).view(samples, classes, samples, classes)
        if self._directions == "classes":
            return K
        half = torch.einsum("nrc,ncmd->nrmd", chosen, K)
        return torch.einsum("nrmd,msd->nrms", half, chosen)

    def _add(self, outputs: Outputs, budget: int | None) -> None:
        self.counts.add(outputs)
        if not len(outputs.logits):
            return
        core = self.problem.distributions(outputs, self._method.validation, compact=True, labels=False).core
        self._chosen.append(self._of(core))
        self._grams(outputs, budget)
        self._rows += core.batch_shape[0]
        self._method.release()
        self._check_size(core.dim)

    def _of(self, core: Core) -> Tensor:
        """Return the directions of some distributions, [n, r, C]."""
        samples, classes = *core.batch_shape, core.dim
        if self._directions == "classes":
            return torch.eye(classes, dtype=torch.float64).expand(samples, classes, classes)
        if self._directions == "fisher":
            return core.factor_matrix().mT.double().cpu()
        assert callable(self._directions)
        found = self._directions(core)
        rank = self._chosen[0].shape[1] if self._chosen else "r"
        fits = isinstance(found, Tensor) and found.ndim == 3 and (found.shape[0], found.shape[2]) == (samples, classes)
        if not fits or rank not in ("r", found.shape[1]):
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(message("directions", f"a function to tensors [{samples}, {rank}, {classes}]", f"{got}"))
        return found.detach().double().cpu()

    def _check_size(self, classes: int) -> None:
        matrix, gradients = 8 * (self._rows * classes) ** 2, 4 * self.kept.numbers
        if max(matrix, gradients) > self._limit:
            got = f"{gradients / GIB:.3g} GiB of gradients of {self._rows} samples"
            if matrix > self._limit:
                got = f"{matrix / GIB:.3g} GiB for {self._rows} x {classes} rows"
            advice = "Use fewer samples, or fewer `parameters`; nm.fisher_operator needs no matrix."
            raise ValueError(message("max_bytes", "enough for the Gram matrix", got, advice))
