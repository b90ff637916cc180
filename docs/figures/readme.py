"""Make the plot that the README shows: `make figures`."""

from pathlib import Path

import neuromanifold as nm
from neuromanifold.experiments.digits import train_digits
from neuromanifold.report.plots import histograms, plot_histograms, save_figure

IMAGES = Path(__file__).parents[1] / "images"

if __name__ == "__main__":
    trained = train_digits(1024)
    exact, estimate = (nm.fisher_diagonal(trained.model, trained.batches, one) for one in (nm.Exact(), nm.Hutchinson()))
    bars, line = histograms(exact, span=estimate), histograms(estimate, span=exact)
    print(save_figure(plot_histograms(bars, line, "exact", "Hutchinson()"), IMAGES / "fisher-histograms.png"))
