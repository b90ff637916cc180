"""Elastic weight consolidation (EWC): a quadratic penalty that keeps a model near what it has learned.

With F the Fisher information per sample and N samples, the loss of the old data near its minimum θ* is, but for a
constant, (N/2) Σ_i F_i (θ_i − θ*_i)²  (the log posterior in Laplace's approximation).  Hence

    penalty(model) = strength/2 Σ_i F_i (θ_i − θ*_i)²

and `strength` is the number of old samples for which one sample of the new loss stands: N/M next to a loss that is a
mean over M new samples.  Penalties of several tasks are added up into a single one, at the memory of a single one:

    ½ Σ_k A_k (θ − a_k)²  =  ½ A (θ − a)² + constant,    A = Σ_k A_k,    a = Σ_k A_k a_k / A.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import check_reduction, finite_number, message, promoted
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.files import reads, save_tensors
from neuromanifold.results.scaling import Scalable
from neuromanifold.uses.matching import (
    RESULT,
    check_diagonal,
    finite_mean,
    finite_values,
    matched_shapes,
    parameters_of,
    selected,
)


class Consolidation(Scalable):
    """The penalty ½ strength Σ_i F_i (θ_i − θ*_i)² of elastic weight consolidation, with θ* the model's parameters now.

    Call it on the model in training, and add it to the loss.  Penalties are values: `a + b` holds on to two tasks, each
    with its own θ*; `0.9 * a` forgets a little; `a.moved(model)` has the same weights around the model's parameters
    now.  Online EWC, with one θ* and decay γ, is `nm.Consolidation(model, fim, strength) + γ * penalty.moved(model)`.
    Cost: one multiplication and one addition for each parameter.

    Args:
        model: where the penalty is zero.  Its parameters are copied.
        fim: a result for this model, in the view in which it is meant: "mean" (as it is by default), "sum" or "token".
        strength: a number for all parameters, or numbers by pattern, such as {"classifier.*": 0, "*": 100}: the first
            pattern that matches counts.  Parameters with strength 0 may differ from the model's.

    Raises:
        ValueError: model and result do not have the same parameters, or a strength is negative.

    Example:
        >>> penalty = nm.Consolidation(model, nm.fisher_diagonal(model, data), strength=10.0)
        >>> penalty(model).item()  # zero until the model is trained on
        0.0
    """

    def __init__(self, model: nn.Module, fim: DiagonalFisher, strength: float | Mapping[str, float] = 1.0) -> None:
        check_diagonal(fim)
        strengths = {name: s for name, s in _strengths(list(fim.sums), strength).items() if s}
        given = parameters_of(model)
        advice = f"It was made for {fim.provenance.model or 'another model'}; fim.filter(...) selects parameters."
        shapes = {name: fim.sums[name].shape for name in strengths}
        tied = fim.provenance.tied
        found = matched_shapes(shapes, {n: p.shape for n, p in given.items()}, tied, "fim", RESULT, advice)
        anchors = {
            n: finite_values(given[there], n).clone().to(promoted(given[there].dtype)) for n, there in found.items()
        }
        scale = fim.count / fim.divisor  # from what is per sample to the view
        self.importances: Mapping[str, Tensor] = {  # strength times F
            name: finite_mean(fim, name).to(anchor.device) * (scale * strengths[name])
            for name, anchor in anchors.items()
        }
        self.anchors: Mapping[str, Tensor] = anchors
        self.constant = torch.zeros((), dtype=torch.float64)  # what a sum of several penalties is at its minimum
        self.reduction, self.tied = fim.reduction, dict(tied)

    def __call__(self, model: nn.Module) -> Tensor:
        """Return the penalty as a scalar, to be added to the loss; in float32 or better, also inside autocast.

        Frozen parameters count, without a gradient.
        """
        parameters = self._found(model)
        total = self.constant.to(device=next(iter(parameters.values())).device, dtype=torch.float32)
        for name, parameter in parameters.items():
            importance, anchor = (d[name].to(parameter.device) for d in (self.importances, self.anchors))
            difference = parameter.to(anchor.dtype) - anchor
            term = 0.5 * (difference.square() * importance).sum()
            total = total.to(torch.promote_types(total.dtype, term.dtype)) + term.to(total.device)
        return total

    def __add__(self, other: Consolidation) -> Consolidation:
        if not isinstance(other, Consolidation):
            return NotImplemented
        if self.reduction != other.reduction:
            got, advice = f"{other.reduction} and {self.reduction}", "Use .mean, .sum or .per_token on both results."
            raise ValueError(message("other", "a penalty made of a result in the same view", got, advice))
        importances, anchors, constant = dict(self.importances), dict(self.anchors), self.constant + other.constant
        for name, b in other.importances.items():
            if name not in importances:
                importances[name], anchors[name] = b, other.anchors[name]
                continue
            a = importances[name]
            if a.shape != b.shape:
                got = f"{list(b.shape)} and {list(a.shape)} for {name}"
                advice = "Give a head that differs from task to task the strength 0: strength={'head.*': 0, '*': 1}."
                raise ValueError(message("other", "a penalty for parameters of the same shapes", got, advice))
            b, apart = b.to(a.device), other.anchors[name].to(a.device) - anchors[name]
            share = (b / (a + b)).nan_to_num(0.0)  # both are zero
            anchors[name] = anchors[name] + share * apart
            importances[name] = a + b
            constant = constant + 0.5 * (a * share * apart.square()).double().sum().cpu()
        return self._with(importances=importances, anchors=anchors, constant=constant, tied={**self.tied, **other.tied})

    def _times(self, factor: float) -> Consolidation:
        scaled = {name: value * factor for name, value in self.importances.items()}
        return self._with(importances=scaled, constant=self.constant * factor)

    def moved(self, model: nn.Module) -> Consolidation:
        """Return the penalty with the same weights, zero at the model's parameters as they are now."""
        anchors = {n: p.detach().clone().to(self.anchors[n].dtype) for n, p in self._found(model).items()}
        return self._with(anchors=anchors, constant=torch.zeros_like(self.constant))

    def to(self, device: torch.device | str) -> Consolidation:
        """Return the penalty on another device; a call on a model that is elsewhere copies it there each time."""
        importances, anchors = ({n: t.to(device) for n, t in d.items()} for d in (self.importances, self.anchors))
        return self._with(importances=importances, anchors=anchors)

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file, all or nothing; `nm.load` reads it."""
        tensors = {f"importance/{name}": value for name, value in self.importances.items()}
        tensors |= {f"anchor/{name}": value for name, value in self.anchors.items()} | {"constant": self.constant}
        texts = {"names": json.dumps(list(self.importances)), "tied": json.dumps(dict(self.tied))}
        save_tensors(path, tensors, "consolidation", {**texts, "reduction": self.reduction})

    def __repr__(self) -> str:
        entries = sum(value.numel() for value in self.importances.values())
        total = sum(float(value.double().sum()) for value in self.importances.values())
        view = {"mean": "per sample", "sum": "summed over samples", "token": "per token"}[self.reduction]
        shape = f"{entries:,} entries of {len(self.importances)} parameters"
        return f"Consolidation({shape}; Σ strength·F = {total:.4g}, F {view})"

    def _found(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters by the names that they have here."""
        given = parameters_of(model)
        shapes, there = ({name: t.shape for name, t in d.items()} for d in (self.importances, given))
        advice = "A head that differs can be left out: strength={'head.*': 0, '*': 1}."
        found = matched_shapes(shapes, there, self.tied, "model", "one with the parameters of the penalty", advice)
        return {name: given[other] for name, other in found.items()}

    def _with(self, **changes: Any) -> Consolidation:
        """The same penalty with some attributes replaced."""
        made = object.__new__(Consolidation)
        made.__dict__ = {**self.__dict__, **changes}
        return made


