"""`neuromanifold demo`: every estimator on a small network, trained on the spot; a table, a plot and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from neuromanifold.cli.console import print_facts, print_table
from neuromanifold.cli.files import check_creatable
from neuromanifold.experiments import one_thread
from neuromanifold.experiments.comparison import EstimatorComparison, EstimatorRow, compare_estimators
from neuromanifold.experiments.digits import TRAINING, TrainedDigits, train_digits
from neuromanifold.report.plots import histograms, needs_matplotlib, plot_histograms, save_figure

_SHOWN = "Hutchinson()"  # the estimate that is saved and plotted over the exact diagonal
_HEADER = ("estimator", "for F", "passes", "RelMAE", "corr.", "s.e.", "/grad", "/back")
_TITLE = """\
A convolutional network of {parameters:,} parameters, trained on {training:,} digits; test
accuracy {accuracy:.1f} %.  The diagonal F of its Fisher information over {samples:,} images
in {batches} batches, exact and estimated:
"""
_NOTES = """
for F   right for F on average?  not F: not a Fisher estimate
passes  backward passes for a batch of 64
RelMAE  mean of |estimate - F|/(F + 1e-12) over all entries, as in the paper
corr.   Spearman's rank correlation with the exact diagonal
s.e.    relative standard error that a result reports; –: not random
/grad   time over that of SquaredBatchGradient(), the paper's "empirical FIM"
/back   time over that of forward + backward, {milliseconds:.0f} ms for all batches;
        in a network this small, overheads show

Errors are means over {rounds} seeds, times medians of {rounds} interleaved runs on one
thread; Exact() ran once."""
_TARGETS = {"exact": "exact", "unbiased": "yes", "not a Fisher information": "not F"}


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the plot and the result; created if missing.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the network, its training and the probes.")] = 0,
    samples: Annotated[int, typer.Option(min=1, max=TRAINING, help="Number of images.")] = 1024,
) -> None:
    """Train a small network on handwritten digits and compare every estimator with its exact Fisher diagonal."""
    plot, file = out / "fisher-histograms.png", out / "fisher.safetensors"
    check_creatable(file)
    trained, comparison = _compute(samples, seed)
    _print(trained, comparison)
    estimate, exact = comparison.estimates[_SHOWN], comparison.exact
    with needs_matplotlib():
        figure = plot_histograms(histograms(exact, span=estimate), histograms(estimate, span=exact), "exact", _SHOWN)
    save_figure(figure, plot)
    estimate.save(file)
    print_facts({"plot": plot, "result": f"{file} (nm.load reads it)"})


def _compute(samples: int, seed: int) -> tuple[TrainedDigits, EstimatorComparison]:
    """Train and compare, behind progress bars that vanish."""
    with one_thread(), Progress(console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in bars:
                bars[step] = progress.add_task(step, total=total)
            progress.update(bars[step], completed=done)

        trained = train_digits(samples, seed, report=report)
        return trained, compare_estimators(trained.model, trained.batches, seed=seed, report=report)


def _print(trained: TrainedDigits, comparison: EstimatorComparison) -> None:
    title = _TITLE.format(
        parameters=trained.parameters,
        training=TRAINING,
        accuracy=100 * trained.test_accuracy,
        samples=comparison.exact.count,
        batches=len(trained.batches),
    )
    rounds = max(row.rounds for row in comparison.rows)
    notes = _NOTES.format(rounds=rounds, milliseconds=1e3 * comparison.backward_seconds)
    print_table(title, _HEADER, [_cells(row) for row in comparison.rows], notes, left=2)


def _cells(row: EstimatorRow) -> tuple[str, ...]:
    times = (row.relative_to_batch_gradient, row.relative_to_backward)
    return (
        row.name,
        _TARGETS.get(row.target.split(" (")[0], "no"),
        f"{row.passes:.0f}",
        f"{row.relmae:.3g}",
        f"{row.rank_correlation:.3f}",
        f"{100 * row.relative_error:.0f} %" if row.relative_error else "–",
        *(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in times),
    )
