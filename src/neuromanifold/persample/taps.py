"""Taps: where a module's input and the gradient of its output are picked up, for the time of a call only.

Before a module with a rule runs, its parameters are replaced by detached ones, so that autograd neither keeps anything
for their gradients nor computes them; right after, they are put back, and the output goes through a `Tap`, an identity
whose backward hands the gradient to whoever is listening.  What autograd still connects to a parameter is then exactly
what no rule covers: a use outside of the module.

The tap shares the output's memory without being a view of it, so a model may go on working on it in place.
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

from neuromanifold.persample.rules import Place, Rule, find_any_rule, places

Listener = Callable[["Record", Tensor], None]


@dataclass(eq=False)
class Site:
    """A module with a rule, and those of its parameters that are asked for."""

    module: nn.Module
    rule: Rule
    parameters: dict[str, int]  # name in the module: number among the chosen parameters
    detached: dict[str, Tensor]
    originals: dict[str, nn.Parameter]
    places: dict[str, Place]
    argument: str  # what the first argument is called
    number: int = 0  # among the sites of the model

    def first(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The first argument of a call."""
        return args[0] if args else options.get(self.argument)


@dataclass(eq=False, slots=True)
class Record:
    """One call of a module: all that its rule will need, but for the gradient."""

    site: Site
    parameters: dict[str, int]
    x: Tensor
    others: tuple[Any, ...]
    options: dict[str, Any]
    shape: torch.Size  # of the output
    version: int | None  # of x, which must not be changed in place afterwards
    key: tuple[int, int]  # of the site, and how many of its calls came before in the same forward pass
    layout: tuple[int, int] | None = None  # which dimension holds the samples, and how many rows each of them has there
    node: Any = None  # of the tap in autograd's graph
    meetings: list[Any] = field(default_factory=list)  # where its gradients are picked up instead, if shared

    @property
    def changed(self) -> bool:
        """Whether the input has been overwritten since."""
        return self.version is not None and self.x._version != self.version


class Tap(torch.autograd.Function):
    """The identity; its backward tells what passes."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor, root: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
        """Another tensor with the same memory.  `root` is what autograd is asked to go to."""
        del root
        ctx.tell = tell  # type: ignore[attr-defined]
        return output.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """Tell, and pass on."""
        ctx.tell(g)
        return g, None, None


class Taps:
    """The taps of one model.  `records` are the calls since `begin`."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.plain: set[int] = set()  # parameters that rules must leave alone
        self.sites = [site for module in model.modules() if (site := _site(module, numbers)) is not None]
        for number, site in enumerate(self.sites):
            site.number = number
        self.records: list[Record] = []
        self.listener: Listener | None = None
        self.root = torch.empty(0, requires_grad=True)
        self.nothing = torch.empty(0)
        self._recording = False
        self._calls: dict[int, int] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on the modules while inside; every trace of them is gone afterwards, whatever happens."""
        handles = []
        try:
            for site in self.sites:
                handles.append(site.module.register_forward_pre_hook(_before(self, site), with_kwargs=True))
                hook = site.module.register_forward_hook(
                    _after(self, site), with_kwargs=True, prepend=True, always_call=True
                )
                handles.append(hook)
            yield
        finally:
            self.restore()
            for handle in handles:
                handle.remove()
            self.records, self.listener = [], None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls inside are recorded; what came before is forgotten.  Activation checkpoints call modules later, too."""
        self.records, self._calls = [], {}
        self.root, self._recording = torch.empty(0, requires_grad=True), True
        try:
            yield
        finally:
            self._recording = False
            self.restore()

    def restore(self) -> None:
        """Put every parameter back into its module."""
        for site in self.sites:
            self.put_back(site)

    def swap(self, site: Site, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Detached parameters for those that are asked for, but for the plain ones and for any that are not there."""
        if not torch.is_grad_enabled() or not _usable(site.first(args, options)):
            return
        for name, number in site.parameters.items():
            held, key = site.places[name]
            if held is not site.module._parameters and parametrize._cache_enabled:
                continue  # torch keeps the weight for others, who may want its gradient
            if number not in self.plain and held.get(key) is site.originals[name]:
                held[key] = site.detached[name]

    def put_back(self, site: Site) -> list[str]:
        """The parameters of a module; which of them had been swapped."""
        swapped = []
        for name, (held, key) in site.places.items():
            if held.get(key) is site.detached[name]:
                held[key] = site.originals[name]
                swapped.append(name)
        return swapped

    def tapped(
        self, site: Site, swapped: list[str], args: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> Tensor:
        """The output behind a tap, and a record of the call."""
        all_of_them = len(swapped) == len(site.parameters)
        wanted = site.parameters if all_of_them else {name: site.parameters[name] for name in swapped}
        x = site.first(args, options)
        named = {name: value for name, value in options.items() if name != site.argument} if options else options
        version = None if x.is_inference() else x._version
        before = self._calls.get(site.number, 0)
        record = Record(site, wanted, x, args[1:], named, output.shape, version, (site.number, before))
        if self._recording:
            self._calls[site.number] = before + 1
            self.records.append(record)
        through: Tensor = Tap.apply(output, self.root, lambda g: self._tell(record, g))  # type: ignore[no-untyped-call]
        record.node = through.grad_fn
        return through

    def _tell(self, record: Record, g: Tensor) -> None:
        if self.listener is not None:
            self.listener(record, g)


def _site(module: nn.Module, numbers: dict[int, int]) -> Site | None:
    own = {name: (place, place.held[place.key]) for name, place in places(module).items()}
    chosen = {name: numbers[id(parameter)] for name, (_, parameter) in own.items() if id(parameter) in numbers}
    found = find_any_rule(module) if chosen else None
    if found is None:
        return None
    originals = {name: own[name][1] for name in chosen}
    detached, there = {name: own[name][1].detach() for name in chosen}, {name: own[name][0] for name in chosen}
    return Site(module, found, chosen, detached, originals, there, _first_argument(type(module).forward))


@functools.cache
def _first_argument(forward: Callable[..., object]) -> str:
    _, first, *_ = *inspect.signature(forward).parameters, ""
    return first


def _usable(x: object) -> bool:
    """Whether an input can be kept: a tensor, and not one inside of a transform such as vmap."""
    return isinstance(x, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _before(taps: Taps, site: Site) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        del module
        taps.swap(site, args, options)

    return hook


def _after(taps: Taps, site: Site) -> Callable[..., Tensor | None]:
    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: object) -> Tensor | None:
        del module
        swapped = taps.put_back(site)
        if not swapped or not isinstance(output, Tensor):
            return None  # nothing was swapped, or the module has failed
        return taps.tapped(site, swapped, args, options, output)

    return hook
