"""Further things that break hooks, caches and a validation on the first batch: state, control flow, zeros, layouts."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, Kind, Maker

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def parts(m: Maker) -> dict[str, Any]:
    return {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "h": m.head()}


def flagged(m: Maker, *shape: int) -> list[Any]:
    """(x, number of the batch)."""
    return [(x, torch.tensor(i)) for i, x in enumerate(m.inputs(*shape))]


@kind
def zero_at_first(m: Maker) -> Case:
    """Gradients that vanish in the first batches (or for some samples), and rows that are not samples behind them."""
    how, until = m.pick("how", "times zero", "relu", "mask of samples", "detached"), m.pick("until", 1, 2)

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        z = torch.tanh(n.a(x.transpose(0, 1)))  # positions first
        z = z.sum(0) if swap else z.mean(0)
        late = int(i) >= until
        if how == "times zero":
            z = z * float(late)
        elif how == "relu":
            z = torch.relu(z - (0 if late else 100))
        elif how == "mask of samples":
            z = z * (torch.arange(len(x)) < (len(x) if late else 1))[:, None]
        else:
            z = z if late else z.detach()
        return n.h(n.b(x.mean(1)) + z)

    swap = m.pick("sum", False, True)
    return m.case(run, flagged(m, m.t, m.d), parts(m), may_warn=how == "mask of samples")


@kind
def rows_mixed_behind_zeros(m: Maker) -> Case:
    """Nothing in the first batches; then rows in another order than the shape suggests."""

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        z = torch.tanh(n.a(x.flatten(0, 1)))  # [B*T, d]
        if int(i) == 0:
            z = z.view(len(x), -1, x.shape[2]).mean(1) * 0.0
        elif order == "transposed":
            z = n.a(x.transpose(0, 1).flatten(0, 1)).view(x.shape[1], len(x), -1).mean(0)
        else:
            z = z.view(len(x), -1, x.shape[2]).mean(1)
        return n.h(z + x.mean(1))

    order = m.pick("order", "transposed", "same")
    return m.case(run, flagged(m, m.t, m.d), parts(m))


@kind
def other_branches_later(m: Maker) -> Case:
    """Control flow by data: other layers, other orders of the same operations, other arguments of them."""
    how = m.pick("how", "swap", "skip", "another dimension", "another stride", "other reshape", "transposed weight")

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        late = int(i) > 0
        size, steps, width = x.shape
        if how == "swap":
            z = n.b(torch.tanh(n.a(x))) if late else n.a(torch.tanh(n.b(x)))
            return n.h(z.mean(1))
        if how == "skip":
            return n.h((torch.tanh(n.b(n.a(x))) if late else torch.tanh(n.a(x))).mean(1))
        if how == "another dimension":
            z = torch.tanh(n.a(x.transpose(0, 1) if late else x))
            return n.h(z.mean(0 if late else 1))
        if how == "another stride":
            z = torch.tanh(n.a(x.reshape(-1, width)))
            return n.h(z.as_strided((size, width), (steps * width, 1)) if not late else z.view(size, steps, -1)[:, -1])
        if how == "other reshape":
            rows = (
                x.transpose(0, 1).reshape(-1, width) if late else x.transpose(1, 2).transpose(1, 2).reshape(-1, width)
            )
            z = torch.tanh(n.a(rows))
            z = z.view(steps, size, width).transpose(0, 1) if late else z.view(size, steps, width).transpose(1, 1)
            return n.h(z.mean(1))
        z = x.mean(1)
        return n.h(z @ n.a.weight if late else z @ n.a.weight.T)

    return m.case(run, flagged(m, m.t, m.d), parts(m))


@kind
def the_same_names_of_operations(m: Maker) -> Case:
    """Batches whose graphs have the same operations and shapes, with other arguments: orders, dimensions, offsets."""
    how = m.pick("how", "view", "permute", "slice", "sum", "split", "roll", "diagonal")

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        late, (size, steps, width) = int(i) > 0, x.shape
        if how == "view":  # the same shapes where T = B
            rows = x.permute(1, 0, 2) if late else x.permute(0, 1, 2)
            z = torch.tanh(n.a(rows.reshape(size * steps, width)))
            z = z.view(steps, size, width).permute(1, 0, 2) if late else z.view(size, steps, width).permute(0, 1, 2)
            return n.h(z.mean(1))
        if how == "permute":
            z = torch.tanh(n.a(x.permute(1, 0, 2) if late else x.permute(0, 1, 2)))
            return n.h((z.permute(1, 0, 2) if late else z.permute(0, 1, 2))[:, 0])
        if how == "slice":
            z = torch.tanh(n.a(torch.cat([x, x.flip(1)]) if late else torch.cat([x.flip(1), x])))
            return n.h((z[:size] + 2 * z[size:]).mean(1))
        if how == "sum":
            z = torch.tanh(n.a(x.transpose(0, 1) if late else x))
            return n.h(z.sum(0) if late else z.sum(1))
        if how == "split":
            u, v = n.a(
                torch.cat([x[:, 0], x[:, -1]]) if late else torch.stack([x[:, 0], x[:, -1]], 1).flatten(0, 1)
            ).split(size)
            both = torch.cat([u, v])
            both = torch.stack(both.split(size), 1) if late else both.view(size, 2, width)
            return n.h(torch.tanh(both[:, 0]) * both[:, 1])
        if how == "roll":
            z = torch.tanh(n.a(x[:, 0].roll(int(late), 0)))
            return n.h(z.roll(-int(late), 0))
        z = torch.tanh(n.a(x))
        table = z[:, :, None] * torch.eye(steps).to(x)[None, :, :, None]
        return n.h(table.diagonal(0, 1, 2).mean(-1))

    return m.case(run, flagged(m, m.pick("T", m.spec.sizes[0], m.t), m.d), parts(m))


@kind
def state_between_batches(m: Maker) -> Case:
    """A cache made with the first batch and used with all later ones: a table of features, a mask, a plan of rows."""
    how = m.pick("how", "weight cache", "feature table", "normaliser")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "weight cache":  # made once, without a gradient, as in inference code
            if n.cache is None:
                n.cache = n.b.weight.detach().T.clone()
            return n.h(torch.tanh(n.a(x)) @ n.cache)
        if how == "feature table":
            if n.cache is None:
                n.cache = torch.linspace(-1, 1, x.shape[1]).to(x)
            return n.h(n.b(torch.tanh(n.a(x)) * n.cache))
        if n.cache is None:
            n.cache = torch.ones(()).to(x)
        return n.h(n.b(torch.tanh(n.a(x) / n.cache)))

    case = m.case(run, m.inputs(m.d), parts(m))
    case.model.cache = None
    return case


@kind
def cached_with_a_graph(m: Maker) -> Case:
    """Tensors that hang on the parameters are kept for the time of one forward pass, and used by several modules."""

    def run(n: Any, x: Tensor) -> Tensor:
        n.shared = torch.tanh(n.a.weight @ n.b.weight)
        z = n.a(x) @ n.shared
        z = n.b(torch.tanh(z)) @ n.shared.T
        del n.shared
        return n.h(z)

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def odd_strides(m: Maker) -> Case:
    """Expanded (stride 0), transposed, sliced and channels-last tensors as inputs of layers, and as gradients."""
    how = m.pick(
        "how", "expanded input", "transposed", "sliced", "channels last", "expanded gradient", "flipped", "strided"
    )

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "expanded input":
            z = n.a(x[:, :1].expand(-1, 4, -1)).mean(1)
        elif how == "transposed":
            z = n.a(x.mT.contiguous().mT).mean(1)
        elif how == "sliced":
            z = n.a(x[:, ::2]).sum(1)
        elif how == "channels last":
            z = n.conv(x.mT[:, :, None].contiguous(memory_format=torch.channels_last)).mean((2, 3))
        elif how == "expanded gradient":
            z = n.a(x).sum((1, 2), keepdim=True).expand(-1, 1, x.shape[2])[:, 0]
        elif how == "flipped":
            z = n.a(x.flip(1))[:, 0]
        else:
            z = n.a(x.as_strided((len(x), x.shape[2]), (x.stride(0), x.stride(2))))
        return n.h(torch.tanh(z))

    return m.case(run, m.inputs(m.t, m.d), {**parts(m), "conv": nn.Conv2d(m.d, m.d, 1)})


@kind
def inputs_that_need_gradients(m: Maker) -> Case:
    """The data require gradients, or the input is made to."""
    how = m.pick("how", "data", "in forward", "retained")

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "in forward":
            x = x.detach().requires_grad_()
        z = n.a(x)
        if how == "retained":
            z.retain_grad()
        return n.h(torch.tanh(z))

    inputs = m.inputs(m.d)
    return m.case(run, [x.requires_grad_() for x in inputs] if how == "data" else inputs, parts(m))


@kind
def forward_on_the_instance(m: Maker) -> Case:
    """forward replaced on the instance, before the run or during it; the class still says what it was."""
    how = m.pick("how", "instance", "method", "class changed", "during", "wrapper")

    def double(layer: Any, x: Tensor) -> Tensor:
        return 2 * functional.linear(x, layer.weight.tanh(), layer.bias)

    def run(n: Any, x: Tensor) -> Tensor:
        if how == "during":
            n.b.forward = types.MethodType(double, n.b)
        z = n.h(torch.tanh(n.b(torch.tanh(n.a(x)))))
        if how == "during":
            del n.b.forward
        return z

    made = parts(m)
    layer = made["b"]
    if how == "instance":
        layer.forward = lambda x: double(layer, x)
    elif how == "method":
        layer.forward = types.MethodType(double, layer)
    elif how == "class changed":
        layer.__class__ = type("Linear", (nn.Linear,), {"forward": double})
    elif how == "wrapper":
        inner = layer.forward
        layer.forward = lambda x: inner(x) * 2
    return m.case(run, m.inputs(m.d), made)


@kind
def modules_not_called_by_call(m: Maker) -> Case:
    """module.forward(x), a bound method kept elsewhere, F.linear with a module's parts: hooks see nothing."""
    how = m.pick("how", "forward", "class forward", "both", "kept")

    def run(n: Any, x: Tensor) -> Tensor:
        z = n.a(x)
        if how == "forward":
            z = n.b.forward(z)
        elif how == "class forward":
            z = nn.Linear.forward(n.b, z)
        elif how == "both":
            z = n.b.forward(torch.tanh(n.b(z)))
        else:
            z = n.kept(z)
        return n.h(torch.tanh(z))

    made = parts(m)
    made["kept"] = made["b"].forward
    return m.case(run, m.inputs(m.d), made)


