"""J Jᵀ between all samples and classes, against Jacobians written out in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.reference import network


class Tokens(nn.Module):
    """An embedding whose weight is the output layer's, a norm, and a direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.mix = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.mix(self.table(x)).cumsum(1)) * self.gain
        return h @ self.table.weight.T


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))


def case(name: str) -> tuple[nn.Module, list[Tensor], Callable[..., Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, x, likelihood = {
            "vectors": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(7, 4), None),
            "images": lambda: (images(), torch.randn(5, 2, 5, 5), None),
            "tokens": lambda: (Tokens(), torch.randint(0, 6, (4, 3)), None),
            "labels": lambda: (nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 4), nm.Bernoulli),
            "numbers": lambda: (nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 4), nm.Gaussian),
        }[name]()
        x = x.double() if x.is_floating_point() else x
        return model.double().eval(), [x[:3], x[3:]], likelihood or nm.Categorical


@pytest.mark.parametrize("name", ["vectors", "images", "tokens", "labels", "numbers"])
def test_it_is_the_product_of_jacobians(name: str) -> None:
    model, data, likelihood = case(name)
    J, logits = network.jacobian(model, lambda m: m(torch.cat(data)))
    classes = logits.shape[-1]
    J = J.reshape(-1, J.shape[-1])
    found = nm.fisher_gram(model, data, likelihood=likelihood)
    torch.testing.assert_close(found.matrix, J @ J.mT)
    assert found.blocks.shape == (len(J) // classes, classes) * 2
    assert found.count == sum(map(len, data))
    f = network.reference_matrix(model, lambda m: m(torch.cat(data)), likelihood)
    of_f = nm.fisher_gram(model, data, "fisher", likelihood)
    values = torch.linalg.eigvalsh(f).flip(0)
    most = min(len(values), len(of_f.matrix))
    torch.testing.assert_close(of_f.eigenvalues()[:most], values[:most].clamp(min=0), atol=1e-9, rtol=1e-7)
    assert of_f.trace == pytest.approx(float(f.trace()))


def test_directions_of_ones_own_and_parameters_chosen() -> None:
    model, data, _ = case("vectors")
    J, _ = network.jacobian(model, lambda m: m(torch.cat(data)))
    margins = J.view(7, 3, -1)[:, :1] - J.view(7, 3, -1)[:, 1:2]
    difference = torch.tensor([[[1.0, -1.0, 0.0]]], dtype=torch.float64)
    found = nm.fisher_gram(model, data, lambda core: difference.expand(core.batch_shape[0], 1, 3))
    torch.testing.assert_close(found.matrix, margins[:, 0] @ margins[:, 0].mT)
    last = nm.fisher_gram(model, data, parameters="2.*")
    torch.testing.assert_close(last.matrix, J.view(21, -1)[:, 25:] @ J.view(21, -1)[:, 25:].mT)
    assert "GramMatrix[7 x 3, 7 x 3]: 7 samples" in repr(nm.fisher_gram(model, iter(data)))


def test_ignored_positions_have_no_rows() -> None:
    model, data, _ = case("tokens")
    x = torch.cat(data)
    labels = torch.zeros_like(x)
    labels[0, 1] = labels[2, :] = -100
    J, _ = network.jacobian(model, lambda m: m(x))
    J = J.reshape(4, 3, 6, -1)[labels != -100].flatten(0, 1)
    torch.testing.assert_close(nm.fisher_gram(model, [(x, labels)]).matrix, J @ J.mT)


def test_wrong_arguments() -> None:
    model, data, _ = case("vectors")
    with pytest.raises(ValueError, match="`directions` must be 'classes', 'fisher', or a function"):
        nm.fisher_gram(model, data, "all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`directions` must be a function to tensors \[3, r, 3\], got \[3, 3\]"):
        nm.fisher_gram(model, data, lambda core: torch.eye(core.dim))
    with pytest.raises(ValueError, match="`max_bytes` must be enough for the Gram matrix"):
        nm.fisher_gram(model, data, max_bytes=1000)
    with pytest.raises(ValueError, match="at least one sample"):
        nm.fisher_gram(model, [])
