"""The data behind the plots, and that the plots show it."""

from itertools import pairwise
from pathlib import Path

import torch

from neuromanifold.experiments.core_space import core_path, plot_core_path, tightness
from neuromanifold.report.plots import save_figure


def test_the_path_leads_from_uniform_to_one_hot() -> None:
    path = core_path(classes=7, points=50)
    x = path.largest_probability
    assert abs(x[0] - 1 / 7) < 1e-15
    assert 1 - 1e-5 < x[-1] < 1
    assert (x[1:] > x[:-1]).all()


def test_every_statement_holds_along_the_path() -> None:
    path = core_path(classes=7, points=50)
    slack = 1 + 1e-12
    bounds, errors, worst = path.eigenvalue_bounds, list(path.envelope_errors.values()), path.empirical
    assert (bounds.lower <= path.eigenvalue * slack).all()
    assert (path.eigenvalue <= bounds.upper * slack).all()
    assert all((error.lower <= error.lower_bound * slack).all() for error in errors)
    assert all((a.lower >= b.lower).all() for a, b in pairwise(errors))  # a higher rank is closer
    assert (errors[0].upper >= 1 / 7 - 1e-15).all()
    assert (worst.simple_bound <= worst.bound + 1e-15).all()
    assert (worst.bound <= worst.actual * slack).all()


def test_tightness_is_that_of_the_samples() -> None:
    two = tightness(classes=2, scale=3.0, samples=100)
    torch.testing.assert_close(
        torch.tensor([two.lower_worst, two.upper_worst, two.lower_median, two.upper_median]), torch.ones(4)
    )
    many = tightness(classes=100, scale=3.0, samples=100)
    assert 0.5 <= many.lower_worst < many.lower_median < 1 < many.upper_median < many.upper_worst <= 2
    assert tightness(classes=100, scale=3.0, samples=100) == many


def test_the_figure_shows_the_data(tmp_path: Path) -> None:
    path = core_path(classes=5, points=20)
    figure = plot_core_path(path)
    eigenvalue, envelopes, empirical = figure.axes
    drawn = {line.get_label(): torch.as_tensor(line.get_ydata()) for axes in figure.axes for line in axes.lines}
    assert torch.equal(drawn["$\\lambda_C$, exact"], path.eigenvalue)
    assert torch.equal(drawn["lower, rank 2"], path.envelope_errors[2].lower)
    assert torch.equal(drawn["Lemma 4"], path.empirical.bound)
    assert len(eigenvalue.collections) == 1
    assert len(envelopes.lines) == 2 + 2 * len(path.envelope_errors)
    assert len(empirical.lines) == 4
    for suffix in ("png", "svg", "pdf"):
        assert save_figure(figure, tmp_path / "new" / f"plot.{suffix}").stat().st_size > 5000
