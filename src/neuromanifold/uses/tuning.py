"""Which layers to tune: by how much the outputs, or the loss, depend on each of them.

    trace      Σ F_ii of a layer: the expected squared gradient, which is what a step of given length can gain
    mean       the same for each parameter of it
    relative   Σ F_ii θ_i²: for changes in proportion to the weights

With `nm.Hutchinson` (the default) F is about the model's own predictions, and labels play no part.  `nm.Empirical()`
on labelled data of the new task is the squared gradient of the loss, large where the labels disagree with the model.

Ranks of LoRA: a layer with trace T and c parameters for each rank gains T log r in r ranks, each less than the one
before, so that Σ T log r is largest at a given size for r in proportion to T/c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuromanifold.core.checks import finite_number, integer_in_range, message, one_of
from neuromanifold.problem.model import plain_name
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.naming import layers as layers_of
from neuromanifold.results.table import TOTAL, text_table
from neuromanifold.uses.matching import finite_mean, finite_values, matched, parameters_of
from neuromanifold.uses.weights import weights_of


@dataclass(frozen=True)
class LayerScore:
    """A layer's part of the Fisher information per sample."""

    parameters: tuple[str, ...]
    entries: int
    trace: float
    relative: float  #: Σ F_ii θ_i²

    @property
    def mean(self) -> float:
        """The trace for each parameter."""
        return self.trace / self.entries if self.entries else 0.0


