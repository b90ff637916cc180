"""`nm.check`: every estimator against the exact diagonal, on the user's own model.

first_batches: on the device; does a second pass over the data give the same?
examine: how each parameter is done and why; does the model repeat itself, do samples leave each other alone?
affordable: how many passes would the exact diagonal take?  too many: fewer batches, fewer samples, or a good estimate
for each round:                                             interleaved, so that a busy machine is busy for all
    reference = diagonal of Exact()
    seconds of forward + ordinary backward over the batches
    for each estimator: its diagonal with a fresh seed: seconds, errors, coverage
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import nn

from neuromanifold import estimators as nm
from neuromanifold.core import Categorical
from neuromanifold.core.checks import integer_in_range, listed, message
from neuromanifold.diagnostics.check_result import Check, verdict
from neuromanifold.diagnostics.examination import Examination, Sizes, as_item, examine, first_batches
from neuromanifold.diagnostics.runs import Runs, expected_warnings_ignored, short_name, timed
from neuromanifold.estimators import Estimator, Exact, Hutchinson
from neuromanifold.problem.batches import sample_dim
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.progress import tracked
from neuromanifold.run.fisher import diagonal_of
from neuromanifold.run.settings import LoopOptions, Settings, choose_granularity

PASSES = 1000  # the exact diagonal may take so many backward passes
PROBES = 64  # of the estimate that stands in for it
ROUNDS = 3
SHORT = 1.0  # seconds: what takes more, and is not random, runs once
_OPTIONS = LoopOptions(cuda_graphs="auto")

_HUTCHINSON = (nm.Hutchinson(), nm.Hutchinson(deflate=0), nm.Hutchinson(probes=2), nm.Hutchinson(probes=4))
_PER_SAMPLE = (*_HUTCHINSON, nm.Adaptive())
_OTHERS = (nm.MonteCarlo(), nm.Exact(nm.Upper()), nm.Exact(nm.Lower(1)), nm.Empirical(), nm.SquaredBatchGradient())


@dataclass(frozen=True)
class Affordable:
    """Batches, and an estimator that gives their diagonal well enough to compare others with."""

    problem: Problem
    sizes: tuple[Sizes, ...]
    reference: Estimator
    passes: int
    note: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the reference has no error of its own."""
        return self.reference == Exact()


@torch.inference_mode(mode=False)
def check(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    batches: int = 4,
    seed: int = 0,
    estimators: Iterable[Estimator] | Mapping[str, Estimator] | None = None,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
) -> Check:
    """Compare the estimators with the exact diagonal on your own model and the first batches of your data.

    Says which of them is good enough, which parameters are done per sample or per batch and why, on how many batches
    that was verified against autograd, whether samples influence each other, and whether outputs, labels and data are
    what they are taken for.  The model is not changed.  Arguments that are not listed are those of
    `fisher_diagonal`.

    Cost: the exact diagonal takes C - 1 backward passes for each batch of C classes, times the number of output
    positions of a sample, times the number of samples where a parameter is not done per sample.  If that is more than
    1000, fewer batches are used, then fewer samples; if nothing helps, `nm.Hutchinson` with 64 probes stands in for it.

    Args:
        data: only the first `batches` are used, in two passes unless it is a generator.
        batches: how many.
        seed: round r draws from `seed` + r.
        estimators: several, perhaps by name in a dict; by default all that the data allow.
        progress: say on standard error what it will take, and show a progress bar.

    Returns:
        A `Check`, which prints as a table with notes and a verdict.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected; the message says what is.

    Example:
        >>> result = nm.check(model, data)
        >>> result.is_exact, len(result.rows) > 5
        (True, True)
    """
    batches = integer_in_range(batches, "batches", 1, 10**9, "at least one")
    seed = integer_in_range(seed, "seed", 0, 2**62, "a seed")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    requested = _requested(estimators)
    problem, note = first_batches(problem, batches)
    examination = examine(problem, seed)
    affordable = _affordable(problem, examination)
    reference = Runs("Exact()" if affordable.is_exact else "reference", affordable.reference, keep=True)
    compared = _applicable(affordable.sizes, examination.one_by_one) if requested is None else requested
    if progress:
        _forecast(affordable)
    strict = requested is not None
    seconds, refused = _run_all(affordable.problem, reference, compared, seed, progress, strict=strict)
    exact, rows = reference.first, tuple(one.row(seconds) for one in (reference, *compared) if one.measured)
    assert exact is not None
    zero = tuple(name for name, value in exact.sums.items() if not bool(value.any()))
    notes = [note, *examination.notes, affordable.note, *refused, *_notes_on_zeros(zero, examination)]
    notes.append(_note_on_time(seconds / len(affordable.sizes)))
    return Check(
        rows=rows,
        exact=exact,
        is_exact=affordable.is_exact,
        verdict=verdict(rows, 0.0 if affordable.is_exact else exact.relative_error),
        notes=tuple(filter(None, notes)),
        repeats=examination.repeats,
        apart=examination.apart,
        zero=zero,
        granularity=examination.granularity,
        reasons=examination.reasons,
        verified=examination.verified,
        backward_seconds=seconds,
    )


