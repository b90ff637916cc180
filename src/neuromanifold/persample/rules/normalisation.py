"""Layers that normalise, then scale and shift: y = w∘x̂ + b, so ∂/∂w = Σ_t g_t∘x̂_t and ∂/∂b = Σ_t g_t."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from neuromanifold.core.checks import promoted
from neuromanifold.kernels import dispatch
from neuromanifold.persample.gradients import Dense, Form
from neuromanifold.persample.rules.registry import Call, rule


@rule(nn.LayerNorm, extra_dims=True)
def layer_norm(call: Call) -> dict[str, Form]:
    """x̂ is normalised over the last dimensions; the scale has their shape."""
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape, eps = module.normalized_shape, module.eps
    over = tuple(range(1, call.g.ndim - len(shape)))
    return scale_and_shift(call, lambda: functional.layer_norm(_input(call), shape, None, None, eps), over)


@rule(nn.RMSNorm, parameters=("weight",), extra_dims=True)
def rms_norm(call: Call) -> dict[str, Form]:
    """x̂ is x over its root mean square in the last dimensions; the scale has their shape."""
    module = call.module
    assert isinstance(module, nn.RMSNorm)
    shape = list(module.normalized_shape)
    over = tuple(range(1, call.g.ndim - len(shape)))
    return scale_and_shift(call, lambda: functional.rms_norm(_input(call), shape, None, module.eps), over)


@rule(nn.GroupNorm)
def group_norm(call: Call) -> dict[str, Form]:
    """x̂ is normalised over groups of channels; the scale has one entry for each channel, the second dimension."""
    module = call.module
    assert isinstance(module, nn.GroupNorm)
    groups, eps, over = module.num_groups, module.eps, tuple(range(2, call.g.ndim))
    return scale_and_shift(call, lambda: functional.group_norm(_input(call), groups, None, None, eps), over)


def _fixed_or_own_statistics(module: nn.Module) -> bool:
    """Whether statistics are running ones, or those of single samples: those of a batch mix the samples."""
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) or module.running_mean is not None


@rule(
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    applies=_fixed_or_own_statistics,
)
def batch_or_instance_norm(call: Call) -> dict[str, Form]:
    """x̂ is normalised by running statistics, or by those of each sample and channel."""
    module = call.module
    assert isinstance(module, nn.modules.batchnorm._NormBase)
    mean, variance = module.running_mean, module.running_var
    if mean is not None and variance is not None:
        sums = dispatch.channel_norm_sums(call.x, call.g, mean, variance, module.eps)
        if sums is not None:
            return {name: Dense(sums[name == "bias"]) for name in call.wanted}

    def normalised() -> Tensor:
        x = _input(call)
        if mean is None or variance is None:
            return functional.instance_norm(x, eps=module.eps)
        shape = (1, -1, *[1] * (x.ndim - 2))
        scale = (variance.to(x.dtype) + module.eps).rsqrt()
        return (x - mean.to(x.dtype).view(shape)) * scale.view(shape)

    return scale_and_shift(call, normalised, tuple(range(2, call.g.ndim)))


def scale_and_shift(call: Call, normalised: Callable[[], Tensor], over: tuple[int, ...]) -> dict[str, Form]:
    """Return the gradients of w and b in y = w∘x̂ + b, summed over all dimensions but those of samples and parameter."""
    found: dict[str, Form] = {}
    if "weight" in call.wanted:
        found["weight"] = Dense.summed(call.g.to(promoted(call.g.dtype)) * normalised(), over)
    if "bias" in call.wanted:
        found["bias"] = Dense.summed(call.g, over)
    return found


def _input(call: Call) -> Tensor:
    """Return the input in the gradient's precision, float32 at least: products of large float16 numbers overflow."""
    return call.x.to(promoted(call.g.dtype))
