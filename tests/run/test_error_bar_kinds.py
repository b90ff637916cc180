"""Error bars of rows, or none: what they are, what they cost, and what asks for those of entries gets an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.estimators import NoiseFactors
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.accumulate import DiagonalSums, Pass
from neuromanifold.persample.gradients import Dense, Form, Product, Rows
from neuromanifold.persample.gradients.totals import Sum, Tied
from neuromanifold.persample.rules.convolution import Convolution
from neuromanifold.run import settings

N, T, OUT, IN = 3, 4, 5, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def forms() -> dict[str, Form]:
    ids = torch.tensor([[0, 1, 1, 4], [2, 2, 2, 2], [0, 3, 0, 1]])
    product, table = Product(drawn(N, T, OUT), drawn(N, T, IN)), Rows(drawn(N, T, IN), ids, OUT)
    image = Convolution(
        drawn(N, 1, 4, 7, 7), drawn(N, 1, 6, 5, 5), torch.Size((6, 4, 3, 3)), (1, 1), (0, 0), (1, 1), False, 1
    )
    return {
        "dense": Dense(drawn(N, OUT, IN)),
        "dense of three dimensions": Dense(drawn(N, OUT, IN, 2)),
        "product": product,
        "product with one position": Product(drawn(N, 1, OUT), drawn(N, 1, IN)),
        "product with groups": Product(drawn(N, 2, T, OUT), drawn(N, 2, T, IN), torch.Size((2, OUT, IN))),
        "product with groups in the first dimension": Product(
            drawn(N, 2, T, OUT), drawn(N, 2, T, IN), torch.Size((2 * OUT, IN))
        ),
        "product whose rows are parts of the parameter's": Product(
            drawn(N, 1, OUT * 2), drawn(N, 1, IN), torch.Size((OUT, 2, IN))
        ),
        "product whose rows are several of the parameter's": Product(
            drawn(N, T, OUT), drawn(N, T, IN), torch.Size((OUT * 2, IN // 2))
        ),
        "rows": table,
        "tied": Tied([product, table], product, table),
        "sum": Sum([product, Dense(drawn(N, OUT, IN, seed=1))]),
        "convolution": image,
    }


def z_score(values: Tensor) -> float:
    """The mean in standard errors; above 4 by chance once in 30,000 times."""
    return float(values.mean() / values.std() * len(values) ** 0.5)


def rows_of(form: Form, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Σ g² of each entry, and Σ ‖g_r‖⁴ of each row, by definition."""
    squares = form.gradients(0, form.samples, torch.float64).view(form.samples, *form.shape).div(scale).square()
    return squares.sum(0), squares.flatten(2).sum(2).square().sum(0)


@pytest.mark.parametrize("limit", [None, 7], ids=["", "by rows of one sample"])
@pytest.mark.parametrize("name", forms())
def test_fourth_powers_of_rows_are_those_of_the_definition(name, limit, monkeypatch):
    if limit:
        monkeypatch.setattr("neuromanifold.persample.gradients.forms.CPU_TILE", limit)
        monkeypatch.setattr("neuromanifold.persample.gradients.forms.CPU_ROWS", limit)
    form, unit = forms()[name], 0.5
    to = PowerSums(torch.zeros(form.shape), None, unit, 2.0, 4.0, row_fourths=torch.zeros(form.shape[0]))
    form.add_squares(to)
    squares, powers = rows_of(form, 4.0)
    torch.testing.assert_close(to.squares.double(), squares, rtol=1e-4, atol=1e-7)
    assert to.row_fourths is not None
    torch.testing.assert_close(to.row_fourths.double(), 2 * powers / unit**4, rtol=1e-4, atol=1e-7)


