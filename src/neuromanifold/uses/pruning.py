"""Pruning by predicted loss: setting θ_i to zero changes the loss per sample by about ½ F_ii θ_i².

That is the second-order change δᵀFδ/2 for δ = −θ_i, near a minimum and without what entries do together (off the
diagonal); for a group of entries it is the sum.  What is least is pruned:

    entries    single entries of weights
    "2:4"      of each four consecutive inputs of an output two stay (any N:M)
    rows       all weights of an output (a neuron, a channel) and its bias
    heads      the columns of an attention's output projection that belong to a head
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from neuromanifold.core.checks import finite_number, integer_in_range, message, one_of
from neuromanifold.problem.model import tied_names
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.table import TOTAL, text_table
from neuromanifold.uses.matching import matched_shapes
from neuromanifold.uses.weights import Weight, attention_outputs, weights_of


@dataclass(frozen=True, eq=False)
class PruningPlan:
    """Which entries stay, and by how much the loss per sample is predicted to grow without the others."""

    masks: Mapping[str, Tensor]  #: bool, by the names of the result: True stays
    losses: Mapping[str, float]  #: ½ Σ F_ii θ_i² over what is pruned
    tied: Mapping[str, str]

    @property
    def loss_increase(self) -> float:
        """The predicted increase of the loss per sample."""
        return sum(self.losses.values())

    @property
    def sparsity(self) -> float:
        """The share of the masks' entries that are pruned."""
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        return 1 - kept / sum(mask.numel() for mask in self.masks.values())

    def apply(self, model: nn.Module, permanent: bool = False) -> nn.Module:
        """Prune the model in place with `torch.nn.utils.prune`, and return it.

        The masks stay in force while the model is trained further; `permanent` writes the zeros into the parameters.
        """
        given = dict(model.named_parameters())
        shapes, there = ({n: t.shape for n, t in d.items()} for d in (self.masks, given))
        names = matched_shapes(
            shapes, there, self.tied, "model", "one with the parameters of the plan", "Is it pruned already?"
        )
        for name, mask in self.masks.items():
            path, _, attribute = names[name].rpartition(".")
            module = model.get_submodule(path)
            mask = mask.to(getattr(module, attribute))
            prune.custom_from_mask(module, attribute, mask)  # type: ignore[no-untyped-call]
            if permanent:
                prune.remove(module, attribute)  # type: ignore[no-untyped-call]
        return model

    def __str__(self) -> str:
        rows = [self._row(name, [name]) for name in self.masks] + [self._row(TOTAL, list(self.masks))]
        header = ("parameter", "entries", "pruned", "predicted loss")
        return "\n".join(["Pruning plan: what goes, and the increase of the loss per sample", text_table(header, rows)])

    __repr__ = __str__

    def _row(self, title: str, names: Sequence[str]) -> tuple[str, ...]:
        entries = sum(self.masks[name].numel() for name in names)
        pruned = entries - sum(int(self.masks[name].sum()) for name in names)
        loss = sum(self.losses[name] for name in names)
        return (title, f"{entries:,}", f"{100 * pruned / max(entries, 1):.1f} %", f"{loss:.3g}")


def plan_pruning(
    model: nn.Module,
    fim: DiagonalFisher,
    sparsity: float = 0.5,
    *,
    structure: str = "entries",
    scope: str = "global",
    parameters: str | Sequence[str] | None = None,
    score: str = "fisher",
) -> PruningPlan:
    """Return masks that prune the entries (or groups) with the least ½ Σ F_ii θ_i², the loss that is expected from it.

    Args:
        model: whose parameters are scored; it is not changed before `plan.apply(model)`.
        fim: a result for this model.  Its mean over samples is used, whatever its view.
        sparsity: the share of entries to be pruned; of groups, as many as fit into it.  N:M has its own, 1 − N/M.
        structure: "entries", "2:4" or another N:M, "rows" (each parameter keeps at least one), or "heads".
        scope: "global" compares over all parameters, "layer" takes the same share of each.
        parameters: patterns of names.  By default weights of two dimensions or more that are no embeddings; for heads
            the output projections of attention.  For rows, name them: the rows of a last layer are the classes.
        score: "fisher"; or "magnitude", θ², which is what most tools do, to compare with.

    Returns:
        A `PruningPlan`: masks by parameter name, the sum, and `.apply(model)`.

    Raises:
        ValueError: model and result do not fit, or an argument is out of range.

    Example:
        >>> plan = nm.plan_pruning(model, nm.fisher_diagonal(model, data), sparsity=0.5)
        >>> plan.sparsity
        0.5
    """
    one_of(scope, "scope", "global", "layer")
    one_of(score, "score", "fisher", "magnitude")
    pattern = re.fullmatch(r"(\d+):([1-9]\d*)", str(structure))
    if pattern is None:
        one_of(structure, "structure", "entries", "rows", "heads", "2:4")
    if not 0 <= finite_number(sparsity, "sparsity") < 1:
        raise ValueError(message("sparsity", "at least 0 and below 1", repr(sparsity)))
    if structure == "rows" and parameters is None:
        advice = "Such as parameters=['*.intermediate.dense.weight']; the rows of a last layer are the classes."
        raise ValueError(message("parameters", "given for structure='rows'", "None", advice))
    heads = attention_outputs(model, list(fim)) if structure == "heads" else {}
    if structure == "heads" and parameters is None:
        parameters = list(heads)
        if not heads:
            advice = "Name them with parameters=, of a model whose config has num_attention_heads."
            raise ValueError(message("model", "one whose attention is found by name", type(model).__name__, advice))
    weights = weights_of(model, fim, parameters)
    if structure in ("rows", "heads"):
        weights = [weight for weight in weights if weight.parameter.ndim > 1]
        if not weights:
            raise ValueError(message("parameters", "a selection with matrices", repr(parameters)))
    _refuse_tied(model, weights)
    if pattern:
        keep, of = int(pattern[1]), int(pattern[2])
        integer_in_range(keep, "structure", 0, of - 1, f"N of {of} stay")
        masks = {w.name: _n_of_m(w, keep, of, score) for w in weights}
        return PruningPlan(masks, {w.name: _loss(w, masks[w.name]) for w in weights}, fim.provenance.tied)
    groups = [_groups(weight, structure, heads, score) for weight in weights]
    parts = [groups] if scope == "global" else [[group] for group in groups]
    kept = [mask for part in parts for mask in _kept(part, sparsity, least=structure != "entries")]
    masks, losses = {}, {}
    for weight, group, mask in zip(weights, groups, kept, strict=True):
        masks[weight.name] = group.spread(mask)
        losses[weight.name] = _loss(weight, masks[weight.name])
        bias = weight.name.removesuffix(weight.attribute) + "bias"
        if structure == "rows" and weight.attribute == "weight" and bias in fim:
            (found,) = weights_of(model, fim, [bias.replace("[", "[[]")])
            masks[bias], losses[bias] = mask.clone(), _loss(found, mask)
    return PruningPlan(masks, losses, fim.provenance.tied)