@kind
def hooks_of_the_user(m: Maker) -> Case:
    """Forward hooks that change inputs and outputs, backward hooks that change gradients."""
    how = m.pick("how", "output", "input", "backward", "backward pre", "kwargs", "scaled twice")

    made = parts(m)
    layer = made["b"]
    if how == "output":
        layer.register_forward_hook(lambda _, __, out: out * 2)
    elif how == "input":
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    elif how == "backward":
        layer.register_full_backward_hook(lambda _, gin, __: tuple(None if g is None else g * 2 for g in gin))
    elif how == "backward pre":
        layer.register_full_backward_pre_hook(lambda _, gout: (gout[0] * 2,))
    elif how == "kwargs":
        layer.register_forward_pre_hook(lambda _, args, kw: (args, {k: v + 1 for k, v in kw.items()}), with_kwargs=True)
    else:
        layer.register_forward_hook(lambda _, __, out: out.mul_(2))

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        return n.h(torch.tanh(n.b(input=z) if how == "kwargs" else n.b(z)))

    return m.case(run, m.inputs(m.d), made)


@kind
def weights_shared_with_modules_without_a_rule(m: Maker) -> Case:
    """One parameter in a layer with a rule and in a module whose forward nobody knows."""

    class Odd(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.kernel = weight

        def forward(self, x: Tensor) -> Tensor:
            if how == "nonlinear":
                return x @ self.kernel.tanh().T
            if how == "batched":
                return torch.bmm(self.kernel.expand(len(x), -1, -1), x[..., None])[..., 0]
            return (
                (x[:, None] * self.kernel).sum(-1) if how == "broadcast" else x @ torch.linalg.matrix_exp(self.kernel)
            )

    how = m.pick("how", "nonlinear", "batched", "broadcast", "matrix exponential")
    made = parts(m)
    made["odd"] = Odd(made["a"].weight)

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(torch.tanh(n.odd(torch.tanh(n.a(x)))))

    return m.case(run, m.inputs(m.d), made)


@kind
def precision_changed_inside(m: Maker) -> Case:
    """A part in float64 within a float32 model, or with weights cast on the way."""
    how = m.pick("how", "island", "cast weight", "cast back and forth")

    def run(n: Any, x: Tensor) -> Tensor:
        z = torch.tanh(n.a(x))
        if how == "island":
            z = functional.linear(z.double(), n.b.weight.double(), n.b.bias.double()).to(x.dtype)
        elif how == "cast weight":
            z = (z.double() @ n.b.weight.double().T).to(x.dtype)
        else:
            z = n.b(z.double().to(x.dtype))
        return n.h(torch.tanh(z))

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def inputs_shifted_by_forward(m: Maker) -> Case:
    """Forward changes its input in place, and doing so twice is not the same as once."""

    def run(n: Any, x: Tensor) -> Tensor:
        x.mul_(1.5).add_(0.5)
        return n.h(torch.tanh(n.a(x)))

    return m.case(run, m.inputs(m.d), parts(m), may_refuse=True)


@kind
def noise_inside(m: Maker) -> Case:
    """Noise from the global generator, the same whenever the model sets its own seed."""

    def run(n: Any, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(x))
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).float().to(x.dtype)
        return n.h(torch.tanh(n.b(torch.tanh(n.a(x)) + noise)))

    return m.case(run, m.inputs(m.d), parts(m), may_warn=True)


