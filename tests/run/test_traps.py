"""Models made to break a sample-wise pullback: each has led one to wrong numbers without any error, or to a crash."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import neuromanifold as nm
from neuromanifold.reference import network as reference
from tests.problems.problem import Net

Y = torch.tensor([0, 2, 1, 1])
Data = list[Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(**more: Any) -> dict[str, Any]:
    return {"a": nn.Linear(3, 3), "h": nn.Linear(3, 3), **more}


def time_first_read_at_0(m: Net, x: Tensor) -> Tensor:
    """As many positions as samples, and only position 0 has a gradient: one cannot see which of the two it is."""
    return m.h(torch.tanh(m.a(x.transpose(0, 1)))[0])


def time_first_flat(t: int) -> Callable[[Net, Tensor], Tensor]:
    """Rows [t·n, d], of which only those of one position have a gradient."""
    return lambda m, x: m.h(torch.tanh(m.a(x.transpose(0, 1).flatten(0, 1))).view(x.shape[1], len(x), 3)[t])


def time_first_by_function(t: int) -> Callable[[Net, Tensor], Tensor]:
    """The same with a product that is not a module's."""
    return lambda m, x: m.h(torch.tanh(x.transpose(0, 1).flatten(0, 1) @ m.w + m.b).view(x.shape[1], len(x), 3)[t])


def positions_read_at(t: int) -> Callable[[Net, Tensor], Tensor]:
    """A table of as many rows as samples, looked up once for all of them."""
    return lambda m, x: m.h(torch.tanh(x + m.e(torch.arange(4)))[:, t])


def sorted_rows(m: Net, x: Tensor) -> Tensor:
    """Called twice, on sorted samples and on all as they come: the same if the first batch is sorted anyway."""
    order = x[:, 0].argsort()
    return m.h(m.a(torch.tanh(m.a(x[order]))[order.argsort()]))


def sorted_tokens(m: Net, x: Tensor) -> Tensor:
    """Tokens of all samples sorted together, as in a mixture of experts."""
    flat = x.reshape(-1, 3)
    order = flat[:, 0].argsort(stable=True)
    return m.h(torch.tanh(m.a(flat[order]))[order.argsort()].view_as(x).sum(1))


def mixing_later(m: Net, x: Tensor) -> Tensor:
    """Samples know of each other in the second batch only."""
    z = m.a(x)
    return m.h(torch.tanh(z - z.mean(0) if x[0, 0] > 0 else z))


def called_later(m: Net, x: Tensor) -> Tensor:
    """A module is called in the second batch only, and not on rows of samples."""
    z = m.h(x.mean(1))
    return z + m.a(x.transpose(0, 1))[0] if x.shape[1] > 2 else z


def dead_at_first(m: Net, x: Tensor) -> Tensor:
    """A module has no gradient in the first batch, so that nothing can be seen there."""
    return m.h(x.mean(1)) + m.a(x.transpose(0, 1)).mean(0) * float(x[0, 0, 0] > 0)


def by_function_later(m: Net, x: Tensor) -> Tensor:
    """A module's weight is used by a function as well, but in the second batch only."""
    return m.h(torch.tanh(m.a(x))) + (x @ m.a.weight if x[0, 0] > 0 else 0)


def other_lengths_later(m: Net, x: Tensor) -> Tensor:
    """Rows of samples one after the other, as nodes of graphs: two of each sample, but in the third batch."""
    owners = [0, 0, 0, 1, 2, 2, 3, 3] if x[0, 0, 0] > 0 else [0, 0, 1, 1, 2, 2, 3, 3]
    rows = torch.tanh(m.a(x.flatten(0, 1)))
    return m.h(torch.zeros(4, 3).to(x).index_add(0, torch.tensor(owners), rows))


def counted_from_the_last_later(m: Net, x: Tensor) -> Tensor:
    """Rows of a table by index, negative ones in the third batch."""
    return m.h(torch.tanh(m.a(x) + m.b[torch.tensor([0, 2, 1, 2]) - (3 if x[0, 0] > 0 else 0)]))


def batches(*shape: int, flag: bool = True) -> Data:
    """Two batches; the first number of the first is negative, that of the second positive."""
    both = [random(*shape, seed=seed) for seed in (0, 1)]
    if flag:
        both[0].view(-1)[0], both[1].view(-1)[0] = -1, 1
    return both


def third_differs(*shape: int) -> Data:
    """Three batches, of which the first two are verified."""
    first, last = batches(*shape)
    return [first, first.neg().sub(9), last]


def sorted_first(*shape: int) -> Data:
    first, second = batches(*shape, flag=False)
    return [first.view(-1, 3)[first.view(-1, 3)[:, 0].argsort()].view_as(first), second]


def other_order_of_arguments(m: Net, x: Tensor) -> Tensor:
    return m.up(output_size=[8], input=x).mean(-1)


class UnusualNorm(nn.Module):
    def __init__(self, layer_norm: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.randn(3))
        self.layer_norm = layer_norm

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.norm(dim=-1, keepdim=True)
        return self.weight * (x + self.bias) if self.layer_norm else self.weight.exp() * x + self.bias


