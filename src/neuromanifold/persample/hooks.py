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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils import parametrize

from neuromanifold.persample.rules import Place, Rule, find_rule, parametrized_places, parametrized_rule

Consume = Callable[["Capture", Tensor], None]
"""Takes a captured call and the gradient of its output, during a backward pass."""


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
    detached: dict[str, Tensor] = field(default_factory=dict)  # what is in the originals' places during a call

    def first(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the first argument of a call, however it was passed."""
        return args[0] if args else options.get(self.argument)


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
    key: tuple[int, int]  # the module's number, and how many of its calls came before in the same forward pass
    node: Any = None  # of the captured output in autograd's graph

    @property
    def overwritten(self) -> bool:
        """Whether the input was changed in place after the call."""
        return self.version is not None and self.x._version != self.version


class CaptureGradient(torch.autograd.Function):
    """An identity whose backward captures the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor, root: Tensor, consume: Callable[[Tensor], None]) -> Tensor:
        """Return another tensor with the same memory.  `root` is differentiated, so that backward always runs."""
        del root
        ctx.consume = consume  # type: ignore[attr-defined]
        return output.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """Call `consume` with the gradient, and return it."""
        ctx.consume(g)
        return g, None, None


class Hooks:
    """The hooks of one model, active inside of `capturing` and in backward passes of what was captured.

    Activation checkpoints call modules again during a backward pass: then parameters are swapped as in the forward
    pass (`excluded` is kept), and nothing is added to the captures.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.modules: list[HookedModule] = []
        for module in model.modules():
            if (owner := _hooked(len(self.modules), module, numbers)) is not None:
                self.modules.append(owner)
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self.captures: list[Capture] = []
        self.root = torch.empty(0, requires_grad=True)
        self._excluded: frozenset[int] = frozenset()
        self._active = self._capturing = False
        self._calls: dict[int, int] = {}
        self._consume: Consume | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Register the hooks while inside; they are removed and parameters restored in any case."""
        handles: list[Any] = []
        try:
            for module in self._recurrent:
                handles += _unfused(module)
            for owner in self.modules:
                before, after = self._hooks_of(owner)
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
        self.captures, self._calls, self._excluded = [], {}, excluded
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
        self._consume = consume
        try:
            yield
        finally:
            self._consume = None
            self.restore()

    def restore(self) -> None:
        """Put every parameter back into its module."""
        for owner in self.modules:
            if owner.detached:
                _put_back(owner)

    def _hooks_of(self, owner: HookedModule) -> tuple[Callable[..., None], Callable[..., Tensor | None]]:
        def before(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            del module
            if self._active:
                self._swap(owner, args, options)

        def after(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: object) -> Tensor | None:
            del module
            swapped = _put_back(owner) if owner.detached else []
            if not swapped or not isinstance(output, Tensor):
                return None  # nothing was swapped, or the module has failed
            return self._capture(owner, swapped, args, options, output)

        return before, after

    def _swap(self, owner: HookedModule, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Put detached parameters in place of those that are asked for and not excluded."""
        if not torch.is_grad_enabled() or not _usable(owner.first(args, options)):
            return
        for name, number in owner.parameters.items():
            held, key = owner.places[name]
            if held is not owner.module._parameters and parametrize._cache_enabled:
                continue  # torch keeps the weight for others, who may want its gradient
            if number not in self._excluded and held.get(key) is owner.originals[name]:
                held[key] = owner.detached[name] = owner.originals[name].detach()

    def _capture(
        self, owner: HookedModule, swapped: list[str], args: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> Tensor:
        wanted = owner.parameters
        if len(swapped) != len(wanted):
            wanted = {name: owner.parameters[name] for name in swapped}
        x = owner.first(args, options)
        x = x if x.device == output.device else x.to(output.device)  # as the dispatch of a `device_map` does
        named = {name: value for name, value in options.items() if name != owner.argument} if options else options
        version = None if x.is_inference() else x._version
        before = self._calls.get(owner.number, 0)
        capture = Capture(owner, wanted, x, args[1:], named, output.shape, version, (owner.number, before))
        if self._capturing:
            self._calls[owner.number] = before + 1
            self.captures.append(capture)
        through: Tensor = CaptureGradient.apply(output, self.root, lambda g: self._consume_gradient(capture, g))  # type: ignore[no-untyped-call]
        capture.node = through.grad_fn
        return through

    def _consume_gradient(self, capture: Capture, g: Tensor) -> None:
        if self._consume is not None:
            self._consume(capture, g)


def _hooked(number: int, module: nn.Module, numbers: dict[int, int]) -> HookedModule | None:
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
            chosen[name], originals[name] = numbers[id(held[key])], held[key]
    rule = (parametrized_rule if parametrized else find_rule)(module) if chosen else None
    if rule is None:
        return None
    return HookedModule(number, module, rule, chosen, originals, places, _first_argument(type(module).forward))


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


def _usable(x: object) -> bool:
    """Whether an input can be kept: a tensor, and not one inside of a transform such as vmap."""
    return isinstance(x, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


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
