"""Derivatives inside forward: energies, forces, divergences, penalties, tangents, inner gradient steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def gradient(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂ Σ energy/∂x, differentiable."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def body(m: Maker, width: int | None = None) -> nn.Module:
    """Layers from [.., d] to [.., d], smooth, so that second derivatives are there."""
    d = m.d if width is None else width
    return m.pick(
        "body",
        nn.Sequential(nn.Linear(d, d), nn.Tanh()),
        nn.Sequential(nn.Linear(d, d), nn.Softplus(), nn.Linear(d, d)),
        nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d), nn.Tanh(), nn.Linear(d, d)),
        nn.Sequential(nn.Linear(d, d, bias=False), nn.SiLU(), nn.Linear(d, d)),
    )


@kind
def hamiltonian(m: Maker) -> Case:
    read = m.pick("read", "gradient", "both", "gradient and head twice")

    def run(n: Any, x: Tensor) -> Tensor:
        force = gradient(lambda z: n.body(z).square().sum(-1), x)
        if read == "gradient":
            return n.h(force)
        return n.h(force) + (n.h(x) if read != "both" else n.h(n.body(x)))

    return m.case(run, m.inputs(m.d), {"body": body(m), "h": m.head()})


@kind
def linear_energy(m: Maker) -> Case:
    """The weight of the energy's last layer is in the force, though the energy itself is not in the logits."""

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(gradient(lambda z: n.energy(n.body(z)), x))

    return m.case(run, m.inputs(m.d), {"body": body(m), "energy": nn.Linear(m.d, 1), "h": m.head()})


@kind
def forces_of_atoms(m: Maker) -> Case:
    """Energies of pairs; the logits are functions of the forces and perhaps of the energy."""
    also = m.pick("also energy", False, True)

    def run(n: Any, x: Tensor) -> Tensor:
        def energy(z: Tensor) -> Tensor:
            pairs = (z[:, :, None] - z[:, None]).tanh()  # [B, T, T, d]
            return n.body(pairs).flatten(1).square().sum(1)

        logits = n.h(gradient(energy, x)).sum(1)
        return logits + energy(x)[:, None] if also else logits

    return m.case(run, m.inputs(m.t, m.d), {"body": body(m), "h": m.head()})


