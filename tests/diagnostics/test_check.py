"""`nm.check` on models of which everything is known: right ones, and one for each thing that it must see."""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.diagnostics.check_result import CheckRow, verdict
from neuromanifold.diagnostics.runs import coverage, short_name
from tests.diagnostics.odd_models import DATA, X, Y, computed, network
from tests.problems.networks import PROBLEMS


@pytest.fixture(scope="module")
def result() -> nm.Check:
    return nm.check(network(), DATA, seed=7)


def test_the_reference_is_the_exact_diagonal_of_the_first_batches(result: nm.Check) -> None:
    exact = nm.fisher_diagonal(network(), DATA[:4], nm.Exact())
    assert result.is_exact
    assert result.exact.count == 64
    for name in exact:
        assert torch.equal(result.exact[name], exact[name])


def test_a_row_for_every_estimator(result: nm.Check) -> None:
    names = [row.name for row in result.rows]
    assert names == [
        "Exact()",
        "Hutchinson()",
        "Hutchinson(deflate=0)",
        "Hutchinson(probes=2)",
        "Hutchinson(probes=4)",
        "Adaptive()",
        "Hutchinson() per batch",
        "MonteCarlo()",
        "Exact(envelope=Upper())",
        "Exact(envelope=Lower(rank=1))",
        "Empirical()",
        "SquaredBatchGradient()",
    ]
    assert all(eval(row.name.removesuffix(" per batch"), vars(nm)) == row.estimator for row in result.rows)
    assert all(row.time > 0 and math.isfinite(row.time) for row in result.rows)
    assert [row.passes for row in result.rows] == [4, 1, 1, 2, 4, 1, 1, 1, 5, 1, 1, 1]
    unbiased = {row.name for row in result.rows if row.unbiased}
    assert unbiased == {name for name in names if name.startswith(("Adaptive", "Hutchinson", "MonteCarlo"))}


def test_numbers_are_means_over_three_seeds(result: nm.Check) -> None:
    exact = nm.fisher_diagonal(network(), DATA[:4], nm.Exact(), reduction="sum")
    runs = [nm.fisher_diagonal(network(), DATA[:4], nm.MonteCarlo(), seed=7 + r, reduction="sum") for r in range(3)]
    compared = [run.compare(exact) for run in runs]
    row = next(row for row in result.rows if row.name == "MonteCarlo()")
    assert row.rounds == 3
    assert row.relmae == pytest.approx(fmean(c.relmae for c in compared))
    assert row.trace_ratio == pytest.approx(fmean(float(run.trace) / float(exact.trace) for run in runs))
    assert row.rank_correlation == pytest.approx(fmean(c.rank_correlation for c in compared))
    assert row.coverage == pytest.approx(fmean(coverage(run, exact) for run in runs))
    assert 0.5 < row.coverage <= 1


def test_rows_without_noise_have_no_coverage_and_exact_ones_no_error(result: nm.Check) -> None:
    rows = {row.name: row for row in result.rows}
    assert rows["Exact()"].relmae == rows["Exact()"].relmae_positive == 0
    assert rows["Hutchinson(probes=4)"].relmae_positive < 1e-5  # as many probes as columns
    assert rows["Hutchinson(probes=4)"].coverage == 1
    assert [row.coverage is None for row in result.rows] == [row.estimator.noise_factor == 0 for row in result.rows]
    assert rows["Exact(envelope=Upper())"].trace_ratio > 1 > rows["Exact(envelope=Lower(rank=1))"].trace_ratio


def test_it_prints_a_table_and_a_verdict(result: nm.Check) -> None:
    text = str(result)
    assert text.startswith("Check of Sequential with 85 parameters on 64 samples in 4 batches")
    for row in result.rows:
        assert f"\n{row.name} " in text
    assert result.verdict.replace("\n", " ") in " ".join(text.split())
    assert "use it." in result.verdict
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("name", "estimators"),
    [
        *((name, [nm.Hutchinson(deflate=0), nm.Empirical()]) for name in PROBLEMS),
        *((name, None) for name in ("transformer encoder", "multi-label", "segmentation, class_dim=1")),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in PROBLEMS),
    ],
)
def test_every_kind_of_network(name: str, estimators: list[nm.Estimator] | None) -> None:
    problem = PROBLEMS[name]
    options = {"estimators": estimators, **problem.options}
    result = nm.check(problem.model, problem.data, problem.likelihood, **options)
    assert result.is_exact
    assert result.repeats
    assert result.apart is ("samples mixed" not in name)
    assert result.rows[0].relmae == 0
    assert {row.name for row in result.rows} >= {"Hutchinson(deflate=0)", "Empirical()"}


