"""Adaptive passes where everyone is kept: the batch's own pass, and further ones for its noisy samples.

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
from neuromanifold.core import Core
from neuromanifold.estimators import Apart
from neuromanifold.estimators.adaptive import AfterFirst
from neuromanifold.persample.accumulate import DiagonalSums, Pass, TraceSums
from neuromanifold.problem.cotangents import Cotangent
from neuromanifold.run import windows
from neuromanifold.run.methods import PerSample
from tests.estimators.probes import normal
from tests.run.test_adaptive import CASES, SINGLE, Case, allowed, backwards, error_over_claimed, flat, mlp, z_score
from tests.run.test_error_bar_kinds import forms
from tests.zscores import allowed_z_score, worst_z_score

COST = 1.6
NOISY = ("ten classes, confident", "some labels ignored", "multi-label", "two inputs")  # with very unequal samples


@pytest.fixture(autouse=True)
def _everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the samples are like."""
    monkeypatch.setattr(windows, "strategy", lambda *_: "everyone")


# ------------------------------------------------------------------------------------------------------ unbiased


@pytest.mark.parametrize("name", CASES)
def test_unbiased(name: str) -> None:
    """z-scores of combinations of entries over 14 seeds, false-alarm rate 1e-6; of tokens there are no noisy ones."""
    assert z_score(CASES[name], COST, 14) < allowed(14)


