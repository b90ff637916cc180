"""Adaptive passes in a run: unbiased on every kind of data, exact where the cost allows, and repeatable to the bit.

The truth is `by_hand`: float64, one derivative after the other by autograd, and M written out.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.core import Core
from neuromanifold.estimators.adaptive import EIGENPAIRS, Strategy
from neuromanifold.problem.cotangents import Cotangent
from neuromanifold.run import windows
from neuromanifold.run.methods import PerSample
from tests.problems.problem import Net
from tests.run.killed_runs import BrokenError, failing
from tests.zscores import worst_z_score

COSTS = (0.5, 0.7, 1.0, 1.5, 3.0)


@dataclass
class Case:
    """A model, its data, and what the outputs mean."""

    model: nn.Module
    data: list[Any]
    likelihood: Callable[[Tensor], Core] = nm.Categorical
    options: dict[str, Any] = field(default_factory=dict)

    def estimate(self, cost: float, seed: int = 0, window: int = 3, **options: Any) -> nm.DiagonalFisher:
        estimator = nm.Adaptive(cost, window=window)
        options = {"likelihood": self.likelihood, "reduction": "sum", **self.options, **options}
        return nm.fisher_diagonal(self.model, options.pop("data", self.data), estimator, seed=seed, **options)

    @functools.cached_property
    def truth(self) -> Tensor:
        return by_hand(self.model, self.data, self.likelihood)


def by_hand(model: nn.Module, data: list[Any], likelihood: object) -> Tensor:
    """Σ over samples and positions of Jᵀ M J's diagonal, [P], by one call of autograd for each logit."""
    parameters, total = list(model.parameters()), 0.0
    for item in data:
        batch, labels = (dict(item), item["labels"]) if isinstance(item, dict) else (item[0], item[1])
        if isinstance(batch, dict):
            del batch["labels"]
            logits = model(**batch)
        else:
            logits = model(*batch) if isinstance(batch, tuple) else model(batch)
        rows = logits.flatten(0, -2)
        counts = (labels.flatten() != -100).tolist() if not labels.is_floating_point() else [True] * len(rows)
        for row, counted in zip(rows, counts, strict=True):
            if not counted:
                continue
            derivatives = [torch.autograd.grad(z, parameters, retain_graph=True, materialize_grads=True) for z in row]
            J = torch.stack([torch.cat([g.flatten() for g in one]) for one in derivatives])  # [C, P]
            p = row.detach()
            if likelihood is nm.Categorical:
                p = p.softmax(-1)
                M = torch.diag(p) - torch.outer(p, p)
            elif likelihood is nm.Bernoulli:
                M = torch.diag(p.sigmoid() * (1 - p.sigmoid()))
            else:
                M = torch.eye(len(p), dtype=p.dtype)
            total = total + torch.einsum("cp,cd,dp->p", J, M, J)
    assert isinstance(total, Tensor)
    return total


def flat(fim: nm.DiagonalFisher, which: str = "sums") -> Tensor:
    values = getattr(fim, which)
    return torch.cat([values[name].double().flatten() for name in fim])


class Tokens(nn.Module):
    """Logits for each token, or one for each sequence."""

    def __init__(self, classes: int, pooled: bool, scale: float) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, classes)
        self.pooled, self.scale = pooled, scale

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.table(ids))
        if self.pooled:
            mask = torch.ones_like(ids) if attention_mask is None else attention_mask
            h = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.scale * h)


def mlp(inputs: int, outputs: int, scale: float) -> nn.Module:
    """With logits of about this size."""
    model = nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))
    with torch.no_grad():
        model[2].weight *= scale
        model[2].bias *= scale
    return model


