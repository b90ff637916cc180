"""What no use can work with is refused by each of them, before anything changes or is written."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from neuromanifold.uses.training.callbacks import FisherRecorder
from tests.uses.models import diagonal, network

Use = Callable[[nn.Module, Any], object]
USES: dict[str, Use] = {
    "consolidation": nm.Consolidation,
    "merge": lambda model, fim: dict(nm.merge([model, model], [fim, fim])),
    "pruning": nm.plan_pruning,
    "quantization": nm.quantization_sensitivity,
    "tuning": nm.plan_tuning,
    "lora": nm.plan_lora,
    "distance": lambda _, fim: nm.task_distance(fim, fim),
    "laplace": nm.Laplace,
}
EVERY = pytest.mark.parametrize("use", USES.values(), ids=USES)


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_result_with_numbers_that_are_no_squares(use: Use, bad: float) -> None:
    model = network()
    fim = diagonal(model)
    use(model, fim)
    fim.sums["2.weight"][1, 1] = bad
    with pytest.raises(ValueError, match=r"must be finite and not negative, got other numbers in '2\.weight'"):
        use(model, fim)


@EVERY
def test_what_is_no_diagonal(use: Use) -> None:
    model = network()
    for other in (nm.fisher_trace(model, [torch.zeros(2, 3).double()]), "fisher.safetensors", None):
        with pytest.raises((TypeError, FileNotFoundError), match=r"nm\.DiagonalFisher|No file fisher"):
            use(model, other)


@EVERY
def test_a_result_of_another_model_names_the_first_differences(use: Use) -> None:
    if use is not USES["distance"]:
        with pytest.raises(
            ValueError, match=r"0\.weight has shape .*; 0\.bias .*; 2\.weight .*; and 1 more|; 2\.weight"
        ):
            use(network(), diagonal(network(7)))


@pytest.mark.parametrize("name", ["pruning", "quantization", "tuning", "consolidation"])
def test_a_model_with_infinite_parameters(name: str) -> None:
    model = network()
    fim = replace(diagonal(model), provenance=replace(diagonal(model).provenance, weights=""))
    model[0].weight.data[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"`model` must be of finite parameters, got infinities or NaN in '0\.weight'"):
        USES[name](model, fim)


def test_merging_models_with_nan_or_results_taken_for_models_leaves_nothing(tmp_path: Path) -> None:
    model = network()
    broken = {name: value * math.nan for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"free of NaN, got NaN in '0\.weight' of models\[1\]"):
        nm.merge([model, broken], method="average").save(tmp_path / "out")
    file = tmp_path / "fisher.safetensors"
    diagonal(model).save(file)
    with pytest.raises(ValueError, match=r"files of weights, got .*, a result \(diagonal\)"):
        nm.merge([file, file], method="average")
    with pytest.raises(FileExistsError, match=r"fisher\.safetensors, a file"):
        nm.merge([model, model], method="average").save(file)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_quantization_plan_of_another_model_rounds_nothing() -> None:
    plan = nm.quantization_sensitivity(network(), diagonal(network())).uniform("int4")
    other = network(7)
    before = other[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"the plan was made for, got 0\.weight of shape \[7, 3\]; 2\.weight"):
        plan.apply(other)
    assert torch.equal(other[0].weight, before)


def test_optimizers_refuse_logits_and_states_of_others() -> None:
    model, x = network(), torch.randn(4, 3, dtype=torch.float64)
    optimizer = nm.optim.FisherAdam(model.parameters())
    optimizer.update_fisher(model(x))
    before = {name: value.clone() for name, value in optimizer.state[model[0].weight].items()}
    with pytest.raises(ValueError, match="outputs of a model whose parameters the optimizer has"):
        optimizer.update_fisher(network()(x))
    assert all(torch.equal(optimizer.state[model[0].weight][name], value) for name, value in before.items())
    adam = torch.optim.Adam(model.parameters())
    cross_entropy(model(x), torch.zeros(4, dtype=torch.long)).backward()
    adam.step()
    for other in (adam, nm.optim.FisherSGD(model.parameters())):
        with pytest.raises(ValueError, match="`state_dict` must be a state of FisherAdam, got one without beta, clip"):
            optimizer.load_state_dict(other.state_dict())


def test_a_recorder_fails_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'estimators'"):
        FisherRecorder([], estimators=nm.Exact())
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="`folder` must be a folder"):
        FisherRecorder([], folder=tmp_path / "file")


def test_other_wrong_arguments() -> None:
    model = network()
    fim = diagonal(model)
    with pytest.raises(TypeError, match=r"`a and b` must be nm\.DiagonalFishers, or lists of them, got int and int"):
        nm.task_distance(3, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`scaling` must be a number > 0"):
        nm.plan_lora(model, fim).config(scaling=-1)
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module"):
        nm.plan_tuning(None, fim)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`structure`"):
        nm.plan_pruning(model, fim, structure="0:0")
