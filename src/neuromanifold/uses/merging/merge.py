"""Models of one architecture merged into one, each parameter weighted by how much its model's outputs depend on it.

    average            θ = Σ_k w_k θ_k / Σ_k w_k
    fisher             θ = Σ_k w_k F_k θ_k / Σ_k w_k F_k             the most probable θ of a product of posteriors
                                                                     N(θ_k, F_k⁻¹); the average where all F_k are zero
    task-arithmetic    θ = θ_0 + scale Σ_k w_k τ_k                   τ_k = θ_k − θ_0
    ties               θ = θ_0 + scale (mean of the τ_k that have the sign of their sum), each τ_k trimmed before to the
                       share `density` of its tensor that has the largest |τ_k|; with Fishers, the largest F_k τ_k²,
                       which is the predicted change of the loss

Each tensor is read, merged and written before the next one, so models may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold._version import __version__
from neuromanifold.core.checks import finite_number, message, one_of
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.diagonal import diagonal_from_file
from neuromanifold.results.files import files_of, load_tensors
from neuromanifold.results.sharded import parse_size
from neuromanifold.results.table import text_table
from neuromanifold.uses.matching import RESULT, check_diagonal, check_squares, first_of, matched_shapes
from neuromanifold.uses.merging.checkpoints import TensorSource, from_files, source_of, write_checkpoint

METHODS = ("fisher", "average", "task-arithmetic", "ties")
_WITHOUT = "averaged, without a Fisher"
_INTEGERS, _INTEGERS_DIFFER = (
    "from the first model: integers, equal in all",
    "from the first model: integers that differ",
)
_DIFFERING, _DROPPED = "from the first model: not the same in all", "left out: not in the first model"


class _Importance(NamedTuple):
    """A result whose sums may be in a file."""

    fim: DiagonalFisher  # without its tensors if they are in a file
    sums: TensorSource
    names: Mapping[str, str]  # a model's name: the result's, with a prefix in a file

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        values = self.sums[self.names[name]].to(dtype) / self.fim.divisor
        check_squares(values, "fishers", f"{name!r} of {self.sums.about}")
        return values


@dataclass(frozen=True, eq=False)
class Merged(Mapping[str, Tensor]):
    """The merged model: a mapping from name to tensor that merges a tensor when it is asked for.

    `dict(merged)` is a state dict; `save` writes a folder, a tensor at a time; printed, it says how each was made.
    """

    method: str
    how: Mapping[str, str]  #: of each tensor, in words; those that were left out, too
    models: tuple[TensorSource, ...]
    fishers: tuple[_Importance, ...]
    weights: tuple[float, ...]
    base: TensorSource | None
    density: float
    scale: float

    def __getitem__(self, name: str) -> Tensor:
        how = self.how.get(name, _DROPPED)
        if how == _DROPPED:
            raise KeyError(name)
        first = self.models[0][name]
        if how not in (self.method, _WITHOUT):
            return first
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        tensors = [source[name].to(device=first.device, dtype=dtype) for source in self.models]
        importances: list[Tensor | None] = [None] * len(tensors)
        if all(name in fisher.names for fisher in self.fishers):
            importances[: len(self.fishers)] = [f.read(name, dtype).to(first.device) for f in self.fishers]
        if self.base is None:
            merged = _weighted(tensors, importances, self.weights)
        else:
            start = self.base[name].to(tensors[0])
            changes = [tensor - start for tensor in tensors]
            if self.method == "ties":
                merged = start + self.scale * self._elected(changes, importances)
            else:
                merged = start + self.scale * sum(w * c for w, c in zip(self.weights, changes, strict=True))
        if bool(merged.isnan().any()):
            which = [s.about for s, t in zip(self.models, tensors, strict=True) if bool(t.isnan().any())]
            raise ValueError(message("models", "free of NaN", f"NaN in {name!r} of {first_of(which) or 'the result'}"))
        return merged.to(first.dtype)

    def _elected(self, changes: list[Tensor], importances: list[Tensor | None]) -> Tensor:
        """The mean of the trimmed changes that have the sign of their sum."""
        squares = [c.square() if f is None else f * c.square() for c, f in zip(changes, importances, strict=True)]
        trimmed = [_trimmed(c, square, self.density) for c, square in zip(changes, squares, strict=True)]
        weighted = [w * c for w, c in zip(self.weights, trimmed, strict=True)]
        sign = torch.stack(weighted).sum(0).sign()
        total, weight = torch.zeros_like(sign), torch.zeros_like(sign)
        for w, change, times in zip(self.weights, trimmed, weighted, strict=True):
            agrees = (change.sign() == sign) & (sign != 0)
            total, weight = total + times * agrees, weight + w * agrees
        return torch.where(weight > 0, total / weight, 0.0)

    def __iter__(self) -> Iterator[str]:
        return (name for name, how in self.how.items() if how != _DROPPED)

    def __len__(self) -> int:
        return sum(how != _DROPPED for how in self.how.values())

    def save(self, folder: str | Path, shard_size: str | int = "5GB", progress: bool = False) -> None:
        """Write a folder as transformers reads it: weights in shards, and the other files of the first model's folder.

        The folder is written aside and renamed; memory holds up to two shards.  merge.json says what was merged.
        """
        first = self.models[0]
        sizes = {n: torch.Size(first.shapes[n]).numel() * first.dtypes[n].itemsize for n in self}
        notes: dict[str, object] = {"neuromanifold": __version__, "method": self.method, "weights": self.weights}
        notes |= {"models": [m.about for m in self.models], "fishers": [f.sums.about for f in self.fishers]}
        if self.base is not None:
            notes |= {"base": self.base.about, "scale": self.scale}
            notes |= {"density": self.density} if self.method == "ties" else {}
        notes["other tensors"] = {name: how for name, how in self.how.items() if how != self.method}
        write_checkpoint(self, sizes, Path(folder), first.folder, notes, parse_size(shard_size), progress)

    def __str__(self) -> str:
        groups: dict[str, list[str]] = {}
        for name, how in self.how.items():
            groups.setdefault(how, []).append(name)
        rows = []
        for how, names in groups.items():
            entries = sum(self._entries(name) for name in names)
            rows.append((how, f"{len(names):,}", f"{entries:,}", ", ".join([*names[:2], *["..."] * (len(names) > 2)])))
        lines = [line.rstrip() for line in text_table(("tensors", "number", "entries", "such as"), rows).splitlines()]
        models = ", ".join(f"{w:g} × {m.about}" for w, m in zip(self.weights, self.models, strict=True))
        return "\n".join([f"Merged ({self.method}): {models}", *lines])

    __repr__ = __str__

    def _entries(self, name: str) -> int:
        shapes = (source.shapes[name] for source in self.models if name in source.shapes)
        return torch.Size(next(shapes)).numel()


def merge(
    models: Sequence[object],
    fishers: Sequence[DiagonalFisher | str | Path] = (),
    *,
    method: str = "fisher",
    weights: Sequence[float] | None = None,
    base: object = None,
    density: float = 0.2,
    scale: float = 1.0,
    differing: str = "error",
) -> Merged:
    """Return models of one architecture merged into one: by default θ = Σ_k w_k F_k θ_k / Σ_k w_k F_k.

    Floating-point tensors that are in no result (buffers, parameters that were frozen) are averaged; integers are taken
    from the first model.  Where a model has no tensor of a name, or one of another shape, that is an error; with
    differing="first", the first model's is taken.  `print(merged)` lists each of these.  Cost: each tensor of each
    model is read once, when the result is saved or applied; one is in memory at a time.

    Args:
        models: at least two folders of transformers (with one or more safetensors files), safetensors files, modules or
            state dicts.  The first one decides about dtypes, configuration and tokenizer.
        fishers: a result, or its file, for each model, in the same order and the same view.  With means (the default
            view) each model counts the same whatever its number of samples; with sums each sample does.
        method: "fisher", "average", "task-arithmetic" or "ties".
        weights: w_k, 1 by default.
        base: the model that all were fine-tuned from, for "task-arithmetic" and "ties".
        density: the share of each task vector's entries that "ties" keeps.
        scale: by which the change from `base` is multiplied.
        differing: "error" or "first", for tensors that are not the same in all models, such as classifiers.

    Returns:
        A `Merged`: a mapping from name to tensor, computed when asked for; `.save(folder)` writes what transformers
        reads.

    Raises:
        TypeError, ValueError: models or results do not fit together; the message names the tensor.
        FileNotFoundError: there is no such folder or file.

    Example:
        >>> import copy
        >>> other = copy.deepcopy(model)  # and fine-tuned on other data
        >>> fishers = [nm.fisher_diagonal(m, data) for m in (model, other)]
        >>> merged = nm.merge([model, other], fishers)
        >>> other.load_state_dict(dict(merged))
        <All keys matched successfully>
    """
    one_of(method, "method", *METHODS)
    one_of(differing, "differing", "error", "first")
    if isinstance(models, str | Path | Mapping) or len(models) < 2:
        got = str(len(models)) if isinstance(models, Sequence) and not isinstance(models, str) else "one"
        advice = "Files of results are no models: they belong to `fishers`."
        raise ValueError(message("models", "two models or more", got, advice))
    sources = tuple(source_of(model, f"models[{i}]") for i, model in enumerate(models))
    start = _base(base, method)
    w = tuple(1.0 for _ in models) if weights is None else tuple(weights)
    for i, weight in enumerate(w):
        finite_number(weight, f"weights[{i}]", positive=True)
    if len(w) != len(models):
        raise ValueError(message("weights", f"a number for each of {len(models)} models", str(len(w))))
    if not 0 < finite_number(density, "density") <= 1:
        raise ValueError(message("density", "above 0 and at most 1", repr(density)))
    how = _plan(sources, start, method, differing)
    results = _importances(fishers, sources, method)
    for name in [name for name, done in how.items() if done == method]:
        covered = [name in result.names for result in results]
        if any(covered) and not all(covered):
            got = f"none for it in {results[covered.index(False)].sums.about}"
            raise ValueError(message("fishers", f"results that all have {name!r}, or none of them", got))
        if method == "fisher" and not all(covered):
            how[name] = _WITHOUT
    if method == "fisher" and method not in how.values():
        raise ValueError(message("fishers", "results for tensors that all models have", "no such tensor"))
    return Merged(method, how, sources, results, w, start, float(density), finite_number(scale, "scale", positive=True))


def _base(base: object, method: str) -> TensorSource | None:
    """The tensors of the base model, for the methods that need one."""
    if method in ("task-arithmetic", "ties"):
        if base is None:
            advice = "It is the model that all were fine-tuned from."
            raise ValueError(message("base", f"given for method {method!r}", "None", advice))
        return source_of(base, "base")
    if base is not None:
        raise ValueError(message("base", "left out unless the method is task-arithmetic or ties", f"method {method!r}"))
    return None


def _plan(sources: Sequence[TensorSource], base: TensorSource | None, method: str, differing: str) -> dict[str, str]:
    """How each tensor is made: by the method, from the first model, or not at all; an error lists mismatches."""
    first, *others = sources
    how, wrong = dict[str, str](), list[str]()
    for name, shape in first.shapes.items():
        floating = first.dtypes[name].is_floating_point
        same = all(source.shapes.get(name) == shape for source in others)
        if not same:
            how[name] = _DIFFERING
            there = (
                f"{list(s.shapes[name])} in {s.about}" if name in s.shapes else f"not in {s.about}" for s in others
            )
            wrong.append(f"{name} is {list(shape)} in {first.about}, {', '.join(there)}")
        elif not all(source.dtypes[name].is_floating_point == floating for source in others):
            raise ValueError(message("models", "of one kind of numbers", f"integers and floats for {name!r}"))
        elif not floating:
            equal = all(bool(torch.equal(first[name].cpu(), source[name].cpu())) for source in others)
            how[name] = _INTEGERS if equal else _INTEGERS_DIFFER
        else:
            how[name] = method
            if base is not None and base.shapes.get(name) != shape:
                how[name] = _DIFFERING
                found = f"is {list(base.shapes[name])}" if name in base.shapes else "is not"
                wrong.append(f"{name} {found} in the base, {base.about}")
    for source in others:
        for name in source.shapes:
            if name not in first.shapes and name not in how:
                how[name] = _DROPPED
                wrong.append(f"{name} is in {source.about}, not in {first.about}")
    if wrong and differing == "error":
        advice = "differing='first' (--differing first) takes these from the first model, such as a classifier."
        raise ValueError(message("models", "of the same names and shapes", first_of(wrong), advice))
    if method not in how.values():
        raise ValueError(message("models", "with floating-point tensors in common", "none"))
    return how


def _importances(
    fishers: Sequence[DiagonalFisher | str | Path], sources: Sequence[TensorSource], method: str
) -> tuple[_Importance, ...]:
    """The results, matched with their models; tensors of files are not read."""
    if isinstance(fishers, str | Path | DiagonalFisher):
        raise TypeError(message("fishers", "a list with a result for each model", type(fishers).__name__))
    if fishers and method in ("average", "task-arithmetic"):
        raise ValueError(message("fishers", f"left out for method {method!r}", str(len(fishers))))
    if len(fishers) != len(sources) and (fishers or method == "fisher"):
        advice = "`neuromanifold estimate` writes one; method='average' needs none."
        raise ValueError(message("fishers", f"a result for each of {len(sources)} models", str(len(fishers)), advice))
    found = []
    for i, (fisher, source) in enumerate(zip(fishers, sources, strict=False)):
        fim, sums, prefix = _opened(fisher, f"fishers[{i}]")
        shapes = {name: sums.shapes[prefix + name] for name in fim.sums}
        advice = f"It was made for {fim.provenance.model or 'another model'}; is the order that of the models?"
        tied = fim.provenance.tied
        there = matched_shapes(shapes, source.shapes, tied, f"fishers[{i}]", RESULT, advice)
        names = {model: prefix + name for name, model in there.items()}
        names |= {alias: prefix + held for alias, held in tied.items() if alias in source.shapes and held in there}
        found.append(_Importance(fim, sums, names))
    if len(views := {result.fim.unit for result in found}) > 1:
        advice = "Weights would differ by the number of samples. Use .mean or .sum on all of them."
        raise ValueError(message("fishers", "in the same view", " and ".join(sorted(views)), advice))
    if len({result.fim.provenance.likelihood for result in found}) > 1:
        raise ValueError(message("fishers", "of the same likelihood", "different ones"))
    return tuple(found)


def _opened(fisher: DiagonalFisher | str | Path, argument: str) -> tuple[DiagonalFisher, TensorSource, str]:
    """A result, where its sums are, and the prefix of their names there."""
    if not isinstance(fisher, str | Path):
        fim = check_diagonal(fisher, argument)
        return fim, replace(source_of(fim.sums, argument), about=fim.provenance.model or argument), ""
    _, head = load_tensors(fisher, only=())
    if head.get("kind") != "diagonal":
        expected = "a diagonal (nm.fisher_diagonal and `neuromanifold estimate` make one)"
        raise ValueError(message(argument, expected, f"{fisher}, a {head.get('kind')}"))
    sums = from_files(files_of(fisher), str(fisher), None, results=True)
    empty = {name: torch.empty(shape, device="meta") for name, shape in sums.shapes.items()}
    return check_diagonal(diagonal_from_file(empty, head), argument), sums, "sum/"


def _weighted(tensors: Sequence[Tensor], importances: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor:
    """Σ_k w_k F_k θ_k / Σ_k w_k F_k;  Σ_k w_k θ_k / Σ_k w_k where there is no F, or all are zero."""
    largest = torch.zeros_like(tensors[0])  # shares are relative to it, so that tiny importances do not underflow
    for importance, weight in zip(importances, weights, strict=True):
        largest = largest if importance is None else torch.maximum(largest, weight * importance)
    total, norm = torch.zeros_like(largest), torch.zeros_like(largest)
    for tensor, importance, weight in zip(tensors, importances, weights, strict=True):
        share = torch.full_like(largest, weight)
        if importance is not None:
            share = torch.where(largest > 0, weight * importance / largest, share)
        total, norm = total + share * tensor, norm + share
    return total / norm


def _trimmed(change: Tensor, saliency: Tensor, density: float) -> Tensor:
    """The change where its saliency is among the largest, zero elsewhere."""
    kept = round(density * change.numel())
    places = saliency.flatten().topk(kept).indices
    mask = torch.zeros_like(change).flatten()
    mask[places] = 1.0
    return change * mask.view_as(change)
