"""The runs behind `nm.check`: a look at the model, what is affordable, and every estimator several times."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from torch import nn

from neuromanifold.diagnostics.check_result import Check, CheckRow, verdict
from neuromanifold.diagnostics.model_checks import CannotSliceError, ModelChecks, check_model, cut, model_notes
from neuromanifold.diagnostics.trials import Trial, short_name, timed
from neuromanifold.estimators import (
    Empirical,
    Estimator,
    Exact,
    Hutchinson,
    Lower,
    MonteCarlo,
    SquaredBatchGradient,
    Upper,
)
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs, read_outputs
from neuromanifold.problem.parameters import Selection
from neuromanifold.problem.progress import tracked
from neuromanifold.problem.unchanged import unchanged
from neuromanifold.problem.validation import LateValidation, Likelihood
from neuromanifold.results import DiagonalFisher
from neuromanifold.run.fisher import fisher_diagonal
from neuromanifold.run.granularity import Granularity, SlowPathWarning

PASSES = 1000  # the exact diagonal may take so many backward passes
PROBES = 64  # of the estimate that stands in for it
ROUNDS = 3
SHORT = 1.0  # seconds: what takes more, and is not random, runs once

ESTIMATORS: tuple[tuple[Estimator, Granularity], ...] = (
    (Hutchinson(), "auto"),
    (Hutchinson(deflate=0), "auto"),
    (Hutchinson(probes=2), "auto"),
    (Hutchinson(probes=4), "auto"),
    (Hutchinson(), "batch"),
    (MonteCarlo(), "auto"),
    (Exact(Upper()), "auto"),
    (Exact(Lower(1)), "auto"),
    (Empirical(), "auto"),
    (SquaredBatchGradient(), "auto"),
)


@dataclass(frozen=True)
class _Sizes:
    """What one batch is, as far as the number of passes goes."""

    samples: int
    columns: int  # of the exact factor
    positions: int
    labels: bool

    def passes(self, one_by_one: bool) -> int:
        return self.columns * self.positions * (1 + self.samples if one_by_one else 1)


@dataclass
class Run:
    """Everything about a check but the batches and the estimators."""

    model: nn.Module
    chosen: dict[str, nn.Parameter]
    likelihood: Likelihood
    parameters: Selection
    class_dim: int
    batch_dim: int
    ignore_index: int
    seed: int
    progress: bool

    def check(self, items: list[Batch], asked: list[Trial] | None) -> Check:
        """All of it."""
        sizes, checks = self._look(items)
        ways = self._estimate(items[:1], Hutchinson(), "auto", self.seed).provenance.granularity
        one_by_one = [name for name, way in ways.items() if way != "sample"]
        items, sizes, reference, note = self._affordable(items, sizes, bool(one_by_one))
        trials = self._applicable(sizes, bool(one_by_one)) if asked is None else asked
        self._forecast(items, sizes, reference, note, bool(one_by_one))
        backward = self._run(items, reference, trials)
        exact, seconds = reference.first, median(backward)
        zero = tuple(name for name, value in exact.sums.items() if not bool(value.any()))
        rows = tuple(_row(one, seconds) for one in (reference, *trials))
        notes = [*model_notes(checks, self.model), note, *_notes_on_parameters(one_by_one, zero, ways)]
        notes.append(_note_on_time(seconds / len(items)))
        is_exact = reference.estimator == Exact()
        said = verdict(rows, 0.0 if is_exact else exact.relative_error)
        noted = tuple(filter(None, notes))
        return Check(rows, exact, is_exact, said, noted, checks.repeats, checks.apart, zero, ways, seconds)

    def _forecast(self, items: list[Batch], sizes: list[_Sizes], reference: Trial, note: str, one_by_one: bool) -> None:
        """Say what the reference will take."""
        if not self.progress:
            return
        passes = PROBES * len(items)
        if reference.estimator == Exact():
            passes = sum(size.passes(one_by_one) for size in sizes)
        seconds = passes * self._backward_seconds(items) / len(items)
        text = f"{short_name(reference.estimator)} takes {passes:,} backward passes, about {seconds:.2g} s."
        print(" ".join(filter(None, (note, text))), file=sys.stderr)

    # ------------------------------------------------------------------ the model

    def _evaluate(self, batch: Batch) -> Outputs:
        output = self.model(*batch.args, **batch.kwargs)
        return read_outputs(output, batch, self.class_dim, self.ignore_index, self.batch_dim)

    def _look(self, items: list[Batch]) -> tuple[list[_Sizes], ModelChecks]:
        """One forward pass for each batch, some more for the first."""
        sizes, validation, checks = [], LateValidation(self.likelihood), None
        with unchanged(self.model), torch.no_grad():
            for number, batch in enumerate(items):
                outputs = self._evaluate(batch)
                logits, valid = outputs.logits, outputs.valid
                core = validation.core(logits[valid] if valid is not None else logits.flatten(0, -2), number)
                positions = logits.shape[1:-1].numel()
                if valid is not None and logits.ndim > 2:
                    positions = int(valid.flatten(1).any(0).sum())  # those that count in no sample take no pass
                labels = outputs.labels is not None and outputs.labels_fit
                sizes.append(_Sizes(len(logits), core.rank, positions, labels))
                checks = checks or check_model(self._evaluate, batch, outputs, self.batch_dim)
            validation.finish()
        assert checks is not None
        return sizes, checks

    def _backward_seconds(self, items: list[Batch]) -> float:
        """How long forward and ordinary backward take, in the mode that the estimators run in."""
        wanted = list(self.chosen.values())

        def job() -> None:
            for batch in items:
                logits = self._evaluate(batch).logits
                torch.autograd.grad(logits, wanted, torch.ones_like(logits), allow_unused=True)

        with unchanged(self.model):
            return timed(self.model, job)[1]

    def _estimate(
        self, items: list[Batch], estimator: Estimator, granularity: Granularity, seed: int
    ) -> DiagonalFisher:
        data = [_as_item(batch) for batch in items]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowPathWarning)
            return fisher_diagonal(
                self.model,
                data,
                estimator,
                self.likelihood,
                self.parameters,
                granularity=granularity,
                seed=seed,
                class_dim=self.class_dim,
                batch_dim=self.batch_dim,
                ignore_index=self.ignore_index,
            )

    # ------------------------------------------------------------------ what is affordable

    def _affordable(
        self, items: list[Batch], sizes: list[_Sizes], one_by_one: bool
    ) -> tuple[list[Batch], list[_Sizes], Trial, str]:
        """Batches for which the exact diagonal takes at most `PASSES` passes; else all of them, and an estimate."""
        exact, cost = Trial("Exact()", Exact(), keep=True), [size.passes(one_by_one) for size in sizes]
        if sum(cost) <= PASSES:
            return items, sizes, exact, ""
        would = f"The exact diagonal would take {sum(cost):,} backward passes"
        fit = next((k for k in range(len(cost) - 1, 0, -1) if sum(cost[:k]) <= PASSES), 0)
        if fit:
            note = f"{would}, and at most {PASSES} are made: only {fit} of {len(items)} batches are used."
            return items[:fit], sizes[:fit], exact, note
        first, few = sizes[0], PASSES // sizes[0].passes(False) - 1
        if one_by_one and few >= min(8, first.samples):
            try:
                part = [cut(items[0], first.samples, 0, few, self.batch_dim)]
            except CannotSliceError:
                pass
            else:
                note = f"{would}, and at most {PASSES} are made: only {few} samples of the first batch are used."
                return part, [replace(first, samples=few)], exact, note
        together = max(size.positions for size in sizes) > 1
        stand_in = Hutchinson(probes=PROBES, orthogonal=not together)
        note = (
            f"{would}, and at most {PASSES} are made: {short_name(stand_in)} stands in for it, with a seed of its own."
        )
        return items, sizes, Trial("reference", stand_in, keep=True), note

    def _applicable(self, sizes: list[_Sizes], one_by_one: bool) -> list[Trial]:
        """All estimators that the labels allow and that do not take too long."""
        labels = all(size.labels for size in sizes)
        exact_fits = sum(size.passes(one_by_one) for size in sizes) <= PASSES
        found = []
        for estimator, granularity in ESTIMATORS:
            if (estimator.needs_labels and not labels) or (isinstance(estimator, Exact) and not exact_fits):
                continue
            by = " by batches" if granularity == "batch" else ""
            found.append(Trial(short_name(estimator) + by, estimator, granularity))
        return found

    # ------------------------------------------------------------------ the runs

    def _run(self, items: list[Batch], reference: Trial, trials: Sequence[Trial]) -> list[float]:
        """All runs; gives the seconds of forward + backward."""

        def estimate(estimator: Estimator, granularity: Granularity, seed: int) -> DiagonalFisher:
            return self._estimate(items, estimator, granularity, seed)

        backward: list[float] = []
        jobs = [(one, number) for number in range(ROUNDS) for one in (reference, None, *trials)]
        for one, number in tracked(jobs, self.progress, "Check"):
            if one is None:
                backward.append(self._backward_seconds(items))
            elif not number or one.estimator.noise_factor or one.seconds[0] < SHORT:
                if one is reference and number and one.estimator.noise_factor:
                    continue
                # a stand-in must not share its noise with what it is compared to
                seed = self.seed + number + (ROUNDS if one is reference else 0)
                one.add(self.model, estimate, seed, reference.first if reference.results else None)
        return backward


def _as_item(batch: Batch) -> object:
    """A batch as data yield it."""
    if batch.kwargs and not batch.args:
        return (batch.kwargs, batch.labels)
    return (batch.args, batch.labels)


def _row(trial: Trial, backward: float) -> CheckRow:
    return CheckRow(
        name=trial.name,
        estimator=trial.estimator,
        granularity=trial.granularity,
        target=trial.estimator.target,
        passes=trial.passes_per_batch,
        relmae=trial.mean("relmae"),
        relmae_positive=trial.mean("relmae_positive"),
        trace_ratio=trial.mean("mean_ratio"),
        rank_correlation=trial.mean("rank_correlation"),
        coverage=fmean(trial.coverages) if trial.coverages else None,
        time=trial.time / backward,
        rounds=len(trial.seconds),
    )


def _note_on_time(seconds: float) -> str:
    if seconds > 0.01:
        return ""
    return f"A plain pass takes {1e3 * seconds:.2g} ms a batch: times are mostly overhead, which larger models hide."


def _notes_on_parameters(one_by_one: list[str], zero: Sequence[str], ways: dict[str, str]) -> list[str]:
    notes = []
    if one_by_one:
        text = (
            f"No rule covers {_listed(one_by_one)} ({len(one_by_one)} of {len(ways)} parameters): random probes square "
        )
        notes.append(text + "them by batches, with more noise, and Exact() and Empirical() go one sample at a time.")
    if zero:
        notes.append(f"The Fisher information of {_listed(zero)} is zero in every entry: nothing here depends on it.")
    return notes


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
