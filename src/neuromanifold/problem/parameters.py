"""Which parameters: by name pattern, by list, or by predicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from neuromanifold.core.checks import message

Selection = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of `torch.compile`, FSDP and (Distributed)DataParallel."""
    wrappers = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    plain = ".".join([part for part in name.split(".") if part not in wrappers])
    while plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return plain


def select_parameters(model: nn.Module, selection: Selection) -> dict[str, nn.Parameter]:
    """The trainable parameters that match, by plain name; shared ones once, under their first name.

    `selection` is None (all), a pattern such as "encoder.*" or several of them, or a function of name and parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(message("model", "a torch.nn.Module", type(model).__name__))
    if selection is not None and not callable(selection) and not isinstance(selection, str):
        selection = list(selection)
    given = dict(model.named_parameters())
    plain = {name: plain_name(name) for name in given}
    times = Counter(plain.values())
    named = {plain[name] if times[plain[name]] == 1 else name: value for name, value in given.items()}
    for name, parameter in named.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(message("model", "initialised", f"a lazy {name!r}", "Call it once on a batch first."))
    chosen = {name: parameter for name, parameter in named.items() if _matches(selection, name, parameter)}
    trainable = {name: parameter for name, parameter in chosen.items() if parameter.requires_grad}
    for name, parameter in trainable.items():
        if parameter.is_complex():
            advice = "Leave it out, or store it as real numbers with torch.view_as_real."
            raise TypeError(message("parameters", "real", f"{parameter.dtype} for {name!r}", advice))
    if trainable:
        return trainable
    if not named:
        raise ValueError(message("model", "a module with parameters", "one without"))
    if chosen:
        advice = "Call .requires_grad_() on those you want; frozen parameters are left out."
        got = f"{len(chosen)} frozen ones ({next(iter(chosen))}, ...)"
        raise ValueError(message("parameters", "a selection with trainable parameters", got, advice))
    advice = f"The model's names begin with {', '.join(list(named)[:3])}; patterns match whole names, e.g. '*.weight'."
    raise ValueError(message("parameters", "a selection that matches something", repr(selection), advice))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter, with the first name, which results have it under."""
    first: dict[nn.Parameter, str] = {}
    every = [(plain_name(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    held = [(name, first.setdefault(parameter, name)) for name, parameter in every]
    return {name: first_name for name, first_name in held if name != first_name}


def _matches(selection: Selection, name: str, parameter: nn.Parameter) -> bool:
    if selection is None:
        return True
    if callable(selection):
        return bool(selection(name, parameter))
    patterns = [selection] if isinstance(selection, str) else list(selection)
    if not all(isinstance(pattern, str) for pattern in patterns):
        expected = "None, a pattern, a list of patterns, or a function of name and parameter"
        raise TypeError(message("parameters", expected, repr(selection)))
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, plain_name(pattern)) for pattern in patterns)
