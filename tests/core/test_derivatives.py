"""Derivatives: first and second order, backward and forward, at ties and zeros too."""

import math
from collections.abc import Callable

import pytest
import torch

import neuromanifold as nm

Function = Callable[[torch.Tensor], torch.Tensor]
INF = math.inf


def numerical(function: Function, z: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """Central differences of a scalar function."""
    units = step * torch.eye(len(z), dtype=z.dtype)
    return torch.stack([(function(z + unit) - function(z - unit)) / (2 * step) for unit in units])


def analytical(function: Function, z: torch.Tensor) -> torch.Tensor:
    z = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(z), z)
    return gradient


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


GENERIC = 2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
V = torch.linspace(-1, 1, 6, dtype=torch.float64)
FUNCTIONS: dict[str, Function] = {
    "fisher": lambda z: nm.Categorical(z).fisher(),
    "matvec": lambda z: nm.Categorical(z).matvec(V),
    "factor": lambda z: nm.Categorical(z).factor(V),
    "factor_transpose": lambda z: nm.Categorical(z).factor_transpose(V),
    "factor_matrix": lambda z: nm.Categorical(z).factor_matrix(),
    "score": lambda z: nm.Categorical(z).score(torch.tensor([3, 1, 0])),
    "trace": lambda z: nm.Categorical(z).trace(),
    "values": lambda z: nm.Categorical(z).spectrum(6).values,
    "vectors": lambda z: nm.Categorical(z).spectrum(5).vectors,
    "eigenvalue bounds": lambda z: torch.stack(nm.Categorical(z).largest_eigenvalue_bounds()),
    "lower error": lambda z: nm.Categorical(z).envelope_errors(2).lower,
    "its bounds": lambda z: torch.stack(nm.Categorical(z).envelope_errors(2)[3:]),
    "empirical error": lambda z: torch.stack(nm.Categorical(z).empirical_error_bound()[1:]),
    "score variance": lambda z: nm.Categorical(z).score_variance().variance,
    "cv": lambda z: nm.Categorical(z).score_variance().cv,
    "bernoulli": lambda z: nm.Bernoulli(z).factor(V),
    "gaussian": lambda z: nm.Gaussian(z, 0.5).score(V),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_derivatives_backward_and_forward(name: str) -> None:
    z = GENERIC.clone().requires_grad_()
    assert torch.autograd.gradcheck(FUNCTIONS[name], z, check_forward_ad=True)


@pytest.mark.parametrize("name", ["values", "vectors", "lower error", "matvec", "factor", "empirical error"])
def test_second_derivatives(name: str) -> None:
    z = GENERIC[:1].clone().requires_grad_()
    function: Function = FUNCTIONS[name]
    assert torch.autograd.gradgradcheck(lambda x: function(x).reshape(-1)[::3], z)


# Where p has ties, some eigenvalues still have a derivative: simple ones, and sums over a tie.
SMOOTH_AT_TIES: dict[str, tuple[Function, torch.Tensor]] = {
    "two equal classes": (lambda z: nm.Categorical(z).largest_eigenvalue(), tensor(0, 0)),
    "second of a tied pair": (lambda z: nm.Categorical(z).spectrum(2).values[1], tensor(1, 0, 0)),
    "largest of a tied pair": (lambda z: nm.Categorical(z).largest_eigenvalue(), tensor(0, 0, -1)),
    "sum at uniform": (lambda z: nm.Categorical(z).spectrum(2).values.sum(), tensor(0, 0, 0)),
    "sum over a tie of three": (lambda z: nm.Categorical(z).spectrum(4).values[1:3].sum(), tensor(1, 0, 0, 0, -1)),
    "error, tie in the top": (lambda z: nm.Categorical(z).envelope_errors(2).lower, tensor(0, 0, -1, -2)),
    "error, rank within a pair": (lambda z: nm.Categorical(z).envelope_errors(1).lower, tensor(0, 0, -1, -2)),
    "error, three in the top": (lambda z: nm.Categorical(z).envelope_errors(3).lower, tensor(0, 0, 0, -1, -2)),
    "error, tie in the tail": (lambda z: nm.Categorical(z).envelope_errors(1).lower, tensor(1, 0, -1, -1)),
}


@pytest.mark.parametrize("name", SMOOTH_AT_TIES)
def test_derivatives_at_ties_where_they_exist(name: str) -> None:
    function, z = SMOOTH_AT_TIES[name]
    torch.testing.assert_close(analytical(function, z), numerical(function, z), rtol=1e-6, atol=1e-9)


EDGES = {
    "uniform": tensor(0, 0, 0, 0),
    "one-hot": tensor(900, 0, 0, 0),
    "masked": tensor(0, 1, -INF, 0.5),
    "two left": tensor(0, -INF, -INF, 0.5),
    "tied": tensor(5, 1, 1, 0),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    "name",
    [
        "fisher",
        "trace",
        "values",
        "eigenvalue bounds",
        "lower error",
        "its bounds",
        "empirical error",
        "score variance",
    ],
)
def test_derivatives_at_the_edge_are_finite(name: str, edge: str) -> None:
    function: Function = FUNCTIONS[name] if name != "values" else lambda z: nm.Categorical(z).spectrum(4).values
    gradient = analytical(lambda z: function(z).sum(), EDGES[edge])
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("product", ["matvec", "factor", "factor_transpose"])
def test_derivatives_of_products_at_the_edge_are_finite(product: str, edge: str) -> None:
    gradient = analytical(lambda z: getattr(nm.Categorical(z), product)(V[:4])[1], EDGES[edge])
    assert torch.isfinite(gradient).all()


def test_every_rank_can_be_differentiated() -> None:
    for rank in (1, 2):
        gradient = analytical(lambda z, rank=rank: nm.Categorical(z).envelope_errors(rank).lower, tensor(0, 1))
        assert (gradient == 0).all()  # two classes: rank 1 is exact


def test_what_happened_under_no_grad_is_not_remembered() -> None:
    z = tensor(1, 0.2, -0.5, -2).requires_grad_()
    for core in (nm.Categorical(z), nm.Bernoulli(z)):
        (expected,) = torch.autograd.grad(core.trace(), z, retain_graph=True)
        fresh = type(core)(z)
        with torch.no_grad():
            fresh.trace()
        with torch.inference_mode():
            fresh.trace()
        torch.testing.assert_close(torch.autograd.grad(fresh.trace(), z)[0], expected)
