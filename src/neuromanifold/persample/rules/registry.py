"""The registry of per-sample rules: which layers have one, and how one is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from neuromanifold.core.checks import message
from neuromanifold.persample.gradients import Form


class Call(NamedTuple):
    """One call of a module: what went in, and the gradient of what came out, both with samples first."""

    module: nn.Module
    x: Tensor  #: the first argument, [n, ...]
    others: tuple[Any, ...]  #: the other positional arguments, as they came
    options: dict[str, Any]  #: the keyword arguments, as they came
    g: Tensor  #: the gradient of the output, [n, ...]
    wanted: frozenset[str]  #: names of the module's own parameters whose gradients are asked for
    validating: bool = True  #: whether the rule should check that it applies; False once it has been validated


RuleFunction = Callable[[Call], dict[str, Form]]
"""Returns the per-sample gradients with respect to the wanted parameters, by name."""


class Slot(NamedTuple):
    """Where a module holds a parameter, so that another tensor can take its place during a call."""

    held: dict[str, Any]  # the `_parameters` of a module
    key: str


class NotApplicableError(TypeError):
    """Raised by a rule that finds that it does not apply to a call: the module then has no rule."""


Applies = Callable[[nn.Module], bool]


class Rule(NamedTuple):
    """An entry of the registry: a rule and the modules that it applies to."""

    function: RuleFunction
    parameters: frozenset[str]  # all that such a module may have
    extra_dims: bool  # whether inputs may have further dimensions between the batch dimension and the layer's own
    applies: Applies


_RULES: dict[type[nn.Module], Rule] = {}
_NAMED: list[tuple[Applies, Rule]] = []

F = TypeVar("F", bound=RuleFunction)


def rule(
    *modules: type[nn.Module],
    parameters: tuple[str, ...] = ("weight", "bias"),
    extra_dims: bool = False,
    applies: Applies | None = None,
) -> Callable[[F], F]:
    """Register a function as the per-sample rule of one or several module classes.

    The function gets a `Call` and returns, for each name in `call.wanted`, the gradients of single samples as one of
    the forms `Dense`, `Product` and `Rows`.  It must be pure: it neither changes the module nor keeps anything.

    Args:
        modules: classes with this very forward; subclasses count if they have not overridden it.
        parameters: the names of all parameters that such a module may have of its own.
        extra_dims: whether the function takes inputs with any number of dimensions after the samples.
        applies: a module for which this returns False has no rule.

    Returns:
        A decorator, which returns the function as it is.

    Raises:
        TypeError: what is registered is no class of modules, or not a function.

    Example:
        >>> from neuromanifold.persample.gradients import Dense
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.ones(4))
        ...     def forward(self, x):
        ...         return x * self.scale
        >>> @nm.rule(Scale, parameters=("scale",))
        ... def scale(call):
        ...     return {"scale": Dense(call.g * call.x)}
        >>> nm.check_rule(Scale(), torch.randn(5, 4)).passed
        True
    """
    for kind in modules:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(message("modules", "subclasses of torch.nn.Module", repr(kind)))
    if not modules:
        raise TypeError(message("modules", "at least one subclass of torch.nn.Module", "none"))

    def enter(function: F) -> F:
        entry = Rule(function, frozenset(parameters), extra_dims, applies or _always)
        _RULES.update(dict.fromkeys(modules, entry))
        return function

    return enter


def rule_where(condition: Applies, parameters: tuple[str, ...], extra_dims: bool = False) -> Callable[[F], F]:
    """Register a function as the rule of all modules that meet a condition: for classes that may not be installed."""

    def enter(function: F) -> F:
        _NAMED.append((condition, Rule(function, frozenset(parameters), extra_dims, _always)))
        return function

    return enter


def find_rule(module: nn.Module, computed: frozenset[str] = frozenset()) -> Rule | None:
    """Return the rule of a module, if one knows its forward and all of its parameters.

    `computed`: names of tensors that a parametrization computes in place of parameters (`parametrized.py`).
    """
    own = {name for name, parameter in module._parameters.items() if parameter is not None} | computed
    if not own or _has_forward_of_its_own(module) or torch_module._global_forward_hooks:
        return None
    for kind in type(module).__mro__:
        entry = _RULES.get(kind)
        if entry is not None:
            if type(module).forward is kind.forward:  # type: ignore[attr-defined]
                return entry if own <= entry.parameters and entry.applies(module) else None
            break  # another forward: perhaps one of those below
    for condition, entry in _NAMED:
        if own <= entry.parameters and condition(module):
            return entry
    return None


def _has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether the module itself has another forward than its class.

    That of accelerate's dispatch (`device_map`) moves inputs to the module's device and calls the one of the class; so
    does that of a tensor-parallel layer of transformers, between conversions of its input and output.
    """
    own = vars(module)
    inner = own.get("_old_forward") if "_hf_hook" in own else _inside_of_parallel(own.get("forward"))
    return "forward" in own and getattr(inner, "__func__", None) is not type(module).forward


def _inside_of_parallel(forward: Any) -> Any:
    """Return the forward that one of a tensor-parallel layer of transformers calls; None for any other."""
    if getattr(forward, "__module__", None) != "transformers.distributed.tensor_parallel":
        return None
    closure = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in closure if name == "original_forward"), None)


def _always(module: nn.Module) -> bool:
    del module
    return True


def known_rules() -> list[str]:
    """Return the names of module classes with a rule, and of rules for other libraries' classes, for messages."""
    named = [entry.function.__name__ for _, entry in _NAMED]
    return sorted({kind.__name__ for kind in _RULES} | set(named), key=str.lower)


def why_no_rule(module: nn.Module) -> str:
    """Return the reason why `find_rule` finds no rule, as text; empty if it finds one."""
    if find_rule(module) is not None:
        return ""
    kind, own = type(module).__name__, {name for name, value in module._parameters.items() if value is not None}
    if not own:
        inside = next((f"{name!r} ({type(child).__name__})" for name, child in module.named_children()), "")
        return f"{kind} has no parameters of its own" + (f"; its part {inside} may" if inside else "")
    entered = next((parent for parent in type(module).__mro__ if parent in _RULES), None)
    if _has_forward_of_its_own(module) or (entered is not None and type(module).forward is not entered.forward):
        return f"{kind} has a forward of its own" + (f", other than {entered.__name__}'s" if entered else "")
    if entered is None:
        return f"{kind} has not been registered"
    if not own <= _RULES[entered].parameters:
        return f"the rule of {entered.__name__} does not know {', '.join(sorted(own - _RULES[entered].parameters))}"
    return f"the rule of {entered.__name__} says that it does not apply to this {kind}"
