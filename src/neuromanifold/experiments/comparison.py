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
from functools import partial
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuromanifold import estimators as nm
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.diagnostics.runs import Runs, timed
from neuromanifold.estimators import Estimator
from neuromanifold.experiments import Report
from neuromanifold.problem.batches import model_device
from neuromanifold.problem.unchanged import unchanged
from neuromanifold.results import DiagonalFisher
from neuromanifold.run.fisher import fisher_diagonal

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
    exact = Runs("Exact()", nm.Exact(), keep=True)
    wanted = ESTIMATORS if estimators is None else estimators
    compared = [Runs(name, estimator, keep=True) for name, estimator in wanted.items()]
    gradient = next((one for one in compared if one.estimator == nm.SquaredBatchGradient()), None)
    gradient = Runs("", nm.SquaredBatchGradient()) if gradient is None else gradient

    def reported() -> Iterator[tuple[Tensor, Tensor]]:
        for done, batch in enumerate(batches, start=1):
            yield batch
            report(exact.name, done, len(batches))

    device = model_device(model)
    truth = exact.add(lambda: fisher_diagonal(model, reported(), nm.Exact()), device)
    backward: list[float] = []
    for number in range(rounds):
        backward.append(_backward_seconds(model, batches))
        for one in (gradient, *(one for one in compared if one is not gradient)):
            if not number or not isinstance(one.estimator, nm.Exact):
                estimate = partial(fisher_diagonal, model, batches, one.estimator, seed=seed + number)
                one.add(estimate, device, truth)
        report("estimators", number + 1, rounds)
    rows = [_estimator_row(one, gradient.seconds, median(backward)) for one in (exact, *compared)]
    estimates = {one.name: one.first for one in compared if one.first is not None}
    return EstimatorComparison(rows, truth, estimates, median(backward))


def _estimator_row(runs: Runs, gradient_seconds: float, backward_seconds: float) -> EstimatorRow:
    return EstimatorRow(
        name=runs.name,
        target=runs.estimator.target,
        passes=runs.measured[0].passes_per_batch,
        relmae=runs.mean("relmae"),
        rank_correlation=runs.mean("rank_correlation"),
        relative_error=fmean(one.relative_error for one in runs.measured),
        seconds=runs.seconds,
        relative_to_batch_gradient=runs.seconds / gradient_seconds,
        relative_to_backward=runs.seconds / backward_seconds,
        rounds=len(runs.measured),
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
        return timed(device, job)[1]
