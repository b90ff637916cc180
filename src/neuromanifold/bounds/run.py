"""`fisher_bounds`: section 3 of the paper for a network and its data.

for batch in data:
    logits = model(batch)                                   one forward pass
    K = J Jᵀ of every distribution                          C backward passes, in groups of layers (grams.py)
    terms = all that follows from K and p                   bounds/network.py
    diagonals += (Jᵀu)², u = √λ_i v_i and p                 C backward passes
norms of sums over all x                                    from inner products between samples, or by random products
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from neuromanifold.bounds.actual import estimated_norms, exact_norms
from neuromanifold.bounds.gram import GramRun
from neuromanifold.bounds.kept_gradients import KeptGradients
from neuromanifold.bounds.network import Terms, network_terms
from neuromanifold.bounds.result import Actual, Cost, Diagonals, NetworkBounds
from neuromanifold.core import Bernoulli, Categorical, Gaussian
from neuromanifold.core.checks import check_reduction, integer_in_range, message, one_of
from neuromanifold.estimators import Exact, Lower, Upper
from neuromanifold.estimators.differences import AboveFull, BelowRank
from neuromanifold.persample.accumulate import DiagonalSums
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem, refuse_a_part
from neuromanifold.results import DiagonalFisher, Provenance
from neuromanifold.run.fisher import make_provenance
from neuromanifold.run.settings import Settings

ActualNorms = Literal["auto", "exact", "estimate", "none"]


@torch.inference_mode(mode=False)
def fisher_bounds(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    rank: int = 1,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    diagonals: bool = True,
    actual: ActualNorms = "auto",
    max_bytes: int | None = None,
    seed: int = 0,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
) -> NetworkBounds:
    """Return bounds of F and of the errors of its envelopes, beside the actual values (Propositions 5 and 7 to 10).

    Corollary 6, about the trace, is among them.  Each output distribution is an x of its own: in a sequence, every
    position that counts.  Cost: about C backward passes for each batch, twice that with `diagonals`, and for
    `actual="exact"` the inner products of all N·C gradients.  Arguments that are not listed are those of
    `fisher_diagonal`.

    Args:
        data: batches; Prop. 9 needs labels, the others do not.
        rank: k of the lower bound F^LR(k), 1 to C - 1; Prop. 8 is there for every other rank as well.
        likelihood: `nm.Categorical`, which the statements are about.
        diagonals: also the diagonals of F^LR(k), F and F^DG, in C more passes.
        actual: norms of sums over all x: "exact", from inner products between all samples, for N·C up to some thousand;
            "estimate", by random products, for which the data are gone through again; "none"; or "auto", exact while
            N·C <= 3000 and the gradients that must be kept take less than 256 MB, else estimated.
        max_bytes: how much memory the gradients of several classes may take at a time; more take fewer passes.  None:
            about as much as an ordinary backward pass takes.
        seed: random seed of the estimates.

    Returns:
        A `NetworkBounds`, which prints as a table of all statements.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected; the message says what is.

    Example:
        >>> bounds = nm.fisher_bounds(model, data, rank=1)
        >>> bounds.lower_trace(1) < nm.fisher_trace(model, data, nm.Exact()).value
        True
    """
    if likelihood in (Bernoulli, Gaussian):
        _refuse(getattr(likelihood, "__name__", ""))
    one_of(actual, "actual", "auto", "exact", "estimate", "none")
    if not isinstance(diagonals, bool):
        raise TypeError(message("diagonals", "True or False", repr(diagonals)))
    rank = integer_in_range(rank, "rank", 1, 10**9, "the lower bound has 1 to C - 1 eigenvectors")
    if max_bytes is not None:
        max_bytes = integer_in_range(max_bytes, "max_bytes", 1, 2**60, "memory for gradients")
    view = check_reduction(reduction)
    refuse_a_part(data, "fisher_bounds")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    settings = Settings.of(Exact(), "sample", seed)
    if actual == "estimate":
        problem.repeated()  # refuses a generator
    bounds_run = _BoundsRun(problem, settings, rank, diagonals, actual, max_bytes)
    bounds_run.run(progress)
    norms = bounds_run.norms()
    provenance = make_provenance(problem, settings, bounds_run.counts)
    return NetworkBounds(
        terms=Terms.cat(bounds_run.terms),
        actual=norms,
        diagonals=bounds_run.diagonals(provenance) if diagonals else None,
        count=bounds_run.counts.samples,
        classes=bounds_run.classes,
        rank=rank,
        costs=tuple(Cost(part, *cost) for part, cost in bounds_run.costs.items()),
        provenance=provenance,
        has_labels=bounds_run.has_labels,
    )._view(view)


class _BoundsRun(GramRun):
    """One run over the data: accumulates terms, diagonals, and gradients for norms."""

    description = "Fisher bounds"

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        rank: int,
        diagonals: bool,
        actual: ActualNorms,
        max_bytes: int | None,
    ) -> None:
        kept = KeptGradients(actual in ("auto", "exact"), limited=actual != "exact")
        super().__init__(problem, settings, kept, max_bytes)
        self.rank, self.actual = rank, actual
        self.terms: list[Terms] = []
        self.classes, self.has_labels = 0, True
        self.costs: dict[str, tuple[int, float]] = {}
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        tensors = list(problem.parameters.values())
        # F^LR, what F adds to it, and what F^DG adds to F; `diagonals` sums them up in this order.
        parts = (Exact(Lower(rank)), BelowRank(rank=rank), AboveFull()) if diagonals else ()
        self._sums = {part: DiagonalSums(tensors, fourth_powers=False) for part in parts}

    def _add(self, outputs: Outputs, budget: int | None) -> None:
        """Add the distributions of a batch, or of a part of one, to terms and diagonals."""
        self.counts.add(outputs)
        if not len(outputs.logits):
            return
        core, labels = self._core(outputs)
        with self._timed("Gram matrices"):
            K = self._grams(outputs, budget)
        with self._timed("terms"):
            self.terms.append(network_terms(K, core, labels))
        self._logits.append(core.logits)
        self._rows += len(core.logits)
        if labels is not None:
            self._labels.append(labels)
        for part, sums in self._sums.items():
            with self._timed("diagonals"):
                self._method.backward(outputs, sums, part)
                sums.synchronize()
        self._method.release()

    def _core(self, outputs: Outputs) -> tuple[Categorical, Tensor | None]:
        """Return the valid distributions, in float64, and their labels."""
        where = f"Batch {outputs.number} of `data`: "
        core, labels = self.problem.distributions(outputs, self._method.validation, compact=True)
        if not isinstance(core, Categorical):
            _refuse(type(core).__name__)
        if self.classes and core.dim != self.classes:
            raise ValueError(where + message("logits", f"of {self.classes} classes as before", f"{core.dim}"))
        self.classes = core.dim
        why = f"1 to C - 1 for the {core.dim} classes of this model"
        integer_in_range(self.rank, "rank", 1, core.dim - 1, why)
        if labels is None or labels.is_floating_point() or labels.ndim > 1:
            self.has_labels, labels = False, None
        try:
            precise = Categorical(core.logits.double().cpu())
            if labels is not None:
                labels = labels.cpu()
                precise.score(labels)
        except ValueError as error:
            raise ValueError(where + str(error).replace("`y`", "`labels`")) from error
        return precise, labels

    def diagonals(self, provenance: Provenance) -> Diagonals:
        """Return the three diagonals: that of F^LR, and each further one by adding squares to the one before."""
        found, total = [], None
        for sums, part in zip(self._sums.values(), (Exact(Lower(self.rank)), Exact(), Exact(Upper())), strict=True):
            squares = sums.squares
            total = squares if total is None else [a + b for a, b in zip(total, squares, strict=True)]
            errors = dict(zip(self.problem.parameters, sums.standard_errors(), strict=True))
            entries = dict(zip(self.problem.parameters, total, strict=True))
            own = replace(provenance, estimator=repr(part), target=part.target)
            found.append(DiagonalFisher(entries, errors, self.counts.samples, self.counts.positions, own))
        return Diagonals(*found)

    def norms(self) -> Actual:
        """Return the norms of sums over all x, exact or estimated, or the reason why there are none."""
        if self.actual == "none":
            return Actual(how="not computed (actual='none')")
        with self._timed("norms of sums"):
            labels = torch.cat(self._labels) if self.has_labels else None
            if self.kept.keeps:
                core = Categorical(torch.cat(self._logits))
                return exact_norms(self.kept.gram(self.classes), core, labels, self.settings.seed)
            if isinstance(self.problem.data, Iterator):
                why = "not computed: too many samples for exact ones, and a generator cannot be gone through again"
                return Actual(how=why)
            try:
                found, products = estimated_norms(
                    self.problem, self.settings.seed, self.rank, self.classes, self.has_labels
                )
            except (ValueError, RuntimeError) as error:  # operations that have no forward mode, for instance
                if self.actual == "auto":
                    return Actual(how=f"not computed: {error}")
                raise
            self._passes += products * self.counts.batches
            return found

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        passes, seconds = self.costs.get(part, (0, 0.0))
        before = self._method.passes + self._passes
        start = time.perf_counter()
        yield
        if self.problem.device.type == "cuda":
            torch.cuda.synchronize(self.problem.device)
        done = self._method.passes + self._passes - before
        self.costs[part] = (passes + done, seconds + time.perf_counter() - start)


def _refuse(name: str) -> NoReturn:
    advice = "For independent outputs the upper bound is F itself, nm.fisher_diagonal(..., nm.Exact())."
    expected = "nm.Categorical, whose simplex section 3 of the paper is about"
    raise TypeError(message("likelihood", expected, f"one of {name}", advice))
