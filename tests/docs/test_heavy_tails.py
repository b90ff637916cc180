"""Section 4.1: the formulas against simulations, and that the picture shows them."""

import math

import torch
from docs.figures.heavy_tails import data_cv, heavy_tails, label_noise, plot_heavy_tails, student_t

from neuromanifold.bounds import CV_BOUND
from tests.zscores import allowed_z_score, worst_z_score


def test_student_t_has_the_moments_that_the_paper_gives() -> None:
    """False-alarm rate 1e-6, at ν with finite eighth moments; the moments of another ν are the biased twin."""
    nu = torch.tensor([12.5, 20.0, 1e6], dtype=torch.float64)
    x = student_t(nu, (400_000,), torch.Generator().manual_seed(0)).mT  # [draws, points]

    def moments(nu: torch.Tensor) -> torch.Tensor:
        return torch.stack([0 * nu, nu / (nu - 2), 3 * nu**2 / ((nu - 2) * (nu - 4))])

    draws, allowed = torch.stack([x, x**2, x**4], dim=1), allowed_z_score(9)
    assert worst_z_score(draws, moments(nu)) < allowed < worst_z_score(draws, moments(0.75 * nu))


def test_the_formula_for_new_data() -> None:
    """Std/mean of Σ x²/(4m), with the factor 1/(16m); false-alarm rate 1e-6.  The printed 1/(4m) is the biased twin."""
    nu, m = torch.tensor([20.0, 1e6], dtype=torch.float64), 16
    x = student_t(nu, (100_000, m), torch.Generator().manual_seed(1))
    estimate = (x.square().mean(-1) / 4).mT  # [repeats, points]
    second, fourth = nu / (nu - 2), 3 * nu**2 / ((nu - 2) * (nu - 4))
    variance = (fourth - second**2) / (16 * m)
    torch.testing.assert_close(data_cv(nu, m), variance.sqrt() / (second / 4))
    squares = (estimate - second / 4).square()
    assert worst_z_score(squares, variance) < allowed_z_score(2) < worst_z_score(squares, 4 * variance)


def test_new_data_has_no_bound_and_a_new_probe_has() -> None:
    tails = heavy_tails(samples=16, points=9, repeats=2000)
    assert (tails.data_cv[1:] > tails.data_cv[:-1]).all()
    assert tails.data_cv[-1] > 4 * CV_BOUND
    assert (data_cv(4 + 10.0 ** -torch.arange(3, 12, dtype=torch.float64), 16).diff() > 0).all()
    assert (tails.probe_cv <= CV_BOUND).all()
    torch.testing.assert_close(tails.probe_cv_simulated, tails.probe_cv, rtol=0.15, atol=0)
    light = tails.degrees > 12
    torch.testing.assert_close(tails.data_cv_simulated[light], tails.data_cv[light], rtol=0.15, atol=0)


def test_theorem_11_for_the_neuron() -> None:
    """Var/F² = 2 - 2 Σ x⁴/(Σ x²)² at the data that the simulation starts with."""
    tails = heavy_tails(samples=16, points=5, repeats=3, seed=4)
    x = student_t(tails.degrees, (3, 16), torch.Generator().manual_seed(4))[:, 0]
    share = (x**4).sum(-1) / (x**2).sum(-1).square()
    torch.testing.assert_close(tails.probe_cv, (2 - 2 * share).sqrt())


def test_most_simulations_do_not_see_the_tail() -> None:
    """As ν falls to 4, the spread that is observed is mostly far below the true one."""
    runs = [heavy_tails(samples=16, points=2, repeats=300, seed=seed) for seed in range(15)]
    seen = torch.stack([run.data_cv_simulated[-1] / run.data_cv[-1] for run in runs])
    assert seen.median() < 0.3


def test_label_noise() -> None:
    labels = label_noise(samples=32, points=12)
    p, x = labels.probability, torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = (x**4).sum() / (x**2).sum().square()
    rare = share * (1 - 2 * p).square() / (p * (1 - p))
    torch.testing.assert_close(labels.labels_cv_per_sample, rare.sqrt(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(labels.labels_cv, (2 - 2 * share + rare).sqrt())
    torch.testing.assert_close(labels.probe_cv, (2 - 2 * share).sqrt().expand(12))
    assert (labels.probe_cv_per_sample == 0).all()
    assert labels.labels_cv[-1] > 30 * CV_BOUND
    assert math.isclose(labels.labels_cv[0], labels.probe_cv[0])  # at p = ½ the two are the same estimate


def test_the_same_seed_gives_the_same_data() -> None:
    assert torch.equal(heavy_tails(points=3, repeats=9).probe_cv, heavy_tails(points=3, repeats=9).probe_cv)
    assert not torch.equal(heavy_tails(points=3, repeats=9).probe_cv, heavy_tails(points=3, repeats=9, seed=1).probe_cv)


def test_the_picture_draws_the_data() -> None:
    tails, labels = heavy_tails(samples=8, points=5, repeats=50), label_noise(samples=8, points=5)
    left, right = plot_heavy_tails(tails, labels).axes
    drawn = {line.get_label(): torch.as_tensor(line.get_ydata()) for axes in (left, right) for line in axes.lines}
    assert torch.equal(drawn["new data, formula"], tails.data_cv)
    assert torch.equal(drawn["new data, simulated"], tails.data_cv_simulated)
    assert torch.equal(drawn["new probe, Theorem 11"], tails.probe_cv)
    assert torch.equal(drawn["drawn labels, per batch"], labels.labels_cv)
    assert torch.equal(drawn["Hutchinson, per batch"], labels.probe_cv)
    assert len(left.lines) == 5
    assert len(right.lines) == 4
