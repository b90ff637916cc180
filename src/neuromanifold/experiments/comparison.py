"""Every estimator against the exact diagonal on one model: accuracy and time, the paper's table.

exact = fisher_diagonal(Exact())
for each round:                                             interleaved, so that a busy machine is busy for all
    backward: seconds of forward + ordinary backward over the batches
    for each estimator:
        runs: seconds of fisher_diagonal(estimator, a fresh seed), and its errors against exact
rows: medians of the seconds, means of the errors
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuromanifold.core.checks import integer_in_range, message
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
from neuromanifold.experiments import Report
from neuromanifold.results import Comparison, DiagonalFisher
from neuromanifold.run.batches import model_device
from neuromanifold.run.fisher import fisher_diagonal
from neuromanifold.run.loop import SlowPathWarning
from neuromanifold.run.unchanged import unchanged

EPSILON = 1e-12  # the paper's, added to the exact value that an error is divided by

ESTIMATORS: dict[str, Estimator] = {
    "Empirical()": Empirical(),
    "SquaredBatchGradient()": SquaredBatchGradient(),
    "Hutchinson()": Hutchinson(),
    "Hutchinson(core=Upper())": Hutchinson(core=Upper()),
    "Hutchinson(core=Lower(1))": Hutchinson(core=Lower(1)),
    "Hutchinson(core=Lower(2))": Hutchinson(core=Lower(2)),
    "Hutchinson(deflate=1)": Hutchinson(deflate=1),
    "Hutchinson(probes=4, deflate=1)": Hutchinson(probes=4, deflate=1),
    "MonteCarlo()": MonteCarlo(),
}

Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
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

    rows: list[Row]
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

    `estimators` maps names to estimators, by default `ESTIMATORS`.  Round r draws from the seed `seed` + r.  One that
    squares each sample on its own is slow, and nothing in it is random: it runs once.
    """
    integer_in_range(rounds, "rounds", 1, 10**6, "runs of each estimator")
    if not batches:
        raise ValueError(message("batches", "a list of (inputs, labels)", "an empty one"))
    tell = report or _silent
    exact = _Runs("Exact()", Exact())
    runs = [_Runs(name, estimator) for name, estimator in (ESTIMATORS if estimators is None else estimators).items()]
    gradient = next((one for one in runs if one.estimator == SquaredBatchGradient()), None)
    gradient = _Runs("", SquaredBatchGradient()) if gradient is None else gradient
    for one in (exact, *(one for one in runs if one.slow)):
        one.add(model, _told(batches, one.name, tell), seed, exact)
    backward: list[float] = []
    fast = [one for one in runs if not one.slow and one is not gradient]
    for number in range(rounds):
        backward.append(_backward_seconds(model, batches))
        for one in (gradient, *fast):
            one.add(model, batches, seed + number, exact)
        tell("estimators", number + 1, rounds)
    rows = [one.row(median(gradient.seconds), median(backward), len(batches)) for one in (exact, *runs)]
    return EstimatorComparison(rows, exact.first, {one.name: one.first for one in runs}, median(backward))


@dataclass
class _Runs:
    """One estimator's runs: their times and errors, and the first one's result."""

    name: str
    estimator: Estimator
    results: list[DiagonalFisher] = field(default_factory=list)  # the first only
    seconds: list[float] = field(default_factory=list)
    errors: list[Comparison] = field(default_factory=list)
    relative_errors: list[float] = field(default_factory=list)

    @property
    def slow(self) -> bool:
        """Whether each sample takes backward passes of its own."""
        return not (self.estimator.centred or isinstance(self.estimator, SquaredBatchGradient))

    @property
    def first(self) -> DiagonalFisher:
        return self.results[0]

    def add(self, model: nn.Module, data: Iterable[object], seed: int, exact: _Runs) -> None:
        """Run once more."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowPathWarning)
            start = time.perf_counter()
            result = fisher_diagonal(model, data, self.estimator, seed=seed)
            _wait(model)
            self.seconds.append(time.perf_counter() - start)
        self.results = self.results or [result]
        self.errors.append(result.sum.compare(exact.first.sum, EPSILON))
        self.relative_errors.append(result.relative_error)

    def row(self, gradient_seconds: float, backward_seconds: float, batches: int) -> Row:
        seconds = median(self.seconds)
        return Row(
            name=self.name,
            target=self.estimator.target,
            passes=self.first.provenance.passes / batches,
            relmae=fmean(error.relmae for error in self.errors),
            rank_correlation=fmean(error.rank_correlation for error in self.errors),
            relative_error=fmean(self.relative_errors),
            seconds=seconds,
            relative_to_batch_gradient=seconds / gradient_seconds,
            relative_to_backward=seconds / backward_seconds,
            rounds=len(self.seconds),
        )


def _backward_seconds(model: nn.Module, batches: Batches) -> float:
    """How long forward and ordinary backward take over the batches, in the mode that the estimators run in."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = model_device(model)
    with unchanged(model):
        start = time.perf_counter()
        for inputs, labels in batches:
            loss = cross_entropy(model(inputs.to(device)), labels.to(device))
            torch.autograd.grad(loss, parameters)
        _wait(model)
        return time.perf_counter() - start


def _wait(model: nn.Module) -> None:
    """A GPU computes while Python goes on; wait for it before looking at the clock."""
    if model_device(model).type == "cuda":
        torch.cuda.synchronize(model_device(model))


def _told(batches: Batches, what: str, tell: Report) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, each announced when it is done."""
    for done, batch in enumerate(batches, start=1):
        yield batch
        tell(what, done, len(batches))


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total