def test_without_labels_there_are_no_rows_that_need_them() -> None:
    names = {row.name for row in nm.check(network(), list(X.split(16))).rows}
    assert "MonteCarlo()" in names
    assert not names & {"Empirical()", "SquaredBatchGradient()"}


def test_only_as_many_batches_as_asked_are_taken() -> None:
    taken = []

    def endless() -> Iterator[Tensor]:
        while True:
            taken.append(1)
            yield X[:16]

    assert nm.check(network(), endless(), batches=2).exact.count == 32
    assert len(taken) == 2


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 5)).train()
    model[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags, random = [module.training for module in model.modules()], torch.random.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16, shuffle=True)
    nm.check(model, loader)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.random.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------------- what it says of labels and entries


def test_labels_that_the_model_does_not_believe_are_seen() -> None:
    sure = network()
    with torch.no_grad():
        sure[2].weight.mul_(20)
        wrong = [(x, sure(x).argmin(-1)) for x, _ in DATA]
        drawn = [(x, nm.Categorical(network()(x)).sample(torch.Generator().manual_seed(0))) for x, _ in DATA]
    assert "Empirical() is off by a factor" in nm.check(sure, wrong).verdict
    assert "Empirical() has the trace of F within" in nm.check(network(), drawn, batches=6).verdict


def test_outputs_that_depend_on_nothing_chosen() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.zero_()
    result = nm.check(model, DATA, parameters="0.*")
    assert result.zero == ("0.weight", "0.bias")
    assert "zero in every entry" in result.verdict


class TooLarge(nm.Hutchinson):
    """A biased twin: F times 2.25."""

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (1.5 * u for u in super().cotangents(core, labels, generator))


def test_a_biased_twin_shows() -> None:
    result = nm.check(
        network(), DATA, estimators={"twin": TooLarge(probes=4, deflate=0), "right": nm.Hutchinson(probes=4, deflate=0)}
    )
    twin, right = result.rows[1:]
    assert (twin.name, right.name) == ("twin", "right")
    assert twin.trace_ratio == pytest.approx(2.25, rel=1e-4)
    assert twin.relmae_positive == pytest.approx(1.25, rel=1e-4)
    assert twin.coverage == 0
    assert right.coverage == 1
    assert "twin (0 %)" in result.verdict


# ---------------------------------------------------------------------- when the exact value takes too long


def test_fewer_batches_if_all_would_take_too_long() -> None:
    result = nm.check(network(400), [x for x, _ in DATA], estimators=[nm.Hutchinson(deflate=0)])
    assert result.is_exact
    assert result.exact.provenance.passes == 2 * 399
    note = (
        "The exact diagonal would take 1,596 backward passes, and at most 1000 are made: only 2 of 4 batches are used."
    )
    assert note in result.notes


def test_fewer_samples_where_each_takes_passes_of_its_own() -> None:
    result = nm.check(computed(40), [X[:64], X[:64]], estimators=[nm.Hutchinson(deflate=0)])
    assert result.is_exact
    assert result.exact.count == 1000 // 39 - 1
    assert any("only 24 samples of the first batch" in note for note in result.notes)


def test_an_estimate_stands_in_if_nothing_helps(capsys: pytest.CaptureFixture[str]) -> None:
    result = nm.check(network(1500), [x for x, _ in DATA[:2]], progress=True)
    assert not result.is_exact
    assert result.exact.provenance.passes == 2 * 64
    assert result.rows[0].name == "reference"
    assert not any(isinstance(row.estimator, nm.Exact) for row in result.rows)
    assert any("2,998 backward passes" in note and "stands in" in note for note in result.notes)
    assert "itself known to" in result.verdict
    rows = {row.name: row for row in result.rows}
    assert 0 < rows["Hutchinson(deflate=0)"].relmae_positive < 1
    told = capsys.readouterr().err
    assert "Hutchinson(probes=64) takes 128 backward passes, about" in told


