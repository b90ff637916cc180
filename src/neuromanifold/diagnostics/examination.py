"""What forward passes and a verified run say about a model and some batches, in numbers and in words.

first_batches(problem, n)    the first n batches, and whether a second pass over the data gives the same ones
examine(problem)             how each parameter is done and why, what the loop warns about, what the outputs depend on
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from itertools import islice

from neuromanifold.core.checks import listed, message
from neuromanifold.estimators import Hutchinson
from neuromanifold.persample.accumulate import TraceSums
from neuromanifold.persample.engine import PerSampleGradients
from neuromanifold.persample.graph import Graph
from neuromanifold.persample.verify import Reference
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.suspicions import SuspiciousInputWarning, same_logits, samples_influence_each_other
from neuromanifold.run.counts import Counts
from neuromanifold.run.loop import run
from neuromanifold.run.settings import Settings

_NO_RULE = "no rule covers the layer, nor a broadcast over the samples"
_UNSUPPORTED = "used outside of the layer as well, or samples not found in the layer's inputs"
_WRONG = "per-sample gradients differ from autograd's"


@dataclass(frozen=True)
class Sizes:
    """What decides how many backward passes the exact diagonal of one batch takes."""

    samples: int
    columns: int  # of the exact factor
    positions: int  # of a sample, those left out that count in no sample
    labels: bool

    def passes(self, one_by_one: bool) -> int:
        """Backward passes of `Exact()`, where some parameters may take one for each sample."""
        return self.columns * self.positions * (1 + self.samples if one_by_one else 1)


@dataclass(frozen=True)
class Examination:
    """What is known about a model before any estimator runs."""

    sizes: tuple[Sizes, ...]  # of each batch
    granularity: dict[str, str]  # of each parameter: "sample" or "batch"
    reasons: dict[str, str]  # why, for those that are done per batch
    verified: int  # batches on which per-sample gradients were compared with autograd's
    depends: frozenset[str]  # parameters that the outputs depend on
    repeats: bool  # whether two evaluations agree
    apart: bool | None  # whether samples leave each other alone; None: not known
    notes: tuple[str, ...]

    @property
    def one_by_one(self) -> bool:
        """Whether some parameters take a backward pass for each sample if the estimator is not random."""
        return bool(self.reasons)


def first_batches(problem: Problem, batches: int) -> tuple[Problem, str]:
    """The problem with its first batches as data, on its device, and a note if another pass over the data differs."""
    note = ""
    with problem.session():
        try:
            passes = problem.repeated()
        except TypeError:  # a generator: there is no other pass
            taken = list(islice(problem.batches(), batches))
        else:
            taken = list(islice(passes, batches))
            try:
                for _ in islice(passes, batches):
                    pass
            except ValueError as error:
                note = f"The data differ from pass to pass: {error} Only single passes over such data, such as "
                note += "nm.fisher_diagonal, are right; this check keeps to the batches of its first pass."
    if not taken:
        advice = "A generator can be used up only once; pass a list or a DataLoader."
        raise ValueError(message("data", "an iterable with at least one batch", "an empty one", advice))
    return replace(problem, data=[as_item(batch) for batch in taken]), note


def as_item(batch: Batch) -> object:
    """Return a batch in the form in which data yield it: (inputs, labels)."""
    return (batch.kwargs if batch.kwargs and not batch.args else batch.args, batch.labels)


def examine(problem: Problem, seed: int = 0) -> Examination:
    """Evaluate all batches, compare some evaluations of the first, and run the loop once with random probes."""
    names, sizes, depends = list(problem.parameters), [], set[int]()
    repeats, apart, note, reasons = True, None, "", dict[int, str]()
    validation, examined = problem.validation(), False
    quiet = replace(problem, warned={"labels"})  # they are among the notes of the run
    with problem.session():
        for batch in problem.batches():
            outputs = quiet.evaluate(batch)
            sizes.append(_sizes(outputs, problem.distributions(outputs, validation, labels=False).core.rank))
            if len(outputs.logits) and not examined:
                examined = True
                repeats, apart, note = _compare_evaluations(quiet, batch, outputs)
                reasons = _reasons(quiet, batch, repeats, apart is not False)
            depends |= Reference.of(outputs.logits, list(problem.parameters.values())).gradients.keys()
    validation.flush()
    counts, warned = _verified_run(problem, seed)
    methods = dict(zip(names, counts.methods, strict=True))
    per_batch = {
        name: reasons.get(i, _WRONG) for i, name in enumerate(names) if methods[name] not in ("sample", "token")
    }
    notes = [*filter(None, [note]), *warned, *_notes_on_methods(methods, per_batch, counts)]
    used = frozenset(names[i] for i in depends)
    return Examination(tuple(sizes), methods, per_batch, counts.verified, used, repeats, apart, tuple(notes))


def _sizes(outputs: Outputs, columns: int) -> Sizes:
    logits, valid = outputs.logits, outputs.valid
    positions = logits.shape[1:-1].numel()
    if valid is not None and logits.ndim > 2:
        positions = int(valid.flatten(1).any(0).sum())
    return Sizes(len(logits), columns, positions, outputs.labels is not None)


def _compare_evaluations(problem: Problem, batch: Batch, outputs: Outputs) -> tuple[bool, bool | None, str]:
    """Whether the model repeats itself, whether samples leave each other alone, and a note where that is not so."""
    if not same_logits(problem, problem.outputs(batch).logits, outputs.logits, outputs.valid):
        kind = type(problem.model).__name__
        note = f"Two evaluations of the same batch in eval mode differ: something in {kind} is random or has a state. "
        return False, None, note + "No two numbers below are about the same network."
    mixes = samples_influence_each_other(problem, batch, outputs)
    if mixes is not None:
        return True, not mixes, ""
    why = "samples cannot be cut out of its inputs"
    why = "the first batch has a single sample" if len(outputs.logits) < 2 else why
    return True, None, f"Whether samples influence each other is not known: {why}."


def _reasons(problem: Problem, batch: Batch, repeats: bool, apart: bool) -> dict[int, str]:
    """Why each parameter would be left to autograd, if it is, going by one forward pass with hooks."""
    engine = PerSampleGradients(problem.model, problem.parameters, problem.batch_dim)
    every = range(len(engine.parameters))
    if not repeats:
        return dict.fromkeys(every, "two evaluations of the same batch differ")
    with engine.attached():
        try:
            with engine.capturing():
                logits = problem.evaluate(batch).logits
        except Exception as error:  # whatever a model does about hooks
            return dict.fromkeys(every, f"the model fails with hooks ({type(error).__name__}: {error})")
        uses = engine.uses(logits)
        engine.hooks.release()
    wrong = _WRONG if apart else f"{_WRONG}, since samples influence each other"
    if (
        apart
        and logits.grad_fn is not None
        and any("BackwardBackward" in node.name() for node in Graph.of(logits.grad_fn, len(logits)).users)
    ):
        wrong += ", since forward takes derivatives itself"
    reasons = dict.fromkeys(every, wrong) | dict.fromkeys(uses.remaining, _NO_RULE)
    return reasons | dict.fromkeys(uses.unsupported, _UNSUPPORTED)


def _verified_run(problem: Problem, seed: int) -> tuple[Counts, list[str]]:
    """One run of the loop with one random probe, and what it warns about."""
    settings = Settings.of(Hutchinson(), "auto", seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = run(problem, settings, TraceSums(settings.estimator.noise_factor))
    ours = [one for one in caught if issubclass(one.category, SuspiciousInputWarning)]
    for other in caught:
        if other not in ours:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return counts, [str(one.message) for one in ours]


def _notes_on_methods(methods: dict[str, str], reasons: dict[str, str], counts: Counts) -> list[str]:
    done, every = len(methods) - len(reasons), len(methods)
    batches = f"{counts.verified} of {counts.batches} batches"
    notes = [f"Per sample: {done} of {every} parameters, verified against autograd on {batches}."] if done else []
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, own in reasons.items() if own == reason]
        text = (
            f"Per batch: {listed(names, 4)} ({len(names)} of {every} parameters): {reason}. Random probes square the "
        )
        text += "gradient of the whole batch, with more noise; Exact() and Empirical() take one backward pass for each "
        notes.append(text + "sample.")
    return notes
