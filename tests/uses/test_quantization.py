"""Rounding errors are those of the formats, their predicted loss is the sum, and plans are optimal on the hull."""

import copy
import itertools

import pytest
import torch
from torch import nn

import neuromanifold as nm
from neuromanifold.uses.quantization import QuantizationSensitivity, parse_format
from tests.uses.models import bert, diagonal, network, tokens


@pytest.mark.parametrize("name", ["int2", "int3g5", "int4", "int4g128", "int8g7", "int8", "fp8", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (5, 37)])
def test_rounding_errors_are_at_most_half_a_step(name: str, shape: tuple[int, int]) -> None:
    kind, generator = parse_format(name), torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    rounded = kind.rounded(weight)
    assert rounded.shape == weight.shape
    error = (rounded - weight).abs()
    if name.startswith("int"):
        for i, j in itertools.product(*map(range, shape)):
            group = kind.group or shape[1]
            part = weight[i, j // group * group : (j // group + 1) * group]
            top, low = max(float(part.max()), 0.0), min(float(part.min()), 0.0)
            step = (top - low) / (2**kind.bits - 1) if kind.group else float(part.abs().max()) / 127
            assert float(error[i, j]) <= step * (1.0 + 1e-9)  # a step at the ends, where the offset was rounded
        assert float(error.mean()) <= step
        for row in range(shape[0]):
            if not kind.group:
                assert len(rounded[row].unique()) <= 255
            for start in range(0, shape[1], kind.group or shape[1]):
                assert len(rounded[row, start : start + (kind.group or shape[1])].unique()) <= 2**kind.bits
    else:
        assert float((error / weight.abs()).max()) <= {"fp8": 2**-4, "bf16": 2**-8, "fp16": 2**-10}[name] * 1.0001 or (
            name == "fp8" and float(error.max()) <= float(weight.abs().max()) * 2**-4
        )


def test_zeros_stay_zeros_and_constants_are_kept() -> None:
    for name in ("int2", "int4", "int8", "fp8", "bf16"):
        kind = parse_format(name)
        assert not kind.rounded(torch.zeros(2, 9)).any()
        assert kind.rounded(torch.tensor([[0.0, 3.0, -1.0, 2.0]]))[0, 0] == 0
        torch.testing.assert_close(kind.rounded(torch.full((2, 9), 0.7)), torch.full((2, 9), 0.7), rtol=0.01, atol=0)


def test_the_predicted_loss_is_the_sum() -> None:
    model = network(7)
    fim = diagonal(model)
    found = nm.quantization_sensitivity(model, fim.sum, ["int3", "int8", "fp8"])
    for name in ("0.weight", "2.weight"):
        weight = dict(model.named_parameters())[name].detach()
        for kind in found.formats:
            rounded = parse_format(kind).rounded(weight)
            rows = [
                sum(0.5 * f * (a - b) ** 2 for f, a, b in zip(*parts, strict=True))
                for parts in zip(fim[name].tolist(), rounded.tolist(), weight.tolist(), strict=True)
            ]
            assert found.channels[name][kind].tolist() == pytest.approx(rows, rel=1e-12)
            assert found[name][kind] == pytest.approx(sum(rows), rel=1e-12)
        assert found[name]["int8"] < found[name]["int3"]


def every_choice(found: QuantizationSensitivity, budget: float) -> float:
    losses, best = {name: found[name] for name in found.channels}, float("inf")
    for formats in itertools.product(found.formats, repeat=len(losses)):
        chosen = list(zip(losses, formats, strict=True))
        if sum(found.sizes[n][f] for n, f in chosen) <= budget * (1 + 1e-12):
            best = min(best, sum(losses[n][f] for n, f in chosen))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_optimal_where_they_fill_the_budget_and_the_bound_holds(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 17), nn.Tanh(), nn.Linear(17, 40), nn.Linear(40, 3)
    )
    fim = nm.fisher_diagonal(model, [torch.randn(16, 8)], nm.Exact())
    found = nm.quantization_sensitivity(model, fim, ["int2", "int3", "int4", "int6", "int8"])
    total, filled = sum(found.entries.values()), 0
    for bits in torch.linspace(4.0, 9, 12).tolist():
        plan = found.plan(bits)
        best = every_choice(found, bits * total)
        assert plan.bits <= bits + 1e-9
        assert plan.bound <= best * (1 + 1e-9)
        assert plan.loss_increase >= best * (1 - 1e-9)
        exactly = found.plan(plan.bits)  # the budget that is filled
        if exactly.bound == pytest.approx(exactly.loss_increase, rel=1e-9):
            filled += 1
            assert exactly.loss_increase == pytest.approx(every_choice(found, plan.bits * total), rel=1e-9)
    assert filled
    losses = [found.plan(bits).loss_increase for bits in (4, 5, 6, 7, 8, 9)]
    assert losses[0] > losses[-1]


