"""Hooks that capture a module's input and the gradient of its output, for the time of a call only.

Before a module with a rule runs, its parameters are replaced by detached ones, so that autograd neither keeps anything
for their gradients nor computes them; right after, they are put back, and the output goes through `CaptureGradient`, an
identity whose backward captures the gradient.  What autograd still connects to a parameter is then exactly what no rule
covers: a use outside of the module.

The captured output shares the output's memory without being a view of it, so a model may go on working on it in place.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from neuromanifold.persample.rules import Place, Rule, find_rule, parametrized_places, parametrized_rule
from neuromanifold.persample.shards import is_distributed

_PLAIN = (int, float, str, tuple, list, type(None))
_FREED = torch.empty(0)
Consume = Callable[["Capture", Tensor], bool]
"""Takes a captured call and the gradient of its output, during a backward pass; returns whether to free its input."""


@dataclass(eq=False)
class HookedModule:
    """A module with a rule, and those of its parameters that are asked for."""

    number: int
    module: nn.Module
    rule: Rule
    parameters: dict[str, int]  # name in the module: number among the chosen parameters
    originals: dict[str, nn.Parameter]
    places: dict[str, Place]
    argument: str  # the name of the first argument
    settings: tuple[str, ...]  # names of plain attributes, such as a stride, which rules read
    detached: dict[str, Tensor] = field(default_factory=dict)  # what is in the originals' places during a call

    def state(self) -> list[object]:
        """Return what a rule may read of the module besides its parameters; a buffer comes with its version."""
        held, found = vars(self.module), list[object]()
        for buffer in self.module._buffers.values():
            found += () if buffer is None or buffer.is_inference() else (buffer, buffer._version)
        return [*map(held.get, self.settings), *found]


@dataclass(eq=False, slots=True)
class Capture:
    """One call of a module: all that its rule needs, but for the gradient."""

    owner: HookedModule
    parameters: dict[str, int]
    x: Tensor
    others: tuple[Any, ...]
    options: dict[str, Any]
    shape: torch.Size  # of the output
    version: int | None  # of x, which must not be changed in place afterwards
    state: list[object]  # of the module during the call, which rules read only later
    key: tuple[int, int]  # the module's number, and how many of its calls came before in the same forward pass
    node: Any = None  # of the captured output in autograd's graph

    @property
    def overwritten(self) -> bool:
        """Whether the input was changed in place after the call, or the module has other settings or buffers now."""
        now = self.owner.state()
        same = len(now) == len(self.state) and (
            all(map(operator.is_, now, self.state))
            or all(a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(now, self.state, strict=True))
        )
        return not same or (self.version is not None and self.x._version != self.version)


class CaptureGradient(torch.autograd.Function):
    """An identity whose backward captures the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor, hooks: Hooks, capture: Capture) -> Tensor:
        """Return another tensor with the same memory.  `root` is differentiated, so that backward always runs."""
        del root
        ctx.hooks, ctx.capture = hooks, capture
        return output.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        """Hand the gradient to whoever consumes it during this backward pass, and return it."""
        if ctx.hooks.consume is not None and ctx.hooks.consume(ctx.capture, g):
            ctx.capture.x = _FREED  # autograd frees what it has used, too
        return g, None, None, None


