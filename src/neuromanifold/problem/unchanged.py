"""Nothing of the user's model changes, whatever happens inside."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in eval mode with gradients on, and leave everything as it was found.

    Restored at the end, after an error or Ctrl-C too: the training flag of every submodule, buffers (some modules write
    to theirs even in eval mode), and the global random states of torch, numpy and Python, on which the model or a
    shuffling loader may draw.  Hooks on parameters are not called inside.  Parameters, their .grad and requires_grad,
    and hooks of modules are never touched in the first place.  Flags are set one by one: a module's own `train()` may
    do more than that, such as merging weights.
    """
    flags = {module: module.training for module in model.modules()}
    restore = model_states(model)
    try:
        recurrent = [module for module in flags if isinstance(module, nn.RNNBase)]
        plain = [module for module in recurrent if not module.dropout]
        for module in flags:
            module.training = module in plain and _on_gpu(module)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            # cuDNN cannot go backward through a recurrent layer in eval mode; without dropout both modes are the same.
            _cudnn(torch.backends.cudnn.enabled and len(plain) == len(recurrent)),
            _no_kept_weights(),
            _no_parameter_hooks(model),
        ):
            yield
    finally:
        restore()
        for module, training in flags.items():
            module.training = training


@contextmanager
def _cudnn(enabled: bool) -> Iterator[None]:
    """With cuDNN or without; torch.backends.cudnn.flags would set its precision and everything else to defaults."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def _no_kept_weights() -> Iterator[None]:
    """Inside of the user's `parametrize.cached()`, weights that are computed have graphs which are not ours to use."""
    before = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = {}, 0
    try:
        yield
    finally:
        parametrize._cache, parametrize._cache_enabled = before


@contextmanager
def _no_parameter_hooks(model: nn.Module) -> Iterator[None]:
    """Without the user's hooks on parameters: they change gradients for an optimizer, and F is that of the model.

    Autograd would call them with sums over a batch, and per-sample rules not at all.
    """
    hooks = [parameter._backward_hooks for parameter in model.parameters() if parameter._backward_hooks]
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, entries in zip(hooks, before, strict=True):
            each.update(entries)


def _on_gpu(module: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def random_states() -> Callable[[], None]:
    """Return a function that puts the global random states of torch, Python and numpy back to what they are now."""
    cpu, python, legacy = torch.random.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore() -> None:
        torch.random.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def model_states(model: nn.Module) -> Callable[[], None]:
    """Return a function that puts a model's buffers and the global random states back to what they are now.

    Each module gets the same tensors back, with the same values, and what is new is taken away.
    """
    restore_random = random_states()
    # A scripted module's buffers cannot be taken out.
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [(module, dict(module._buffers)) for module in modules]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore() -> None:
        restore_random()
        for module, own in buffers:
            module._buffers.clear()
            module._buffers.update(own)
        for buffer, value in values:
            if not torch.equal(buffer, value):
                _overwrite(buffer, value)

    return restore


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return  # an expanded view of another buffer, which is restored itself
    with torch.no_grad():
        tensor.copy_(values)