def test_several_cotangents_of_one_position_and_whole_batches_count_as_well():
    weight, bias = nn.Parameter(torch.zeros(OUT, IN)), nn.Parameter(torch.zeros(OUT))
    sums = DiagonalSums([weight, bias], "rows")
    right, expected = drawn(N, 1, IN), torch.zeros(OUT, dtype=torch.float64)
    for k in range(2):
        form = Product(drawn(N, 1, OUT, seed=k), right)
        sums.add_samples(0, form, Pass(noise_factors=NoiseFactors(batch=1.0, sample=0.5), more=True))
        expected += 0.5 * rows_of(form)[1]
    sums.end_batch()
    whole = drawn(OUT, IN, seed=7)
    sums.add([whole, drawn(OUT)], Pass(2.0, NoiseFactors(batch=0.25)))
    expected += 0.25 * (whole.double() / 2).square().sum(1).square()
    noise = sums.standard_errors()
    torch.testing.assert_close(noise[0].double(), expected.sqrt(), rtol=1e-5, atol=0)
    assert [value.shape for value in noise] == [(OUT,), (OUT,)]


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
def test_standard_errors_of_rows_are_right_for_rows_of_rank_one_and_bounds_for_others(noise: str) -> None:
    """In a linear layer a row's gradients are multiples of one number: Var R = (2/3) E[R²] for Gaussian probes.

    The twin forgets that a row's entries go together, and adds up their variances.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4))
    x, estimator = [drawn(3, 2, 4)], nm.Hutchinson(deflate=0, noise=noise)
    runs = [nm.fisher_diagonal(model, x, estimator, seed=seed, error_bars="rows").sum for seed in range(150)]
    exact = nm.fisher_diagonal(model, x, nm.Exact()).sum.rows
    entries = [nm.fisher_diagonal(model, x, estimator, seed=seed).sum for seed in range(150)]
    for name in ("0.weight", "3.weight"):
        errors = torch.stack([(run.rows[name] - exact[name]).double().square() for run in runs])
        found = torch.stack([run.rows.stderr[name].double().square() for run in runs])
        twin = torch.stack([run.stderr[name].double().square().flatten(1).sum(1) for run in entries])
        found_z = z_score((errors - found).sum(1))
        assert found_z < 4
        if name == "3.weight":
            assert found_z > -4 or noise == "rademacher"
            assert z_score((errors - twin).sum(1)) > 4


@pytest.mark.parametrize("probes", [2, 3])
def test_orthogonal_probes_keep_the_bound_for_rows(probes: int) -> None:
    """Their passes depend on each other, so the proof for single passes does not hold; their bound does."""
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)), [drawn(1, 3)]
    estimator = nm.Hutchinson(probes=probes, deflate=0)
    exact = nm.fisher_diagonal(model, x, nm.Exact()).sum.rows
    runs = [nm.fisher_diagonal(model, x, estimator, seed=seed, error_bars="rows").sum.rows for seed in range(120)]
    for name in ("0.weight", "2.weight"):
        errors = torch.stack([(run[name] - exact[name]).double().square() for run in runs])
        found = torch.stack([run.stderr[name].double().square() for run in runs])
        assert z_score((errors - found).sum(1)) < 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def run(**options: Any) -> nm.DiagonalFisher:
    return nm.fisher_diagonal(network(), list(drawn(4, 16, 6)), nm.Hutchinson(deflate=0), **options)


def test_values_are_the_same_whatever_error_bars_are_kept():
    full, rows, none = (run(error_bars=kind) for kind in (True, "rows", False))
    for name in full:
        torch.testing.assert_close(rows[name], full[name])
        torch.testing.assert_close(none[name], full[name])
    assert [fim.error_bars for fim in (full, rows, none)] == [True, "rows", False]
    assert rows.noise["0.weight"].shape == (8,)
    assert not none.noise
    torch.testing.assert_close(rows.stderr["0.bias"], full.stderr["0.bias"])
    assert 0 < rows.relative_error <= full.relative_error
    assert none.relative_error != none.relative_error


def test_what_needs_error_bars_of_entries_says_so():
    for kind, kept in (("rows", "those of its rows"), (False, "no error bars")):
        fim = run(error_bars=kind)
        for ask in (lambda fim: fim.stderr["0.weight"], lambda fim: fim.interval()[0]["0.weight"]):
            with pytest.raises(ValueError, match=kept):
                ask(fim)
        with pytest.raises(ValueError, match="error_bars"):
            nm.task_distance(fim, fim)
    with pytest.raises(ValueError, match="'rows' with rtol"):
        run(error_bars=False, rtol=0.1)
    with pytest.raises(ValueError, match="`error_bars` must be True, False, 'rows' or 'auto', got 'row'"):
        run(error_bars="row")


def test_rows_have_standard_errors_intervals_and_a_table():
    fim = run(error_bars="rows")
    rows = fim.rows
    torch.testing.assert_close(rows["0.weight"], fim["0.weight"].sum(1))
    low, high = (end["0.weight"] for end in rows.interval())
    assert bool((low < rows["0.weight"]).all())
    assert bool((rows["0.weight"] < high).all())
    assert rows.error_bars is True
    assert rows.stderr["0.weight"].shape == (8,)
    assert "standard errors of rows" in str(fim)
    assert "no error bars" in str(run(error_bars=False))
    wide = run(error_bars=True).rows.stderr["0.weight"]
    assert bool((rows.stderr["0.weight"] <= 1.001 * wide).all())


@pytest.mark.parametrize("kind", [True, "rows", False])
def test_kinds_go_through_files_sums_shards_and_checkpoints(kind: Any, tmp_path: Path) -> None:
    whole = run(error_bars=kind)
    whole.save(tmp_path / "fim.safetensors")
    loaded = nm.load(tmp_path / "fim.safetensors")
    assert loaded.error_bars == kind
    assert loaded.noise.keys() == whole.noise.keys()
    both = run(error_bars=kind, shard=(0, 2)) + run(error_bars=kind, shard=(1, 2))
    for name, value in whole.noise.items():
        torch.testing.assert_close(both.noise[name], value, rtol=0.5, atol=0)  # of some batches each
    first = {"checkpoint": nm.Checkpoint(tmp_path / "state", every=0), "error_bars": kind}
    run(**first)
    again = run(**first)
    assert all(torch.equal(again.noise[name], value) for name, value in whole.noise.items())
    other = next(one for one in (True, "rows", False) if one is not kind)
    with pytest.raises(ValueError, match="error_bars"):
        run(**{**first, "error_bars": other})


def test_a_sum_of_two_kinds_has_the_coarser_one():
    a, b = run(error_bars=True, shard=(0, 2)), run(error_bars="rows", shard=(1, 2))
    both, none = a + b, a + run(error_bars=False, shard=(1, 2))
    assert both.error_bars == "rows"
    assert none.error_bars is False
    assert not none.noise
    assert bool((both.noise["0.weight"] >= b.noise["0.weight"]).all())


def test_large_models_have_error_bars_of_rows_by_default(monkeypatch):
    assert run().error_bars is True
    monkeypatch.setattr(settings, "LARGE", 50)
    assert run().error_bars == "rows"
    assert nm.fisher_diagonal(network(), [drawn(2, 6)], nm.Exact()).error_bars is True  # nothing is random


def test_the_forecast_counts_what_is_kept():
    sizes = {kind: nm.forecast(network(), list(drawn(3, 16, 6)), error_bars=kind) for kind in (True, "rows", False)}
    assert sizes[True].file > sizes["rows"].file > sizes[False].file
