"""Nothing of the user's model changes, whatever happens inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in eval mode with gradients on, and leave everything as it was found.

    Restored at the end, after an error or Ctrl-C too: the training flag of every submodule, buffers (some modules write
    to theirs even in eval mode), and the global random states, on which the model or a shuffling loader may draw.
    Parameters, their .grad and requires_grad, and hooks are never touched in the first place.
    """
    flags = {module: module.training for module in model.modules()}
    buffers = [
        _Buffer(module, name) for module in flags for name, value in module._buffers.items() if value is not None
    ]
    cpu_state = torch.random.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        model.eval()
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, training in flags.items():
            module.training = training
        for buffer in buffers:
            buffer.restore()
        torch.random.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


class _Buffer:
    """A buffer as it was: the tensor, and what was in it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        tensor = module._buffers[name]
        assert tensor is not None
        self.module, self.name, self.tensor = module, name, tensor
        self.version, self.values = tensor._version, tensor.detach().clone()

    def restore(self) -> None:
        """Put the same tensor back, with the same values, if either has changed."""
        if self.tensor._version != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.values)
        if self.module._buffers.get(self.name) is not self.tensor:
            self.module._buffers[self.name] = self.tensor
