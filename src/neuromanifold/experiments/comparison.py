"""Every estimator against the exact diagonal on one model: accuracy and time, the paper's table.

exact = fisher_diagonal(Exact())
for each round:                                             interleaved, so that a busy machine slows all of them
    backward: seconds of forward + ordinary backward over the batches
    for each estimator:
        runs: seconds of fisher_diagonal(estimator, a fresh seed), and its errors against exact
rows: medians of the seconds, means of the errors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuromanifold import estimators as nm
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.diagnostics.trials import Trial, timed
from neuromanifold.estimators import Estimator
from neuromanifold.experiments import Report
from neuromanifold.problem.batches import model_device
from neuromanifold.problem.unchanged import unchanged
from neuromanifold.results import DiagonalFisher
from neuromanifold.run.fisher import fisher_diagonal
from neuromanifold.run.granularity import Granularity

ESTIMATORS: dict[str, Estimator] = {
    "Empirical()": nm.Empirical(),
    "SquaredBatchGradient()": nm.SquaredBatchGradient(),
    "Hutchinson(deflate=0)": nm.Hutchinson(deflate=0),
    "Hutchinson(envelope=Upper())": nm.Hutchinson(envelope=nm.Upper()),
    "Hutchinson(envelope=Lower(1))": nm.Hutchinson(envelope=nm.Lower(1)),
    "Hutchinson(envelope=Lower(2))": nm.Hutchinson(envelope=nm.Lower(2)),
    "Hutchinson()": nm.Hutchinson(),
    "Hutchinson(probes=4)": nm.Hutchinson(probes=4),
    "MonteCarlo()": nm.MonteCarlo(),
}

Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EstimatorRow:
    """One estimator against the exact diagonal; errors are means over the rounds, times are medians."""

    name: str
    target: str  # what the estimate is right for on average
    passes: float  # backward passes for each batch
    relmae: float  # the paper's: mean of |estimate - F|/(F + 1e-12), both as sums over the samples
    rank_correlation: float
    relative_error: float  # the standard error that the result itself reports, over the value; 0: nothing is random
    seconds: float
    relative_to_batch_gradient: float  # to SquaredBatchGradient(), which is what the paper's table calls empirical FIM
    relative_to_backward: float  # to forward + ordinary backward over the same batches
    rounds: int


@dataclass(frozen=True)
class EstimatorComparison:
    """The rows, the exact one first, and the diagonals behind them (those of the first round)."""

    rows: list[EstimatorRow]
    exact: DiagonalFisher
    estimates: dict[str, DiagonalFisher]
    backward_seconds: float


def compare_estimators(
    model: nn.Module,
    batches: Batches,
    estimators: dict[str, Estimator] | None = None,
    rounds: int = 10,
    seed: int = 0,
    report: Report | None = None,
) -> EstimatorComparison:
    """Run every estimator over the batches of a classifier, next to the exact diagonal and an ordinary backward.

    `estimators` maps names to estimators, by default `ESTIMATORS`.  Round r draws from the seed `seed` + r.  What is
    exact takes many passes, and nothing in it is random: it runs once.
    """
    integer_in_range(rounds, "rounds", 1, 10**6, "runs of each estimator")
    if not batches:
        raise ValueError(message("batches", "a list of (inputs, labels)", "an empty one"))
    report = report or (lambda *_: None)
    exact = Trial("Exact()", nm.Exact(), keep=True)
    wanted = ESTIMATORS if estimators is None else estimators
    trials = [Trial(name, estimator, keep=True) for name, estimator in wanted.items()]
    gradient = next((one for one in trials if one.estimator == nm.SquaredBatchGradient()), None)
    gradient = Trial("", nm.SquaredBatchGradient()) if gradient is None else gradient

    def estimate(estimator: Estimator, granularity: Granularity, seed: int) -> DiagonalFisher:
        return fisher_diagonal(model, batches, estimator, granularity=granularity, seed=seed)

    def reported() -> Iterator[tuple[Tensor, Tensor]]:
        for done, batch in enumerate(batches, start=1):
            yield batch
            report(exact.name, done, len(batches))

    exact.add(model, lambda *_: fisher_diagonal(model, reported(), nm.Exact()), seed)
    backward: list[float] = []
    for number in range(rounds):
        backward.append(_backward_seconds(model, batches))
        for one in (gradient, *(one for one in trials if one is not gradient)):
            if not number or not isinstance(one.estimator, nm.Exact):
                one.add(model, estimate, seed + number, exact.first)
        report("estimators", number + 1, rounds)
    rows = [_estimator_row(one, gradient.time, median(backward)) for one in (exact, *trials)]
    return EstimatorComparison(rows, exact.first, {one.name: one.first for one in trials}, median(backward))


def _estimator_row(trial: Trial, gradient_seconds: float, backward_seconds: float) -> EstimatorRow:
    return EstimatorRow(
        name=trial.name,
        target=trial.estimator.target,
        passes=trial.passes_per_batch,
        relmae=trial.mean("relmae"),
        rank_correlation=trial.mean("rank_correlation"),
        relative_error=fmean(trial.relative_errors),
        seconds=trial.time,
        relative_to_batch_gradient=trial.time / gradient_seconds,
        relative_to_backward=trial.time / backward_seconds,
        rounds=len(trial.seconds),
    )


def _backward_seconds(model: nn.Module, batches: Batches) -> float:
    """The seconds of forward and ordinary backward over the batches, in the mode that the estimators run in."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = model_device(model)

    def job() -> None:
        for inputs, labels in batches:
            loss = cross_entropy(model(inputs.to(device)), labels.to(device))
            torch.autograd.grad(loss, parameters)

    with unchanged(model):
        return timed(model, job)[1]
