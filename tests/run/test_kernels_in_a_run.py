"""Whole runs by the Triton kernels, interpreted on the CPU, against the same in float64, which none of them takes."""

import copy

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.kernels import dispatch

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "interpret")


class LanguageModel(nn.Module):
    """Embedding, both norms, linear layers with positions, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.last = nn.Embedding(7, 6), nn.LayerNorm(6), nn.RMSNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(self.last(x))


class Classifier(LanguageModel):
    """The same without the tie: one distribution for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean(1)


def convolutional() -> nn.Module:
    """Kernels, strides, groups and padding of several kinds, and BatchNorm as it is in evaluation."""
    norm = nn.BatchNorm2d(6)
    norm.running_mean, norm.running_var = torch.randn(6), torch.rand(6) + 0.5
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6)),
        *(nn.Conv2d(6, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, (1, 3), groups=2, dilation=(1, 2), padding="same")),
        *(nn.Conv2d(8, 4, 1, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def _case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "images":
        return convolutional(), torch.randn(4, 2, 6, 5), torch.randint(0, 3, (4,))
    ids = torch.randint(0, 7, (4, 5))
    if name == "tied":
        return LanguageModel(), ids[:, :3], torch.randint(0, 7, (4, 3))
    return Classifier(), ids, torch.randint(0, 3, (4,))


def _run(model: nn.Module, x: Tensor, y: Tensor, estimator: nm.Estimator) -> nm.DiagonalFisher:
    return nm.fisher_diagonal(model, [(x[:3], y[:3]), (x[3:], y[3:])], estimator)


@pytest.mark.parametrize(
    ("name", "tf32", "estimator"),
    [
        pytest.param(
            name, tf32, nm.Exact() if exact else nm.Empirical(), marks=[pytest.mark.slow] if exact == tf32 else []
        )
        for name in ("text", "tied", "images")
        for tf32 in (False, True)
        for exact in (False, True)
    ],
)
def test_kernels_give_what_float64_gives(
    name: str, estimator: nm.Estimator, tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "tf32_products", lambda: tf32)
    monkeypatch.setattr(dispatch, "tf32_convolutions", lambda: tf32)
    model, x, y = _case(name)
    double = copy.deepcopy(model).double()
    found = _run(model, x, y, estimator)
    truth = _run(double, x.double() if x.is_floating_point() else x, y, estimator)
    tolerance = 3e-3 if tf32 else 1e-5
    assert set(found) == set(truth)
    for key in truth:
        assert not found[key].requires_grad
        assert float((found[key].double() - truth[key]).norm()) <= tolerance * float(truth[key].norm()), key


@pytest.mark.parametrize("name", ["text", "tied", "images"])
def test_error_bars_are_those_of_the_torch_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "tf32_convolutions", lambda: False)
    model, x, y = _case(name)
    found = _run(model, x, y, nm.MonteCarlo())
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "0")
    expected = _run(model, x, y, nm.MonteCarlo())
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-6 * float(expected[key].max()))
        errors = expected.stderr[key]
        torch.testing.assert_close(found.stderr[key], errors, rtol=1e-4, atol=1e-6 * float(errors.max()))


def test_a_wrong_wish_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "off")
    with pytest.raises(ValueError, match="`NEUROMANIFOLD_KERNELS` must be 0, 1 or interpret, got 'off'"):
        _run(*_case("text"), nm.Exact())