class Hooks:
    """The hooks of one model, active inside of `capturing` and in backward passes of what was captured.

    Activation checkpoints call modules again during a backward pass: then parameters are swapped as in the forward
    pass (`excluded` is kept), and nothing is added to the captures.
    """

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], held: list[nn.Parameter] | None = None
    ) -> None:
        """`held`: what modules hold while they do not compute, if these are others (FSDP2)."""
        numbers = {id(parameter): i for i, parameter in enumerate(held or parameters)}
        self.modules: list[HookedModule] = []
        for module in model.modules():
            if (owner := _hooked(len(self.modules), module, numbers, parameters)) is not None:
                self.modules.append(owner)
        self.in_parts = any(map(is_distributed, model.parameters()))
        """Whether what is captured may be a part of a tensor, as in tensor parallelism."""
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self.captures: list[Capture] = []
        self.root = torch.empty(0, requires_grad=True)  # differentiated, so that `CaptureGradient.backward` always runs
        self._excluded: frozenset[int] = frozenset()
        self._active = self._capturing = False
        self._calls: dict[int, int] = {}
        self.consume: Consume | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Register the hooks while inside; they are removed and parameters restored in any case."""
        handles: list[Any] = []
        try:
            for module in self._recurrent:
                handles += _unfused(module)
            for owner in self.modules:
                before, after = functools.partial(self._swap, owner), functools.partial(self._capture, owner)
                handles.append(owner.module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(
                    owner.module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True)
                )
            yield
        finally:
            self.restore()
            self._active = False
            for handle in handles:
                handle.remove()
            self.captures = []

    @contextmanager
    def capturing(self, excluded: frozenset[int]) -> Iterator[None]:
        """Capture the calls inside; parameters with `excluded` numbers are left to autograd."""
        self.release()
        self._calls, self._excluded = {}, excluded
        self.root = torch.empty(0, requires_grad=True)
        self._active = self._capturing = True
        try:
            yield
        finally:
            self._capturing = False
            self.restore()

    def release(self) -> None:
        """Release the captures of the last forward pass, and deactivate the hooks."""
        for capture in self.captures:
            capture.node = None
        self.captures, self._active = [], False

    @contextmanager
    def consumed_by(self, consume: Consume) -> Iterator[None]:
        """Call `consume` with each captured gradient during a backward pass."""
        self.consume = consume
        try:
            yield
        finally:
            self.consume = None
            self.restore()

    def restore(self) -> None:
        """Put every parameter back into its module."""
        for owner in self.modules:
            if owner.detached:
                _put_back(owner)

    def _swap(self, owner: HookedModule, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Before a module runs: put detached parameters in place of those that are asked for and not excluded."""
        x = args[0] if args else options.get(owner.argument)
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # inside of a transform such as vmap
        if not self._active or not torch.is_grad_enabled() or not isinstance(x, Tensor) or wrapped(x):
            return
        for name, number in owner.parameters.items():
            held, key = owner.places[name]
            if held is not module._parameters and parametrize._cache_enabled:
                continue  # torch keeps the weight for others, who may want its gradient
            if number not in self._excluded and held.get(key) is owner.originals[name]:
                held[key] = owner.detached[name] = owner.originals[name].detach()

    def _capture(
        self, owner: HookedModule, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: object
    ) -> Tensor | None:
        """After a module has run: put its parameters back, and capture the call."""
        del module
        swapped = _put_back(owner) if owner.detached else []
        if not swapped or not isinstance(output, Tensor):
            return None  # nothing was swapped, or the module has failed
        wanted = owner.parameters
        if len(swapped) != len(wanted):
            wanted = {name: owner.parameters[name] for name in swapped}
        x: Tensor = args[0] if args else options[owner.argument]
        x = x if x.device == output.device else x.to(output.device)  # as the dispatch of a `device_map` does
        named = {name: value for name, value in options.items() if name != owner.argument} if options else options
        version = None if x.is_inference() else x._version
        before = self._calls.get(owner.number, 0)
        key = (owner.number, before)
        capture = Capture(owner, wanted, x, args[1:], named, output.shape, version, owner.state(), key)
        if self._capturing:
            self._calls[owner.number] = before + 1
            self.captures.append(capture)
        through: Tensor = CaptureGradient.apply(output, self.root, self, capture)  # type: ignore[no-untyped-call]
        capture.node = through.grad_fn
        return through


def _hooked(
    number: int, module: nn.Module, numbers: dict[int, int], parameters: list[nn.Parameter]
) -> HookedModule | None:
    """Return a module with those of its parameters that are asked for, if a rule knows it."""
    parametrized = parametrize.is_parametrized(module)
    if not (module._parameters or parametrized) or isinstance(module, torch.jit.ScriptModule):
        return None  # of a scripted one, parameters cannot be taken out, nor has it hooks
    places = {name: Place(module._parameters, name) for name in module._parameters}
    if parametrized:
        places |= parametrized_places(module)
    chosen, originals = {}, {}
    for name, (held, key) in places.items():
        if id(held[key]) in numbers:
            chosen[name] = numbers[id(held[key])]
            originals[name] = parameters[chosen[name]]
    rule = (parametrized_rule if parametrized else find_rule)(module) if chosen else None
    if rule is None:
        return None
    plain = tuple(name for name, value in vars(module).items() if isinstance(value, _PLAIN) and name != "training")
    return HookedModule(number, module, rule, chosen, originals, places, _first_argument(type(module).forward), plain)


def _put_back(owner: HookedModule) -> list[str]:
    """Put the parameters of a module back, and return which of them had been swapped."""
    swapped = []
    for name, tensor in owner.detached.items():
        held, key = owner.places[name]
        if held.get(key) is tensor:
            held[key] = owner.originals[name]
            swapped.append(name)
    owner.detached.clear()
    return swapped


@functools.cache
def _first_argument(forward: Callable[..., object]) -> str:
    _, first, *_ = *inspect.signature(forward).parameters, ""
    return first


def _unfused(module: nn.RNNBase) -> list[Any]:
    """Add hooks that disable a recurrent layer's fused CPU kernel, which hides where its weights are used."""
    enabled: list[bool] = []

    def before(*_: object) -> None:
        enabled.append(torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)

    def after(*_: object) -> None:
        if enabled:
            torch._C._set_mkldnn_enabled(enabled.pop())

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