def test_plans_round_models_in_place() -> None:
    model = bert()
    fim = nm.fisher_diagonal(model, tokens())
    found = nm.quantization_sensitivity(model, fim, ["int4", "int8"])
    before = copy.deepcopy(model.state_dict())
    plan = found.plan(6)
    assert set(plan.formats.values()) == {"int4", "int8"}
    assert not any("embeddings" in name for name in plan.formats)
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)
    plan.apply(wrapped)
    for name, value in model.state_dict().items():
        if name in plan.formats:
            matrix = before[name].flatten(1)
            torch.testing.assert_close(value, parse_format(plan.formats[name]).rounded(matrix).view_as(value))
        else:
            assert torch.equal(value, before[name])
    again = nm.quantization_sensitivity(model, fim, ["int8"])
    assert sum(again[n]["int8"] for n, f in plan.formats.items() if f == "int8") < 1e-9
    assert "Quantization plan" in str(plan)
    assert "int8" in str(found)
    assert found.uniform("int4").loss_increase == pytest.approx(sum(found[n]["int4"] for n in found.channels))


def test_convolutions_and_transposed_weights_are_rounded_by_output() -> None:
    transformers = pytest.importorskip("transformers")
    for layer, outputs in (
        (nn.Conv2d(4, 6, 3), 6), (nn.ConvTranspose2d(4, 6, 3), 6), (transformers.pytorch_utils.Conv1D(6, 4), 6)
    ):  # fmt: skip
        x = torch.randn(3, 4) if outputs and type(layer).__name__ == "Conv1D" else torch.randn(3, 4, 5, 5)
        model = nn.Sequential(layer, nn.Flatten())
        fim = nm.fisher_diagonal(model, [x])
        found = nm.quantization_sensitivity(model, fim, ["int4g4"])
        assert found.channels["0.weight"]["int4g4"].shape == (outputs,)
        before = layer.weight.detach().clone()
        found.uniform("int4g4").apply(model)
        error = 0.5 * fim["0.weight"] * (layer.weight.detach() - before) ** 2
        assert float(error.sum()) == pytest.approx(found["0.weight"]["int4g4"], rel=1e-4)


def test_bad_input() -> None:
    model = network()
    fim = diagonal(model)
    for name in ("int1", "int9", "int4g0", "nf4", ""):
        with pytest.raises(ValueError, match="`formats` must be int2g32 to int8g128"):
            nm.quantization_sensitivity(model, fim, [name])
    with pytest.raises(ValueError, match="a list of at least one name"):
        nm.quantization_sensitivity(model, fim, "int4")
    with pytest.raises(ValueError, match="a list of at least one name"):
        nm.quantization_sensitivity(model, fim, [])
    with pytest.raises(ValueError, match=r"0\.weight has shape \[5, 3\]"):
        nm.quantization_sensitivity(network(5), fim)
    found = nm.quantization_sensitivity(model, fim)
    with pytest.raises(ValueError, match=r"`bits` must be at least 11\.6, which the smallest formats take, got 1"):
        found.plan(1)
    with pytest.raises(ValueError, match="`bits` must be a number > 0"):
        found.plan(-3)
    with pytest.raises(ValueError, match="one of int2, int3, int4, int8, got 'fp8'"):
        found.uniform("fp8")
    with pytest.raises(ValueError, match=r"0\.weight is missing"):
        found.uniform("int8").apply(nn.Linear(2, 2))
