"""`fisher_operator`: exact products F v over a data set, without ever forming F.

for batch in data:
    z, J v = model(batch) at dual parameters (θ, v)         one forward pass (pullback/jacobian.py)
    u = middle(core, labels, J v)                           M J v at the positions that count
    F v += Jᵀ u                                             one backward pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.estimators import Exact, Lower, Upper
from neuromanifold.estimators.envelopes import Envelope
from neuromanifold.operators.jacobian import JacobianProducts
from neuromanifold.operators.layout import Layout
from neuromanifold.operators.metric import Metric
from neuromanifold.problem.batches import Batch, model_device, read_batch
from neuromanifold.problem.outputs import Outputs, read_outputs
from neuromanifold.problem.parameters import Selection, select_parameters
from neuromanifold.problem.progress import tracked
from neuromanifold.problem.unchanged import unchanged
from neuromanifold.problem.validation import LateValidation
from neuromanifold.results.trace import Reduction, check_reduction
from neuromanifold.run.fisher import Likelihood
from neuromanifold.run.loop import check_data, check_model
from neuromanifold.run.step import Settings, check_outputs

Middle = Callable[[Core, Tensor | None, Tensor], Tensor]
"""From the core over rows [R, C], their labels ([R] classes, or [R, C] targets, or None) and v [R, C] to M v [R, C]."""


def fisher_operator(
    model: nn.Module,
    data: Iterable[object],
    envelope: Envelope | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
) -> FisherOperator:
    """F = Σ_x Jᵀ M(x) J as a linear operator: exact, matrix-free, one pass over the data for each product.

    Args:
        model: any module whose output is, holds or begins with logits.  Nothing of it is changed.  It is looked at
            anew with each product, so train it between products and F is that of the new parameters.
        data: an iterable of batches that can be gone through again and again: a list or a DataLoader.
        envelope: None for F itself, or an envelope of it: `nm.Upper()`, `nm.Lower(k)`.
        likelihood: what the outputs mean: `nm.Categorical`, `nm.Bernoulli`, `nm.Gaussian`, or a function of them.
        parameters: a name pattern, several, or a function of name and parameter; frozen ones are left out.
        reduction: "mean" (per sample) or "sum" (over samples): only a view, changed by `.mean` and `.sum`.
        progress: show a progress bar on standard error for each pass over the data.
        class_dim: which dimension of the logits holds the classes.
        batch_dim: which dimension of inputs and of logits holds the samples.
        ignore_index: positions with this label do not count, nor samples without any other.

    """
    estimator = Exact(envelope)
    if not callable(likelihood):
        expected = "nm.Categorical, nm.Bernoulli, nm.Gaussian, or a function from outputs to one of them"
        raise TypeError(message("likelihood", expected, repr(likelihood)))
    chosen = select_parameters(model, parameters)
    batch_dim = integer_in_range(batch_dim, "batch_dim", 0, 63, "a dimension of the logits, counted from the front")
    settings = Settings(estimator, likelihood, "auto", 0, class_dim, batch_dim, ignore_index, progress)
    return metric_operator(model, data, chosen, settings, envelope_product(envelope), check_reduction(reduction))


def metric_operator(
    model: nn.Module,
    data: Iterable[object],
    parameters: dict[str, nn.Parameter],
    settings: Settings,
    middle: Middle,
    reduction: Reduction = "mean",
) -> FisherOperator:
    """Σ_x Jᵀ middle(x) J for any symmetric matrix in the middle.

    Labels are handed to `middle` where the data have them, and are demanded if `settings.estimator` needs them.
    """
    check_data(data)
    if isinstance(data, Iterator) or (not isinstance(data, Sized) and iter(data) is iter(data)):
        advice = "Each product goes through the data once; a generator is used up after the first. Pass list(data)."
        raise TypeError(message("data", "a list, a DataLoader or another iterable of batches", "an iterator", advice))
    check_model(model)
    return FisherOperator(model, data, parameters, settings, middle, reduction)


def envelope_product(envelope: Envelope | None) -> Middle:
    """Return the product of M, or of an envelope, with a vector of the outputs."""
    if isinstance(envelope, Upper):
        return lambda core, _, v: core.upper_envelope() * v
    if isinstance(envelope, Lower):
        return lambda core, _, v: _low_rank(core, min(envelope.rank, core.rank), v)
    return lambda core, _, v: core.matvec(v)


def _low_rank(core: Core, rank: int, v: Tensor) -> Tensor:
    values, vectors = core.spectrum(rank)  # [R, k], [R, k, C]
    return torch.einsum("nk,nkc,nkd,nd->nc", values, vectors, vectors, v)


class FisherOperator(Metric):
    """F as a linear operator; `way` says how J v is found.  It holds on to the model and the data."""

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[object],
        parameters: dict[str, nn.Parameter],
        settings: Settings,
        middle: Middle,
        reduction: Reduction = "mean",
    ) -> None:
        self.model, self.data, self.parameters = model, data, parameters
        self.settings, self.middle, self.reduction = settings, middle, reduction
        self.layout, self.device = Layout.of(parameters), model_device(model)
        exact = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        self.precision = torch.float64 if exact else torch.float32
        self._count: list[int] = []  # shared by views
        self._jacobian: JacobianProducts[Outputs] = JacobianProducts(model, parameters, lambda outputs: outputs.logits)
        self._choose_way()

    @property
    def way(self) -> str:
        """How J v is found: by forward mode, or by double backward, perhaps without fused kernels."""
        return self._jacobian.way

    @property
    def count(self) -> int:
        """Samples; asking for it before the first product takes a pass of forward evaluations."""
        if not self._count:
            with self._passing() as batches, torch.no_grad():
                self._set_count(sum(int(self._evaluate(batch, number).samples) for batch, number in batches))
        return self._count[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reduction}, {self.layout.size:,} parameters, by {self.way})"

    @torch.inference_mode(False)
    def _product(self, block: Tensor) -> Tensor:
        """One pass over the data for all columns."""
        if not block.shape[1]:
            return torch.zeros_like(block)
        total = torch.zeros_like(block.mT, memory_format=torch.contiguous_format)
        sizes = total.new_zeros(len(total), 2)
        samples: int | Tensor = 0
        rows = block.mT.contiguous()
        validation = LateValidation(self.settings.likelihood)
        with self._passing() as batches:
            for batch, number in batches:
                samples = samples + self._add(batch, number, rows, total, sizes, validation)
        validation.finish()
        self._jacobian.compare(rows, total, sizes)
        self._set_count(int(samples))
        return total.mT

    def _add(
        self, batch: Batch, number: int, vectors: Tensor, sums: Tensor, sizes: Tensor, validation: LateValidation
    ) -> int | Tensor:
        """Add the products of one batch with vectors [m, P], and their sizes; how many samples it has."""
        samples: int | Tensor = 0
        seen: tuple[Outputs, Core, Tensor | None] | None = None  # the columns of a block have the same outputs

        def middle(outputs: Outputs, tangent: Tensor) -> Tensor:
            nonlocal samples, seen
            if seen is None or seen[0] is not outputs:
                samples = outputs.samples
                seen = (outputs, *self._core(outputs, validation, number))
            _, core, labels = seen
            v = outputs.select(tangent).to(core.dtype)
            with torch.autocast(v.device.type, enabled=False):
                return outputs.scatter(self.middle(core, labels, v))

        parts = [
            vectors[:, place].view(len(vectors), *self.layout.shapes[name])
            for name, place in self.layout.slices.items()
        ]
        for which, product, size in self._jacobian(lambda: self._evaluate(batch, number), parts, middle):
            for place, g in zip(self.layout.slices.values(), product, strict=True):
                if g is not None:
                    sums[which, place] += g.reshape(len(g), place.stop - place.start).to(sums)
            sizes[which] += size.to(sizes)
        return samples

    def _core(self, outputs: Outputs, validation: LateValidation, number: int) -> tuple[Core, Tensor | None]:
        """The distributions at the positions that count, and their labels."""
        logits, labels, valid = outputs.logits.detach(), outputs.labels, outputs.valid
        rows = outputs.select(logits)
        if labels is not None and outputs.labels_fit:
            every = valid is None or logits.ndim == 2
            labels = labels.reshape(len(rows), *labels.shape[logits.ndim - 1 :]) if every else labels[valid]
        return validation.core(rows, number), labels if outputs.labels_fit else None

    def _choose_way(self) -> None:
        """On the first batch that is not empty."""
        with self._passing(show=False) as batches:
            for batch, number in batches:
                with torch.no_grad():  # errors of the model itself, and bad logits, show here
                    outputs = self._evaluate(batch, number)
                    validation = LateValidation(self.settings.likelihood)
                    self._core(outputs, validation, number)
                    validation.finish()
                if len(outputs.logits):
                    self._jacobian.choose(lambda batch=batch, number=number: self._evaluate(batch, number))  # type: ignore[misc]
                    return
        self._set_count(0)

    def _evaluate(self, batch: Batch, number: int) -> Outputs:
        s = self.settings
        output = self.model(*batch.args, **batch.kwargs)
        outputs = read_outputs(output, batch, s.class_dim, s.ignore_index, s.batch_dim)
        if torch.is_grad_enabled():
            check_outputs(outputs, s.estimator, number)
        return outputs

    @contextmanager
    def _passing(self, show: bool | None = None) -> Iterator[Iterator[tuple[Batch, int]]]:
        """The batches on the model's device, while nothing of the model changes."""
        show = self.settings.progress if show is None else show

        def batches() -> Iterator[tuple[Batch, int]]:
            for number, item in enumerate(tracked(self.data, show, "Fisher information")):
                yield read_batch(item, number).to(self.device), number

        with ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(unchanged(self.model))
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled graphs have no forward mode
            yield batches()

    def _set_count(self, samples: int) -> None:
        if not samples:
            got = "none in one pass over it" if self._count else "none"
            advice = "Ignored samples do not count."
            raise ValueError(message("data", "an iterable with at least one sample", got, advice))
        if self._count and self._count[0] != samples:
            advice = "Each product must be over the same data."
            raise ValueError(message("data", f"the same {self._count[0]} samples in each pass", f"{samples}", advice))
        self._count[:] = [samples]
