"""Where a trial has seen nothing but zeros, it is repeated once something else comes by, and not with every batch."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample import plan as plan_module
from neuromanifold.persample.trial import Trial
from neuromanifold.persample.watch import Watch


class Adapter(nn.Module):
    """As fresh adapters are: the second matrix is zero, hence the gradient of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


class Gated(nn.Module):
    """A layer that has a gradient only where the first entry of x is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.layer(x)) * (x[:, :1] > 2))
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
    assert (result["0.down.weight"] == 0).all()
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
    model = TwoHeads().double()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert said == []
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


class Turned(nn.Module):
    """Rows of a layer are positions, as many as samples; it counts where the first entry is large."""

    def __init__(self, turned: bool = True) -> None:
        super().__init__()
        self.layer, self.head, self.rest, self.turned = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(4, 3), turned

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.layer(x)
        out: Tensor = (self.rest(x) + self.head(torch.tanh(y)) * (x[:, :1, :1] > 10)).mean(1)
        return out.sigmoid() if x[0, 0, 1] > 10 else out  # another graph


def turned_data(pattern: str) -> list[Tensor]:
    """1: the layer counts; B: so it does, in another graph."""
    data = list(torch.randn(len(pattern), 3, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for x, kind in zip(data, pattern, strict=True):
        x[:, 0, 0] = 11.0 if kind in "1B" else 0.0
        x[:, 0, 1] = 11.0 if kind == "B" else 0.0
    return data


@pytest.mark.parametrize("pattern", ["000011", "0000100001"])
def test_rows_that_turn_out_not_to_be_samples_end_the_run(pattern: str) -> None:
    torch.manual_seed(0)
    model = Turned().double()
    with pytest.raises(RuntimeError, match=r"zero at first.*granularity='batch'"):
        nm.fisher_diagonal(model, turned_data(pattern), nm.Exact())


@pytest.mark.parametrize("pattern", ["00001000", "0000001", "00001B", "00001B1"])
def test_what_comes_too_late_to_be_tried_is_said(pattern: str) -> None:
    torch.manual_seed(0)
    model = Turned().double()
    with pytest.warns(RuntimeWarning, match="begin with a batch in which they are not zero"):
        nm.fisher_diagonal(model, turned_data(pattern), nm.Exact())


@pytest.mark.parametrize("pattern", ["1000", "000011", "00001B1", "0B10", "00001000011"])
def test_rows_that_are_samples_are_right_whenever_they_come(pattern: str) -> None:
    torch.manual_seed(0)
    model, data = Turned(turned=False).double(), turned_data(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


def test_a_resumed_run_knows_what_came_late(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Turned().double(), turned_data("000011")

    def stopped() -> Iterator[Tensor]:
        yield from data[:5]
        raise OSError("stopped")

    state = nm.Checkpoint(tmp_path / "state", every=0)
    with pytest.raises(OSError, match="stopped"):
        nm.fisher_diagonal(model, stopped(), nm.Exact(), checkpoint=state)
    with pytest.raises(RuntimeError, match="zero at first"):
        nm.fisher_diagonal(model, data, nm.Exact(), checkpoint=state)


def test_batches_of_one_sample_are_not_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    nn.init.constant_(model[0].bias, -50.0)
    data = [torch.zeros(1, 4, dtype=torch.float64)] * 5 + [torch.full((1, 4), 1e3, dtype=torch.float64)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert said == []
    assert (result["0.weight"] > 0).any()  # it came late


def test_on_a_gpu_it_is_looked_up_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, looked = Watch(), []
    watch.tried(set(), {"a"})
    watch._flags["a"] = torch.zeros((), dtype=torch.bool, device="meta")  # anything but a CPU

    def late() -> set[object]:
        looked.append(watch._asked)
        return set()

    monkeypatch.setattr(watch, "late", late)
    for _ in range(50):
        assert not watch.calls_for_a_trial({"a"})
    assert looked == [1, 2, 4, 8, 16, 32, 48]
    assert watch.calls_for_a_trial({"a", "b"})
