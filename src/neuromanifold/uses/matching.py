"""Match a result with the tensors that it is used on: by name, prefixes of wrappers and tied names included."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.problem.model import plain_name
from neuromanifold.results import DiagonalFisher

_SHOWN = 3  # differences that a message lists


def matched(fim: DiagonalFisher, tensors: Mapping[str, Tensor], argument: str = "fim") -> dict[str, str]:
    """Return for each parameter of the result the name that it has among `tensors`.

    A parameter that is not there, or has another shape, is an error that lists the first few differences.
    """
    if not isinstance(fim, DiagonalFisher):
        advice = "Make one with nm.fisher_diagonal(model, data), or read one with nm.load."
        raise TypeError(message(argument, "an nm.DiagonalFisher", type(fim).__name__, advice))
    if not len(fim):
        raise ValueError(message(argument, "a result with at least one parameter", "an empty selection"))
    names = {plain_name(name): name for name in tensors}
    aliases = {held: other for other, held in fim.provenance.tied.items()}
    found, wrong = {}, []
    for name, values in fim.sums.items():
        there = names.get(plain_name(name)) or names.get(aliases.get(name, ""))
        if there is None:
            wrong.append(f"{name} is missing")
        elif tensors[there].shape != values.shape:
            wrong.append(f"{name} has shape {list(tensors[there].shape)} instead of {list(values.shape)}")
        else:
            found[name] = there
    if wrong:
        listed = "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        advice = f"It was made for {fim.provenance.model or 'another model'}; fim.filter(...) selects parameters."
        raise ValueError(message(argument, "a result of the same parameters as the model's", listed, advice))
    return found