def make_cases() -> dict[str, Case]:
    """All cases, seeded, without touching the global random state."""

    def x(*shape: int) -> Tensor:
        """Samples near and far from the decision boundary."""
        return torch.randn(shape) * torch.rand(shape[0], *[1] * (len(shape) - 1)) * 3

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, 11, shape)

    def some(labels: Tensor, every: int = 3) -> Tensor:
        return torch.where(torch.arange(labels.numel()).view(labels.shape) % every == 0, -100, labels)

    sizes = (6, 5, 6, 2, 6, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cases = {
            "two classes": Case(mlp(3, 2, 6), [(x(n, 3), torch.zeros(n).long()) for n in sizes]),
            "three classes, confident": Case(mlp(3, 3, 12), [(x(n, 3), torch.zeros(n).long()) for n in sizes]),
            "ten classes, confident": Case(mlp(3, 10, 12), [(x(n, 3), torch.zeros(n).long()) for n in sizes]),
            "ten classes, near-uniform": Case(mlp(3, 10, 0.1), [(x(n, 3), torch.zeros(n).long()) for n in sizes]),
            "some labels ignored": Case(mlp(3, 4, 9), [(x(n, 3), some(torch.zeros(n).long())) for n in sizes]),
            "multi-label": Case(mlp(3, 4, 9), [(x(n, 3), torch.ones(n, 4).double()) for n in sizes], nm.Bernoulli),
            "regression": Case(mlp(3, 3, 2), [(x(n, 3), torch.ones(n, 3).double()) for n in sizes], nm.Gaussian),
            "tokens": Case(Tokens(4, False, 6), [(ids(n, 3), some(ids(n, 3) % 4)) for n in sizes]),
            "tokens of several lengths": Case(
                Tokens(4, False, 6), [(ids(n, 2 + i % 3), ids(n, 2 + i % 3) % 4) for i, n in enumerate(sizes)]
            ),
            "dicts of several lengths, with a mask": Case(
                Tokens(5, True, 9),
                [
                    {
                        "ids": ids(n, 2 + i % 2),
                        "attention_mask": (torch.arange(2 + i % 2) < 1 + torch.arange(n)[:, None] % 3).long(),
                        "labels": torch.zeros(n).long(),
                    }
                    for i, n in enumerate(sizes)
                ],
            ),
            "two inputs": Case(
                Net(
                    lambda m, a, b: m.last(torch.tanh(m.a(a) * m.b(b))),
                    a=nn.Linear(3, 4),
                    b=nn.Linear(2, 4),
                    last=mlp(4, 6, 9),
                ),
                [((x(n, 3), x(n, 2)), torch.zeros(n).long()) for n in sizes],
            ),
            "a parameter without a rule": Case(
                Net(
                    lambda m, a: m.last(a @ torch.linalg.inv(m.odd)),
                    odd=nn.Parameter(torch.eye(3) + 0.1),
                    last=mlp(3, 5, 9),
                ),
                [(x(n, 3), torch.zeros(n).long()) for n in sizes],
            ),
        }
    for case in cases.values():
        case.model.double()
        case.data = torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, case.data)
    return cases


CASES = make_cases()
SINGLE = [name for name, case in CASES.items() if not name.startswith("tokens")]  # one distribution for each sample


def projected(values: Tensor) -> Tensor:
    """Eight fixed combinations of the entries [..., P]: close to normal, since many samples contribute."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(values.shape[-1], 8, generator=generator, dtype=torch.float64)
    weights[:, 0] = 1
    return values @ weights


def z_score(case: Case, cost: float, seeds: int, **options: Any) -> float:
    runs = torch.stack([flat(case.estimate(cost, seed, **options)) for seed in range(seeds)])
    return worst_z_score(projected(runs), projected(case.truth))


def allowed(seeds: int, entries: int = 8) -> float:
    """The z-score that the worst of so many entries exceeds with probability 1e-6, by Student's t."""
    return float(student.isf(1e-6 / entries / 2, seeds - 1))


# ------------------------------------------------------------------------------------------------------ unbiased

