"""`fisher_operator`: exact products F v over a data set, without ever forming F.

for batch in data:
    z, J v = model(batch) at dual parameters (θ, v)         one forward pass (jacobian.py)
    u = middle(core, labels, J v)                           M J v at the positions that count
    F v += Jᵀ u                                             one backward pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import Reduction, check_reduction, message, random_seed
from neuromanifold.estimators import Empirical, Estimator, MonteCarlo, SquaredBatchGradient, Upper
from neuromanifold.estimators.envelopes import Envelope, check_envelope
from neuromanifold.operators.jacobian import JacobianProducts
from neuromanifold.operators.layout import ParameterLayout
from neuromanifold.operators.metric import Metric
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.cotangents import LateValidation, Likelihood, batch_seed
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem, refuse_a_part
from neuromanifold.problem.unchanged import CarriedState

Middle = Callable[[Core, Tensor | None, Tensor], Tensor]
"""From the core over rows [R, C], their labels ([R] classes, or [R, C] targets, or None) and v [R, C] to M v [R, C]."""


def fisher_operator(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    envelope: Envelope | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
    estimator: Estimator | None = None,
    seed: int = 0,
) -> FisherOperator:
    """Return F = Σ_x Jᵀ M(x) J as a linear operator: exact and matrix-free.

    The model is evaluated anew with each product, so train it between products and F is that of the new parameters.
    Cost of a product: one pass over the data, with one forward-mode and one backward product for each batch.  This call
    itself runs the first batch a few times, to choose how J v is computed.  Arguments that are not listed are those of
    `fisher_diagonal`.

    Args:
        data: batches that can be iterated over several times, the same each time: a list, or a DataLoader that does
            not shuffle.
        envelope: None for F itself, or an envelope of it: `nm.Upper()`, `nm.Lower(k)`.
        estimator: None for M itself; `nm.Empirical()` or `nm.MonteCarlo(k)` for Σ_n g_n g_nᵀ with the scores of given
            or of drawn labels, summed over the positions of a sample.
        seed: random seed of drawn labels, which depend on it and on the batch's number alone, so that all products are
            with the same matrix.

    Returns:
        A `FisherOperator`: `F @ v` for flat vectors, lists and dicts of tensors; eigenpairs, solutions, traces,
        lengths.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected; the message says what is.

    Example:
        >>> F = nm.fisher_operator(model, data)
        >>> v = torch.ones(F.shape[0])
        >>> (F @ v).shape
        torch.Size([67])
        >>> pairs = F.eigenpairs(2)
        >>> bool(pairs.values[0] > pairs.values[1])
        True
    """
    middle, view = envelope_product(envelope), check_reduction(reduction)
    known = isinstance(estimator, (Empirical, MonteCarlo)) and not isinstance(estimator, SquaredBatchGradient)
    if estimator is not None and (not known or envelope is not None):
        expected = "None with an envelope" if envelope is not None else "None, nm.Empirical() or nm.MonteCarlo(k)"
        raise ValueError(message("estimator", expected, repr(estimator)))
    refuse_a_part(data, "fisher_operator")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    chosen = middle if estimator is None else None
    return FisherOperator(problem, chosen, estimator, view, progress=progress, seed=random_seed(seed))


def envelope_product(envelope: Envelope | None) -> Middle:
    """Return the product of M, or of an envelope, with a vector of the outputs."""
    if envelope is None:
        return lambda core, _, v: core.matvec(v)
    check_envelope(envelope)
    if isinstance(envelope, Upper):
        return lambda core, _, v: core.upper_envelope() * v
    return lambda core, _, v: core.spectrum(envelope.size(core)).matvec(v)


class FisherOperator(Metric):
    """F as a linear operator: what `nm.fisher_operator` returns.

    It refers to the model and the data, and goes through the data for each product.  `method` says how J v is computed.

    Example:
        >>> F = nm.fisher_operator(model, data)
        >>> gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
        >>> solution = F.solve(gradients, damping=0.1)
        >>> solution.residual < 1e-2
        True
    """

    def __init__(
        self,
        problem: Problem,
        middle: Middle | None,
        estimator: Estimator | None = None,
        reduction: Reduction = "mean",
        *,
        progress: bool = False,
        seed: int = 0,
    ) -> None:
        """Make the operator Σ_x Jᵀ middle(x) J for any symmetric matrix in the middle.

        Without `middle`, that is Σ_k u_k u_kᵀ with the cotangents u_k of a sample by the estimator.
        `middle` gets labels where the data have them; an estimator that needs labels makes them mandatory.
        """
        self.problem, self.middle, self.reduction = problem, middle, reduction
        self._estimator, self._progress, self._batches = estimator, progress, problem.repeated()
        self.layout, self.device = ParameterLayout.of(problem.parameters), problem.device
        exact = any(parameter.dtype == torch.float64 for parameter in problem.parameters.values())
        self.precision = torch.float64 if exact else torch.float32
        self._seed = seed
        self._count: list[int] = []  # of samples and of positions; shared by views
        self._carried = CarriedState(problem.model)
        self._jacobian = JacobianProducts(problem.model, problem.parameters)
        self._choose_method()

    @property
    def method(self) -> str:
        """How J v is computed: by forward mode, or by double backward, perhaps without fused kernels."""
        return self._jacobian.method

    @property
    def count(self) -> int:
        """The number of samples; before the first product this takes a pass of forward evaluations."""
        if not self._count:
            with self.problem.session():
                counts = [0, 0]
                for batch in self._batches:
                    outputs = self.problem.outputs(batch, self._estimator)
                    counts = [counts[0] + int(outputs.samples), counts[1] + int(outputs.positions)]
                self._set_count(*counts)
        return self._count[0]

    @property
    def positions(self) -> int:
        """The number of distributions: as many as samples, or tokens, or pixels; counted like `count`."""
        return self._count[1] if self.count else 0

    def block(self, names: str | Sequence[str]) -> FisherOperator:
        """Return the operator of some of the parameters, in the order asked for.

        Names are those of parameters or of layers, or patterns such as "encoder.*".
        """
        wanted, chosen = [names] if isinstance(names, str) else list(names), dict[str, nn.Parameter]()
        for one in wanted:
            own = {
                name: parameter
                for name, parameter in self.problem.parameters.items()
                if fnmatchcase(name, one) or name.startswith(f"{one}.")
            }
            if not own:
                got = f"{one!r}, which matches none of {list(self.layout.shapes)[:4]} ..."
                raise ValueError(message("names", "names or patterns of parameters or layers", got))
            chosen |= {name: parameter for name, parameter in own.items() if name not in chosen}
        if not chosen:
            raise ValueError(message("names", "at least one name", "none"))
        return FisherOperator(
            replace(self.problem, parameters=chosen),
            self.middle,
            self._estimator,
            self.reduction,
            progress=self._progress,
            seed=self._seed,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reduction}, {self.layout.size:,} parameters, by {self.method})"

    @torch.inference_mode(False)
    def _product(self, block: Tensor) -> Tensor:
        """Return F B by one pass over the data for all columns."""
        if not block.shape[1]:
            return torch.zeros_like(block)
        rows, validation = block.mT.contiguous(), self.problem.validation()
        places = self.layout.slices.items()
        vectors = [rows[:, place].view(len(rows), *self.layout.shapes[name]) for name, place in places]
        total, sizes = torch.zeros_like(rows), rows.new_zeros(len(rows), 2)
        samples: int | Tensor = 0
        positions: int | Tensor = 0
        self._jacobian.begin_pass()
        with self.problem.session():
            for batch in self._batches.batches(progress=self._progress):
                outputs = self._add(batch, vectors, total, sizes, validation)
                samples, positions = samples + outputs.samples, positions + outputs.positions
        validation.flush()
        self._jacobian.compare(rows, total, sizes)
        self._set_count(int(samples), int(positions))
        return total.mT

    def _add(
        self, batch: Batch, vectors: Sequence[Tensor], sums: Tensor, sizes: Tensor, validation: LateValidation
    ) -> Outputs:
        """Add a batch's products with vectors [m, *shape] to sums [m, P], and their sizes; return its outputs."""
        evaluate = partial(self.problem.evaluate, batch, self._estimator)
        if self._carried.found:  # the columns of a block take several forward passes, which begin alike
            evaluate = partial(_evaluate_after, self._carried.snapshot(), evaluate)
        for which, product in self._jacobian(evaluate, vectors, partial(self._cotangents, validation)):
            for place, g in zip(self.layout.slices.values(), product.gradients, strict=True):
                if g is not None:
                    added_to = sums[which, place]
                    added_to += g.to_dense().reshape(added_to.shape).to(sums)
            sizes[which] += product.sizes().to(sizes)
        return product.outputs.detached()

    def _cotangents(self, validation: LateValidation, outputs: Outputs, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Return u = M J v for each of some J v, in the shape of the logits."""
        core, labels = self.problem.distributions(outputs, validation)
        drawn = [] if self.middle else self._drawn(outputs, core, labels)
        found: list[Tensor] = []
        with torch.autocast(outputs.logits.device.type, enabled=False):
            for tangent in tangents:
                if self.middle is not None:
                    rows = self.middle(core, labels, outputs.select(tangent).to(core.dtype))
                    found.append(outputs.scatter(rows))
                    continue
                u = torch.zeros_like(tangent, dtype=core.dtype)
                for one in drawn:  # u uᵀ of each sample, over all of its positions
                    along = (one * tangent).flatten(1).sum(1)
                    u += one * along.view(-1, *[1] * (u.ndim - 1))
                found.append(u)
        return found

    def _drawn(self, outputs: Outputs, core: Core, labels: Tensor | None) -> list[Tensor]:
        """Return the estimator's cotangents [B, ..., C] of a batch, which are the same in each product."""
        assert self._estimator is not None
        generator = torch.Generator(core.device).manual_seed(batch_seed(self._seed, outputs.number))
        with torch.no_grad():
            return [outputs.scatter(rows) for rows in self._estimator.cotangents(core, labels, generator)]

    def _choose_method(self) -> None:
        """Choose the method for J v on the first batch that is not empty, and warn of inputs that look wrong.

        Batches are inspected until one has two samples: with one, samples that influence each other are not seen.
        """
        chosen = False
        with self.problem.session():
            for batch in self._batches.batches():
                restore = self._carried.snapshot()
                outputs = self.problem.outputs(batch, self._estimator)  # errors of the model itself show here
                restore()
                self.problem.distributions(outputs)
                enough = self.problem.inspect(batch, outputs) or chosen
                if len(outputs.logits) and not chosen:
                    self._jacobian.choose(partial(self.problem.evaluate, batch, self._estimator))
                    chosen = True
                if enough:
                    return
        if not chosen:
            self._set_count(0, 0)

    def _set_count(self, samples: int = 0, positions: int = 0) -> None:
        if not samples:
            got = "none in one pass over it" if self._count else "none"
            advice = "Ignored samples do not count."
            raise ValueError(message("data", "an iterable with at least one sample", got, advice))
        self._count[:] = [samples, positions]


def _evaluate_after(restore: Callable[[], None], evaluate: Callable[[], Outputs]) -> Outputs:
    restore()
    return evaluate()
