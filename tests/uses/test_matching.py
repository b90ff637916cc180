"""Results are matched with models by name, and differences are named."""

import pytest
import torch
from torch import nn

import neuromanifold as nm
from neuromanifold.uses.matching import matched


def network(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


@pytest.fixture(scope="module")
def fim() -> nm.DiagonalFisher:
    return nm.fisher_diagonal(network(), [torch.randn(5, 3)])


def test_names_are_matched_through_wrappers(fim: nm.DiagonalFisher) -> None:
    wrapped = nn.Sequential()
    wrapped.add_module("module", network())
    found = matched(fim, dict(wrapped.named_parameters()))
    assert found == {name: f"module.{name}" for name in fim}


def test_tied_parameters_are_found_under_either_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model.forward = lambda x: model["b"](torch.tanh(model["a"](x)))  # type: ignore[method-assign]
    result = nm.fisher_diagonal(model, [torch.randn(5, 3)])
    assert list(result) == ["a.weight"]
    assert matched(result, {"b.weight": torch.zeros(3, 3)}) == {"a.weight": "b.weight"}


def test_the_first_differences_are_listed(fim: nm.DiagonalFisher) -> None:
    with pytest.raises(ValueError, match=r"0\.weight has shape \[5, 3\] instead of \[4, 3\]; .*") as error:
        matched(fim, dict(network(5).named_parameters()))
    assert "fim.filter" in str(error.value)
    with pytest.raises(ValueError, match=r"2\.bias is missing"):
        matched(fim, {name: p for name, p in network().named_parameters() if name != "2.bias"})


def test_what_is_no_result_is_refused(fim: nm.DiagonalFisher) -> None:
    with pytest.raises(TypeError, match=r"an nm\.DiagonalFisher"):
        matched({"0.weight": torch.zeros(4, 3)}, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an empty selection"):
        matched(nm.DiagonalFisher({}, {}, 1, 1, fim.provenance), {})