class _Groups(NamedTuple):
    """The groups of entries of a weight that go or stay together."""

    weight: Weight
    scores: Tensor  # [groups]: per entry
    ties: Tensor  # [groups]: magnitudes, which decide among equal scores
    size: int  # entries of each group
    heads: int  # 0: rows or entries

    def spread(self, mask: Tensor) -> Tensor:
        """Return a mask [groups] as one of the parameter's shape."""
        if self.size == 1:
            return mask.view(self.weight.parameter.shape)
        rows, columns = self.weight.matrix(self.weight.parameter).shape
        if self.heads:
            return self.weight.restored(
                mask.repeat_interleave(columns // self.heads).expand(rows, columns).contiguous()
            )
        return self.weight.restored(mask[:, None].expand(rows, columns).contiguous())


def _groups(weight: Weight, structure: str, heads: Mapping[str, int], score: str) -> _Groups:
    squares = weight.parameter.to(weight.fisher.dtype).square()
    scores = squares * weight.fisher if score == "fisher" else squares
    if structure == "entries" or squares.ndim < 2:
        return _Groups(weight, scores.flatten(), squares.flatten(), 1, 0)
    matrices = [weight.matrix(values) for values in (scores, squares)]  # [o, i]
    number = heads.get(weight.name, 0)
    if structure == "heads":
        columns = matrices[0].shape[1]
        if not number or columns % number:
            got = f"{weight.name} with {columns} inputs and {number or 'an unknown number of'} heads"
            raise ValueError(message("parameters", "output projections of attention", got))
        matrices = [m.view(len(m), number, -1).transpose(0, 1).flatten(1) for m in matrices]  # [heads, o·d]
    means = [matrix.mean(1) for matrix in matrices]
    return _Groups(weight, means[0], means[1], matrices[0].shape[1], number)


def _kept(groups: Sequence[_Groups], sparsity: float, least: bool) -> list[Tensor]:
    """Which groups stay, when those of the lowest scores go, as many as the share of entries has room for.

    With `least`, the best group of each parameter stays whatever its score.
    """
    scores, ties = (torch.cat([getattr(g, name) for g in groups]) for name in ("scores", "ties"))
    lengths = [len(group.scores) for group in groups]
    for part in torch.split(scores, lengths) if least else ():
        part[part.argmax()] = torch.inf
    order = ties.argsort(stable=True)
    order = order[scores[order].argsort(stable=True)]
    sizes = torch.cat([torch.full_like(g.scores, g.size, dtype=torch.float64) for g in groups])[order].cumsum(0)
    total = sum(group.size * len(group.scores) for group in groups)
    gone = (sizes <= sparsity * total + 1e-6) & scores[order].isfinite()
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[order[gone]] = False
    return list(torch.split(kept, lengths))


def _n_of_m(weight: Weight, keep: int, of: int, score: str) -> Tensor:
    """Of each `of` consecutive inputs of an output, the `keep` with the largest scores stay."""
    if weight.parameter.ndim < 2 or weight.inputs % of:
        got = f"{weight.name} of shape {list(weight.parameter.shape)}"
        advice = "Leave it out with parameters=."
        raise ValueError(message("structure", f"such that inputs come in groups of {of}", got, advice))
    squares = weight.parameter.to(weight.fisher.dtype).square()
    by = squares * weight.fisher if score == "fisher" else squares
    scores, ties = (weight.matrix(values).reshape(len(weight.matrix(values)), -1, of) for values in (by, squares))
    order = ties.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))  # [o, groups, m]
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :keep], True)
    return weight.restored(mask.flatten(1))


def _loss(weight: Weight, mask: Tensor) -> float:
    """½ Σ F_ii θ_i² over what is pruned."""
    terms = weight.fisher.double() * weight.parameter.double().square() * ~mask
    return 0.5 * float(terms.sum())


def _refuse_tied(model: nn.Module, weights: Sequence[Weight]) -> None:
    tied = tied_names(model)
    for weight in weights:
        others = [other for other, first in tied.items() if weight.name in (other, first)]
        if others:
            got = f"{weight.name}, which is also {others[0] if others[0] != weight.name else tied[others[0]]}"
            advice = "A mask would cut them apart. Leave it out with parameters=."
            raise ValueError(message("parameters", "without tied parameters", got, advice))
