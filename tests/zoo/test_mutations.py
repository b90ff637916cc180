"""Rules, layouts and aliases broken on purpose: the result stays right (another method is taken), or an error says so.

A mutant is a wrong rule.  It is entered for a class of its own, or put in the place of a right one in the registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from torch import Tensor, nn
from torch.nn import functional

import neuromanifold as nm
from neuromanifold.persample.gradients import Dense, Form, Product
from neuromanifold.persample.rules import Call, registry
from tests.zoo.case import Case, Kind, Maker, Spec, make, specs
from tests.zoo.reference import judge_all

Function = Callable[[Call], dict[str, Form]]
Mutation = Callable[[Function], Function]


def dense(form: Form) -> Tensor:
    """Gradients [n, *shape]."""
    return form.gradients(0, form.samples, torch.float64)


def of_gradients(change: Callable[[Tensor], Tensor]) -> Mutation:
    """Changes what a rule gives."""

    def mutate(function: Function) -> Function:
        return lambda call: {name: Dense(change(dense(form)).contiguous()) for name, form in function(call).items()}

    return mutate


def of_calls(change: Callable[[Call], Call]) -> Mutation:
    """Changes what a rule gets."""
    return lambda function: lambda call: function(change(call))


def transposed(g: Tensor) -> Tensor:
    return g.mT if g.ndim == 3 and g.shape[1] == g.shape[2] else g


def without_a_position(call: Call) -> Call:
    if call.g.ndim < 3:
        return call
    g = call.g.clone()
    g[:, 0] = 0
    return call._replace(g=g)


def another_position(call: Call) -> Call:
    return call._replace(x=call.x.roll(1, 1)) if call.x.ndim > 2 and call.x.is_floating_point() else call


def other_order(call: Call) -> Call:
    """Reads [n, t, ...] as if it were [t, n, ...]."""
    if call.g.ndim < 3 or call.x.ndim < 3:
        return call
    return call._replace(x=call.x.transpose(0, 1).reshape(call.x.shape), g=call.g.transpose(0, 1).reshape(call.g.shape))


def one_sign_wrong(g: Tensor) -> Tensor:
    return torch.cat([-g[:1], g[1:]])


def failing(error: Exception) -> Mutation:
    def fail(*_: Any) -> dict[str, Form]:
        raise error

    return lambda _: fail


def of_some_parameters(function: Function) -> Function:
    """Nothing for one of the wanted parameters."""
    return lambda call: {name: form for name, form in function(call).items() if name != "bias"}


def swapped_samples(g: Tensor) -> Tensor:
    return g.flip(0)


MUTATIONS: dict[str, Mutation] = {
    "scaled by 1.1": of_gradients(lambda g: g * 1.1),
    "scaled by 1.0001 in float64": of_gradients(lambda g: g * 1.0001),
    "zero": of_gradients(torch.zeros_like),
    "transposed": of_gradients(transposed),
    "samples swapped": of_gradients(swapped_samples),
    "mean over samples": of_gradients(lambda g: g.mean(0, keepdim=True).expand_as(g)),
    "one sign wrong": of_gradients(one_sign_wrong),
    "last entry forgotten": of_gradients(lambda g: torch.cat([g[..., :-1], torch.zeros_like(g[..., -1:])], -1)),
    "not a number": of_gradients(lambda g: g * torch.nan),
    "a sample too few": of_gradients(lambda g: g[:-1]),
    "another shape": of_gradients(lambda g: g[..., None]),
    "a position dropped": of_calls(without_a_position),
    "another position's input": of_calls(another_position),
    "positions first": of_calls(other_order),
    "the input negated": of_calls(lambda call: call._replace(x=-call.x if call.x.is_floating_point() else call.x)),
    "KeyError": failing(KeyError("weight")),
    "IndexError": failing(IndexError("list index out of range")),
    "RuntimeError": failing(RuntimeError("The size of tensor a (3) must match the size of tensor b (2)")),
    "AssertionError": failing(AssertionError()),
    "a parameter forgotten": of_some_parameters,
}


def network(layer: Callable[[Maker], nn.Module], rows: tuple[str, ...]) -> Kind:
    """A layer between others, in several layouts, called once or twice."""

    def kind(m: Maker) -> Case:
        layout, twice = m.pick("layout", *rows), m.pick("twice", False, True)

        def run(n: Any, x: Tensor) -> Tensor:
            z = torch.tanh(n.first(x)) if x.is_floating_point() else x
            if layout == "rows":
                z = z.flatten(0, 1)
            elif layout == "positions first":
                z = z.transpose(0, 1).flatten(0, 1)
            elif layout == "one":
                z = z[:, 0]
            z = n.layer(z)
            z = n.layer(torch.tanh(z)) if twice and x.is_floating_point() else z
            if layout == "rows":
                z = z.unflatten(0, (len(x), -1))
            elif layout == "positions first":
                z = z.unflatten(0, (-1, len(x))).transpose(0, 1)
            z = torch.tanh(z)
            return n.head(z if layout == "one" else z.mean(1))

        made = layer(m)
        inputs = m.inputs(m.t, m.d)
        if isinstance(made, nn.Embedding):
            inputs = [m.randint(4, size, m.t) for size in m.spec.sizes]
        return m.case(run, inputs, {"first": nn.Linear(m.d, m.d), "layer": made, "head": Plain(m.d, m.c)})

    return kind


class Plain(nn.Module):
    """A linear layer that no mutant is entered for."""

    def __init__(self, d: int, c: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(d, c))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


LAYOUTS = ("samples", "rows", "positions first", "one")
LAYERS: dict[type[nn.Module], Kind] = {
    nn.Linear: network(lambda m: nn.Linear(m.d, m.d), LAYOUTS),
    nn.LayerNorm: network(lambda m: nn.LayerNorm(m.d), LAYOUTS),
    nn.RMSNorm: network(lambda m: nn.RMSNorm(m.d), LAYOUTS),
    nn.Embedding: network(lambda m: nn.Embedding(4, m.d), ("samples", "one")),
    nn.PReLU: network(lambda _: nn.PReLU(), ("samples", "one")),
}


def right_or_error(kind: str, kinds: dict[str, Kind], examples: int = 3, batches: int = 4) -> None:
    @settings(max_examples=examples)
    @given(spec=specs(kind))
    def check(spec: Spec) -> None:
        found = judge_all(replace(spec, sizes=spec.sizes[:batches]), kinds)
        note(str(make(spec, kinds).chosen))
        assert all(verdict.fine for verdict in found.values()), found

    check()


def put(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], function: Function) -> None:
    """Another function in the place of a rule's."""
    entry = registry._RULES[kind]
    changed = entry._replace(function=function) if hasattr(entry, "_replace") else replace(entry, function=function)
    monkeypatch.setitem(registry._RULES, kind, changed)