@dataclass(frozen=True)
class TuningPlan:
    """Which layers are tuned, with the scores of all."""

    chosen: tuple[str, ...]
    scores: Mapping[str, LayerScore]  #: by layer
    by: str

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that are tuned."""
        return [name for layer in self.chosen for name in self.scores[layer].parameters]

    def apply(self, model: nn.Module) -> nn.Module:
        """Set `requires_grad` of the model's parameters, True for the chosen layers' alone, and return the model."""
        wanted, there = {plain_name(name) for name in self.parameters}, dict(model.named_parameters())
        if missing := wanted - {plain_name(name) for name in there}:
            raise ValueError(message("model", "the model that the plan was made for", f"none of {sorted(missing)[:3]}"))
        for name, parameter in there.items():
            parameter.requires_grad_(plain_name(name) in wanted)
        return model

    def __str__(self) -> str:
        total = sum(score.trace for score in self.scores.values())
        rows = []
        for layer, score in self.scores.items():
            share = f"{100 * score.trace / total:.1f} %" if total else "–"
            numbers = (f"{score.entries:,}", share, f"{score.mean:.3g}", f"{score.relative:.3g}")
            rows.append((layer or "(the model)", *numbers, "yes" if layer in self.chosen else ""))
        entries = sum(score.entries for score in self.scores.values())
        tuned = sum(self.scores[layer].entries for layer in self.chosen)
        rows.append((TOTAL, f"{entries:,}", "100.0 %", "", "", f"{100 * tuned / max(entries, 1):.1f} %"))
        header = ("layer", "parameters", "of the trace", "mean F", "Σ F θ²", "tuned")
        return "\n".join([f"Layers to tune, by {self.by}", text_table(header, rows)])


@dataclass(frozen=True)
class LoraPlan:
    """The rank of each module's LoRA, as peft's configuration takes it."""

    ranks: Mapping[str, int]  #: by module
    traces: Mapping[str, float]
    costs: Mapping[str, int]  #: parameters for each rank: inputs + outputs
    rank: int

    @property
    def entries(self) -> int:
        """The number of parameters of all LoRA matrices."""
        return sum(rank * self.costs[name] for name, rank in self.ranks.items())

    def config(self, scaling: float = 2.0) -> dict[str, Any]:
        """Return arguments for `peft.LoraConfig`, with lora_alpha = scaling · rank in every module."""
        finite_number(scaling, "scaling", positive=True)
        alphas = {name: scaling * rank for name, rank in self.ranks.items()}
        own = {"target_modules": list(self.ranks), "rank_pattern": dict(self.ranks), "alpha_pattern": alphas}
        return {"r": self.rank, "lora_alpha": scaling * self.rank, **own}

    def __str__(self) -> str:
        rows = [(n, f"{self.traces[n]:.3g}", f"{r}", f"{r * self.costs[n]:,}") for n, r in self.ranks.items()]
        rows.append((TOTAL, f"{sum(self.traces.values()):.3g}", "", f"{self.entries:,}"))
        return text_table(("module", "trace", "rank", "parameters"), rows)


def plan_tuning(model: nn.Module, fim: DiagonalFisher, share: float = 0.3, by: str = "mean") -> TuningPlan:
    """Return the layers with the highest scores that have at most this share of the parameters; at least one.

    Args:
        model: whose layers are scored; `plan.apply(model)` freezes the others.
        fim: a result for this model on data of the new task.
        share: of the result's parameters.
        by: "mean" of F over the layer's entries, "trace" (their sum), or "relative" (F θ²).

    Returns:
        A `TuningPlan`: `.chosen`, all scores, and `.apply(model)`.

    Raises:
        ValueError: model and result do not fit, or an argument is out of range.

    Example:
        >>> plan = nm.plan_tuning(model, nm.fisher_diagonal(model, data), share=0.5)
        >>> len(plan.chosen)
        1
    """
    one_of(by, "by", "mean", "trace", "relative")
    if not 0 < finite_number(share, "share") <= 1:
        raise ValueError(message("share", "above 0 and at most 1", repr(share)))
    given = parameters_of(model)
    names, scores = matched(fim, given), dict[str, LayerScore]()
    for layer, members in layers_of(names).items():
        trace = relative = 0.0
        for name in members:
            fisher, values = finite_mean(fim, name).double(), finite_values(given[names[name]], name).double()
            trace += float(fisher.sum())
            relative += float((fisher * values.to(fisher.device).square()).sum())
        scores[layer] = LayerScore(tuple(members), sum(fim.sums[n].numel() for n in members), trace, relative)
    order = sorted(scores, key=lambda layer: -float(getattr(scores[layer], by)))
    room = share * sum(score.entries for score in scores.values())
    chosen: list[str] = []
    for layer in order:
        if not chosen or scores[layer].entries <= room:
            chosen.append(layer)
            room -= scores[layer].entries
    return TuningPlan(tuple(layer for layer in scores if layer in chosen), scores, by)


def plan_lora(
    model: nn.Module, fim: DiagonalFisher, rank: int = 8, parameters: str | Sequence[str] | None = None
) -> LoraPlan:
    """Return a LoRA rank for each module, with at most as many parameters as the same `rank` for all would take.

    Args:
        model: a model without adapters yet.
        fim: a result for this model on data of the new task.
        rank: on average.
        parameters: patterns of the weights that get a LoRA, such as ["*.query.weight", "*.value.weight"].  By default
            all matrices that are no embeddings.

    Returns:
        A `LoraPlan`, whose `ranks` is PEFT's `rank_pattern`.

    Raises:
        ValueError: the result does not have the parameters, or there is no room for a single rank.

    Example:
        >>> plan = nm.plan_lora(model, nm.fisher_diagonal(model, data), rank=2)
        >>> sorted(plan.ranks)
        ['0', '2']
    """
    integer_in_range(rank, "rank", 1, 10**6, "on average")
    weights = [weight for weight in weights_of(model, fim, parameters) if weight.parameter.ndim == 2]
    if not weights:
        raise ValueError(message("parameters", "a selection with matrices", repr(parameters)))
    modules = [plain_name(weight.name).rpartition(".")[0] for weight in weights]
    pairs = list(zip(modules, weights, strict=True))
    traces = {module: float(weight.fisher.sum(dtype=torch.float64)) for module, weight in pairs}
    costs = {module: sum(weight.parameter.shape) for module, weight in pairs}
    most = {module: min(weight.parameter.shape) for module, weight in pairs}
    ranks = dict.fromkeys(modules, 1)
    left = (rank - 1) * sum(costs.values())
    while open_ := [m for m in modules if ranks[m] < most[m] and costs[m] <= left]:
        best = max(open_, key=lambda m: traces[m] * math.log1p(1 / ranks[m]) / costs[m])
        ranks[best] += 1
        left -= costs[best]
    return LoraPlan(ranks, traces, costs, rank)
