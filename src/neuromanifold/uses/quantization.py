"""How much the loss grows when weights are stored in fewer bits, and a format for each weight at a given size.

With Δ the rounding errors of a weight in a format, the loss per sample grows by about ½ Σ_i F_ii Δ_i², since errors of
different entries are nearly independent.  The sum is per weight and per output channel, and choosing formats is a
knapsack: with the weights' losses and sizes on their lower convex hulls, the step that saves most loss for a bit is
taken first.  Where that fills the budget no choice is predicted to lose less; else `bound` says what none goes below.

    int8            per output channel, symmetric: bits 8 + 16/inputs
    int4g32, ...    2 to 8 bits in groups of 32 inputs with a scale and an offset: bits b + 32/group; "int4" is int4g32
    fp8             e4m3 with a scale for each tensor
    bf16, fp16      rounded
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import finite_number, message
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.table import TOTAL, text_table
from neuromanifold.uses.matching import first_of
from neuromanifold.uses.weights import Weight, weights_named, weights_of

_KNOWN = "int2g32 to int8g128 (bits and group), int2 to int7 (groups of 32), int8 (per channel), fp8, bf16 or fp16"


class Format(NamedTuple):
    """A number format: bits of an entry, and how many inputs share a scale (0: all of an output or a tensor)."""

    name: str
    bits: int
    group: int = 0

    def size(self, weight: Tensor) -> float:
        """Bits of a matrix [outputs, inputs], with its scales."""
        rows, columns = weight.shape
        scales = {"int8": 16 * rows, "fp8": 32}.get(self.name, 0)
        if self.group:
            scales = 32 * rows * -(-columns // self.group)
        return weight.numel() * self.bits + scales

    def rounded(self, weight: Tensor) -> Tensor:
        """Return a matrix [outputs, inputs] as it is after it was stored."""
        if self.name in ("bf16", "fp16"):
            return weight.to(torch.bfloat16 if self.name == "bf16" else torch.float16).to(weight.dtype)
        if self.name == "fp8":
            scale = weight.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) / 448  # the largest number
            return (weight / scale).float().to(torch.float8_e4m3fn).to(weight.dtype) * scale
        if not self.group:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
            return (weight / scale).round() * scale
        rows, columns = weight.shape
        padding = -columns % self.group
        padded = torch.cat([weight, weight[:, -1:].expand(rows, padding)], 1).view(rows, -1, self.group)
        low, high = padded.amin(-1, keepdim=True).clamp(max=0), padded.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low).clamp(min=torch.finfo(torch.float32).tiny) / (2**self.bits - 1)
        zero = (low / scale).round()  # so that zero is stored as zero
        codes = ((padded / scale).round() - zero).clamp(0, 2**self.bits - 1)
        rounded: Tensor = ((codes + zero) * scale).view(rows, -1)[:, :columns]
        return rounded


def parse_format(name: str) -> Format:
    """Return the format of a name such as "int4g64"."""
    if name in ("bf16", "fp16"):
        return Format(name, 16)
    if name in ("fp8", "int8"):
        return Format(name, 8)
    found = re.fullmatch(r"int([2-8])(?:g(\d+))?", str(name))
    if found is None or (found[2] is not None and not int(found[2])):
        raise ValueError(message("formats", _KNOWN, repr(name)))
    return Format(str(name), int(found[1]), int(found[2] or 32))


@dataclass(frozen=True, eq=False)
class QuantizationPlan:
    """A format for each weight: its size, and the loss per sample that it is predicted to cost."""

    formats: Mapping[str, str]
    sizes: Mapping[str, float]  #: bits
    losses: Mapping[str, float]
    entries: Mapping[str, int]
    bound: float  #: no choice of formats within the budget has a smaller predicted loss

    @property
    def loss_increase(self) -> float:
        """The predicted increase of the loss per sample."""
        return sum(self.losses.values())

    @property
    def bits(self) -> float:
        """The bits of an entry on average, scales included."""
        return sum(self.sizes.values()) / sum(self.entries.values())

    def apply(self, model: nn.Module) -> nn.Module:
        """Round the model's weights in place to what their formats store, and return it (dtypes stay)."""
        weights = weights_named(model, list(self.formats))
        if wrong := [f"{w.name} of shape {list(w.parameter.shape)}" for w in weights if self._differs(w)]:
            raise ValueError(message("model", "the model that the plan was made for", first_of(wrong)))
        with torch.no_grad():
            for weight in weights:
                rounded = parse_format(self.formats[weight.name]).rounded(weight.matrix(weight.parameter).float())
                weight.parameter.copy_(weight.restored(rounded))
        return model

    def _differs(self, weight: Weight) -> bool:
        """Whether a weight has another size than when the plan was made."""
        size = parse_format(self.formats[weight.name]).size(weight.matrix(weight.parameter))
        return weight.parameter.numel() != self.entries[weight.name] or size != self.sizes[weight.name]

    def __str__(self) -> str:
        rows = []
        for name, chosen in self.formats.items():
            bits = self.sizes[name] / self.entries[name]
            rows.append((name, f"{self.entries[name]:,}", chosen, f"{bits:.2f}", f"{self.losses[name]:.3g}"))
        rows.append((TOTAL, f"{sum(self.entries.values()):,}", "", f"{self.bits:.2f}", f"{self.loss_increase:.3g}"))
        header = ("parameter", "entries", "format", "bits", "predicted loss")
        title = "Quantization plan: formats, and the increase of the loss per sample"
        return "\n".join([title, text_table(header, rows)])

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class QuantizationSensitivity:
    """The predicted increase of the loss per sample, ½ Σ F_ii Δ_i², of each weight in each format.

    `sensitivity["layer.weight"]["int4"]` is a number, `sensitivity.channels["layer.weight"]["int4"]` has one for each
    output channel; `plan` chooses formats, `uniform` takes the same for all.
    """

    channels: Mapping[str, Mapping[str, Tensor]]  #: [outputs], float64
    sizes: Mapping[str, Mapping[str, float]]  #: bits
    entries: Mapping[str, int]

    def __getitem__(self, name: str) -> dict[str, float]:
        return {one: float(losses.sum()) for one, losses in self.channels[name].items()}

    @property
    def formats(self) -> list[str]:
        """The names of the formats."""
        return list(next(iter(self.channels.values())))

    def uniform(self, name: str) -> QuantizationPlan:
        """Return the plan that stores every weight in the same format."""
        if name not in self.formats:
            raise ValueError(message("name", f"one of {', '.join(self.formats)}", repr(name)))
        return self._made(dict.fromkeys(self.channels, name), sum(self[one][name] for one in self.channels))

    def plan(self, bits: float) -> QuantizationPlan:
        """Return the formats with the least predicted loss at so many bits for an entry on average, with scales."""
        budget = finite_number(bits, "bits", positive=True) * sum(self.entries.values())
        hulls = {name: self._hull(name) for name in self.channels}
        chosen = {name: hull[0] for name, hull in hulls.items()}
        left = budget - sum(point.size for point in chosen.values())
        if left < 0:
            least = (budget - left) / sum(self.entries.values())
            advice = "Add a smaller format to `formats`."
            expected = f"at least {least:.4g}, which the smallest formats take"
            raise ValueError(message("bits", expected, f"{bits:g}", advice))
        steps = sorted(
            (-(a.loss - b.loss) / (b.size - a.size), i, name)
            for name, hull in hulls.items()
            for i, (a, b) in enumerate(pairwise(hull))
        )
        bound, full, stuck = sum(point.loss for point in chosen.values()), False, set[str]()
        for slope, i, name in steps:
            before, after = hulls[name][i], hulls[name][i + 1]
            fits = after.size - before.size <= left
            if not full:  # of the problem with fractions of steps
                bound += slope * min(after.size - before.size, left)
                full = not fits
            if fits and name not in stuck:
                chosen[name] = after
                left -= after.size - before.size
            else:
                stuck.add(name)
        return self._made({name: point.format for name, point in chosen.items()}, max(bound, 0.0))

    def _hull(self, name: str) -> list[_Point]:
        """The formats on the lower convex hull of (size, loss), from the smallest on."""
        points = sorted(_Point(self.sizes[name][one], loss, one) for one, loss in self[name].items())
        hull: list[_Point] = []
        for point in points:
            if hull and point.loss >= hull[-1].loss:
                continue
            while len(hull) > 1 and (hull[-2].loss - hull[-1].loss) * (point.size - hull[-1].size) <= (
                hull[-1].loss - point.loss
            ) * (hull[-1].size - hull[-2].size):
                hull.pop()
            if hull and hull[-1].size == point.size:
                hull.pop()
            hull.append(point)
        return hull

    def _made(self, formats: dict[str, str], bound: float) -> QuantizationPlan:
        sizes = {name: self.sizes[name][one] for name, one in formats.items()}
        losses = {name: self[name][one] for name, one in formats.items()}
        return QuantizationPlan(formats, sizes, losses, self.entries, bound)

    def __str__(self) -> str:
        totals = {one: sum(self[name][one] for name in self.channels) for one in self.formats}
        rows = [(name, f"{n:,}", *(f"{loss:.3g}" for loss in self[name].values())) for name, n in self.entries.items()]
        rows.append((TOTAL, f"{sum(self.entries.values()):,}", *(f"{loss:.3g}" for loss in totals.values())))
        title = "Predicted increase of the loss per sample, for each weight and format"
        return "\n".join([title, text_table(("parameter", "entries", *self.formats), rows)])

    __repr__ = __str__


