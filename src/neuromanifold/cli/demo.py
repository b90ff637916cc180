"""`neuromanifold demo`: every estimator on a small network, trained on the spot; a table, a picture and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from neuromanifold.experiments import one_thread
from neuromanifold.experiments.comparison import EstimatorComparison, EstimatorRow, compare_estimators
from neuromanifold.experiments.digits import TRAINING, TrainedDigits, train_digits
from neuromanifold.report.plots import histograms, plot_histograms, save_figure

SHOWN = "Hutchinson()"  # the estimate that is saved and drawn over the exact diagonal

NOTES = """\
for F   right for F on average?  not F: no Fisher, depends on the batch size
passes  backward passes for a batch of 64
RelMAE  mean of |estimate - F|/(F + 1e-12) over all entries, as in the paper
corr.   Spearman's rank correlation with the exact diagonal
s.e.    relative standard error that a result gives of itself, not knowing F
t/grad  time over that of SquaredBatchGradient(), the paper's "empirical FIM"
t/back  time over that of forward + ordinary backward, {milliseconds:.0f} ms for all batches;
        in a network this small, overheads show

Errors are means over {rounds} seeds, times medians of {rounds} interleaved runs, on one
thread; Exact() ran once.
"""
SHORT = {"not a Fisher information": "not F"}  # targets that are too long for the table


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the result; made if missing.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the network, its training and the estimates.")] = 0,
    samples: Annotated[int, typer.Option(min=1, max=TRAINING, help="Images that the Fisher is taken over.")] = 1024,
) -> None:
    """Train a small network on handwritten digits and compare every estimator with its exact Fisher diagonal."""
    console = Console()
    try:
        trained, comparison = _compute(samples, seed)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sklearn":
            raise
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _print(console, trained, comparison)
    estimate, exact = comparison.estimates[SHOWN], comparison.exact
    try:
        figure = plot_histograms(histograms(exact, span=estimate), histograms(estimate, span=exact), "exact", SHOWN)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        console.print(
            "No picture: matplotlib is missing (pip install 'neuromanifold[demo]').", markup=False, soft_wrap=True
        )
        raise typer.Exit(1) from None
    picture, file = save_figure(figure, out / "fisher-histograms.png"), out / "fisher.safetensors"
    estimate.save(file)
    console.print(f"Picture: {picture}", markup=False, soft_wrap=True)
    console.print(f"Result:  {file}  (neuromanifold.load reads it)", markup=False, soft_wrap=True)


def _compute(samples: int, seed: int) -> tuple[TrainedDigits, EstimatorComparison]:
    """Train and compare, behind progress bars that vanish."""
    with one_thread(), Progress(console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        trained = train_digits(samples, seed, report=report)
        return trained, compare_estimators(trained.model, trained.batches, seed=seed, report=report)


def _print(console: Console, trained: TrainedDigits, comparison: EstimatorComparison) -> None:
    count, batches = comparison.exact.count, len(trained.batches)
    console.print(
        f"A convolutional network of {trained.parameters:,} parameters, trained on {TRAINING:,} digits; it gets\n"
        f"{100 * trained.test_accuracy:.1f} % of others right.  The diagonal F of its Fisher information, over\n"
        f"{count:,} images in {batches} batches, exact and as estimated:\n",
        markup=False,
        highlight=False,
    )
    table = Table(box=box.SIMPLE, padding=0, show_edge=False)  # fits 80 columns
    table.add_column("estimator", no_wrap=True)
    table.add_column("for F")
    for name in ("passes", "RelMAE", "corr.", "s.e.", "t/grad", "t/back"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print()
    rounds, milliseconds = max(row.rounds for row in comparison.rows), 1e3 * comparison.backward_seconds
    console.print(NOTES.format(rounds=rounds, milliseconds=milliseconds), markup=False, highlight=False)


def _cells(row: EstimatorRow) -> tuple[str, ...]:
    target = row.target.split(" (")[0]
    return (
        row.name,
        "biased" if target.endswith("biased for F") else SHORT.get(target, target),
        f"{row.passes:.0f}",
        f"{row.relmae:.3g}",
        f"{row.rank_correlation:.3f}",
        f"{100 * row.relative_error:.0f} %" if row.relative_error else "-",
        _ratio(row.relative_to_batch_gradient),
        _ratio(row.relative_to_backward),
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
