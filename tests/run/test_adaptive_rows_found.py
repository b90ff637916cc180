"""Adaptive passes on inputs that broke them once, one test for each."""

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.estimators.adaptive import Strategy
from neuromanifold.run import windows
from tests.problems.problem import Net
from tests.run.test_adaptive import allowed, flat, projected
from tests.zscores import worst_z_score

CHOSEN, EVERYONE, TWO = Strategy("chosen"), Strategy("everyone"), Strategy("everyone", 2)


def forced(monkeypatch: pytest.MonkeyPatch, plan: Strategy) -> None:
    monkeypatch.setattr(windows, "strategy", lambda *_: plan)


def network(scale: float, classes: int = 3) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    with torch.no_grad():
        model[2].weight *= scale
    return model


def inputs(*sizes: int) -> list[Tensor]:
    return list(torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(0)).double().mul_(2).split(sizes))


def assert_exact(model: nn.Module, data: list[Any], cost: float = 8.0) -> None:
    """At this cost all columns have rows."""
    expected = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    found = nm.fisher_diagonal(model, data, nm.Adaptive(cost, window=len(data)), reduction="sum")
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-9, atol=0)


@pytest.mark.parametrize("plan", [CHOSEN, EVERYONE, TWO], ids=str)
def test_impossible_classes(plan: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of -inf are the same in rows as before, though their difference is NaN."""
    forced(monkeypatch, plan)
    masked = Net(lambda m, x, mask: m.net(x).masked_fill(mask, -math.inf), net=network(9, 4))
    data = []
    for x in inputs(6, 5, 3):
        impossible = (torch.arange(4) - torch.arange(len(x))[:, None]) % 4 == 1
        data.append(((x, impossible), torch.zeros(len(x)).long()))
    assert_exact(masked, data)


@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_masked_classes_do_not_hide_other_logits(value: float) -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    logits[range(6), [0, 1, 2, 3, 0, 1]] = value
    assert windows._nearly_same(logits.clone(), logits)
    assert not windows._nearly_same(logits.roll(4, 0), logits)


@pytest.mark.parametrize("plan", [CHOSEN, EVERYONE, Strategy("alike")], ids=str)
def test_ignored_samples_without_a_possible_class(plan: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, plan)
    masked = Net(lambda m, x, pad: m.net(x).masked_fill(pad[:, None], -math.inf), net=network(9))
    data = []
    for x in inputs(6, 5, 1, 6):
        pad = torch.arange(len(x)) % 3 == 0
        data.append(((x, pad), torch.where(pad, -100, 0)))
    assert_exact(masked, data)
    for seed in range(10):
        nm.fisher_diagonal(masked, data, nm.Adaptive(0.6, window=2), seed=seed)


def test_empty_batches_at_the_beginning_of_a_window() -> None:
    """Of the sample after them none is kept, half of the time."""
    model = network(0.1)
    for seed in range(6):
        found = nm.fisher_diagonal(model, inputs(6, 0, 0, 1, 0), nm.Adaptive(0.4, window=2), seed=seed)
        assert (found.count, found.provenance.batches) == (7, 5)


@pytest.mark.parametrize("plan", [CHOSEN, EVERYONE], ids=str)
def test_batches_with_large_arrays_of_their_own(plan: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays whose repr is the same are not: samples of such batches are not joined."""
    forced(monkeypatch, plan)
    scaled = Net(lambda m, x, array: m.net(x * float(array[1500])), net=network(9))
    data = []
    for i, x in enumerate(inputs(6, 6, 6)):
        array = np.ones(3000)
        array[1500] = 1 + i
        data.append(((x, array), torch.zeros(6).long()))
    assert_exact(scaled, data)


@pytest.mark.parametrize("plan", [CHOSEN, EVERYONE, TWO], ids=str)
def test_small_columns_in_half_precision(plan: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """√λ below the least number of float16 is scaled before it is rounded."""
    forced(monkeypatch, plan)
    model = network(0.1).half()
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([38.0, 0.0, 0.0]))
    data = [x.half() for x in inputs(6, 5)]
    found = nm.fisher_diagonal(model, data, nm.Adaptive(8.0), reduction="sum")
    exact = nm.fisher_diagonal(model.double(), [x.double() for x in data], nm.Exact(), reduction="sum")
    assert float(flat(found).sum() / flat(exact).sum()) == pytest.approx(1, abs=0.02)


class _Alive:
    """Counts the graphs that are held."""

    now = most = 0

    def __init__(self) -> None:
        _Alive.now += 1
        _Alive.most = max(_Alive.most, _Alive.now)

    def __del__(self) -> None:
        _Alive.now -= 1


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.alive = _Alive() if x.requires_grad else None
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return g * 2


def test_the_graph_of_the_first_batch_is_released_before_rows_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, CHOSEN)
    model = Net(lambda m, x: m.last(_Counted.apply(m.first(x))), first=nn.Linear(3, 3).double(), last=network(9))
    held: list[int] = []
    run_group = windows.AdaptiveSteps._run_group

    def noted(self: Any, *args: Any) -> None:
        gc.collect()
        held.append(_Alive.now)
        run_group(self, *args)

    monkeypatch.setattr(windows.AdaptiveSteps, "_run_group", noted)
    nm.fisher_diagonal(model, inputs(6, 6, 6), nm.Adaptive(1.5))
    assert held
    assert not any(held)