def test_positions_count(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 7)
    mask[:, 5:] = 0

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head(x).cumsum(1) * attention_mask[..., None]  # mixes positions: none is squared alone

    result = nm.check(Tagger(), [{"x": x, "attention_mask": mask}], progress=True)
    assert result.is_exact
    assert result.rows[0].passes == 2 * 5
    assert "Exact() takes 10 backward passes" in capsys.readouterr().err
    many = nm.check(Tagger(), [{"x": x.repeat(1, 101, 1), "attention_mask": mask.repeat(1, 101)}])
    assert not many.is_exact
    assert many.rows[0].estimator == nm.Hutchinson(probes=64, orthogonal=False)


# ---------------------------------------------------------------------- words


def rows(**errors: tuple[float, float, int]) -> list[CheckRow]:
    """An exact row at ten times a backward, and unbiased ones with (error, time, passes)."""
    exact = CheckRow("Exact()", nm.Exact(), "auto", "exact", 9, 0, 0, 1, 1, None, 10, 3)
    one = replace(exact, estimator=nm.Hutchinson(deflate=0), target="unbiased", coverage=0.95)
    return [
        exact,
        *(replace(one, name=name, relmae_positive=e, time=t, passes=p) for name, (e, t, p) in errors.items()),
    ]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            rows(a=(0.021, 1.2, 1), b=(0.001, 2.4, 4)),
            "a is within 2.1 % of the exact diagonal at 1.2 times forward + backward: use it.",
        ),
        (
            rows(a=(0.3, 1.2, 1), b=(0.05, 2.4, 4)),
            "b is within 5 % of the exact diagonal at 2.4 times forward + backward: use it. "
            "In a single pass, a is within 30 % of the exact diagonal at 1.2 times forward + backward. "
            "Over m times as many batches that is 1/√m as much.",
        ),
        (
            rows(a=(0.3, 1.2, 1)),
            "a is within 30 % of the exact diagonal at 1.2 times forward + backward. Over m times as many "
            "batches that is 1/√m as much.",
        ),
        (rows(a=(0.05, 8.0, 1)), "Exact() takes 10 times forward + backward here: use it."),
        (rows(a=(1e-7, 1.1, 1)), "a is exact here, at 1.1 times forward + backward: use it."),
        (
            rows(a=(0.05, 1.2, 1), b=(0.047, 1.2, 1)),
            "a is within 5 % of the exact diagonal at 1.2 times forward + backward: use it.",
        ),
    ],
    ids=["one pass is good", "more passes", "only one pass", "exact is cheap", "no error", "a tie"],
)
def test_the_verdict_weighs_time_against_error(found: list[CheckRow], said: str) -> None:
    assert verdict(found, 0.0) == said


def test_a_reference_with_an_error_is_called_so() -> None:
    assert "of the reference (itself known to 3 %) at" in verdict(rows(a=(0.04, 1.2, 1)), 0.03)


def test_names_are_code() -> None:
    assert (
        short_name(nm.Hutchinson(probes=2, deflate=0, noise="gaussian"))
        == "Hutchinson(probes=2, deflate=0, noise='gaussian')"
    )
    assert short_name(nm.Exact(nm.Lower(3))) == "Exact(envelope=Lower(rank=3))"
    assert short_name(nm.Empirical()) == "Empirical()"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": "mlp"}, "`model` must be a torch.nn.Module"),
        ({"data": X}, "Put it into a list"),
        ({"data": []}, "at least one batch"),
        ({"data": [X * torch.nan]}, "Batch 0 of `data`"),
        ({"batches": 0}, "`batches` must be between 1"),
        ({"seed": -1}, "`seed` must be between 0"),
        ({"parameters": "nothing.*"}, "`parameters` must be a selection that matches"),
        ({"estimators": nm.Exact()}, "Put it into a list"),
        ({"estimators": []}, "at least one"),
        ({"estimators": ["Exact"]}, "`estimator` must be an estimator"),
        ({"estimators": [nm.Empirical()], "data": [X]}, "`labels` must be given for Empirical"),
        ({"likelihood": 3}, "`likelihood` must be nm.Categorical"),
    ],
)
def test_bad_input(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        nm.check(**{"model": network(), "data": DATA, **options})
