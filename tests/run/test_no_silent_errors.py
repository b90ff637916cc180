"""Models that once got wrong numbers, slow results or a crash: all results of each against a loop in float64."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.reference import network as reference
from tests.problems.problem import Net

B, T, D, C = 4, 3, 6, 3


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(out: int = C) -> nn.Linear:
    return nn.Linear(D, out)


def memory_tokens(m: Any, x: Tensor) -> Tensor:
    kv = torch.cat([m.memory.expand(len(x), -1, -1), x], 1)
    return m.head((torch.softmax(m.q(x) @ m.k(kv).mT, -1) @ m.v(kv)).mean(1))  # type: ignore[no-any-return]


def decoder(m: Any, x: Tensor) -> Tensor:
    return m.head(m.layer(m.queries.expand(len(x), -1, -1), x).mean(1))  # type: ignore[no-any-return]


def inner_step(m: Any, x: Tensor) -> Tensor:
    """One step of gradient descent on each sample's own loss, as MAML does."""
    w = m.a.weight.expand(len(x), -1, -1)
    (g,) = torch.autograd.grad(torch.tanh(x[:, :1] @ w.mT).square().sum(), w, create_graph=True)
    return m.head(torch.tanh((x.mean(1, keepdim=True) @ (w - 0.1 * g).mT)[:, 0]))  # type: ignore[no-any-return]


def force(m: Any, x: Tensor) -> Tensor:
    y = x.mean(1).detach().requires_grad_()
    (g,) = torch.autograd.grad(m.b(torch.tanh(m.a(y))).sum(), y, create_graph=True)
    return m.head(g)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "memory tokens": lambda: Net(
        memory_tokens, memory=nn.Parameter(torch.randn(1, 2, D)), q=linear(D), k=linear(D), v=linear(D), head=linear()
    ),
    "TransformerDecoder": lambda: Net(
        decoder,
        queries=nn.Parameter(torch.randn(1, 2, D)),
        layer=nn.TransformerDecoderLayer(D, 2, 8, batch_first=True),
        head=linear(),
    ),
    "derivative inside": lambda: Net(force, a=linear(D), b=linear(1), head=linear()),
    "a gradient step inside": lambda: Net(inner_step, a=linear(D), head=linear()),
    "a bias of shape [1]": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.a(x.mean(1)) + m.shift)),
        a=linear(D),
        shift=nn.Parameter(torch.ones(1)),
        head=linear(),
    ),
    "a scalar": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.a(x.mean(1)) * m.scale)),
        a=linear(D),
        scale=nn.Parameter(torch.tensor(1.3)),
        head=linear(),
    ),
    "LayerNorm over samples' dimension": lambda: Net(
        lambda m, x: m.head(m.norm(m.a(x.flatten(0, 1))[:, None].expand(-1, B, -1)).mean(1).view(len(x), T, D).mean(1)),
        a=linear(D),
        norm=nn.LayerNorm((B, D)),
        head=linear(),
    ),
    "convolution of one channel on frames": lambda: Net(
        lambda m, x: m.head(m.conv(x.flatten(0, 1)[:, None]).mean(1).view(len(x), T, D).mean(1)),
        conv=nn.Conv1d(1, 2, 3, padding=1),
        head=linear(),
    ),
    "LSTM": lambda: Net(
        lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=nn.LSTM(D, 5, batch_first=True), head=nn.Linear(5, C)
    ),
}


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().double()


@pytest.mark.parametrize("samples", [B, 1])
@pytest.mark.parametrize("name", MODELS)
def test_every_result_is_that_of_the_definition(name: str, samples: int) -> None:
    if name.startswith("LayerNorm over") and samples == 1:
        pytest.skip("its shape is that of four samples")
    model, x = made(name).eval(), data(samples, T, D)
    matrix = reference.reference_matrix(model, lambda m: m(x))
    diagonal = reference.reference_diagonal(model, lambda m: m(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        found = nm.fisher_diagonal(model, [x], nm.Exact(), reduction="sum")
        trace = nm.fisher_trace(model, [x], nm.Exact(), reduction="sum")
        dense = nm.fisher_matrix(model, [x], nm.Exact(), reduction="sum")
        factors = nm.fisher_factors(model, [x], nm.Exact(), granularity="sample", reduction="sum", dtype=torch.float64)
    product = nm.fisher_operator(model, [x], reduction="sum") @ torch.eye(len(matrix), dtype=torch.float64)
    for key, expected in diagonal.items():
        torch.testing.assert_close(found[key], expected, rtol=1e-9, atol=1e-12)
    assert float(trace) == pytest.approx(float(matrix.trace()), rel=1e-6)
    torch.testing.assert_close(dense.dense(), matrix, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(factors @ torch.eye(len(matrix), dtype=torch.float64), matrix, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(product, matrix, rtol=1e-9, atol=1e-12)


def test_recurrent_layers_are_per_sample_in_float32() -> None:
    model = made("LSTM").float()
    found = nm.fisher_diagonal(model, [data(B, T, D).float()], nm.Exact())
    assert set(found.provenance.granularity.values()) == {"sample"}


@pytest.mark.parametrize("positions", [4, 8, 12])
def test_position_tables_are_per_sample_where_positions_are_a_multiple_of_samples(positions: int) -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.head(torch.tanh(m.a(x) + m.table(torch.arange(x.shape[1]))).mean(1)),
        a=linear(D),
        table=nn.Embedding(16, D),
        head=linear(),
    ).double()
    x = data(B, positions, D)
    found = nm.fisher_diagonal(model, [x], nm.Exact(), reduction="sum")
    assert set(found.provenance.granularity.values()) == {"sample"}
    for key, expected in reference.reference_diagonal(model, lambda m: m(x)).items():
        torch.testing.assert_close(found[key], expected, rtol=1e-9, atol=1e-12)


def test_samples_one_by_one_have_no_noise_with_as_many_probes_as_the_rank() -> None:
    torch.manual_seed(0)
    odd = Net(lambda m, x: m.head(x.mean(1) @ torch.linalg.inv(m.a)), a=nn.Parameter(torch.eye(D) + 0.1), head=linear())
    with pytest.warns(nm.SlowPathWarning):
        found = nm.fisher_diagonal(odd, [data(B, T, D).float()], nm.Hutchinson(C - 1), granularity="sample")
    assert found.provenance.granularity["a"] == "sample, one by one"
    assert all((found.stderr[name] == 0).all() for name in found)


@pytest.mark.parametrize("call", [nm.fisher_diagonal, nm.fisher_trace, nm.fisher_matrix])
@pytest.mark.parametrize("name", ["derivative inside", "LSTM"])
def test_hooks_on_parameters_are_not_called(call: Callable[..., Any], name: str) -> None:
    model, x = made(name), [data(B, T, D)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        expected = call(model, x, nm.Exact())
        seen: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda g: seen.append(g) or 2 * g)  # type: ignore[func-returns-value]
        found = call(model, x, nm.Exact())
    trace, wanted = (value if call is nm.fisher_trace else value.trace for value in (found, expected))
    assert float(trace) == float(wanted)
    assert not seen
    model(x[0]).sum().backward()
    assert seen  # they are back