class _Point(NamedTuple):
    size: float
    loss: float
    format: str


def quantization_sensitivity(
    model: nn.Module,
    fim: DiagonalFisher,
    formats: Sequence[str] = ("int2", "int3", "int4", "int8"),
    parameters: str | Sequence[str] | None = None,
) -> QuantizationSensitivity:
    """Return ½ Σ F_ii Δ_i² of each weight in each format, with Δ the rounding errors: the KL divergence to expect.

    The model is not changed.

    Args:
        model: whose weights are rounded.
        fim: a result for this model.  Its mean over samples is used, whatever its view.
        formats: names such as "int4", "int4g128", "int8", "fp8", "bf16".
        parameters: patterns of names.  By default weights of two dimensions or more that are no embeddings.

    Returns:
        A `QuantizationSensitivity`, whose `.plan(bits=4)` chooses a format for each weight.

    Raises:
        ValueError: model and result do not fit, or a format is not known.

    Example:
        >>> sensitivity = nm.quantization_sensitivity(model, nm.fisher_diagonal(model, data))
        >>> sensitivity.plan(bits=9).bits <= 9
        True
    """
    if isinstance(formats, str) or not formats:
        raise ValueError(message("formats", "a list of at least one name", repr(formats)))
    kinds = [parse_format(name) for name in formats]
    channels: dict[str, dict[str, Tensor]] = {}
    sizes: dict[str, dict[str, float]] = {}
    entries: dict[str, int] = {}
    for weight in weights_of(model, fim, parameters):
        matrix = weight.matrix(weight.parameter).to(weight.fisher.dtype)  # [o, i]
        fisher = weight.matrix(weight.fisher)
        channels[weight.name] = {
            kind.name: 0.5 * (fisher * (kind.rounded(matrix) - matrix).square()).sum(1, dtype=torch.float64).cpu()
            for kind in kinds
        }
        sizes[weight.name] = {kind.name: kind.size(matrix) for kind in kinds}
        entries[weight.name] = matrix.numel()
    return QuantizationSensitivity(channels, sizes, entries)