@pytest.mark.parametrize("plan", [CHOSEN, EVERYONE], ids=str)
def test_rows_of_long_samples_make_small_batches(plan: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches with about as many tokens, those with long samples have few: as few as their rows are run with."""
    forced(monkeypatch, plan)
    sizes: dict[int, int] = {}

    def forward(m: Any, ids: Tensor) -> Tensor:
        sizes[ids.shape[1]] = max(sizes.get(ids.shape[1], 0), len(ids))
        return m.last(9 * m.table(ids).mean(1))  # type: ignore[no-any-return]

    model = Net(forward, table=nn.Embedding(11, 3), last=nn.Linear(3, 4))
    ids = [torch.randint(0, 11, (n, 24 // n)) for n in (12, 2, 12, 2)]
    nm.fisher_diagonal(model, ids, nm.Adaptive(4.0))
    assert sizes == {2: 12, 12: 2}


def test_passes_without_noise_have_sums_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several passes of a batch the first sends a column: its squares are noiseless in a weight, as in a bias."""
    forced(monkeypatch, TWO)
    model = nn.Linear(64, 3).double()
    x = torch.ones(300, 64, dtype=torch.float64) * torch.linspace(0, 3, 300, dtype=torch.float64)[:, None]
    found = nm.fisher_diagonal(model, [x], nm.Adaptive(5 / 3))
    share = {name: float(found.noiseless[name].sum() / found.sums[name].sum()) for name in found}
    assert share["weight"] > 0.4


class Widths(nn.Module):
    """As many logits as its inputs say, which are all alike in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 14)

    def forward(self, x: Tensor) -> Tensor:
        return 8 * self.layer(x[:, :3])[:, : int(x[0, 3])]


@pytest.mark.parametrize("plan", [CHOSEN, EVERYONE], ids=str)
def test_samples_with_other_numbers_of_classes_are_not_joined(plan: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """False-alarm rate 1e-6, over 24 seeds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Widths().double()
        data = [torch.cat([torch.randn(6, 3), torch.full((6, 1), c)], 1).double() for c in (12.0, 14.0, 12.0, 14.0)]
    exact = flat(nm.fisher_diagonal(model, data, nm.Exact()))
    forced(monkeypatch, plan)
    runs = [flat(nm.fisher_diagonal(model, data, nm.Adaptive(1.5, window=4), seed=seed)) for seed in range(24)]
    assert worst_z_score(projected(torch.stack(runs)), projected(exact)) < allowed(24)


class Scaled(nn.Module):
    """Positions first; the scale of each position of a sample [T, B] may be square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 5)
        self.place = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.last(30 * torch.tanh(self.first(x) * self.place[: len(x)]) * scale[..., None])


@pytest.mark.parametrize("cost", [0.6, 0.9])
def test_a_later_batch_as_long_as_it_has_samples_is_refused(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples were looked for in the wrong dimension of a tensor."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Scaled().double()
        data = [
            (torch.randn(6, n, 3).double(), torch.rand(6, n).double() * torch.arange(1, 7)[:, None]) for n in (5, 6)
        ]
    forced(monkeypatch, CHOSEN)
    items = [(item,) for item in data]
    with pytest.raises(ValueError, match="batch 1, whose samples cannot be told from its other dimensions"):
        nm.fisher_diagonal(model, items, nm.Adaptive(cost, window=2), batch_dim=1)
    assert nm.fisher_diagonal(model, items[:1] * 2, nm.Adaptive(cost, window=2), batch_dim=1).count == 10
