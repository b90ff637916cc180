"""`fisher_bounds`: section 3 of the paper for a network and its data.

for batch in data:
    logits = model(batch)                                   one forward pass
    K = J Jᵀ of every distribution                          C backward passes, in groups of layers (pullback/grams.py)
    terms = all that follows from K and p                   bounds/network.py
    diagonals += (Jᵀu)², u = √λ_i v_i and p                 C backward passes
norms of sums over all x                                    from inner products between samples, or by random products
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from neuromanifold.bounds.actual import estimated_norms, exact_norms
from neuromanifold.bounds.grams import GramPullback
from neuromanifold.bounds.kept_gradients import Chunk, KeptGradients
from neuromanifold.bounds.network import Terms, network_terms
from neuromanifold.bounds.result import Actual, Cost, Diagonals, NetworkBounds
from neuromanifold.bounds.splitting import split
from neuromanifold.core import Bernoulli, Categorical, Gaussian
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.estimators import Exact, Lower, Upper
from neuromanifold.estimators.differences import AboveFull, BelowRank
from neuromanifold.persample.sums import DiagonalSums
from neuromanifold.problem.batches import Batch, model_device, read_batch
from neuromanifold.problem.cotangents import cotangents
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.parameters import Selection, select_parameters
from neuromanifold.problem.progress import tracked
from neuromanifold.problem.unchanged import unchanged
from neuromanifold.results import DiagonalFisher, Provenance
from neuromanifold.results.trace import check_reduction
from neuromanifold.run.fisher import Likelihood, make_provenance, make_settings
from neuromanifold.run.loop import Counts, check_data, check_model
from neuromanifold.run.squares import SampleSquares
from neuromanifold.run.step import Settings, Step

ActualNorms = Literal["auto", "exact", "estimate", "none"]


@torch.inference_mode(mode=False)
def fisher_bounds(
    model: nn.Module,
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
) -> NetworkBounds:
    """Lower and upper bounds of F and of their errors beside the actual values: Props. 5, 7 to 10 and Cor. 6.

    Each output distribution is an x of its own: in a sequence, every position that counts.

    Args:
        model: any module whose output is, holds or begins with logits.  Nothing of it is changed.
        data: an iterable of batches: a tensor, (inputs, labels), or a dict with the labels under "labels".  Prop. 9
            needs labels, the others do not.
        rank: k of the lower bound F^LR(k), 1 to C - 1; Prop. 8 is there for every other rank as well.
        likelihood: `nm.Categorical`, which the statements are about.
        parameters: a name pattern, several, or a function of name and parameter; frozen ones are left out.
        reduction: "mean" (per sample) or "sum" (over samples): only a view, changed by `.mean` and `.sum`.
        diagonals: also the diagonals of F^LR(k), F and F^DG, in C more passes.
        actual: norms of sums over all x: "exact", from inner products between all samples, for N·C up to some thousand;
            "estimate", by random products, for which the data are gone through again; "none"; or "auto", exact while
            N·C <= 3000 and the gradients that must be kept take less than 256 MB, else estimated.
        max_bytes: how much memory the gradients of several classes may take at a time; more take fewer passes.  None:
            about as much as an ordinary backward pass takes.
        seed: of the estimates.
        progress: show a progress bar on standard error.
        class_dim: which dimension of the logits holds the classes.
        batch_dim: which dimension of inputs, of what flows between modules, and of logits holds the samples.
        ignore_index: positions with this label do not count.

    """
    if likelihood in (Bernoulli, Gaussian):
        _refuse(getattr(likelihood, "__name__", ""))
    if actual not in ("auto", "exact", "estimate", "none"):
        raise ValueError(message("actual", "'auto', 'exact', 'estimate' or 'none'", repr(actual)))
    if not isinstance(diagonals, bool):
        raise TypeError(message("diagonals", "True or False", repr(diagonals)))
    rank = integer_in_range(rank, "rank", 1, 10**9, "the lower bound has 1 to C - 1 eigenvectors")
    if max_bytes is not None:
        max_bytes = integer_in_range(max_bytes, "max_bytes", 1, 2**60, "memory for gradients")
    view, chosen = check_reduction(reduction), select_parameters(model, parameters)
    settings = make_settings(Exact(), likelihood, "sample", seed, class_dim, batch_dim, ignore_index, progress)
    check_data(data)
    if actual == "estimate" and isinstance(data, Iterator):
        advice = "Each product goes through the data again. Pass list(data), or actual='auto'."
        raise TypeError(message("data", "a list or a DataLoader where actual='estimate'", "a generator", advice))
    check_model(model)
    work = _Work(model, chosen, settings, rank, diagonals, actual, max_bytes)
    work.go_through(data)
    norms = work.norms(data)
    made_by = {
        part: make_provenance(model, data, chosen, dataclasses.replace(settings, estimator=part), work.counts)
        for part in (Exact(Lower(rank)), Exact(), Exact(Upper()))
    }
    return NetworkBounds(
        terms=Terms.cat(work.terms),
        actual=norms,
        diagonals=work.diagonals(made_by) if diagonals else None,
        count=work.counts.samples,
        classes=work.classes,
        rank=rank,
        costs=tuple(Cost(part, *cost) for part, cost in work.costs.items()),
        provenance=made_by[Exact()],
        has_labels=work.has_labels,
    )._view(view)


class _Squares(SampleSquares):
    """One pullback, for Gram matrices and for squares."""

    def __init__(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], sums: DiagonalSums, batch_dim: int
    ) -> None:
        super().__init__(model, parameters, sums, Exact(), "sample", batch_dim)
        self.pullback = self._pullback = GramPullback(model, list(parameters.values()), batch_dim)

    def scale_for(self, logits: Tensor, cotangents: Iterator[Tensor]) -> float:
        """How much larger cotangents should be where float16 is involved: as none of them overflows with."""
        if not (self._half or logits.dtype == torch.float16):
            return 1.0
        return min(self._scale_for(logits, one) for one in cotangents)


class _Work:
    """A run, and what it has found."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        settings: Settings,
        rank: int,
        diagonals: bool,
        actual: ActualNorms,
        max_bytes: int | None,
    ) -> None:
        self.model, self.parameters, self.settings, self.rank, self.actual = model, parameters, settings, rank, actual
        self.counts, self.device = Counts(), model_device(model)
        self.terms: list[Terms] = []
        self.classes, self.has_labels = 0, True
        self.costs: dict[str, tuple[int, float]] = {}
        self.kept = KeptGradients(actual in ("auto", "exact"), limited=actual != "exact")
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        tensors = list(parameters.values())
        parts = (Exact(Lower(rank)), BelowRank(rank=rank), AboveFull()) if diagonals else ()
        self._sums = {part: DiagonalSums(tensors, fourth_powers=False) for part in parts}
        sums = next(iter(self._sums.values()), None) or DiagonalSums([], fourth_powers=False)
        self._step = Step(model, parameters, settings, sums, self.device)
        self._squares = _Squares(model, parameters, sums, settings.batch_dim)
        self._step.squares = self._squares
        self.pullback, self.max_bytes = self._squares.pullback, max_bytes
        self.pullback.budget = max_bytes

    def go_through(self, data: Iterable[object]) -> None:
        """Once."""
        current = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with current, unchanged(self.model), self._squares.attached():
            for number, item in enumerate(tracked(data, self.settings.progress, "Fisher bounds")):
                self._take(read_batch(item, number).to(self.device), number)
                self.counts.batches, self.counts.next = number + 1, number + 1
                self.pullback.budget = self.max_bytes
        self._step.validation.finish()
        self.counts.ways = self._squares.ways()
        self.counts.passes = sum(passes for passes, _ in self.costs.values())
        if not self.counts.samples:
            advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
            got = f"{self.counts.batches} batches"
            raise ValueError(message("data", "an iterable with at least one sample", got, advice))

    def _take(self, batch: Batch, number: int) -> None:
        """One batch: at once, or a few samples at a time if the gradients of all classes would be too large."""
        outputs = self._step.forward(batch, number)
        logits, budget = outputs.logits.detach(), self.pullback.ordinary if self.max_bytes is None else self.max_bytes
        samples = max(1, len(logits) * budget // max(1, logits.shape[-1] * self.pullback.outputs))
        if samples < len(logits) and self.settings.batch_dim == 0:
            del outputs
            self.pullback.release()
            with self.pullback.untapped():
                parts = split(self._step.outputs, batch, logits, samples, list(self.parameters.values()))
            if parts:
                self.pullback.budget = budget
                for part in parts:
                    self._add(self._step.forward(part, number), number)
                return
            outputs = self._step.forward(batch, number)
        self._add(outputs, number)

    def _add(self, outputs: Outputs, number: int) -> None:
        """One batch, or a part of one."""
        self.counts.samples += int(outputs.samples)
        self.counts.positions += int(outputs.positions)
        self.counts.dtype = str(outputs.logits.dtype).removeprefix("torch.")
        if not len(outputs.logits):
            return
        core, labels = self._core(outputs, number)
        with self._timed("Gram matrices"):
            K = self._grams(outputs)
        with self._timed("terms"):
            self.terms.append(network_terms(K, core, labels))
        self._logits.append(core.logits)
        if labels is not None:
            self._labels.append(labels)
        for part, sums in self._sums.items():
            with self._timed("diagonals"):
                self._squares.sums = sums
                columns = cotangents(outputs, part, self._step.generator, self._step.validation)
                self._squares.add_all(outputs, columns)
                self.pullback.flush(sums)
                sums.end_batch()
                sums.settle()
        self.pullback.release()

    def _core(self, outputs: Outputs, number: int) -> tuple[Categorical, Tensor | None]:
        """The distributions that count, in float64, and their labels."""
        logits, valid = outputs.logits.detach(), outputs.valid
        rows = logits.reshape(-1, logits.shape[-1]) if valid is None else logits[valid]
        core, where = self._step.validation.core(rows, number), f"Batch {number} of `data`: "
        if not isinstance(core, Categorical):
            _refuse(type(core).__name__)
        if self.classes and core.dim != self.classes:
            raise ValueError(where + message("logits", f"of {self.classes} classes as before", f"{core.dim}"))
        self.classes = core.dim
        why = f"1 to C - 1 for the {core.dim} classes of this model"
        integer_in_range(self.rank, "rank", 1, core.dim - 1, why)
        labels = outputs.labels
        if labels is not None and not outputs.labels_fit:
            expected = f"of shape {list(logits.shape[:-1])}, a class for each distribution"
            raise ValueError(where + message("labels", expected, f"shape {list(labels.shape)}"))
        if labels is None or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            self.has_labels, labels = False, None
        else:
            labels = (labels.flatten() if valid is None else labels[valid]).cpu()
        try:
            precise = Categorical(core.logits.double().cpu())
            if labels is not None:
                precise.score(labels)
        except ValueError as error:
            raise ValueError(where + str(error).replace("`y`", "`labels`")) from error
        return precise, labels

    def _grams(self, outputs: Outputs) -> Tensor:
        """K of the distributions that count, [rows, C, C] in float64 on the CPU."""
        logits, valid = outputs.logits, outputs.valid
        places = logits.shape[1:-1].numel()
        counts = torch.ones(logits.shape[:-1], dtype=torch.bool) if valid is None else valid.cpu()
        counts = counts.reshape(len(logits), places)
        numbers = (counts.flatten().cumsum(0) - 1).view_as(counts) + sum(map(len, self._logits))
        K = torch.zeros(len(logits), places, logits.shape[-1], logits.shape[-1], dtype=torch.float64)
        for t in counts.any(0).nonzero().flatten().tolist():
            K[:, t] = self._grams_at(logits, t, counts[:, t].nonzero().flatten(), numbers[:, t])
        return K[counts]

    def _grams_at(self, logits: Tensor, t: int, index: Tensor, numbers: Tensor) -> Tensor:
        """K at one position of every sample."""
        pullback, rest = self.pullback, self.pullback.rest()
        places = logits.shape[1:-1].numel()

        def cotangent(c: int) -> Tensor:
            one = torch.zeros(len(logits), places, logits.shape[-1], dtype=logits.dtype, device=logits.device)
            one[:, t, c] = 1
            return one.view(logits.shape)

        scale = self._squares.scale_for(logits, map(cotangent, range(logits.shape[-1])))
        K = torch.zeros(len(logits), logits.shape[-1], logits.shape[-1], dtype=torch.float64)
        chunk = Chunk(numbers[index], {}, scale)
        for i, stack in pullback.stacks(logits, cotangent, scale):
            K += stack.inner().cpu()
            self.kept.add(i, stack, index, chunk)
        for n in index.tolist() if rest else ():
            for i, flat in pullback.rest_stack(logits, cotangent, n, rest, scale).items():
                K[n] += flat.inner()[0].cpu()
                self.kept.add(i, flat, torch.tensor([0]), chunk)
        self.kept.end_chunk(chunk, logits.shape[-1])
        return K / scale**2

    def diagonals(self, made_by: dict[Exact, Provenance]) -> Diagonals:
        """Sums of squares, one upon the other."""
        found, total = [], None
        for sums, provenance in zip(self._sums.values(), made_by.values(), strict=True):
            squares = sums.squares
            total = squares if total is None else [a + b for a, b in zip(total, squares, strict=True)]
            noise = dict(zip(self.parameters, sums.noise(), strict=True))
            entries = dict(zip(self.parameters, total, strict=True))
            found.append(DiagonalFisher(entries, noise, self.counts.samples, self.counts.positions, provenance))
        return Diagonals(*found)

    def norms(self, data: Iterable[object]) -> Actual:
        """Norms of sums over all x."""
        if self.actual == "none":
            return Actual(how="not computed (actual='none')")
        with self._timed("norms of sums"):
            labels = torch.cat(self._labels) if self.has_labels else None
            if self.kept.keeps:
                core = Categorical(torch.cat(self._logits))
                return exact_norms(self.kept.gram(self.classes), core, labels, self.settings.seed)
            if isinstance(data, Iterator):
                why = "not computed: too many samples for exact ones, and a generator cannot be gone through again"
                return Actual(how=why)
            try:
                found, products = estimated_norms(
                    self.model, data, self.parameters, self.settings, self.rank, self.classes, self.has_labels
                )
            except (ValueError, RuntimeError) as error:  # operations that have no forward mode, for instance
                if self.actual == "auto":
                    return Actual(how=f"not computed: {error}")
                raise
            self._squares.passes += products * self.counts.batches
            return found

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        passes, seconds = self.costs.get(part, (0, 0.0))
        before = self._squares.passes + self.pullback.passes
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        done = self._squares.passes + self.pullback.passes - before
        self.costs[part] = (passes + done, seconds + time.perf_counter() - start)


def _refuse(name: str) -> NoReturn:
    advice = "For independent outputs the upper bound is F itself, nm.fisher_diagonal(..., nm.Exact())."
    expected = "nm.Categorical, whose simplex section 3 of the paper is about"
    raise TypeError(message("likelihood", expected, f"one of {name}", advice))