class SomeRMSNorm(UnusualNorm):
    """A name that promises what it is not."""


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(random(*shape, seed=5))


TRAPS: dict[str, tuple[Callable[[], nn.Module], Data]] = {
    "time first, T = B, read at 0": (lambda: Net(time_first_read_at_0, **layers()), [random(4, 4, 3)]),
    **{
        f"time first, flat, T = {size}, read at {t}": (
            lambda t=t: Net(time_first_flat(t), **layers()),
            [random(4, size, 3)],
        )
        for size, t in ((4, 0), (4, 3), (2, 0), (3, 2), (8, 0))
    },
    **{
        f"time first by a function, T = {size}, read at {t}": (
            lambda t=t: Net(time_first_by_function(t), w=parameter(3, 3), b=parameter(3), h=nn.Linear(3, 3)),
            [random(4, size, 3)],
        )
        for size, t in ((4, 0), (4, 3), (2, 0), (3, 2), (8, 0))
    },
    **{
        f"a table of positions, T = B, read at {t}": (
            lambda t=t: Net(positions_read_at(t), e=nn.Embedding(4, 3), h=nn.Linear(3, 3)),
            [random(4, 4, 3)],
        )
        for t in (0, 1, 3)
    },
    "sorted samples": (lambda: Net(sorted_rows, **layers()), sorted_first(4, 3)),
    "sorted tokens": (lambda: Net(sorted_tokens, **layers()), sorted_first(4, 2, 3)),
    "rows of samples, other numbers later": (lambda: Net(other_lengths_later, **layers()), third_differs(4, 2, 3)),
    "negative indices later": (
        lambda: Net(counted_from_the_last_later, b=parameter(3, 3), **layers()),
        third_differs(4, 3),
    ),
    "samples mixed from the second batch on": (lambda: Net(mixing_later, **layers()), batches(4, 3)),
    "a module called from the second batch on": (
        lambda: Net(called_later, **layers()),
        [random(4, 2, 3), random(4, 4, 3)],
    ),
    "a module without a gradient at first": (lambda: Net(dead_at_first, **layers()), batches(4, 4, 3)),
    "a weight used by a function from the second batch on": (lambda: Net(by_function_later, **layers()), batches(4, 3)),
    "another order of arguments": (
        lambda: Net(other_order_of_arguments, up=nn.ConvTranspose1d(2, 3, 3, stride=2)),
        [random(4, 2, 3)],
    ),
    "a module called with other parameters": (
        lambda: Net(lambda m, x: functional_call(m.a, {"weight": m.w}, (x,)) + m.h(x), w=parameter(3, 3), **layers()),
        [random(4, 3)],
    ),
    "a module inside of vmap": (lambda: Net(lambda m, x: m.h(torch.vmap(m.a)(x)), **layers()), [random(4, 3)]),
    "a module called on a vector, D = B": (
        lambda: Net(lambda m, x: m.h(x * m.a(m.v)), v=parameter(4), a=nn.Linear(4, 4), h=nn.Linear(4, 3)),
        [random(4, 4)],
    ),
    "a module called on a vector, D = 2B": (
        lambda: Net(lambda m, x: m.h(x * m.a(m.v)), v=parameter(8), a=nn.Linear(8, 8), h=nn.Linear(8, 3)),
        [random(4, 8)],
    ),
    "an image without a batch, C = B": (
        lambda: Net(
            lambda m, x: m.h(x + m.c(m.v).mean((1, 2))), v=parameter(4, 3, 3), c=nn.Conv2d(4, 4, 2), h=nn.Linear(4, 3)
        ),
        [random(4, 4)],
    ),
    "w(x̂ + b)": (lambda: Net(lambda m, x: m.h(m.n(x)), n=SomeRMSNorm(True), h=nn.Linear(3, 3)), [random(4, 3)]),
    "exp(w)x̂ + b": (lambda: Net(lambda m, x: m.h(m.n(x)), n=SomeRMSNorm(False), h=nn.Linear(3, 3)), [random(4, 3)]),
    "one sample, then more": (lambda: Net(time_first_flat(0), **layers()), [random(1, 4, 3), random(4, 4, 3)]),
    "none, one, more": (
        lambda: Net(
            lambda m, x: m.h(torch.tanh(m.a(x) + m.e(torch.arange(x.shape[1])))[:, 0]), e=nn.Embedding(5, 3), **layers()
        ),
        [random(0, 3, 3), random(1, 3, 3), random(3, 3, 3), random(4, 3, 3), random(2, 4, 3)],
    ),
    "a part of a product": (
        lambda: Net(
            lambda m, x: m.h((x @ m.w[:, 1:4]) + (x @ m.w.T[:3].T)[:, :3]), w=parameter(3, 5), h=nn.Linear(3, 3)
        ),
        [random(4, 3)],
    ),
    "a parameter as both factors": (
        lambda: Net(lambda m, x: m.h(x @ m.w @ m.w + x @ (m.w * 2).T), w=parameter(3, 3), h=nn.Linear(3, 3)),
        [random(4, 3)],
    ),
    "addmm with factors": (
        lambda: Net(
            lambda m, x: m.h(torch.addmm(m.b, x, m.w, beta=3, alpha=2)),
            w=parameter(3, 3),
            b=parameter(3),
            h=nn.Linear(3, 3),
        ),
        [random(4, 3)],
    ),
    "a real parameter and complex numbers without an imaginary part": (
        lambda: Net(
            lambda m, x: m.h((m.a(x).to(torch.complex128) @ m.w.to(torch.complex128)).real.tanh()),
            w=parameter(3, 3),
            **layers(),
        ),
        [random(4, 3)],
    ),
    "a square parameter on the left": (
        lambda: Net(lambda m, x: m.h(m.w @ x), w=parameter(4, 4), h=nn.Linear(3, 3)),
        [random(4, 3)],
    ),
    "a parameter scaled, subtracted, divided by": (
        lambda: Net(
            lambda m, x: m.h(torch.sub(x, m.v, alpha=3) * m.u / (1 + m.w**2)),
            v=parameter(3),
            u=parameter(1, 3),
            w=parameter(3),
            h=nn.Linear(3, 3),
        ),
        [random(4, 3)],
    ),
    "a table for each sample of a full batch": (
        lambda: Net(lambda m, x: m.h(x + m.v[: len(x)]), v=parameter(4, 3), h=nn.Linear(3, 3)),
        [random(4, 3), random(1, 3), random(4, 3)],
    ),
    "a table added to one row": (
        lambda: Net(lambda m, x: m.h((x[:, None] + m.v).flatten(1)), v=parameter(4, 3), h=nn.Linear(12, 3)),
        [random(4, 3)],
    ),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Empirical()], ids=repr)
