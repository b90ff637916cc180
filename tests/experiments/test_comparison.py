"""The table of estimators, on a network so small that everything in it can be computed again."""

import math

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.experiments.comparison import ESTIMATORS, EstimatorComparison, compare_estimators


def problem() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    batches = [
        (torch.randn(8, 3, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(6)
    ]
    return model, batches


@pytest.fixture(scope="module")
def comparison() -> EstimatorComparison:
    return compare_estimators(*problem(), rounds=3)


def test_a_row_for_every_estimator_and_the_exact_one_first(comparison: EstimatorComparison) -> None:
    assert [row.name for row in comparison.rows] == ["Exact()", *ESTIMATORS]
    assert list(comparison.estimates) == list(ESTIMATORS)


def test_names_are_the_code_that_makes_the_estimator() -> None:
    for name, estimator in ESTIMATORS.items():
        assert eval(name, vars(nm)) == estimator


def test_the_exact_row_has_no_error(comparison: EstimatorComparison) -> None:
    exact = comparison.rows[0]
    assert (exact.relmae, exact.relative_error, exact.rounds) == (0, 0, 1)
    assert exact.rank_correlation == pytest.approx(1)
    assert exact.passes == 3  # classes - 1, for all samples of a batch


def test_errors_are_means_over_seeds_against_sums(comparison: EstimatorComparison) -> None:
    model, batches = problem()
    exact = nm.fisher_diagonal(model, batches, nm.Exact(), reduction="sum")
    row = next(row for row in comparison.rows if row.name == "Hutchinson(deflate=0)")
    runs = [
        nm.fisher_diagonal(model, batches, nm.Hutchinson(deflate=0), seed=seed, reduction="sum") for seed in range(3)
    ]
    relmaes = [
        torch.cat([((run[name] - exact[name]).abs() / (exact[name] + 1e-12)).flatten() for name in exact]).mean()
        for run in runs
    ]
    assert row.relmae == pytest.approx(float(torch.stack(relmaes).mean()), rel=1e-5)
    assert row.relative_error == pytest.approx(sum(run.relative_error for run in runs) / 3)
    assert row.target == "unbiased"
    for name in exact:
        assert torch.equal(comparison.exact.sum[name], exact[name])
        assert torch.equal(comparison.estimates["Hutchinson(deflate=0)"].sum[name], runs[0][name])


def test_passes_are_counted_for_each_batch(comparison: EstimatorComparison) -> None:
    passes = {row.name: row.passes for row in comparison.rows}
    assert passes["Empirical()"] == passes["SquaredBatchGradient()"] == 1
    assert passes["Hutchinson(deflate=0)"] == passes["MonteCarlo()"] == 1
    assert passes["Hutchinson(probes=4)"] == 3  # four classes: three are exact


def test_times_are_ratios_of_the_seconds(comparison: EstimatorComparison) -> None:
    rows = {row.name: row for row in comparison.rows}
    gradient = rows["SquaredBatchGradient()"]
    assert gradient.relative_to_batch_gradient == 1
    assert comparison.backward_seconds > 0
    for row in comparison.rows:
        assert row.seconds > 0
        assert row.relative_to_backward == pytest.approx(row.seconds / comparison.backward_seconds)
        assert row.relative_to_batch_gradient == pytest.approx(row.seconds / gradient.seconds)
        assert row.rounds == (1 if row.name == "Exact()" else 3)


def test_any_estimators_can_be_compared_and_progress_is_told() -> None:
    model, batches = problem()
    told: list[tuple[str, int, int]] = []
    state = {name: value.clone() for name, value in model.state_dict().items()}
    comparison = compare_estimators(
        model,
        batches,
        {"mine": nm.Hutchinson(deflate=0, noise="gaussian")},
        rounds=2,
        report=lambda *step: told.append(step),
    )
    assert [row.name for row in comparison.rows] == ["Exact()", "mine"]
    assert math.isfinite(comparison.rows[1].relative_to_batch_gradient)
    assert told == [*(("Exact()", i, 6) for i in range(1, 7)), ("estimators", 1, 2), ("estimators", 2, 2)]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_compare_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="batches"):
        compare_estimators(nn.Linear(3, 4), [])
    with pytest.raises(ValueError, match="rounds"):
        compare_estimators(*problem(), rounds=0)
