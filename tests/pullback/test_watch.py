"""Where a trial has seen nothing but zeros, it is repeated once something else comes by, and not with every batch."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.pullback import plan as plan_module
from neuromanifold.pullback.trial import Trial
from neuromanifold.pullback.watch import Watch


class Adapter(nn.Module):
    """As fresh adapters are: the second matrix is zero, hence the gradient of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(2))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.scale * self.down(x))
        return out


class Gated(nn.Module):
    """A layer that has a gradient only where the first entry of x is large; perhaps it sees positions for samples."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.mixes = nn.Linear(4, 5), nn.Linear(5, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x.flip(0) if self.mixes else x))
        out: Tensor = self.head((y.flip(0) + y if self.mixes else y) * (x[:, :1] > 2))
        return out


def gated_data(open_from: int, batches: int = 9) -> list[Tensor]:
    data = list(
        torch.randn(batches, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(max=1)
    )
    for x in data[open_from:]:
        x[::2, 0] = 3
    return data


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples, of each."""
    made: list[int] = []

    class Counted(Trial):
        def __init__(self, logits: Tensor) -> None:
            made.append(len(logits))
            super().__init__(logits)

    monkeypatch.setattr(plan_module, "Trial", Counted)
    return made


def one_by_one(model: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    parts = [nm.fisher_diagonal(model, [x], nm.Exact(), reduction="sum") for x in data]
    return {name: sum((part[name] for part in parts), torch.zeros(())) for name in parts[0]}


def test_a_part_without_gradients_is_not_tried_with_every_batch(trials: list[int]) -> None:
    model = nn.Sequential(Adapter(), nn.Tanh(), nn.Linear(6, 3)).double()
    data = list(torch.randn(9, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert len(trials) == 3
    assert set(result.provenance.granularity.values()) == {"sample"}
    for name in ("0.down.weight", "0.scale"):
        assert (result[name] == 0).all()
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("open_from", [1, 4, 7])
def test_what_comes_later_is_tried_then(open_from: int, trials: list[int]) -> None:
    model, data = Gated().double(), gated_data(open_from)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert len(trials) == (2 if open_from == 1 else 4)
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


def test_what_has_been_tried_before_is_not_watched() -> None:
    """Two heads in turn, so that there is a trial with each of them; in the second one the layer has no gradient."""

    class TwoHeads(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.layer(x)) * (x[:, :1] > 2)
            out: Tensor = self.head(y) if x[0, 1] > 0 else self.other(y)
            return out

    data = [x.clone() for x in gated_data(0, 3)]
    for x, second, gate in zip(data, (1.0, -1.0, 1.0), (3.0, 0.0, 3.0), strict=True):
        x[:, 0], x[:, 1] = gate, second
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.fisher_diagonal(TwoHeads().double(), data, nm.Exact())


def test_rows_that_turn_out_not_to_be_samples_end_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"zero at first.*granularity='batch'"):
        nm.fisher_diagonal(Gated(mixes=True).double(), gated_data(5), nm.Exact())
    early = nm.fisher_diagonal(Gated(mixes=True).double(), gated_data(0), nm.Hutchinson())
    assert early.provenance.granularity["layer.weight"] == "batch"


def test_what_comes_with_the_last_batch_is_said() -> None:
    with pytest.warns(RuntimeWarning, match="came only with the last ones"):
        nm.fisher_diagonal(Gated().double(), gated_data(8), nm.Exact())


def test_on_a_gpu_it_is_looked_up_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, looked = Watch(), []
    watch.begin({"a"})
    watch._flags[torch.device("cuda")] = torch.zeros((), dtype=torch.bool)
    monkeypatch.setattr(watch, "seen", lambda: looked.append(watch._asked))
    for _ in range(50):
        assert not watch.calls_for_a_trial({"a"})
    assert looked == [1, 2, 4, 8, 16, 32, 48]
    assert watch.calls_for_a_trial({"a", "b"})