QUICK = {name: COSTS[i % 5] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_unbiased(name: str) -> None:
    """z-scores of combinations of entries over 14 seeds, false-alarm rate 1e-6."""
    assert z_score(CASES[name], QUICK[name], 14) < allowed(14)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cost"), list(itertools.product(CASES, COSTS)))
def test_unbiased_at_every_cost(name: str, cost: float) -> None:
    """Over 60 seeds, false-alarm rate 1e-6."""
    assert z_score(CASES[name], cost, 60) < allowed(60)


@pytest.mark.parametrize(
    ("name", "cost"), [("ten classes, confident", 0.5), ("ten classes, near-uniform", 0.5), ("tokens", 0.7)]
)
def test_the_twin_without_weights_is_biased(name: str, cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "weighted", lambda drawn, *_: drawn)
    assert z_score(CASES[name], cost, 14) > allowed(14)


class Peeking(nm.Hutchinson):
    """Looks at the noise before it decides: a probe above the threshold ‖u‖² = tr M is drawn again."""

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        once = nm.Hutchinson(deflate=0)
        (probe,) = once.cotangents(core, labels, generator)
        for _ in range(8):
            (another,) = once.cotangents(core, labels, generator)
            probe = torch.where(probe.square().sum(-1, keepdim=True) > core.trace()[..., None], another, probe)
        yield probe


def test_the_twin_that_looks_at_the_noise_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it decides by outputs alone, the same probe passes."""
    case = CASES["ten classes, near-uniform"]
    monkeypatch.setattr(windows, "several", lambda _: Peeking())
    assert z_score(case, 0.95, 24) > allowed(24)
    monkeypatch.setattr(windows, "several", lambda _: nm.Hutchinson(deflate=0))
    assert z_score(case, 0.95, 14) < allowed(14)


def test_batches_by_hand_agree_with_the_library() -> None:
    """The truth of these tests against `nm.Exact`, for every case."""
    for case in CASES.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nm.SlowPathWarning)
            exact = nm.fisher_diagonal(case.model, case.data, nm.Exact(), case.likelihood, reduction="sum")
        torch.testing.assert_close(flat(exact), case.truth, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_exact_where_the_cost_allows(name: str) -> None:
    """C - 1 passes for every sample, with and without a look at the outputs first."""
    case = CASES[name]
    rank = {
        "two classes": 1,
        "three classes, confident": 2,
        "some labels ignored": 3,
        "multi-label": 4,
        "regression": 3,
    }
    passes = rank.get(name, 9 if name.startswith("ten") else 5)
    for cost in ((2 * passes + 1) / 3, (2 * passes + 2) / 3 + 1e-9, 50.0):
        found = case.estimate(cost, granularity="sample")
        torch.testing.assert_close(flat(found), case.truth, rtol=1e-9, atol=1e-15)
        assert found.provenance.left_out == 0
        assert float(flat(found, "noise").abs().max()) <= 1e-12 * float(case.truth.max())


def test_a_table_that_is_as_long_as_the_batch() -> None:
    """It looks like samples.  Batches stay as they are: unbiased from one pass on, refused below."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attends = Net(
            lambda m, x, t: m.last(torch.tanh(m.first(x)) @ t.T @ t), first=nn.Linear(3, 3), last=mlp(3, 4, 6)
        )
        data = [((torch.randn(6, 3).double(), torch.randn(6, 3).double()), torch.zeros(6).long()) for _ in range(4)]
    case = Case(attends.double(), data)
    for cost in (1.0, 1.5):
        assert z_score(case, cost, 14) < allowed(14)
    assert case.estimate(1.5).provenance.left_out == 0
    with pytest.raises(ValueError, match="at least 1 for this model"):
        case.estimate(0.7)


def test_traces() -> None:
    case, seeds = CASES["ten classes, confident"], 16
    runs = [nm.fisher_trace(case.model, case.data, passes=1.0, reduction="sum", seed=seed) for seed in range(seeds)]
    values = torch.tensor([[float(run)] for run in runs]).double()
    assert worst_z_score(values, case.truth.sum()[None]) < allowed(seeds, 1)
    assert float(values.var()) < 2 * sum(run.stderr**2 for run in runs) / seeds
    exact = nm.fisher_trace(case.model, case.data, passes=7.0, reduction="sum")
    assert float(exact) == pytest.approx(float(case.truth.sum()), rel=1e-9)
    assert exact.stderr == 0


@pytest.mark.parametrize("granularity", ["batch", "sample"])
@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_granularities(granularity: Any) -> None:
    """Whole batches are not regrouped: independent probes, as many as the cost allows."""
    case = CASES["a parameter without a rule"]
    assert z_score(case, 1.5, 10, granularity=granularity) < allowed(10)
    found = case.estimate(2.4, granularity=granularity).provenance
    assert set(found.granularity.values()) <= (
        {"batch"} if granularity == "batch" else {"sample", "sample, one by one"}
    )
    if granularity == "batch":
        assert found.estimator == repr(nm.Hutchinson(3, deflate=EIGENPAIRS, orthogonal=False))
        assert (found.passes, found.left_out) == (3 * len(case.data), 0)


