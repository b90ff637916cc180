"""The penalty of consolidation is the sum that its equation writes, and so is its gradient."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests.uses.models import bert, diagonal, moved, network, tokens

Term = tuple[float, nm.DiagonalFisher, nn.Module]


def by_hand(model: nn.Module, terms: Sequence[Term]) -> float:
    """Σ_k strength_k/2 Σ_i F_ki (θ_i − θ*_ki)², one entry after the other."""
    total = 0.0
    for strength, fim, anchor in terms:
        ends = dict(anchor.named_parameters())
        for name, parameter in model.named_parameters():
            if name in fim:
                entries = zip(fim[name].flatten(), parameter.flatten(), ends[name].flatten(), strict=True)
                total += sum(strength / 2 * f.item() * (a - b).item() ** 2 for f, a, b in entries)
    return total


def gradients(penalty: nm.Consolidation, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(penalty(model), list(model.parameters())))


@pytest.mark.parametrize("view", ["mean", "sum"])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_value_and_gradient_are_those_of_the_loop(view: str, width: int) -> None:
    anchor = network(width)
    fim: nm.DiagonalFisher = getattr(diagonal(anchor), view)
    penalty = nm.Consolidation(anchor, fim, strength=3.0)
    assert penalty(anchor).item() == 0
    model = moved(copy.deepcopy(anchor))
    assert penalty(model).item() == pytest.approx(by_hand(model, [(3.0, fim, anchor)]), rel=1e-12)
    for (name, p), gradient in zip(model.named_parameters(), gradients(penalty, model), strict=True):
        torch.testing.assert_close(gradient, 3 * fim[name] * (p - dict(anchor.named_parameters())[name]))


def test_a_wrong_gradient_would_be_seen() -> None:
    anchor = network()
    fim = diagonal(anchor)
    model = moved(copy.deepcopy(anchor))
    wrong = by_hand(model, [(3.0, fim.sum, anchor)])
    assert nm.Consolidation(anchor, fim, 3.0)(model).item() != pytest.approx(wrong, rel=0.1)


def test_several_tasks_are_one_penalty_with_the_sum_of_their_values_and_gradients() -> None:
    a, b, c = (moved(network(), 0.3, seed) for seed in range(3))
    terms = [(2.0, diagonal(a), a), (0.5, diagonal(b, 2), b), (1.0, diagonal(c, 3), c)]
    parts = [nm.Consolidation(anchor, fim, s) for s, fim, anchor in terms]
    penalty, model = sum(parts), moved(network(), 0.5, 7)
    assert isinstance(penalty, nm.Consolidation)
    assert penalty(model).item() == pytest.approx(by_hand(model, terms), rel=1e-6)  # the constant is added in float32
    together = zip(*(gradients(part, model) for part in parts), strict=True)
    for found, expected in zip(gradients(penalty, model), together, strict=True):
        torch.testing.assert_close(found, torch.stack(expected).sum(0))
    half = 0.5 * penalty
    assert half(model).item() == pytest.approx(0.5 * by_hand(model, terms), rel=1e-6)


def test_tasks_whose_importances_are_zero_at_an_entry_add() -> None:
    a, b = network(seed=0), network(seed=1)
    fim = 1e-30 * diagonal(a)
    fim.sums["0.bias"].zero_()
    penalty = nm.Consolidation(a, fim) + nm.Consolidation(b, fim)
    assert all(bool(value.isfinite().all()) for value in penalty.anchors.values())
    assert all(bool(g.isfinite().all()) for g in gradients(penalty, network(seed=2)))


def test_online_consolidation_has_one_anchor_and_decays() -> None:
    first = network()
    second = moved(copy.deepcopy(first), 0.2)
    fims = diagonal(first), diagonal(second, 2)
    penalty = nm.Consolidation(first, fims[0])
    penalty = nm.Consolidation(second, fims[1]) + 0.9 * penalty.moved(second)
    model = moved(copy.deepcopy(second), 0.4, 5)
    expected = by_hand(model, [(0.9, fims[0], second), (1.0, fims[1], second)])
    assert penalty(model).item() == pytest.approx(expected, rel=1e-12)


def test_strength_by_pattern_and_heads_that_differ() -> None:
    anchor = network()
    fim = diagonal(anchor)
    penalty = nm.Consolidation(anchor, fim, {"2.*": 0, "*.weight": 5, "*": 2})
    assert set(penalty.importances) == {"0.weight", "0.bias"}
    other = nn.Sequential(copy.deepcopy(anchor[0]), nn.Tanh(), nn.Linear(4, 9).double())
    moved(other)
    found = by_hand(other, [(5.0, fim.filter("0.weight"), anchor), (2.0, fim.filter("0.bias"), anchor)])
    assert penalty(other).item() == pytest.approx(found, rel=1e-12)


def test_later_training_does_not_move_the_anchor() -> None:
    model = network()
    penalty = nm.Consolidation(model, diagonal(model), 10.0)
    moved(model)
    assert penalty(model).item() > 0


def test_wrapped_and_frozen_models() -> None:
    anchor = network()
    fim = diagonal(anchor)
    penalty, model = nm.Consolidation(anchor, fim), moved(copy.deepcopy(anchor))
    expected = penalty(model).item()
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)  # as DistributedDataParallel names them
    assert penalty(wrapped).item() == pytest.approx(expected, rel=1e-12)
    assert nm.Consolidation(wrapped, fim)(anchor).item() == pytest.approx(expected, rel=1e-12)
    assert penalty(torch.compile(model)).item() == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
    model[0].requires_grad_(False)  # type: ignore[index]
    assert penalty(model).item() == pytest.approx(expected, rel=1e-12)
    penalty(model).backward()
    assert model[0].weight.grad is None  # type: ignore[index]
    assert model[2].weight.grad is not None  # type: ignore[index]


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]

    model = Tied().double()
    fim = diagonal(model)
    penalty, anchor = nm.Consolidation(model, fim), copy.deepcopy(model)
    moved(model)
    assert penalty(model).item() == pytest.approx(by_hand(model, [(1.0, fim, anchor)]), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_and_autocast(dtype: torch.dtype) -> None:
    anchor = network(dtype=torch.float32)
    fim = diagonal(anchor)
    model = moved(copy.deepcopy(anchor))
    penalty = nm.Consolidation(anchor, fim)
    expected = penalty(model).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert penalty(model).item() == pytest.approx(expected, rel=1e-6)
    low = copy.deepcopy(model).to(dtype)
    value = penalty(low)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected, rel=0.05)
    value.backward()
    assert low[0].weight.grad is not None  # type: ignore[index]
    assert low[0].weight.grad.dtype == dtype  # type: ignore[index, union-attr]


def test_saved_and_loaded(tmp_path: Path) -> None:
    a, b = network(seed=0), network(seed=1)
    penalty = nm.Consolidation(a, diagonal(a)) + nm.Consolidation(b, diagonal(b))
    penalty.save(tmp_path / "penalty.safetensors")
    loaded, model = nm.load(tmp_path / "penalty.safetensors"), network(seed=2)
    assert isinstance(loaded, nm.Consolidation)
    assert loaded(model).item() == penalty(model).item()
    assert (loaded + penalty)(model).item() == pytest.approx(2 * penalty(model).item(), rel=1e-6)
    assert "26 entries of 4 parameters" in repr(loaded)


def test_a_model_of_transformers_trains_with_it() -> None:
    model = bert()
    penalty = nm.Consolidation(model, nm.fisher_diagonal(model, tokens()), strength=1e4)
    moved(model, 0.05)
    before = penalty(model).item()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(20):
        optimiser.zero_grad()
        penalty(model).backward()
        optimiser.step()
    assert penalty(model).item() < before / 2


def test_bad_input() -> None:
    model = network()
    fim = diagonal(model)
    with pytest.raises(
        ValueError, match=r"0\.weight has shape \[5, 3\] instead of \[4, 3\]; .*; and 0 more|fim.filter"
    ):
        nm.Consolidation(network(5), fim)
    with pytest.raises(ValueError, match=r"`model` must be one with the parameters of the penalty.*strength="):
        nm.Consolidation(model, fim)(network(5))
    for strength in (-1.0, 0.0, float("nan"), "much", True):
        with pytest.raises(ValueError, match="`strength` must be a number > 0"):
            nm.Consolidation(model, fim, strength)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"strength\['2\.\*'\]` must be a number >= 0, got -1"):
        nm.Consolidation(model, fim, {"2.*": -1, "*": 1})
    with pytest.raises(ValueError, match=r"a selection that matches something, got 'head\.\*'"):
        nm.Consolidation(model, fim, {"head.*": 0, "*": 1})
    with pytest.raises(ValueError, match=r"a number for each parameter, got none for '2\.weight'.*End it with '\*'"):
        nm.Consolidation(model, fim, {"0.*": 1})
    with pytest.raises(ValueError, match="above 0 for at least one"):
        nm.Consolidation(model, fim, {"*": 0})
    with pytest.raises(ValueError, match="in the same view, got sum and mean"):
        nm.Consolidation(model, fim) + nm.Consolidation(model, fim.sum)
    with pytest.raises(ValueError, match="strength="):
        nm.Consolidation(model, fim) + nm.Consolidation(network(5), diagonal(network(5)))
    with pytest.raises(TypeError, match=r"an nm\.DiagonalFisher, got dict"):
        nm.Consolidation(model, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module"):
        nm.Consolidation(dict(model.named_parameters()), fim)  # type: ignore[arg-type]
    broken = diagonal(network())
    broken.sums["0.bias"][0] = float("inf")
    with pytest.raises(ValueError, match=r"finite and not negative, got other numbers in '0\.bias'"):
        nm.Consolidation(model, broken)
