"""Adaptive passes where everyone is kept: each batch's own passes, and rows for columns of noisy samples.

The truth is that of `test_adaptive.by_hand`: float64, one derivative after the other.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.estimators import NoiseFactors
from neuromanifold.estimators.adaptive import Strategy
from neuromanifold.problem.cotangents import Cotangent
from neuromanifold.run import windows
from neuromanifold.run.methods import PerSample
from tests.run.test_adaptive import CASES, SINGLE, Case, allowed, backwards, error_over_claimed, flat, mlp, z_score

COST = 1.6
NOISY = ("ten classes, confident", "some labels ignored", "multi-label", "two inputs")  # with very unequal samples


@pytest.fixture(autouse=True)
def _everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the samples are like."""
    monkeypatch.setattr(windows, "strategy", lambda *_: Strategy("everyone"))


# ------------------------------------------------------------------------------------------------------ unbiased


@pytest.mark.parametrize("base", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_unbiased(name: str, base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """z-scores of combinations of entries over 14 seeds, false-alarm rate 1e-6; of tokens there are no noisy ones."""
    monkeypatch.setattr(windows, "strategy", lambda *_: Strategy("everyone", base))
    assert z_score(CASES[name], COST + (base - 1) * 2 / 3, 14) < allowed(14)


@pytest.mark.parametrize("name", NOISY)
def test_the_twin_without_rows_of_columns_is_biased(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows.AdaptiveSteps, "_send_columns", lambda *_: None)
    assert z_score(CASES[name], COST, 14) > allowed(14)


def test_the_twin_with_whole_probes_beside_columns_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first columns count twice."""
    monkeypatch.setattr(windows.AdaptiveSteps, "_without", lambda _, drawn, *__: drawn)
    assert z_score(CASES["ten classes, confident"], COST, 14) > allowed(14)


def test_the_twin_that_looks_at_the_noise_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A noisy sample keeps its whole probe where that is small, and else has rows.  By a coin, it is unbiased."""
    case, seeds = CASES["ten classes, confident"], 24
    without, columns = windows.AdaptiveSteps._without, windows.AdaptiveSteps._columns

    def gives_up(peeks: bool) -> None:
        def decided(self: Any, drawn: Iterator[Cotangent], choices: Any, *given: Any) -> Iterator[Cotangent]:
            whole = list(drawn)
            (other,) = without(self, iter(whole), choices, *given)
            sizes, traces = whole[0].values.square().sum(-1), 1 - choices.weights.square().sum(-1)
            whole_ones = sizes < traces if peeks else torch.rand(len(sizes)) < 0.5
            keeps.append(whole_ones)
            yield other._replace(values=torch.where(whole_ones[:, None], whole[0].values, other.values))

        def without_rows(self: Any, seen: Any, own: Tensor, sent: int) -> Any:
            return columns(self, seen, torch.where(keeps.pop(0), 0, own), sent)

        monkeypatch.setattr(windows.AdaptiveSteps, "_without", decided)
        monkeypatch.setattr(windows.AdaptiveSteps, "_columns", without_rows)

    keeps: list[Tensor] = []
    monkeypatch.setattr(windows, "several", lambda _: nm.Hutchinson(deflate=0))  # of which the sizes say more
    gives_up(True)
    assert z_score(case, COST, seeds) > allowed(seeds)
    gives_up(False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert z_score(case, COST, seeds) < allowed(seeds)


@pytest.mark.parametrize("base", [1, 2, 3])
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_exact_where_the_cost_allows(name: str, base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for all columns: nothing is random."""
    monkeypatch.setattr(windows, "strategy", lambda *_: Strategy("everyone", base))
    found = CASES[name].estimate(20.0, granularity="sample")
    torch.testing.assert_close(flat(found), CASES[name].truth, rtol=1e-8, atol=1e-13)
    assert found.provenance.left_out == 0


# -------------------------------------------------------------------------------------------------- standard errors


@pytest.mark.parametrize(("name", "least"), [("ten classes, confident", 0.1), ("some labels ignored", 0.0)])
def test_standard_errors_have_the_right_size(name: str, least: float) -> None:
    """Bounds, within a factor of 1.5 above and 10 below; and more below where noisy samples turn out to be exact."""
    assert least < error_over_claimed(CASES[name], COST, 16) < 1.5


def test_columns_taken_for_noisy_would_widen_error_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["ten classes, confident"]
    ours = float(flat(case.estimate(2 * COST), "stderr").square().sum())
    monkeypatch.setattr(windows, "_NOISE", NoiseFactors(2 / 3, 2 / 3, 2 / 3))
    assert float(flat(case.estimate(2 * COST), "stderr").square().sum()) > 10 * ours


@pytest.mark.parametrize("name", ["two inputs", "ten classes, confident", "multi-label"])
def test_intervals_cover(name: str) -> None:
    """Nominal 95 %, over entries and seeds."""
    case, inside = CASES[name], []
    for seed in range(12):
        lower, upper = case.estimate(COST, seed).interval(0.95)
        low, high = (torch.cat([ends[n].double().flatten() for n in ends]) for ends in (lower, upper))
        positive, truth = case.truth > 1e-12, case.truth
        inside.append(((low <= truth * (1 + 1e-9)) & (truth * (1 - 1e-9) <= high))[positive])
    assert float(torch.cat(inside).double().mean()) > 0.93


def test_traces() -> None:
    case = CASES["ten classes, confident"]
    values = [nm.fisher_trace(case.model, case.data, passes=COST, reduction="sum", seed=seed) for seed in range(16)]
    errors = torch.tensor([float(one) - float(case.truth.sum()) for one in values]).double()
    assert float(errors.mean()).__abs__() < 5 * float(errors.std()) / 4
    assert float(errors.square().mean()) < 2 * sum(one.stderr**2 for one in values) / 16


# ----------------------------------------------------------------------------------------- shards, checkpoints, runs


@pytest.mark.parametrize("name", NOISY)
def test_shards_add_up_to_one_run(name: str) -> None:
    case = backwards(CASES[name])
    whole = case.estimate(COST, seed=5, window=3)
    for shards in (1, 2):
        parts = [case.estimate(COST, seed=5, window=3, shard=(i, shards)) for i in range(shards)]
        total = sum(parts)
        assert isinstance(total, nm.DiagonalFisher)
        torch.testing.assert_close(flat(total), flat(whole), rtol=1e-12, atol=0)
        torch.testing.assert_close(flat(total, "noise"), flat(whole, "noise"), rtol=1e-6, atol=0)
        assert total.provenance.passes == whole.provenance.passes


def test_cost_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is not exceeded by much, and most of it is spent; all samples count once."""
    spent: list[float] = []
    send = PerSample.send

    def recorded(self: Any, outputs: Any, drawn: Iterator[Cotangent], sums: Any) -> None:
        cotangents = list(drawn)
        spent.append(len(outputs.logits) * (1 + 2 * len(cotangents)))
        send(self, outputs, iter(cotangents), sums)

    monkeypatch.setattr(PerSample, "send", recorded)
    case = CASES["ten classes, confident"]
    samples = sum(len(item[1]) for item in case.data)
    for cost in (1.0, 1.2, 1.6, 2.5):
        spent.clear()
        found = case.estimate(cost, window=6)
        assert found.count == samples
        assert 0.9 * (3 * cost * samples - 9) < sum(spent) < 1.1 * 3 * cost * samples + 3, cost
    assert case.estimate(1.0).provenance.passes == len(case.data)


def test_graphs_of_earlier_batches_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: a run that keeps one outputs' graph is seen."""
    alive: list[weakref.ref[Any]] = []
    forward, worst, kept, keeps = PerSample.forward, [0], list[Any](), 0

    def watched(self: Any, batch: Any, **options: Any) -> Any:
        gc.collect()
        worst[0] = max(worst[0], sum(one() is not None for one in alive))
        outputs = forward(self, batch, **options)
        alive.append(weakref.ref(outputs.logits.grad_fn))
        kept.extend([outputs.logits] if len(alive) == keeps else [])
        return outputs

    monkeypatch.setattr(PerSample, "forward", watched)
    for number, most in ((0, 1), (2, 2)):
        keeps = number
        alive.clear()
        worst[0] = 0
        CASES["ten classes, confident"].estimate(COST, window=6)
        assert worst[0] == most


def test_nothing_of_the_model_changes_and_the_seed_decides() -> None:
    case = CASES["two inputs"]
    before, state = {n: v.clone() for n, v in case.model.state_dict().items()}, torch.get_rng_state()
    first, again, other = (flat(case.estimate(COST, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[n]) for n, value in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())


def test_rare_entries_have_values() -> None:
    """Each row of a table is used by one sample: all have a value, where samples that are left out leave zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 3), mlp(3, 10, 9)).double()
    case = Case(model, [(rows, torch.zeros(16).long()) for rows in torch.arange(64).split(16)])
    for cost in (1.1, 1.5):
        assert bool((case.estimate(cost).sums["0.weight"].sum(1) > 0).all())


def test_batches_of_any_size() -> None:
    case = CASES["ten classes, confident"]
    x = torch.cat([item[0] for item in case.data])
    for sizes in ([0, 5, 1, 20], [1] * 26, [26], [1, 0, 25]):
        found = case.estimate(COST, data=list(x.split(sizes)))
        assert (found.count, found.provenance.batches) == (26, len(sizes))