# -------------------------------------------------------------------------------------------------- standard errors


def error_over_claimed(case: Case, cost: float, seeds: int) -> float:
    """Mean squared error of all entries, over the mean of stderr²."""
    runs = [case.estimate(cost, seed) for seed in range(seeds)]
    error = (torch.stack([flat(run) for run in runs]) - case.truth).square().mean(0).sum()
    claimed = torch.stack([flat(run, "stderr") for run in runs]).square().mean(0).sum()
    floor = 1e-18 * case.truth.square().sum()
    return float((error + floor) / (claimed + floor))


@pytest.mark.parametrize(
    ("name", "cost"), [("ten classes, confident", 1.0), ("ten classes, near-uniform", 0.5), ("regression", 0.5)]
)
def test_standard_errors_have_the_right_size(name: str, cost: float) -> None:
    """They are bounds for single passes and for samples of fixed number: within a factor of 1.5 above, 5 below."""
    assert 0.2 < error_over_claimed(CASES[name], cost, 24) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cost"), list(itertools.product(CASES, COSTS)))
def test_standard_errors_at_every_cost(name: str, cost: float) -> None:
    """Not too small by more than a factor of 1.5 in the variance, in any of the cases."""
    assert error_over_claimed(CASES[name], cost, 100) < 1.5


def test_standard_errors_where_every_second_sample_is_of_a_kind() -> None:
    """The squared error of data in which large and small samples alternate, at a cost of one half."""
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[::2] *= 1e-3
    with torch.random.fork_rng():
        case = Case(nn.Linear(3, 2).double(), [(x, torch.zeros(32, 2).double())], nm.Gaussian)
    assert error_over_claimed(case, 0.5, 40) < 1.5


# ----------------------------------------------------------------------------------------- shards, checkpoints, rtol


def backwards(case: Case) -> Case:
    """The same data from the last batch to the first, of a single sample."""
    return replace(case, data=case.data[::-1])


@pytest.mark.parametrize("cost", [0.5, 1.2])
@pytest.mark.parametrize(
    "name", ["ten classes, confident", "three classes, confident", "tokens of several lengths", "regression"]
)
def test_shards_add_up_to_one_run(name: str, cost: float) -> None:
    """Of windows of three batches, whatever the first batch of a shard is."""
    case = backwards(CASES[name])
    whole = case.estimate(cost, seed=5, window=3)
    for shards in (1, 2):
        parts = [case.estimate(cost, seed=5, window=3, shard=(i, shards)) for i in range(shards)]
        total = sum(parts)
        assert isinstance(total, nm.DiagonalFisher)
        torch.testing.assert_close(flat(total), flat(whole), rtol=1e-12, atol=0)
        torch.testing.assert_close(flat(total, "noise"), flat(whole, "noise"), rtol=1e-6, atol=0)
        torch.testing.assert_close(total.noiseless, whole.noiseless, rtol=1e-12, atol=0)
        ours, theirs = total.provenance, whole.provenance
        assert (total.count, total.positions) == (whole.count, whole.positions)
        assert (ours.left_out, ours.passes, ours.batches) == (theirs.left_out, theirs.passes, theirs.batches)
    with pytest.raises(ValueError, match="has seen the same batches"):
        _ = parts[0] + whole


def test_a_shard_without_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one sample, got 0 batches in shard 2 of 3"):
        CASES["two classes"].estimate(1.0, window=3, shard=(2, 3))


