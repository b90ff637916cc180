"""Backward functions that overwrite their incoming gradient, and in-place operations on what modules return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


class Doubled(torch.autograd.Function):
    """y = 2x; its backward doubles the incoming gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        del ctx
        return g.mul_(2)


class Gate(torch.autograd.Function):
    """A ReLU whose backward fills zeros into the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g.masked_fill_(x < 0, 0)


class Reversed(torch.autograd.Function):
    """Gradient reversal, in place, on an output that is a view of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        del ctx
        return g.neg_()


class Zeroing(torch.autograd.Function):
    """Cleans up after itself: the incoming gradient is zero afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        del ctx
        kept = g.clone()
        g.zero_()
        return kept


def function(m: Maker) -> Any:
    return m.pick("function", Doubled, Gate, Reversed, Zeroing).apply


def parts(m: Maker) -> dict[str, Any]:
    return {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "h": m.head()}


@kind
def overwritten_after_each_call(m: Maker) -> Case:
    """A module called several times, each output through the function."""
    f, times = function(m), m.pick("times", 2, 1, 3)

    def run(n: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = f(n.a(x))
        return n.h(x)

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def overwritten_between_layers(m: Maker) -> Case:
    f, where = function(m), m.pick("where", "between", "before", "after")

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(f(n.b(x)) if where == "before" else x)
        z = n.a(f(z) if where == "between" else z)
        return n.h(f(z) if where == "after" else z)

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def overwritten_at_the_logits(m: Maker) -> Case:
    """The cotangent itself is overwritten: it must not be used again."""
    f = function(m)

    def run(n: Any, x: Tensor) -> Tensor:
        return f(n.h(torch.tanh(n.a(x))))

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def overwritten_in_one_branch(m: Maker) -> Case:
    """Branches that are multiplied by numbers first, so that ordinary autograd has a gradient of its own for each."""
    f, order = function(m), m.pick("order", "left", "right")

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        left, right = f(z * 1.5), n.b(z * 0.5)
        return n.h(left * 2.0 + right * 3.0 if order == "left" else right * 3.0 + left * 2.0)

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def overwritten_in_a_residual(m: Maker) -> Case:
    """f(z) + a(z): both get the same gradient, and a is done with it first, since it was called last."""
    f, times = function(m), m.pick("times", 2, 1, 3)
    layer = m.pick("layer", nn.Linear(m.d, m.d), nn.LayerNorm(m.d), nn.Linear(m.d, m.d, bias=False), nn.PReLU(m.d))
    rows = not isinstance(layer, nn.PReLU) and m.pick("rows", False, True)

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.b(x.flatten(0, 1) if rows else x[:, 0])
        for _ in range(times):
            side = f(torch.tanh(z))
            z = side + n.a(z)
        return n.h(z.unflatten(0, (len(x), -1)).mean(1) if rows else z)

    return m.case(run, m.inputs(m.t, m.d), {**parts(m), "a": layer})


@kind
def overwritten_beside_parameters(m: Maker) -> Case:
    """f(z) + s, f(z) * s: what is picked up where s is broadcast is overwritten right after."""
    f, how, times = function(m), m.pick("how", "add", "mul", "expand", "product"), m.pick("times", 1, 2)

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        for _ in range(times):
            side = f(torch.tanh(z))
            z = {
                "add": lambda side=side: side + n.s,
                "mul": lambda side=side: side + x * n.s,
                "expand": lambda side=side: side + n.s.expand_as(side),
                "product": lambda side=side: side + x @ n.w,
            }[how]()
        return n.h(z)

    return m.case(run, m.inputs(m.d), {**parts(m), "s": m.parameter(m.d), "w": m.parameter(m.d, m.d)})


@kind
def overwritten_on_positions(m: Maker) -> Case:
    f, rows = function(m), m.pick("rows", False, True)

    def run(n: Any, x: Tensor) -> Tensor:
        z = x.flatten(0, 1) if rows else x
        z = f(n.norm(f(n.a(f(n.a(z))))))
        return n.h(z.reshape(len(x), -1, z.shape[-1]).mean(1))

    return m.case(run, m.inputs(m.t, m.d), {**parts(m), "norm": nn.LayerNorm(m.d)})


@kind
def overwritten_for_parameters(m: Maker) -> Case:
    """Bare parameters beside the function."""
    f = function(m)

    def run(n: Any, x: Tensor) -> Tensor:
        z = f(f(x * n.s + n.shift) @ n.w)
        return n.h(f(z * n.s))

    extra = {"s": m.parameter(m.d), "shift": m.parameter(m.d), "w": m.parameter(m.d, m.d)}
    return m.case(run, m.inputs(m.d), {**extra, "h": m.head()})


@kind
def hooks_that_overwrite(m: Maker) -> Case:
    """Hooks on activations that change the gradient in place, or return another."""
    how = m.pick("how", "in place", "returned")

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        if z.requires_grad:
            z.register_hook(lambda g: g.mul_(2) if how == "in place" else g * 2)
        return n.h(torch.tanh(n.a(torch.tanh(z))))

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def written_into_outputs(m: Maker) -> Case:
    """What a module returns is changed in place."""
    how = m.pick("how", "relu_", "add_", "mul_", "tanh_", "+=", "masked_fill_", "clamp_", "copy_ of itself")

    def run(n: Any, x: Tensor) -> Tensor:
        z, other = n.a(x), n.b(x)
        if how == "relu_":
            z.relu_()
        elif how == "add_":
            z.add_(other)
        elif how == "mul_":
            z.mul_(2.0)
        elif how == "tanh_":
            z.tanh_()
        elif how == "+=":
            z += other * x
        elif how == "masked_fill_":
            z.masked_fill_(x > 0, 0.5)
        elif how == "clamp_":
            z.clamp_(-0.5, 0.5)
        else:
            z.copy_(torch.tanh(z.clone()))
        return n.h(n.a(z) + other)

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def written_into_views(m: Maker) -> Case:
    """Parts of an output are overwritten: slices, rows, reshaped and transposed views."""
    how = m.pick("how", "column", "slice", "view", "transpose", "diagonal", "assigned", "expanded", "flatten")

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)  # [B, T, d]
        if how == "column":
            z[..., 0] *= 2
        elif how == "slice":
            z[:, :1].relu_()
        elif how == "view":
            z.view(-1).mul_(1.5)
        elif how == "transpose":
            z.transpose(0, 1)[0].add_(1.0)
        elif how == "diagonal":
            z.diagonal(dim1=-2, dim2=-1).mul_(3)
        elif how == "assigned":
            z[..., -1] = x[..., 0] * z[..., 0].detach()
        elif how == "expanded":
            z += n.b(x[:, :1]).expand_as(z)
        else:
            z.flatten(0, 1)[:, :1].mul_(n.s)
        return n.h(torch.tanh(z).mean(1))

    return m.case(run, m.inputs(m.t, m.d), {**parts(m), "s": m.parameter(1)})


@kind
def written_into_a_buffer(m: Maker) -> Case:
    """Outputs of several calls are put into one tensor, samples first or positions first."""
    order = m.pick("order", "samples", "positions", "rows")

    def run(n: Any, x: Tensor) -> Tensor:
        size, steps, width = x.shape
        z = x.new_zeros((size, steps, width) if order == "samples" else (steps, size, width))
        if order == "rows":
            z = z.view(-1, width)
        for t in range(steps):
            out = torch.tanh(n.a(x[:, t]))
            if order == "samples":
                z[:, t] = out
            elif order == "positions":
                z[t] = out
            else:
                z[t * size : (t + 1) * size].add_(out)
        z = n.b(z)
        if order == "samples":
            return n.h(z.mean(1))
        return n.h(z.view(steps, size, width).mean(0))

    return m.case(run, m.inputs(m.t, m.d), parts(m))


class Writing(nn.Module):
    """In-place activations as modules, right behind layers with rules."""

    def __init__(self, d: int, c: int, act: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, d), act, nn.Linear(d, d), act)
        self.h = nn.Linear(d, c)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body[0](x)
        z = self.body[1](z)
        return self.h(self.body[3](self.body[2](z)) + 1)


@kind
def in_place_activations(m: Maker) -> Case:
    act = m.pick(
        "act", nn.ReLU(True), nn.ELU(inplace=True), nn.LeakyReLU(0.1, True), nn.Hardtanh(inplace=True), nn.SiLU(True)
    )
    return m.case(Writing(m.d, m.c, act), m.inputs(m.d))


@kind
def inputs_overwritten(m: Maker) -> Case:
    """Forward works on its input in place; what it does twice is what it does once."""
    how = m.pick("how", "clamp_", "sub_")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "clamp_":
            x.clamp_(-0.5, 0.5)
        else:
            x.sub_(x.mean(-1, keepdim=True))
        return n.h(torch.tanh(n.a(x)))

    return m.case(run, m.inputs(m.d), parts(m))
