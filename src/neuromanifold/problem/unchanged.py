"""Nothing of the user's model changes, whatever happens inside."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in eval mode with gradients on, and leave everything as it was found.

    Restored at the end, after an error or Ctrl-C too: the training flag of every submodule, buffers (some modules write
    to theirs even in eval mode) and other attributes (hidden states, counters, caches), and the global random states of
    torch, numpy and Python, on which the model or a shuffling loader may draw.  Hooks on parameters are not called
    inside.  Parameters, their .grad and requires_grad, and hooks of modules are never touched in the first place.
    Flags are set one by one: a module's own `train()` may do more than that, such as merging weights.
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
    """Enable or disable cuDNN while inside; torch.backends.cudnn.flags would also reset its precision and the rest."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def _no_kept_weights() -> Iterator[None]:
    """Suspend the user's `parametrize.cached()`: weights in its cache belong to graphs that are not to be used here."""
    before = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = {}, 0
    try:
        yield
    finally:
        parametrize._cache, parametrize._cache_enabled = before


@contextmanager
def _no_parameter_hooks(model: nn.Module) -> Iterator[None]:
    """Remove the user's hooks on parameters while inside: they change gradients for an optimizer, F is the model's.

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


def model_states(model: nn.Module) -> Callable[[], bool]:
    """Return a function that puts a model's state and the global random states back to what they are now.

    State is what a forward pass may carry over to the next one: buffers, and attributes of modules that are not torch's
    own, such as the hidden state of a recurrent network.  The function returns whether any of it had changed.
    """
    restore_random, kept, empty = random_states(), list[_Buffers | _Attributes](), []
    for module in model.modules():
        if module._buffers:
            kept.append(_Buffers(module))
        else:
            empty.append(module._buffers)
        if not type(module).__module__.startswith("torch."):
            kept.append(_Attributes(module))

    def restore() -> bool:
        restore_random()
        changed = [one.restore() for one in kept]
        for buffers in empty:
            if buffers:
                changed.append(True)
                buffers.clear()
        return any(changed)

    return restore


class CarriedState:
    """Snapshots of what a model may carry from one forward pass to the next, and whether it was seen to carry any."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.found = model, False  # found: a forward pass has changed some of the model's state

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present state (`model_states`), and notes whether it had changed."""
        restore = model_states(self._model)

        def restore_and_note() -> None:
            self.found = restore() or self.found

        return restore_and_note


class _Buffers:
    """The buffers of one module as they were: which tensors, and what was in them."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.tensors = module, dict(module._buffers)
        present = {name: value for name, value in self.tensors.items() if value is not None and not value.is_meta}
        self.values = {name: value.detach().clone() for name, value in present.items()}

    def restore(self) -> bool:
        """Put the same tensors back, with the same values, and take away what is new; return whether any differed."""
        changed = False
        if not isinstance(self.module, torch.jit.ScriptModule):  # whose buffers cannot be taken out
            changed = not _same_entries(self.module._buffers, self.tensors)
            self.module._buffers.clear()
            self.module._buffers.update(self.tensors)
        return _restore_values(self.tensors, self.values) or changed


class _Attributes:
    """The attributes of one module as they were, but for parameters, buffers, submodules and hooks.

    Of lists, dicts and sets the entries are kept, of tensors the values; what is inside of other objects is not.
    """

    def __init__(self, module: nn.Module) -> None:
        self.held = vars(module)
        self.entries = {name: value for name, value in self.held.items() if name not in _OF_EVERY_MODULE}
        found = self.entries.items()
        self.contents = {name: copy(v) for name, v in found if isinstance(v, _CONTAINERS) and len(v) <= _ENTRIES}
        self.values = {
            name: v.detach().clone() for name, v in found if isinstance(v, Tensor) and v.layout == torch.strided
        }

    def restore(self) -> bool:
        """Put the same objects back, with the same entries and values; return whether any differed."""
        present = {name: value for name, value in self.held.items() if name not in _OF_EVERY_MODULE}
        changed = not _same_entries(present, self.entries)
        if changed:
            for name in present.keys() - self.entries.keys():
                del self.held[name]
            self.held.update(self.entries)
        for name, entries in self.contents.items():
            changed = _refill(self.entries[name], entries) or changed
        return _restore_values(self.entries, self.values) or changed


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, deque)
_ENTRIES = 4096  # of a container that is copied


def _same_entries(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two dicts hold the very same objects under the same names."""
    return found.keys() == expected.keys() and all(found[name] is expected[name] for name in expected)


def _refill(container: Any, entries: Any) -> bool:
    """Put the entries back into a container; return whether it had others."""
    flat = [[*c.items()] if isinstance(c, dict) else [*c] for c in (container, entries)]
    pairs = zip(*(([x for item in c for x in item] if isinstance(entries, dict) else c) for c in flat), strict=False)
    if len(container) == len(entries) and all(a is b for a, b in pairs):
        return False
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(entries)
    return True


def _restore_values(tensors: dict[str, Any], values: dict[str, Tensor]) -> bool:
    """Overwrite the tensors whose values differ from those that were kept; return whether there were any."""
    different = [name for name, kept in values.items() if not torch.equal(tensors[name], kept)]
    for name in different:
        _overwrite(tensors[name], values[name])
    return bool(different)


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return  # an expanded view of another buffer, which is restored itself
    with torch.no_grad():
        tensor.copy_(values)
