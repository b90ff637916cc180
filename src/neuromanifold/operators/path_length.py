"""`path_length`: the length of a path through parameters, in the metric of the network's predictions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message, one_of
from neuromanifold.operators.operator import fisher_operator
from neuromanifold.problem.model import select_parameters

Rule = Literal["midpoint", "trapezoid"]
Point = nn.Module | Mapping[str, Tensor]


@dataclass(frozen=True)
class PathLength:
    """The length of a path through parameters, the length of each of its segments, and by which rule."""

    segments: tuple[float, ...]
    rule: Rule

    @property
    def value(self) -> float:
        """The length of the path: the sum of its segments."""
        return sum(self.segments)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"length {self.value:.6g} in {len(self.segments)} segments ({self.rule} rule)"


def path_length(
    model: nn.Module, data: Iterable[object], checkpoints: Sequence[Point], rule: Rule = "midpoint", **options: Any
) -> PathLength:
    """Return the length ∫ √(θ'ᵀ F(θ) θ') dt of the polygon through some checkpoints of a model, in the metric F.

    On each segment from a to b, δ = b - a, the integrand is taken once: √(δᵀ F(½(a+b)) δ) by the "midpoint" rule; or at
    both ends, ½(√(δᵀF(a)δ) + √(δᵀF(b)δ)), by the "trapezoid" rule.  Both have an error of third order in δ, of opposite
    sign, so that their difference says how well the checkpoints resolve the path.  With reduction="sum" a short segment
    has length √(2 KL) over all data; the default "mean" is that per sample, √(2 KL/N).  Cost: one product with F for
    each segment, two by the "trapezoid" rule.

    Args:
        model: the architecture; its own parameters do not matter, and it is not changed: a copy is used.
        data: an iterable of batches that can be iterated over several times: a list or a DataLoader.
        checkpoints: state dicts, or modules of the same architecture, in the order of the path.  Buffers with numbers,
            such as the statistics of BatchNorm, go along the straight line as well.
        rule: "midpoint" or "trapezoid".
        options: those of `fisher_operator`.

    Returns:
        A `PathLength`: `.value`, and the lengths of all segments.

    Raises:
        TypeError, ValueError: fewer than two checkpoints, or one that does not fit the model.

    Example:
        >>> import copy
        >>> trained = copy.deepcopy(model)
        >>> with torch.no_grad():
        ...     trained[2].bias += 0.1  # to all logits: nothing changes
        >>> round(nm.path_length(model, data, [model, trained]).value, 3)
        0.0
    """
    one_of(rule, "rule", "midpoint", "trapezoid")
    if isinstance(checkpoints, (Mapping, nn.Module)):
        raise ValueError(message("checkpoints", "a sequence of two or more", "one"))
    checkpoints = list(checkpoints)
    if len(checkpoints) < 2:
        raise ValueError(message("checkpoints", "a sequence of two or more", f"{len(checkpoints)}"))
    chosen = select_parameters(model, options.get("parameters"))
    points = [_state(point, i, model) for i, point in enumerate(checkpoints)]
    segments = []
    at = copy.deepcopy(model)
    metric = None
    for a, b in pairwise(points):
        step = {name: torch.sub(*_alike(b[name], a[name])) for name in chosen}
        lengths = []
        for where in (0.5,) if rule == "midpoint" else (0.0, 1.0):
            at.load_state_dict({name: _interpolated(a[name], b[name], where) for name in a}, strict=False)
            metric = fisher_operator(at, data, **options) if metric is None else metric
            lengths.append(metric.length(step))
        segments.append(sum(lengths) / len(lengths))
    return PathLength(tuple(segments), rule)


def _state(point: object, i: int, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, if they have the names and shapes of the model's."""
    own = model.state_dict()
    if isinstance(point, nn.Module):
        point = point.state_dict()
    if not isinstance(point, Mapping):
        raise TypeError(message(f"checkpoints[{i}]", "a state dict or a module", type(point).__name__))
    missing = [name for name in own if name not in point]
    foreign = [name for name in point if name not in own]
    if missing or foreign:
        got = f"one without {missing[0]!r}" if missing else f"one with {foreign[0]!r} too"
        raise ValueError(message(f"checkpoints[{i}]", "a state dict of the model", got))
    own = {name: value for name, value in own.items() if isinstance(value, Tensor)}  # extra state is the model's own
    for name, value in own.items():
        found = point[name]
        if not isinstance(found, Tensor) or found.shape != value.shape:
            got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            got += f" for {name!r}"
            raise ValueError(message(f"checkpoints[{i}]", f"of the model's shapes, {list(value.shape)}", got))
    return {name: point[name].detach() for name in own}


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in float32 or better, on the device of the first."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype), b.to(a.device, dtype)


def _interpolated(a: Tensor, b: Tensor, where: float) -> Tensor:
    return torch.lerp(*_alike(a, b), where) if a.is_floating_point() else (b if where else a)