@pytest.mark.parametrize(
    ("kind", "mutation"),
    [
        pytest.param(kind, mutation, marks=[] if i in (0, 1 + j % (len(LAYERS) - 1)) else pytest.mark.slow)
        for i, kind in enumerate(LAYERS)
        for j, mutation in enumerate(MUTATIONS)
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_broken_rule_is_seen(kind: type[nn.Module], mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kind, MUTATIONS[mutation](registry._RULES[kind].function))
    right_or_error("layer", {"layer": LAYERS[kind]})


@pytest.mark.parametrize("samples", [2, 6, 7, 8, 15])
def test_a_rule_that_is_wrong_for_any_one_sample_is_seen(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = registry._RULES[nn.Linear].function
    x = torch.randn(samples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    expected = nm.fisher_diagonal(model, [x], nm.Exact())
    for wrong in range(samples):
        factors = torch.ones(samples, dtype=torch.float64)
        factors[wrong] = 3.0

        def tripled(call: Call, factors: Tensor = factors) -> dict[str, Form]:
            return {
                name: Dense(dense(form) * factors.view(-1, *[1] * len(form.shape)))
                for name, form in right(call).items()
            }

        put(monkeypatch, nn.Linear, tripled)
        with pytest.warns(nm.SlowPathWarning):
            found = nm.fisher_diagonal(model, [x], nm.Exact())
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("wrong", [nn.LayerNorm, nn.RMSNorm, nn.Linear, nn.PReLU], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm, nn.RMSNorm], ids=lambda kind: kind.__name__)
def test_the_rule_of_another_class_is_seen(
    kind: type[nn.Module], wrong: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is not wrong:
        put(monkeypatch, kind, registry._RULES[wrong].function)
    right_or_error("layer", {"layer": LAYERS[kind]})


class Odd(nn.Module):
    """Looks like a linear layer, and is none: what it computes is one of several things."""

    def __init__(self, d: int, how: str) -> None:
        super().__init__()
        self.weight, self.bias, self.how = nn.Parameter(torch.zeros(d, d)), nn.Parameter(torch.zeros(d)), how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.tanh() if self.how == "another function of the weight" else self.weight
        if self.how == "transposed":
            return x @ weight + self.bias
        if self.how == "half of it stopped":
            weight = 0.5 * weight + 0.5 * weight.detach()
        z = functional.linear(x, weight, self.bias)
        if self.how == "a factor behind":
            return z * 1.5
        if self.how == "neighbouring positions" and x.ndim > 2:
            return z + z.roll(1, 1)
        if self.how == "the other sign for large inputs":
            return torch.where(x.norm(dim=-1, keepdim=True) > 1, z, -z)
        return z


WAYS = ("transposed", "another function of the weight", "half of it stopped", "a factor behind")
WAYS += ("neighbouring positions", "the other sign for large inputs")


@pytest.fixture
def odd_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """nm.rule with the linear layer's derivative, for a class that is none."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    @nm.rule(Odd, parameters=("weight", "bias"), extra_dims=True)
    def odd(call: Call) -> dict[str, Form]:
        g, x = (t.reshape(len(t), -1, t.shape[-1]) for t in (call.g, call.x))
        found: dict[str, Form] = {"weight": Product(g, x), "bias": Dense(g.sum(1))}
        return {name: found[name] for name in call.wanted}


@pytest.mark.usefixtures("odd_rule")
@pytest.mark.parametrize("how", WAYS)
def test_a_wrong_rule_of_the_user_is_seen(how: str) -> None:
    """If it is wrong for some data only, it is seen where these are in a batch that is verified."""
    batches = 2 if how == "the other sign for large inputs" else 4
    right_or_error("layer", {"layer": network(lambda m: Odd(m.d, how), LAYOUTS)}, examples=5, batches=batches)


@pytest.mark.parametrize("when", ["from the second batch on", "for other sizes", "for one sample", "for many samples"])
@pytest.mark.parametrize("mutation", ["scaled by 1.1", "samples swapped", "RuntimeError"])
def test_a_rule_that_is_right_at_first_is_seen(when: str, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is verified, and each whose sizes differ from those before."""
    right = registry._RULES[nn.Linear].function
    wrong = MUTATIONS[mutation](right)
    seen: list[Tensor] = []

    def sometimes(call: Call) -> dict[str, Form]:
        if not any(call.x is one or torch.equal(call.x, one) for one in seen):
            seen.append(call.x.clone())
        first = seen[0].shape == call.x.shape and torch.equal(seen[0], call.x)
        broken = {
            "from the second batch on": not first,
            "for other sizes": call.x.shape != seen[0].shape,
            "for one sample": len(call.x) == 1,
            "for many samples": len(call.x) > 2,
        }[when]
        return (wrong if broken else right)(call)

    put(monkeypatch, nn.Linear, sometimes)
    kinds = {"layer": LAYERS[nn.LayerNorm]}  # its first layer is linear, and called once

    @settings(max_examples=5)
    @given(spec=specs("layer"))
    def check(spec: Spec) -> None:
        seen.clear()
        note(str(make(spec, kinds).chosen))
        found = judge_all(replace(spec, sizes=spec.sizes[:2]), kinds)
        assert all(verdict.fine for verdict in found.values()), found

    check()