@kind
def empty_parts(m: Maker) -> Case:
    """Modules called on no rows, on no positions, and parameters of no size, in some of the batches."""

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        few = x[: 0 if int(i) % 2 == 0 else len(x)]
        z = torch.tanh(n.a(few))
        z = functional.pad(z, (0, 0, 0, len(x) - len(few)))
        return n.h(n.b(x) + z + n.none.sum())

    return m.case(run, flagged(m, m.d), {**parts(m), "none": m.parameter(0, m.d)})


@kind
def outputs_as_views_of_inputs(m: Maker) -> Case:
    """Layers whose output is returned as it is, used twice, or thrown away."""
    how = m.pick("how", "twice", "thrown away", "detached copy", "sum of both", "max with itself")

    def run(n: Any, x: Tensor) -> Tensor:
        z, w = n.a(x), n.b(x)
        if how == "twice":
            return n.h(z * z + z)
        if how == "thrown away":
            return n.h(z)
        if how == "detached copy":
            return n.h(z * w.detach())
        return n.h(z + w - z.detach()) if how == "sum of both" else n.h(torch.maximum(z, w))

    return m.case(run, m.inputs(m.d), parts(m))


@kind
def far_apart_samples(m: Maker) -> Case:
    """Samples whose gradients differ by orders of magnitude: no small one is lost, no wrong one hidden."""
    order = m.pick("order", "samples", "positions")

    def run(n: Any, x: Tensor, scale: Tensor) -> Tensor:
        z = x.transpose(0, 1).flatten(0, 1) if order == "positions" else x.flatten(0, 1)
        z = torch.tanh(n.a(z))
        z = z.view(x.shape[1], len(x), -1).mean(0) if order == "positions" else z.view(len(x), x.shape[1], -1).mean(1)
        return n.h(n.b(z) * scale[:, None])

    inputs = [(x, 10.0 ** -m.randint(4, len(x)).double()) for x in m.inputs(m.t, m.d)]
    return m.case(run, inputs, parts(m))


@kind
def dead_samples(m: Maker) -> Case:
    """In the first batch only one sample has a gradient at all; later all have, in rows that are sorted by data."""

    def run(n: Any, x: Tensor, i: Tensor) -> Tensor:
        order = torch.arange(len(x)) if int(i) == 0 else x[:, 0].argsort()
        z = torch.tanh(n.a(x[order]))[order.argsort()]
        alive = torch.ones(len(x)).to(x)
        if int(i) == 0:
            alive[1:] = 0
        return n.h(z * alive[:, None])

    return m.case(run, flagged(m, m.d), parts(m), may_warn=True)
