"""The length of a path: against the definition, against divergences, and where a metric is known in closed form."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.reference import network as reference
from tests.problem.test_unchanged import same
from tests.problems.networks import ConvWithBatchNorm
from tests.run.test_contract import MODEL, X, batches, network


def between(a: dict[str, Tensor], b: dict[str, Tensor], t: float) -> dict[str, Tensor]:
    return {name: (1 - t) * a[name] + t * b[name] for name in a}


def moved(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in state.values()])


START, END = (network(seed).state_dict() for seed in (0, 1))
STEP = flat(END) - flat(START)
FEW = [X[:5], X[5:8]]


def speed(t: float) -> float:
    """√(δᵀ F δ) by definition, at a point of the straight line."""
    fisher = reference.reference_matrix(moved(MODEL, between(START, END, t)), lambda m: m(X[:8]))
    return float(STEP @ fisher @ STEP) ** 0.5


def test_both_rules_are_those_of_the_definition() -> None:
    found = nm.path_length(MODEL, FEW, [START, END], reduction="sum")
    assert found.segments == pytest.approx((speed(0.5),), rel=1e-10)
    assert "in 1 segments (midpoint rule)" in str(found)
    found = nm.path_length(MODEL, FEW, [START, END], rule="trapezoid", reduction="sum")
    assert float(found) == pytest.approx((speed(0.0) + speed(1.0)) / 2, rel=1e-10)
    per_sample = nm.path_length(MODEL, FEW, [START, END])
    assert float(per_sample) == pytest.approx(speed(0.5) / math.sqrt(8), rel=1e-10)


def test_the_rules_converge_from_both_sides_with_second_order() -> None:
    exact = sum(speed((i + 0.5) / 40) for i in range(40)) / 40
    errors: dict[str, list[float]] = {"midpoint": [], "trapezoid": []}
    for pieces in (8, 16):
        points = [between(START, END, i / pieces) for i in range(pieces + 1)]
        for rule, found in errors.items():
            length = nm.path_length(MODEL, FEW, points, rule=rule, reduction="sum")  # type: ignore[arg-type]
            assert len(length.segments) == pieces
            found.append(float(length) - exact)
    for found in errors.values():
        assert abs(found[1]) < abs(found[0]) / 3
    assert errors["midpoint"][1] * errors["trapezoid"][1] < 0


def test_a_short_segment_is_the_divergence() -> None:
    step = {name: 1e-4 * (END[name] - START[name]) for name in START}
    near = {name: START[name] + step[name] for name in START}
    length = float(nm.path_length(MODEL, batches(64), [START, near], reduction="sum"))
    divergence = reference.divergence(moved(MODEL, START), lambda m: m(X), step)
    assert math.sqrt(2 * divergence) / length == pytest.approx(1, abs=1e-3)


def test_the_bernoulli_family_in_closed_form() -> None:
    """Along one logit the metric is p(1 - p), so that lengths are differences of 2 arcsin √p."""
    model = nn.Linear(1, 1, bias=False).double()
    points = [{"weight": torch.tensor([[z]], dtype=torch.float64)} for z in torch.linspace(-2, 3, 101).tolist()]
    found = nm.path_length(model, [torch.ones(1, 1, dtype=torch.float64)], points, likelihood=nm.Bernoulli)
    angles = [2 * math.asin(math.sqrt(1 / (1 + math.exp(-z)))) for z in (-2, 3)]
    assert float(found) == pytest.approx(angles[1] - angles[0], rel=1e-4)


def test_modules_are_checkpoints_too_and_buffers_go_along() -> None:
    a, b = ConvWithBatchNorm().double(), ConvWithBatchNorm().double()
    x = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    middle = copy.deepcopy(a)
    numbers = {n: (v + b.state_dict()[n]) / 2 for n, v in a.state_dict().items() if v.is_floating_point()}
    middle.load_state_dict({**a.state_dict(), **numbers})
    fisher = reference.reference_matrix(middle, lambda m: m(x))
    step = torch.cat([(q - p).detach().flatten() for p, q in zip(a.parameters(), b.parameters(), strict=True)])
    found = nm.path_length(a, [x], [a, b], reduction="sum")
    assert float(found) == pytest.approx(float(step @ fisher @ step) ** 0.5, rel=1e-10)


def test_some_parameters_only() -> None:
    found = nm.path_length(MODEL, batches(64), [START, END], parameters="2.*", reduction="sum")
    fisher = reference.reference_matrix(moved(MODEL, between(START, END, 0.5)), lambda m: m(X))[40:, 40:]
    assert float(found) == pytest.approx(float(STEP[40:] @ fisher @ STEP[40:]) ** 0.5, rel=1e-10)


def test_checkpoints_of_any_precision_one_after_the_other() -> None:
    expected = float(nm.path_length(MODEL, FEW, [START, END]))
    single = {name: value.float() for name, value in END.items()}
    for points in ([START, single], [single, START], [END, {n: v.bfloat16() for n, v in START.items()}]):
        assert float(nm.path_length(MODEL, FEW, iter(points))) == pytest.approx(expected, rel=0.02)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


def test_extra_state_stays_as_it_is() -> None:
    a, b = WithExtraState(4, 3).double(), WithExtraState(4, 3).double()
    assert float(nm.path_length(a, FEW, [a, b])) > 0


def test_nothing_changes() -> None:
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    nm.path_length(model, batches(64), [START, END, START])
    assert same(dict(before), dict(model.state_dict()))
    assert model.training


def test_bad_input() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        ([START], ValueError, "`checkpoints` must be a sequence of two or more, got 1"),
        (START, ValueError, "`checkpoints` must be a sequence of two or more, got one"),
        ([START, 3], TypeError, r"`checkpoints\[1\]` must be a state dict or a module, got int"),
        ([START, {}], ValueError, r"`checkpoints\[1\]`.*without '0.weight'"),
        ([START, {**END, "more": END["2.bias"]}], ValueError, "with 'more' too"),
        ([{**START, "2.bias": torch.ones(2)}, END], ValueError, r"shape \[2\] for '2.bias'"),
        ([{**START, "2.bias": [0.0] * 3}, END], ValueError, "got list for '2.bias'"),
    ]
    for checkpoints, kind, text in cases:
        with pytest.raises(kind, match=text):
            nm.path_length(MODEL, batches(64), checkpoints)
    with pytest.raises(ValueError, match="`rule` must be"):
        nm.path_length(MODEL, batches(64), [START, END], rule="simpson")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got an iterator"):
        nm.path_length(MODEL, iter(batches(64)), [START, END])