@pytest.mark.parametrize(
    ("name", "cost", "how"),
    [
        *(("ten classes, confident", 0.8, None), ("three classes, confident", 1.5, None), ("tokens", 0.5, None)),
        ("some labels ignored", 1.5, None),
        ("ten classes, confident", 1.6, Strategy("everyone")),
        ("some labels ignored", 2.2, Strategy("everyone", 2)),
    ],
)
def test_a_run_that_fails_at_any_batch_goes_on_with_the_same_bits(
    name: str, cost: float, how: Strategy | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how is not None:
        monkeypatch.setattr(windows, "strategy", lambda *_: how)
    case = backwards(CASES[name])
    expected = case.estimate(cost, window=3)
    for at in range(len(case.data)):
        path = nm.Checkpoint(tmp_path / f"{at}", every=0)
        with pytest.raises(BrokenError):
            case.estimate(cost, window=3, data=failing(case.data, at), checkpoint=path)
        found = case.estimate(cost, window=3, checkpoint=path)
        assert torch.equal(flat(found), flat(expected)), at
        assert torch.equal(flat(found, "noise"), flat(expected, "noise")), at
        torch.testing.assert_close(found.noiseless, expected.noiseless, rtol=0, atol=0)
        verified = found.provenance.verified
        assert found.provenance == replace(expected.provenance, verified=verified), at
    again = case.estimate(cost, window=3, checkpoint=path)  # a run that is done
    assert torch.equal(flat(again), flat(expected))
    others = [case.data[0], *case.data[:0:-1]]
    with pytest.raises(ValueError, match="got others up to batch 5"):
        case.estimate(cost, window=3, data=others, checkpoint=path)
    with pytest.raises(ValueError, match=r"differs in estimator .*cost=2.5"):
        case.estimate(2.5, window=3, checkpoint=path)


def test_rtol() -> None:
    case = CASES["ten classes, confident"]
    many = case.data[:2] * 20
    found = case.estimate(1.0, data=many, rtol=0.2)
    assert found.provenance.stopped.startswith(f"stopped after {found.provenance.batches} batches")
    assert found.provenance.batches % 3 == 0
    assert found.provenance.batches < 40
    assert found.relative_error <= 0.2
    with pytest.warns(nm.ToleranceNotReachedWarning, match="not reached"):
        case.estimate(0.5, data=many, rtol=1e-4)
    assert case.estimate(7.0, data=many, rtol=1e-4).provenance.batches == 3  # exact after the first window


# --------------------------------------------------------------------------------------------------- odd data


def mixing() -> nn.Module:
    return Net(lambda m, x: m.last(x - x.mean(0)), last=mlp(3, 3, 4)).double()


class Lookup(nn.Module):
    """A table of features, which is no sample's own, and which of its rows each sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.layer(table[ids])


def unsplittable() -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    table = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    rows = torch.randint(0, 9, (24,), generator=generator)
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double()
    labels = torch.zeros(6).long()
    return [
        Case(mixing(), [(part, labels) for part in x.split(6)]),
        Case(norm, [(part, labels) for part in x.split(6)]),
        Case(Lookup().double(), [((table, part), labels) for part in rows.split(6)]),
    ]


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_batches_that_cannot_be_split_are_left_as_they_are() -> None:
    """Below 1 they are refused; from 1 on the run is that of the same number of passes for all samples."""
    for case in unsplittable():
        with pytest.raises(ValueError, match=r"`passes` must be at least 1 for this model.*Use passes=1 or more"):
            case.estimate(0.7)
        one = nm.fisher_diagonal(case.model, case.data, nm.Hutchinson(), reduction="sum")
        torch.testing.assert_close(flat(case.estimate(1.0)), flat(one), rtol=1e-12, atol=0)
        exact = nm.fisher_diagonal(case.model, case.data, nm.Exact(), reduction="sum")
        found = case.estimate(5 / 3, granularity="sample")
        torch.testing.assert_close(flat(found), flat(exact), rtol=1e-9, atol=1e-15)
        assert (found.count, found.provenance.left_out) == (24, 0)


@pytest.mark.parametrize("cost", COSTS)
def test_sizes_of_batches(cost: float) -> None:
    """Empty ones and single samples among them, also first; logits of several widths."""
    case = CASES["ten classes, confident"]
    x = torch.cat([item[0] for item in case.data])
    for sizes in ([0, 5, 1, 20], [1] * 26, [26], [1, 0, 25]):
        found = case.estimate(cost, data=list(x.split(sizes)))
        assert (found.count, found.provenance.batches) == (26, len(sizes))
    words = CASES["dicts of several lengths, with a mask"].model
    spans = Case(Net(lambda m, ids: 9 * m.words.table(ids).sum(-1), words=words), [])
    lengths = [(torch.arange(8 * t) % 11).view(8, t) for t in (2, 5, 3)]
    found = spans.estimate(cost, data=lengths, parameters="words.table.*")
    assert found.count == 24
    with pytest.raises(ValueError, match="at least one sample"):
        case.estimate(cost, data=[x[:0], x[:0]])


def test_counts_and_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and positions that count are those of the data, and passes cost what was asked for, on average."""
    spent: list[float] = []
    send, by_scores = PerSample.send, windows.AdaptiveSteps._by_scores

    def recorded(self: Any, outputs: Any, drawn: Iterator[Cotangent], sums: Any) -> None:
        cotangents = list(drawn)
        spent.append(len(outputs.logits) * (1 + 2 * len(cotangents)))
        send(self, outputs, iter(cotangents), sums)

    def looked(self: Any, seen: Any, batches: list[Any], outputs: Any) -> Any:
        spent.append(sum(len(batch.labels) for batch in batches))
        return by_scores(self, seen, batches, outputs)

    monkeypatch.setattr(PerSample, "send", recorded)
    monkeypatch.setattr(windows.AdaptiveSteps, "_by_scores", looked)
    for name, cost in (
        ("ten classes, confident", 0.7),
        ("some labels ignored", 0.5),
        ("tokens", 0.5),
        ("regression", 0.5),
    ):
        case, seeds = CASES[name], 5
        samples = sum(len(item[1]) for item in case.data)
        exact = nm.fisher_diagonal(case.model, case.data, nm.Exact(), case.likelihood)
        spent.clear()
        runs = [case.estimate(cost, seed) for seed in range(seeds)]
        assert {(run.count, run.positions) for run in runs} == {(exact.count, exact.positions)}
        assert 0.7 < sum(spent) / seeds / (3 * cost * samples) < 1.15, name
        assert all(0 < run.provenance.left_out < samples for run in runs)
        if name == "regression":
            assert all(run.provenance.left_out == pytest.approx(samples / 2, abs=len(case.data)) for run in runs)


# ---------------------------------------------------------------------------------------------- contract of a result


def test_nothing_of_the_model_changes() -> None:
    for case in (CASES["ten classes, confident"], unsplittable()[1]):
        case.model.train()
        before = {name: value.clone() for name, value in case.model.state_dict().items()}
        state = torch.get_rng_state()
        for cost in (1.0, 2.0):
            case.estimate(cost)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
        assert all(module.training for module in case.model.modules())
        assert all(p.grad is None and p.requires_grad for p in case.model.parameters())


def test_provenance_and_files(tmp_path: Path) -> None:
    case = CASES["ten classes, confident"]
    found = nm.fisher_diagonal(case.model, case.data, passes=0.7, seed=3)
    twin = nm.fisher_diagonal(case.model, case.data, nm.Adaptive(0.7), seed=3)
    other = nm.fisher_diagonal(case.model, case.data, passes=0.7, seed=4)
    assert torch.equal(flat(found), flat(twin))
    assert not torch.equal(flat(found), flat(other))
    about = found.provenance
    assert about == twin.provenance
    assert about.estimator == "Adaptive(cost=0.7, window=16)"
    assert (about.target, about.seeds, about.noise_factor) == ("unbiased", [3], 1.0)
    assert about.draws == [[3, 0, 1, 1]]  # one window
    assert about.left_out > 0
    assert 0 < about.noise_ratio <= 1
    found.save(tmp_path / "fim.safetensors")
    loaded = nm.load(tmp_path / "fim.safetensors")
    assert isinstance(loaded, nm.DiagonalFisher)
    assert loaded.provenance == about
    assert torch.equal(flat(loaded), flat(found))
    assert torch.equal(flat(loaded, "noise"), flat(found, "noise"))
    assert "Adaptive" in str(found)


@pytest.mark.parametrize("function", [nm.fisher_diagonal, nm.fisher_trace])
def test_wrong_arguments(function: Any) -> None:
    case = CASES["two classes"]
    for passes in (0, -0.5, math.nan, math.inf, "a", True, [1]):
        with pytest.raises(ValueError, match=r"`passes` must be a number > 0, got .* costs as much as forward"):
            function(case.model, case.data, passes=passes)
    with pytest.raises(ValueError, match=r"`passes` must be None if there is an estimator \(Exact"):
        function(case.model, case.data, nm.Exact(), passes=1.0)