@kind
def jacobian_trace(m: Maker) -> Case:
    """log-density of a continuous flow: logits scaled by the divergence of a network."""

    def run(n: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            z = n.body(x)
            columns = [torch.autograd.grad(z[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
        return n.h(z) + torch.stack(columns, 1).sum(1, keepdim=True) * torch.arange(n.h.out_features).to(x)

    return m.case(run, m.inputs(m.d), {"body": body(m), "h": m.head()})


@kind
def gradient_penalty(m: Maker) -> Case:
    def run(n: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            z = n.h(n.body(x))
            slope = torch.autograd.grad(z[:, 0].sum(), x, create_graph=True)[0]
        return z * (1 + slope.square().sum(1, keepdim=True))

    return m.case(run, m.inputs(m.d), {"body": body(m), "h": m.head()})


@kind
def laplacian(m: Maker) -> Case:
    """Second derivatives: a gradient of a gradient."""

    def run(n: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            first = torch.autograd.grad(n.body(x).square().sum(), x, create_graph=True)[0]
            second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
        return n.h(second)

    return m.case(run, m.inputs(m.d), {"body": body(m), "h": m.head()})


@kind
def inner_derivative_later(m: Maker) -> Case:
    """The first batch takes the ordinary way."""
    how = m.pick("by", "flag", "sign")

    def run(n: Any, x: Tensor, flag: Tensor) -> Tensor:
        z = n.body(x)
        if bool(flag) if how == "flag" else bool(x[0, 0] > 0):
            z = z + gradient(lambda y: n.body(y).square(), x)
        return n.h(z)

    inputs = [(x, torch.tensor(i > 0)) for i, x in enumerate(m.inputs(m.d))]
    return m.case(run, inputs, {"body": body(m), "h": m.head()})


@kind
def convolutional_energy(m: Maker) -> Case:
    conv = m.pick("conv", nn.Conv1d(m.d, 2, 1), nn.Conv1d(m.d, 2, 3, padding=1), nn.Conv1d(m.d, 2 * m.d, 1, groups=m.d))

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(gradient(lambda z: n.conv(z).tanh().square(), x).mean(-1))

    return m.case(run, m.inputs(m.d, m.t), {"conv": conv, "h": m.head()})


@kind
def tangents(m: Maker) -> Case:
    """torch.func.jvp and torch.autograd.functional.jvp of modules."""
    how = m.pick("how", "func.jvp", "functional.jvp", "func.vjp")

    def run(n: Any, x: Tensor) -> Tensor:
        v = x.flip(1)
        if how == "func.jvp":
            z, tangent = torch.func.jvp(n.body, (x,), (v,))
        elif how == "func.vjp":
            z, pull = torch.func.vjp(n.body, x)
            (tangent,) = pull(v)
        else:
            z, tangent = torch.autograd.functional.jvp(n.body, x, v, create_graph=True)
        return n.h(z + tangent)

    return m.case(run, m.inputs(m.d), {"body": body(m), "h": m.head()})


@kind
def per_sample_grad_inside(m: Maker) -> Case:
    how = m.pick("how", "vmap grad", "func.grad", "jacrev")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "vmap grad":
            force = torch.func.vmap(torch.func.grad(lambda row: n.body(row).square().sum()))(x)
        elif how == "func.grad":
            force = torch.func.grad(lambda z: n.body(z).square().sum())(x)
        else:
            force = torch.func.vmap(torch.func.jacrev(n.body))(x).sum(1)
        return n.h(force)

    return m.case(run, m.inputs(m.d), {"body": body(m), "h": m.head()})


@kind
def inner_gradient_step(m: Maker) -> Case:
    """Weights adapted to a fixed support set, shared by all samples (MAML)."""
    order = m.pick("second order", True, False)

    def run(n: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = n.a.weight
            loss = functional.linear(n.support, weight, n.a.bias).tanh().square().mean()
            weight = weight - 0.5 * torch.autograd.grad(loss, weight, create_graph=order)[0]
        return n.h(torch.tanh(functional.linear(x, weight, n.a.bias)))

    parts = {"a": nn.Linear(m.d, m.d), "h": m.head(), "support": nn.Buffer(m.randn(4, m.d))}
    return m.case(run, m.inputs(m.d), parts)


@kind
def inner_step_through_the_module(m: Maker) -> Case:
    """As above, but the loss is made by calling the module, and torch.func.functional_call uses what comes out."""

    def run(n: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            names = dict(n.a.named_parameters())
            loss = n.a(n.support).tanh().square().mean()
            steps = torch.autograd.grad(loss, list(names.values()), create_graph=True)
            fast = {name: p - 0.5 * g for (name, p), g in zip(names.items(), steps, strict=True)}
        return n.h(torch.tanh(torch.func.functional_call(n.a, fast, (x,))))

    parts = {"a": nn.Linear(m.d, m.d), "h": m.head(), "support": nn.Buffer(m.randn(4, m.d))}
    return m.case(run, m.inputs(m.d), parts)


@kind
def steps_on_activations(m: Maker) -> Case:
    """Langevin-like: z moves down the slope of an energy that a network gives, a few times."""
    steps = m.pick("steps", 1, 2, 3)

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        for _ in range(steps):
            z = z - 0.1 * gradient(lambda y: n.body(y).square(), z)
        return n.h(z)

    return m.case(run, m.inputs(m.d), {"a": nn.Linear(m.d, m.d), "body": body(m), "h": m.head()})


@kind
def embedding_energy(m: Maker) -> Case:
    """Gradients with respect to an embedding's output."""

    def run(n: Any, ids: Tensor) -> Tensor:
        z = n.e(ids)
        return n.h(gradient(lambda y: n.body(y).square(), z).mean(1) + z.mean(1))

    inputs = [m.randint(5, size, m.t) for size in m.spec.sizes]
    return m.case(run, inputs, {"e": nn.Embedding(5, m.d), "body": body(m), "h": m.head()})


class Cube(torch.autograd.Function):
    """Its backward is differentiable, and uses what forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


@kind
def own_function_twice_differentiated(m: Maker) -> Case:
    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(gradient(lambda z: Cube.apply(n.body(z)), x))

    return m.case(run, m.inputs(m.d), {"body": body(m), "h": m.head()})