def _requested(estimators: Iterable[Estimator] | Mapping[str, Estimator] | None) -> list[Runs] | None:
    """The caller's estimators, by name."""
    if estimators is None:
        return None
    if isinstance(estimators, Estimator) or not isinstance(estimators, Iterable):
        advice = "Put it into a list." if isinstance(estimators, Estimator) else ""
        raise TypeError(message("estimators", "several estimators, or None", repr(estimators), advice))
    pairs = estimators.items() if isinstance(estimators, Mapping) else ((None, one) for one in estimators)
    requested = []
    for name, one in pairs:
        choose_granularity(one, "auto")  # refuses what is no estimator
        requested.append(Runs(name or short_name(one), one))
    if not requested:
        raise ValueError(message("estimators", "at least one, or None for all", "none"))
    return requested


# ---------------------------------------------------------------------------------------------- what is affordable


def _affordable(problem: Problem, examination: Examination) -> Affordable:
    """Batches for which the exact diagonal takes at most `PASSES` passes; else all of them, and an estimate."""
    items, sizes = list(problem.data), examination.sizes
    cost = [size.passes(examination.one_by_one) for size in sizes]
    if sum(cost) <= PASSES:
        return Affordable(problem, sizes, Exact(), sum(cost))
    would = f"The exact diagonal would take {sum(cost):,} backward passes, and at most {PASSES} are made: "
    fit = next((k for k in range(len(cost) - 1, 0, -1) if sum(cost[:k]) <= PASSES), 0)
    if fit:
        note = would + f"only {fit} of {len(items)} batches are used."
        return Affordable(replace(problem, data=items[:fit]), sizes[:fit], Exact(), sum(cost[:fit]), note)
    few = PASSES // max(1, sizes[0].passes(False)) - 1
    part = _some_samples(problem, sizes[0].samples, few) if examination.one_by_one else None
    if part is not None:
        size = replace(sizes[0], samples=few)
        note = would + f"only {few} samples of the first batch are used."
        return Affordable(part, (size,), Exact(), size.passes(True), note)
    stand_in = Hutchinson(probes=PROBES, orthogonal=max(size.positions for size in sizes) == 1)
    note = would + f"{short_name(stand_in)} stands in for it, with a seed of its own."
    return Affordable(problem, sizes, stand_in, PROBES * len(items), note)


def _some_samples(problem: Problem, samples: int, few: int) -> Problem | None:
    """The problem with some samples of its first batch as data; None if they are too few or cannot be told apart."""
    batch = next(problem.batches())
    inputs = batch.inputs()
    if few < min(8, samples) or any(t.ndim and sample_dim(t, samples, problem.batch_dim) is None for t in inputs):
        return None
    return replace(problem, data=[as_item(batch.cut(samples, slice(few), problem.batch_dim))])


