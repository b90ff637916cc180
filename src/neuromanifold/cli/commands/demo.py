"""`neuromanifold demo`: every estimator on a small network, trained on the spot; a table, a plot and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.console import print_facts
from neuromanifold.cli.options import NoProgress
from neuromanifold.cli.parsing import check_creatable
from neuromanifold.diagnostics.check import check
from neuromanifold.experiments import one_thread
from neuromanifold.experiments.digits import TRAINING, train_digits
from neuromanifold.report.plots import histograms, plot_histograms, save_figure
from neuromanifold.results.drawing import needs_matplotlib
from neuromanifold.run.fisher import fisher_diagonal


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the plot and the result; created if missing.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the network, its training and the probes.")] = 0,
    samples: Annotated[int, typer.Option(min=1, max=TRAINING, help="Number of images.")] = 1024,
    no_progress: NoProgress = False,
) -> None:
    """Train a small network on handwritten digits and compare every estimator with its exact Fisher diagonal."""
    plot, file = out / "fisher-histograms.png", out / "fisher.safetensors"
    check_creatable(file)
    with one_thread():
        trained = train_digits(samples, seed, progress=not no_progress)
        data = trained.batches
        compared = check(trained.model, data, batches=len(data), seed=seed, progress=not no_progress)
        estimate = fisher_diagonal(trained.model, data, seed=seed)
    trained_on = f"trained on {TRAINING:,} digits, test accuracy {100 * trained.test_accuracy:.1f} %"
    typer.echo(f"A convolutional network of {trained.parameters:,} parameters, {trained_on}\n\n{compared}\n")
    with needs_matplotlib():
        bars, line = histograms(compared.exact, span=estimate), histograms(estimate, span=compared.exact)
        save_figure(plot_histograms(bars, line, "exact", "Hutchinson()"), plot)
    estimate.save(file)
    print_facts({"plot": plot, "result": f"{file} (nm.load reads it)"})