@pytest.mark.parametrize("name", NOISY)
def test_the_twin_without_further_passes_is_biased(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvectors alone."""
    monkeypatch.setattr(windows.AdaptiveSteps, "_further_passes", lambda *_: None)
    assert z_score(CASES[name], COST, 14) > allowed(14)


def test_the_twin_with_whole_probes_after_an_eigenvector_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leading eigenvector counts twice."""
    monkeypatch.setattr(windows, "AfterFirst", lambda passes: nm.Hutchinson(passes - 1))
    assert z_score(CASES["ten classes, confident"], COST, 14) > allowed(14)


def test_the_twin_that_looks_at_the_noise_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A noisy sample keeps its probe where that is small, and else has further passes.  By a coin, it is unbiased."""
    case, seeds = CASES["ten classes, confident"], 24

    def gives_up(peeks: bool) -> Any:
        def replaced(drawn: Iterator[Cotangent], columns: Tensor, apart: Apart) -> Iterator[Cotangent]:
            for one in drawn:
                sizes, exact = one.values[apart.rows].square().sum(-1), columns.square().sum(-1)
                some = sizes < exact if peeks else torch.rand(len(sizes)) < 0.5
                mixed = torch.where(some[:, None], one.values[apart.rows], columns.to(one.values.dtype))
                forgotten.append(some)
                yield one._replace(values=one.values.index_copy(0, apart.rows, mixed), apart=apart)

        return replaced

    class Unless(AfterFirst):
        """No further passes for those that kept their probe."""

        def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
            kept = torch.cat(forgotten)[rows.pop(0)]
            return (torch.where(kept[:, None], 0.0, u) for u in super().cotangents(core, labels, generator))

    forgotten, rows = list[Tensor](), list[Tensor]()
    further, only = windows.AdaptiveSteps._further_passes, windows.Taken.only

    def one_window(self: Any, *given: Any) -> None:
        further(self, *given)
        forgotten.clear()

    def noted(self: Any, numbers: Tensor) -> Any:
        rows.append(numbers)
        return only(self, numbers)

    monkeypatch.setattr(windows.AdaptiveSteps, "_further_passes", one_window)
    monkeypatch.setattr(windows.Taken, "only", noted)
    monkeypatch.setattr(windows, "AfterFirst", Unless)
    monkeypatch.setattr(windows, "several", lambda _: nm.Hutchinson(deflate=0))  # of which the sizes say more
    monkeypatch.setattr(windows, "with_eigenvectors", gives_up(True))
    assert z_score(case, COST, seeds) > allowed(seeds)
    monkeypatch.setattr(windows, "with_eigenvectors", gives_up(False))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert z_score(case, COST, seeds) < allowed(seeds)


@pytest.mark.parametrize("name", [name for name in SINGLE if name != "regression"])  # which has equal eigenvalues
@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_exact_where_the_cost_allows(name: str) -> None:
    """As many passes as the rank, the first of which is an eigenvector's: nothing is random, and error bars say so."""
    found = CASES[name].estimate(20.0, granularity="sample")
    torch.testing.assert_close(flat(found), CASES[name].truth, rtol=1e-8, atol=1e-13)
    assert float(flat(found, "noise").abs().max()) <= 1e-12 * float(CASES[name].truth.max())
    assert found.provenance.left_out == 0


@pytest.mark.parametrize("classes", [3, 4, 9, 12])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_first_and_further_passes_add_up_to_the_metric(classes: int, scale: float) -> None:
    """E[u uᵀ] by z-scores, false-alarm rate 1e-6, and exactly from the rank on.  Twin: a fifth too much."""
    logits = scale * normal(5, classes)
    metric, draws = nm.Categorical(logits).fisher(), 2000
    first = nm.Categorical(logits).spectrum(1).factor()[:, 0]
    for passes in (2, 3, classes - 1, classes + 3):
        core, generator = nm.Categorical(logits.repeat(draws, 1)), torch.Generator().manual_seed(passes)
        rest = torch.stack([*AfterFirst(passes).cotangents(core, None, generator)])  # [m - 1, draws n, c]
        assert len(rest) == AfterFirst(passes).passes(core) == min(passes, core.rank) - 1
        found = (
            torch.einsum("mkc,mkd->kcd", rest, rest).view(draws, -1)
            + torch.einsum("nc,nd->ncd", first, first).flatten()
        )
        if passes >= classes - 1:
            torch.testing.assert_close(found[0], metric.flatten(), rtol=0, atol=1e-12)
            continue
        z = [worst_z_score(found * size, metric.flatten()) for size in (1.0, 1.2)]
        assert z[0] < allowed_z_score(metric.numel()) < z[1]


# -------------------------------------------------------------------------------------------------- standard errors


@pytest.mark.parametrize(("name", "least"), [("ten classes, confident", 0.17), ("some labels ignored", 0.0)])
def test_standard_errors_have_the_right_size(name: str, least: float) -> None:
    """Bounds, within a factor of 1.5 above and 6 below; and more below where noisy samples turn out to be exact."""
    assert least < error_over_claimed(CASES[name], COST, 16) < 1.5


def test_eigenvectors_taken_for_noisy_would_widen_error_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["ten classes, confident"]
    ours = float(flat(case.estimate(COST), "stderr").square().sum())
    kept = PerSample._pass
    monkeypatch.setattr(PerSample, "_pass", lambda *given, **more: kept(*given, **more)._replace(apart=None))
    assert float(flat(case.estimate(COST), "stderr").square().sum()) > 3 * ours


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


@pytest.mark.parametrize("kind", forms())
def test_samples_of_a_form(kind: str) -> None:
    form = forms()[kind]
    every = form.gradients(0, form.samples, torch.float64)
    for rows in ([], [1], [2, 0], [0, 1, 2]):
        some = form.select(torch.tensor(rows, dtype=torch.long))
        assert some.samples == len(rows)
        torch.testing.assert_close(some.gradients(0, len(rows), torch.float64), every[rows], rtol=0, atol=0)


@pytest.mark.parametrize("kind", forms())
def test_sums_with_samples_apart(kind: str) -> None:
    """Squares of all, fourth powers of each part with its own factor, squares without noise beside them."""
    form = forms()[kind]
    g = form.gradients(0, form.samples, torch.float64)
    for own in (0.0, 0.1):
        apart = Apart(torch.tensor([1]), torch.tensor([0, 2]), own)
        sums, trace = DiagonalSums([torch.zeros(form.shape)], fourth_powers=True), TraceSums(1.0)
        made_by = Pass(scale=2.0, apart=apart)
        made_by = made_by._replace(noise_factors=made_by.noise_factors._replace(sample=0.5))
        for one in (sums, trace):
            one.add_samples(0, form, made_by)
            one.end_pass()
            one.end_batch()
        squares = (g / 2).square()
        torch.testing.assert_close(sums.squares[0].double(), squares.sum(0), rtol=1e-5, atol=1e-6)
        fourths = 0.5 * squares[[0, 2]].square().sum(0) + own * squares[1].square()
        torch.testing.assert_close(sums.standard_errors()[0].double().square(), fourths, rtol=1e-4, atol=1e-6)
        if not own:
            torch.testing.assert_close(sums.noiseless[0].double(), squares[1], rtol=1e-5, atol=1e-6)
        norms = squares.flatten(1).sum(1)
        variance = 0.5 * norms[[0, 2]].square().sum() + own * norms[1].square()
        assert trace.total_and_standard_error()[1] == pytest.approx(float(variance.sqrt()), rel=1e-5)


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