def _applicable(sizes: Sequence[Sizes], one_by_one: bool) -> list[Runs]:
    """All estimators that do not take too long, those for labels if there are labels."""
    labels = all(size.labels for size in sizes)
    exact_fits = sum(size.passes(one_by_one) for size in sizes) <= PASSES
    candidates = [Runs(short_name(one), one) for one in (*_PER_SAMPLE, *_OTHERS)]
    candidates.insert(len(_PER_SAMPLE), Runs("Hutchinson() per batch", Hutchinson(), "batch"))
    fitting = [one for one in candidates if labels or not one.estimator.needs_labels]
    return [one for one in fitting if exact_fits or not isinstance(one.estimator, Exact)]


def _forecast(affordable: Affordable) -> None:
    """Say on standard error what the reference will take."""
    batches = len(affordable.sizes)
    seconds = affordable.passes * backward_seconds(affordable.problem) / batches
    text = f"{short_name(affordable.reference)} takes {affordable.passes:,} backward passes, about {seconds:.2g} s."
    print(" ".join(filter(None, (affordable.note, text))), file=sys.stderr)


# -------------------------------------------------------------------------------------------------------- the runs


def _run_all(
    problem: Problem, reference: Runs, estimators: list[Runs], seed: int, progress: bool, *, strict: bool
) -> tuple[float, list[str]]:
    """Run all in turn, so that a busy machine is busy for all; return the median seconds of forward + backward.

    Estimators that refuse the labels are left out, with a note for each reason, unless `strict`.
    """
    backward, refused = list[float](), dict[str, list[str]]()
    jobs = [(one, number) for number in range(ROUNDS) for one in (reference, None, *estimators)]
    for one, number in tracked(jobs, "Check") if progress else jobs:
        if one is None:
            backward.append(backward_seconds(problem))
        elif not number or _runs_again(one, reference):
            # a stand-in must not share its noise with what it is compared to
            settings = Settings.of(one.estimator, one.granularity, seed + number + (ROUNDS if one is reference else 0))
            try:
                with expected_warnings_ignored():  # a note says it already
                    one.add(partial(diagonal_of, problem, settings, _OPTIONS), problem.device, reference.first)
            except ValueError as error:
                if strict or not one.estimator.needs_labels:
                    raise
                refused.setdefault(str(error).replace("`y`", "`labels`"), []).append(one.name)
    return median(backward), [f"Without {' and '.join(names)}: {error}" for error, names in refused.items()]


def _runs_again(one: Runs, reference: Runs) -> bool:
    """What is random, but for the reference; what is not, for its time alone, if it is short."""
    if not one.measured:
        return False  # it was refused
    return one is not reference if one.estimator.noise_factor else one.measured[0].seconds < SHORT


def backward_seconds(problem: Problem) -> float:
    """How long forward and ordinary backward take over all batches, in the mode that the estimators run in."""
    wanted = list(problem.parameters.values())

    def job() -> None:
        for batch in problem.batches():
            logits = problem.evaluate(batch).logits
            torch.autograd.grad(logits, wanted, torch.ones_like(logits), allow_unused=True)

    with problem.session():
        return timed(problem.device, job)[1]


def _note_on_time(seconds: float) -> str:
    if seconds > 0.01:
        return ""
    text = (
        f"Forward + backward take {1e3 * seconds:.2g} ms for a batch: times are mostly overhead, which does not grow "
    )
    return text + "with the model."


def _notes_on_zeros(zero: Sequence[str], examination: Examination) -> list[str]:
    """What zeros mean: parameters that nothing depends on, or gradients that vanish."""
    unused, vanishing = [[name for name in zero if (name in examination.depends) == used] for used in (False, True)]
    notes = [f"The outputs do not depend on {listed(unused, 4)}: F is zero there."] if unused else []
    if vanishing:
        text = f"F of {listed(vanishing, 4)} is zero in every entry, though the outputs depend on it: all gradients of "
        notes.append(text + "log p vanish on these batches, as behind dead units or weights of zero.")
    return notes