@reads("consolidation")
def consolidation_from_file(tensors: dict[str, Tensor], head: dict[str, Any]) -> Consolidation:
    """The penalty that `Consolidation.save` wrote."""
    names = json.loads(head["names"])
    made = object.__new__(Consolidation)
    made.importances, made.anchors = ({n: tensors[f"{kind}/{n}"] for n in names} for kind in ("importance", "anchor"))
    made.constant, made.tied = tensors["constant"], json.loads(head["tied"])
    made.reduction = check_reduction(head["reduction"], tokens=True)
    return made


def _strengths(names: list[str], strength: float | Mapping[str, float]) -> dict[str, float]:
    """The strength of each parameter, by the first pattern that matches."""
    if not isinstance(strength, Mapping):
        return dict.fromkeys(names, finite_number(strength, "strength", positive=True))
    for pattern, value in strength.items():
        finite_number(value, f"strength[{pattern!r}]")
        selected(names, pattern, "strength")
    found = {}
    for name in names:
        first = next((pattern for pattern in strength if fnmatchcase(name, pattern)), None)
        if first is None:
            advice = "End it with '*', as in {'classifier.*': 0, '*': 100}."
            raise ValueError(message("strength", "a number for each parameter", f"none for {name!r}", advice))
        found[name] = float(strength[first])
    if not any(found.values()):
        raise ValueError(message("strength", "above 0 for at least one parameter", repr(dict(strength))))
    return found
