"""From a loss to a likelihood and a scale: the Hessian of the very loss, by autograd, of a model whose GGN it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm

torch.manual_seed(0)
MODEL = nn.Linear(3, 4).double()  # linear: the Gauss-Newton matrix of a loss is its Hessian
X, TOKENS = torch.randn(6, 3).double(), torch.randn(6, 5, 3).double()
CLASSES, OF_TOKENS = torch.randint(0, 4, (6,)), torch.randint(0, 4, (6, 5))
OF_TOKENS[2, 3:] = -100
BITS, TARGETS = torch.randint(0, 2, (6, 4)).double(), torch.randn(6, 4).double()
D = 4  # outputs

LOSSES: dict[str, tuple[nn.Module, Any, Tensor, Tensor, Any]] = {  # loss, likelihood, inputs, targets, scaled product
    "CrossEntropyLoss()": (
        *(nn.CrossEntropyLoss(), nm.Categorical, X, CLASSES),
        lambda fisher, v: fisher.mean @ v,
    ),
    'CrossEntropyLoss(reduction="sum")': (
        *(nn.CrossEntropyLoss(reduction="sum"), nm.Categorical, X, CLASSES),
        lambda fisher, v: fisher.sum @ v,
    ),
    "CrossEntropyLoss(), tokens": (
        *(nn.CrossEntropyLoss(), nm.Categorical, TOKENS, OF_TOKENS),
        lambda fisher, v: (fisher.sum @ v) / fisher.positions,
    ),
    'CrossEntropyLoss(reduction="sum"), tokens': (
        *(nn.CrossEntropyLoss(reduction="sum"), nm.Categorical, TOKENS, OF_TOKENS),
        lambda fisher, v: fisher.sum @ v,
    ),
    "BCEWithLogitsLoss()": (
        *(nn.BCEWithLogitsLoss(), nm.Bernoulli, X, BITS),
        lambda fisher, v: (fisher.mean @ v) / D,
    ),
    'BCEWithLogitsLoss(reduction="sum")': (
        *(nn.BCEWithLogitsLoss(reduction="sum"), nm.Bernoulli, X, BITS),
        lambda fisher, v: fisher.sum @ v,
    ),
    "MSELoss()": (
        *(nn.MSELoss(), nm.Gaussian, X, TARGETS),
        lambda fisher, v: 2 / D * (fisher.mean @ v),
    ),
    'MSELoss(reduction="sum")': (
        *(nn.MSELoss(reduction="sum"), nm.Gaussian, X, TARGETS),
        lambda fisher, v: 2 * (fisher.sum @ v),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_line_of_the_table_is_the_hessian_of_the_loss(name: str) -> None:
    loss, likelihood, inputs, targets, scaled = LOSSES[name]
    parameters = dict(MODEL.named_parameters())
    shapes = {key: value.shape for key, value in parameters.items()}

    def value(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
        named = {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}
        outputs = torch.func.functional_call(MODEL, named, (inputs,))
        if targets.is_floating_point():
            return loss(outputs, targets)  # type: ignore[no-any-return]
        return loss(outputs.flatten(0, -2), targets.flatten())  # type: ignore[no-any-return]

    flat = torch.cat([one.detach().flatten() for one in parameters.values()])
    hessian = torch.autograd.functional.hessian(value, flat)  # type: ignore[no-untyped-call]
    data = list(zip(inputs.split(4), targets.split(4), strict=True))
    fisher = nm.fisher_operator(MODEL, data, likelihood=likelihood)
    found = scaled(fisher, torch.eye(len(flat), dtype=torch.float64))
    torch.testing.assert_close(found, hessian, rtol=1e-9, atol=1e-12)
