"""When the verification is repeated: as something comes where only zeros were, and where samples cannot be followed."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.engine import PerSampleGradients
from neuromanifold.persample.gradients import Dense
from neuromanifold.persample.graph import leaves_in_place
from neuromanifold.persample.rules import registry


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


def one_by_one(model: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    parts = [nm.fisher_diagonal(model, [x], nm.Exact(), reduction="sum") for x in data]
    return {name: sum((part[name] for part in parts), torch.zeros(())) for name in parts[0]}


def test_a_part_without_gradients_is_not_verified_with_every_batch() -> None:
    model = nn.Sequential(Adapter(), nn.Tanh(), nn.Linear(6, 3)).double()
    data = list(torch.randn(9, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert result.provenance.verified == 2
    assert set(result.provenance.granularity.values()) == {"sample"}
    assert (result["0.down.weight"] == 0).all()
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("open_from", [1, 4, 7])
def test_what_comes_later_is_verified_then(open_from: int) -> None:
    model, data = Gated().double(), gated_data(open_from)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert result.provenance.verified == (2 if open_from == 1 else 3)  # of which two are the first ones
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


def test_one_part_may_come_and_another_never() -> None:
    """As of experts, of which one gets rows in the third batch, and one gets none: later batches are not verified."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for k, layer in enumerate(self.layers):
                out = out + layer(x) * (x[:, :1] > 10 * k)
            return self.head(out.tanh())

    data = list(torch.rand(6, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    data[2][:2, 0] = 11
    model = Experts().double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert result.provenance.verified == 3
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


def test_what_has_been_verified_before_is_not_verified_again() -> None:
    """Two heads in turn, each verified on its own; in the second one the layer has no gradient."""

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


PATTERNS = ["1000", "000011", "00001000", "0000001", "00001B", "00001B1", "0B10", "00001000011"]


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_right_whenever_they_come(pattern: str, turned: bool) -> None:
    torch.manual_seed(0)
    model, data = Turned(turned).double(), turned_data(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    for name, value in one_by_one(model, data).items():
        torch.testing.assert_close(result[name], value, rtol=1e-12, atol=1e-14)


class Amplified(nn.Module):
    """Adds a parameter, times a number that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift * (2.0 if x[0, 0] > 2 else 1.0)


def test_a_rule_that_is_right_at_first_and_wrong_later_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    nm.rule(Amplified, parameters=("shift",))(lambda call: {"shift": Dense(call.g)})
    x = torch.zeros(4, 3, dtype=torch.float64)
    model = nn.Sequential(Amplified())
    nm.fisher_diagonal(model, [x, x], nm.Exact())
    with pytest.raises(nm.VerificationError, match=r"0.shift were right on an earlier batch.*granularity='batch'"):
        nm.fisher_diagonal(model, [x, x + 3.0], nm.Exact())


def test_batches_of_one_sample_need_no_second_verification() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    nn.init.constant_(model[0].bias, -50.0)
    data = [torch.zeros(1, 4, dtype=torch.float64)] * 5 + [torch.full((1, 4), 1e3, dtype=torch.float64)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert said == []
    assert (result["0.weight"] > 0).any()  # it came late


def test_a_flag_on_a_gpu_is_read_rarely() -> None:
    """Reading makes a GPU wait.  A tensor without data cannot be read, so that reading it is an error."""
    model = nn.Linear(4, 3)
    engine, read = PerSampleGradients(model, dict(model.named_parameters())), []
    engine.findings.late = torch.zeros((), dtype=torch.bool, device="meta")
    for batch in range(1, 50):
        engine.end_batch()
        try:
            assert not engine.came_late
        except RuntimeError:
            read.append(batch)
    assert read == [16, 32, 48]


STRIDED = (4, 4, 1, 1), (4, 1, 4, 4)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax((2, 3), keepdim=True).as_strided(*STRIDED)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_pooling_to_a_single_pixel_is_followed(memory: torch.memory_format) -> None:
    """With channels last it sees its averages with other strides, for which every batch was verified."""
    x = torch.randn(4, 2, 5, 5).contiguous(memory_format=memory)
    verified = []
    for pool in (nn.AdaptiveAvgPool2d(1), Largest()):
        model = nn.Sequential(nn.Conv2d(2, 4, 2), pool, nn.Flatten(), nn.Linear(4, 3))
        verified.append(nm.fisher_diagonal(model, [x] * 5).provenance.verified)
    assert verified[0] < verified[1] == 5
    mean = torch.randn(4, 4, 3, 3, requires_grad=True).mean((2, 3), keepdim=True)
    assert leaves_in_place(mean.as_strided(*STRIDED).grad_fn)
    for moved in ((4, 4, 1, 1), (1, 4, 1, 1)), ((3, 4, 1, 1), (4, 1, 1, 1), 4), ((4, 4, 1, 1), (0, 1, 1, 1)):
        assert not leaves_in_place(mean.as_strided(*moved).grad_fn)