@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, estimator: nm.Estimator) -> None:
    make, data = TRAPS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
    expected: dict[str, Tensor] = {}
    for x in data:
        if not len(x):
            continue
        if isinstance(estimator, nm.Exact):
            one = reference.reference_diagonal(model, lambda m, x=x: m(x))
        else:
            one = reference.empirical_diagonal(model, lambda m, x=x: m(x), Y[: len(x)])
        expected = {key: value + expected.get(key, 0) for key, value in one.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        result = nm.fisher_diagonal(model, [(x, Y[: len(x)]) for x in data], estimator, reduction="sum")
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=1e-10, atol=1e-14, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("selects", [False, True], ids=["index", "index_select"])
def test_sequences_that_are_sorted_and_put_back_are_as_if_they_were_not(selects: bool) -> None:
    """Sorted already in the first batch; logits [n, T, C], whose head and last layer are squared per token."""

    def sorts(m: Net, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        z = torch.tanh(m.a(x[order]))
        return m.h(z.index_select(0, order.argsort()) if selects else z[order.argsort()])

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(sorts, **layers()).double()
    plain = Net(lambda m, x: m.h(torch.tanh(m.a(x))), a=model.a, h=model.h)
    first, *others = (random(4, 2, 3, seed=seed) for seed in range(3))
    data = [first[first[:, 0, 0].argsort()], *others]
    found, expected = (nm.fisher_diagonal(one, data, nm.Exact()) for one in (model, plain))
    for key in expected:
        torch.testing.assert_close(found[key], expected[key])
    blocks = [nm.fisher_kronecker(one, data, nm.Exact()) for one in (model, plain)]
    torch.testing.assert_close(blocks[0].dense(), blocks[1].dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "estimator",
    [nm.Exact(nm.Upper()), nm.Exact(), nm.Hutchinson(3, deflate=0), nm.Hutchinson(2, envelope=nm.Lower(2))],
    ids=repr,
)
def test_layers_that_only_some_cotangents_reach(estimator: nm.Estimator, dtype: torch.dtype) -> None:
    """The first cotangent has a zero gradient for some layers, which says nothing of the size of the next."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(
            lambda m, x: torch.cat([m.a(x), m.b(x), m.c(x)], 1), a=nn.Linear(3, 1), b=nn.Linear(3, 1), c=nn.Linear(3, 1)
        )
    x = random(4, 3)
    truth = nm.fisher_diagonal(model.double(), [x], estimator, granularity="sample")
    result = nm.fisher_diagonal(model.to(dtype), [x.to(dtype)], estimator, granularity="sample")
    for key in truth:
        torch.testing.assert_close(result[key].double(), truth[key], rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(result.stderr[key].double(), truth.stderr[key], rtol=1e-3, atol=1e-7)


def test_standard_errors_of_float16_models_do_not_underflow() -> None:
    """Cotangents are scaled up in float16; what is kept of several of them must not be scaled down to nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
        model[2].bias.data[0] = 9.0  # a confident model: small cotangents, large scales
    x, estimator = random(16, 4), nm.Hutchinson(3, deflate=0, orthogonal=False)
    truth = nm.fisher_diagonal(model.half().double(), [x.half().double()], estimator)
    result = nm.fisher_diagonal(model.half(), [x.half()], estimator)
    for key in truth:
        ratio = float(result.stderr[key].double().norm() / truth.stderr[key].norm())
        assert 0.8 < ratio < 1.25, key
