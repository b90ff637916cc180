"""Match a result with the tensors that it is used on: by name, prefixes of wrappers and tied names included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.problem.fingerprint import fingerprint
from neuromanifold.problem.model import plain_name
from neuromanifold.results import DiagonalFisher, Provenance

RESULT = "a result of the same parameters as the model's"
_SHOWN = 3  # differences that a message lists
_FINGERPRINTED = 1024  # numbers of each parameter, as in a result's provenance
_ADVICE = "Make one with nm.fisher_diagonal(model, data), or read one with nm.load."


def matched(fim: DiagonalFisher, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each parameter of the result the name that it has among `tensors`.

    A parameter that is not there, or has another shape, is an error that lists the first few differences.
    """
    check_diagonal(fim)
    shapes = {name: values.shape for name, values in fim.sums.items()}
    advice = f"It was made for {fim.provenance.model or 'another model'}; fim.filter(...) selects parameters."
    there = {name: t.shape for name, t in tensors.items()}
    return matched_shapes(shapes, there, fim.provenance.tied, "fim", RESULT, advice)


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters by name, tied ones under each of their names."""
    if not isinstance(model, nn.Module):
        raise TypeError(message("model", "a torch.nn.Module", type(model).__name__))
    return dict(model.named_parameters(remove_duplicate=False))


def check_diagonal(fim: object, argument: str = "fim") -> DiagonalFisher:
    """Return the result if it is a diagonal of at least one parameter."""
    if not isinstance(fim, DiagonalFisher):
        raise TypeError(message(argument, "an nm.DiagonalFisher", type(fim).__name__, _ADVICE))
    if not len(fim):
        raise ValueError(message(argument, "a result with at least one parameter", "an empty selection"))
    return fim


def finite_mean(fim: DiagonalFisher, name: str) -> Tensor:
    """Return the entries of a parameter per sample, in float32 or better; what is no finite square is refused."""
    values = (fim.sums[name] / fim.count).to(torch.promote_types(fim.sums[name].dtype, torch.float32))
    check_squares(values, "fim", repr(name))
    return values


def check_squares(values: Tensor, argument: str, where: str) -> None:
    """Refuse infinities, NaN and negative numbers in a diagonal."""
    if not bool(((values >= 0) & (values < math.inf)).all()):
        advice = "Were outputs finite on all data?"
        raise ValueError(message(argument, "finite and not negative", f"other numbers in {where}", advice))


def finite_values(parameter: Tensor, name: str) -> Tensor:
    """Return a parameter's values without a graph; infinities and NaN are refused."""
    values = parameter.detach()
    if not bool(values.isfinite().all()):
        raise ValueError(message("model", "of finite parameters", f"infinities or NaN in {name!r}"))
    return values


def matched_shapes(
    shapes: Mapping[str, Sequence[int]],
    there: Mapping[str, Sequence[int]],
    tied: Mapping[str, str],
    argument: str,
    expected: str,
    advice: str,
) -> dict[str, str]:
    """Return for each name of `shapes` the one that it has `there`; raise an error that lists the first differences."""
    names = {plain_name(name): name for name in there}
    aliases = {held: other for other, held in tied.items()}
    found, wrong = {}, []
    for name, shape in shapes.items():
        other = names.get(plain_name(name)) or names.get(aliases.get(name, ""))
        if other is None:
            wrong.append(f"{name} is missing")
        elif list(there[other]) != list(shape):
            wrong.append(f"{name} has shape {list(there[other])} instead of {list(shape)}")
        else:
            found[name] = other
    if wrong:
        raise ValueError(message(argument, expected, first_of(wrong), advice))
    return found


def check_weights(provenance: Provenance, model: nn.Module, argument: str) -> None:
    """Raise if a result was made at other weights than the model has now, where that is known."""
    named = {plain_name(name): value for name, value in model.named_parameters()}
    chosen = [(name, named[name]) for name in provenance.granularity if name in named]
    if not provenance.weights or len(chosen) < len(provenance.granularity):
        return
    if fingerprint(*chosen, most=_FINGERPRINTED) != provenance.weights:
        advice = "Compute it again at these weights, or restore those that it was made at."
        raise ValueError(message(argument, "a result at the model's present weights", "one of other weights", advice))


def first_of(differences: Sequence[str]) -> str:
    """Return the first few differences as text, and how many more there are."""
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "; ".join(differences[:_SHOWN]) + more


def selected(names: Sequence[str], patterns: str | Sequence[str], argument: str = "parameters") -> list[str]:
    """Return the names that match one of the patterns; a pattern that matches none is an error."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            begin = f"The names begin with {', '.join(names[:3])}; patterns match whole names, e.g. '*.weight'."
            raise ValueError(message(argument, "a selection that matches something", repr(pattern), begin))
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not found:
        raise ValueError(message(argument, "a selection of at least one parameter", "none"))
    return found
