"""Make the plot that the README shows: `make figures`."""

from pathlib import Path

from neuromanifold.experiments.comparison import compare_estimators
from neuromanifold.experiments.digits import train_digits
from neuromanifold.report.plots import histograms, plot_histograms, save_figure

IMAGES = Path(__file__).parents[1] / "images"
SHOWN = "Hutchinson()"

if __name__ == "__main__":
    trained = train_digits(1024)
    comparison = compare_estimators(trained.model, trained.batches)
    exact, estimate = comparison.exact, comparison.estimates[SHOWN]
    figure = plot_histograms(histograms(exact, span=estimate), histograms(estimate, span=exact), "exact", SHOWN)
    print(save_figure(figure, IMAGES / "fisher-histograms.png"))
