"""Layers that multiply what they compute by a parameter: PReLU, and variants of RMSNorm and LayerNorm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import promoted
from neuromanifold.persample.gradients import Dense, Form
from neuromanifold.persample.rules.normalisation import scale_and_shift
from neuromanifold.persample.rules.registry import Call, NotApplicableError, rule, rule_where


@rule(nn.PReLU, parameters=("weight",))
def prelu(call: Call) -> dict[str, Form]:
    """y = max(x, 0) + w min(x, 0), with one w or one for each channel (the second dimension)."""
    product = call.g.to(promoted(call.g.dtype)) * call.x.clamp(max=0)
    product = product[:, None] if call.module.num_parameters == 1 else product  # [n, 1 or c, ...]
    return {"weight": Dense.summed(product, (*range(2, product.ndim),))}


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm of another library, by its class name: with a vector `weight`, perhaps a `bias`."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm", "GlobalResponseNorm", "ScaleNorm"))
    alone = not any(True for _ in module.children()) and not type(module).__module__.startswith("torch.")
    scaled = module._parameters.get("weight") is not None
    return named and alone and scaled and all(parameter.ndim == 1 for parameter in own)


@rule_where(_is_norm, parameters=("weight", "bias"), extra_dims=True)
def norm_like(call: Call) -> dict[str, Form]:
    """y = w∘x̂ + b, with x̂ = f(w = 1) - f(w = 0) from the module itself; refused if y is something else.

    It covers all variants: with or without an epsilon, in any precision, with w or 1 + w.  Once it is validated,
    nothing is read back, which would rule out CUDA graphs: where several dimensions have the size of the weight (width
    and sequence length, say), the device picks the one that the module scales.
    """
    weight, bias = call.module._parameters["weight"], call.module._parameters.get("bias")
    assert weight is not None
    nothing = None if bias is None else torch.zeros_like(bias)
    origin = _evaluate(call, torch.zeros_like(weight), nothing)
    scaled = _evaluate(call, torch.ones_like(weight), nothing) - origin
    fitting = [d for d in range(1, scaled.ndim) if scaled.shape[d] == len(weight)]
    if call.validating or len(fitting) != 1:
        fits = _dimensions_that_fit(call, weight, bias, origin, scaled, fitting)
        if call.validating:
            fitting = [d for d, one in zip(fitting, fits, strict=True) if one][-1:]
        if not fitting:
            raise NotApplicableError(f"{type(call.module).__name__} is not linear in its weight.")
    forms = [scale_and_shift(call, lambda: scaled, tuple(o for o in range(1, call.g.ndim) if o != d)) for d in fitting]
    return forms[0] if len(forms) == 1 else {name: _picked(fits, [form[name] for form in forms]) for name in forms[0]}


def _dimensions_that_fit(
    call: Call, weight: Tensor, bias: Tensor | None, origin: Tensor, scaled: Tensor, fitting: list[int]
) -> list[Tensor]:
    """Return for each dimension whether the weight scales it, by evaluating the module, as booleans on the device.

    The weight has entries that are all different: the module's own are often all one, which fits every dimension.
    """
    some = torch.linspace(0.5, 1.5, len(weight), dtype=weight.dtype, device=weight.device)
    output = _evaluate(call, some, None if bias is None else some)
    eps = torch.finfo(call.x.dtype if call.x.dtype.itemsize < 4 else torch.float32).eps  # many work in float32 inside

    def fits(dim: int) -> Tensor:
        vector = some.view([-1 if d == dim else 1 for d in range(output.ndim)]).to(scaled)
        expected = origin + scaled * vector + (0.0 if bias is None else vector)
        error, size = (torch.linalg.vector_norm(t) for t in (output - expected, output.abs() + origin.abs() + vector))
        return torch.le(error, 16 * eps * size)

    return [fits(dim) for dim in fitting]


def _picked(fits: list[Tensor], forms: list[Form]) -> Form:
    """Return the last form that fits, without reading which; NaN if none does."""
    picked: Tensor | float = math.nan
    for one, form in zip(fits, forms, strict=True):
        assert isinstance(form, Dense)
        picked = torch.where(one, form.values, picked)
    assert isinstance(picked, Tensor)
    return Dense(picked)


def _evaluate(call: Call, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the module's output with another weight, in float32 or better; the module is restored in any case."""
    module, before = call.module, dict(call.module._parameters)
    try:
        module._parameters["weight"] = weight  # type: ignore[assignment]
        if bias is not None:
            module._parameters["bias"] = bias.detach()  # type: ignore[assignment]
        with torch.no_grad():
            output: Tensor = module.forward(call.x, *call.others, **call.options)
        return output if output.dtype.itemsize >= 4 else output.float()
    finally:
        module._parameters.update(before)
