"""Parameters that accelerate has offloaded to the CPU or the disk (`device_map`, `cpu_offload`), loaded for a run.

Between calls such a module has parameters without values, and new ones in each forward pass.  Autograd keeps what the
backward pass needs of them, so that all are in memory once the outputs are there: a run may load them before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.problem.model import Selection, base_model, select_parameters

_COMPARED = 64  # numbers of each parameter that are compared first


@contextmanager
def loading_offloaded(model: object, selection: Selection) -> Iterator[None]:
    """Load the modules that have offloaded parameters among the chosen ones; offload them again at the end."""
    if "accelerate.hooks" not in sys.modules or not isinstance(model, nn.Module):  # without it nothing was offloaded
        yield
        return
    offloaded = {module: hook for module in model.modules() if (hook := _loading(module)) is not None}
    chosen = set(map(id, select_parameters(model, selection).values())) if offloaded else set()
    wanted = {one: hook for one, hook in offloaded.items() if not chosen.isdisjoint(map(id, one.parameters()))}
    with ExitStack() as stack:
        for module, hook in wanted.items():
            stack.callback(hook.post_forward, module, None)
            hook.pre_forward(module)
        if wanted:
            _tie(model, wanted)
        try:
            for hook in wanted.values():
                hook.offload = False
            yield
        finally:
            for hook in wanted.values():
                hook.offload = True


def _loading(module: nn.Module) -> Any:
    """Return the hook that loads a module's own tensors for a call; that of the whole model has another one beside."""
    hook: Any = getattr(module, "_hf_hook", None)
    kind = sys.modules["accelerate.hooks"].AlignDevicesHook
    return next((one for one in getattr(hook, "hooks", (hook,)) if isinstance(one, kind) and one.offload), None)


def _tie(model: nn.Module, hooks: dict[nn.Module, Any]) -> None:
    """Make one parameter of those that were one before they were offloaded, each of which was loaded by itself."""
    first, from_disk = dict[int, nn.Parameter](), set[int]()
    for module, hook in hooks.items():
        values = hook.weights_map
        for name, parameter in module._parameters.items():
            if parameter is not None:
                one, again = values[name], values[name]
                if one.data_ptr() == again.data_ptr():  # on the CPU, where those that were tied share their memory
                    module._parameters[name] = first.setdefault(one.data_ptr(), parameter)
                else:
                    from_disk.add(id(parameter))
    base: Any = base_model(model)
    if hasattr(base, "tie_weights"):
        base.tie_weights()
    seen: dict[object, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or parameter.ndim < 2:
            continue
        key = parameter.shape, *parameter.detach().flatten()[:_COMPARED].tolist()
        before, other = seen.setdefault(key, (name, parameter))
        if other is not parameter and not from_disk.isdisjoint((id(parameter), id(other))) and _same(parameter, other):
            advice = "Leave one of them out with `parameters`, or do not offload them to the disk."
            got = f"the same values in {before!r} and {name!r}, which may be a single parameter that is used twice"
            raise ValueError(message("model", "with other values in each parameter on the disk", got, advice))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same numbers, and not all of them the same number."""
    return torch.equal(a, b.to(a.device)) and bool((a != a.flatten()[0]).any())
