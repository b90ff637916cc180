"""Sums of small parameters: biases and scales are many, so they are squared together, once for each pass.

One after the other, each would take ten operations on a few thousand numbers, and on a GPU launching an operation takes
longer than doing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuromanifold.persample.accumulate.base import Reducer, zero_sums

LIMIT, _LINES = 2**20, 8  # numbers that a small parameter's gradients of all samples have, at most; lines, likewise
_KINDS = ("squares", "fourths", "noiseless")  # of sums
_PART = 2**18  # numbers that are raised to the fourth power at a time


class _Entry(NamedTuple):
    values: Tensor  # [n, *shape]  the gradients of one parameter
    scale: float  # they are so many times too large
    noise_factor: float  # c with Var(g²) <= c E[g⁴]
    version: int | None  # of the values, which autograd may share with others

    def goes_with(self, other: _Entry) -> bool:
        """Whether both can be squared in one operation."""
        a, b = self.values, other.values
        same = a.shape[0] == b.shape[0] and a.dtype == b.dtype and a.device == b.device
        return same and (self.scale, self.noise_factor) == (other.scale, other.noise_factor)


@dataclass
class _Line:
    """Sums of some parameters, concatenated into vectors."""

    squares: Tensor
    fourths: Tensor | None = None  # float64, which needs no units
    noiseless: Tensor | None = None  # the part of `squares` in which nothing is random


Columns = tuple[tuple[int, torch.Size], ...]
"""The parameters of a line in their order, by number, with their shapes."""


class SmallSums:
    """Σ g² and Σ c g⁴ of small parameters."""

    def __init__(self, separate_noiseless: bool = False) -> None:
        """`separate_noiseless`: squares in which nothing is random are also summed on their own."""
        self._separate_noiseless = separate_noiseless
        self._waiting: dict[int, _Entry] = {}
        self._lines: dict[Columns, _Line] = {}
        self.moves = 0
        """How often sums have moved to other memory, which invalidates captured CUDA graphs."""

    def add(self, i: int, values: Tensor, scale: float, noise_factor: float) -> None:
        """Take per-sample gradients of parameter number i, [n, *shape], until the next `flush`."""
        entry = _Entry(values, scale, noise_factor, None if values.is_inference() else values._version)
        if i in self._waiting or not next(iter(self._waiting.values()), entry).goes_with(entry):
            self.flush()
        self._waiting[i] = entry

    def flush(self) -> None:
        """Square the gradients that have been taken, and add them to the sums."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            self._square(waiting)

    @torch.no_grad()
    def _square(self, waiting: dict[int, _Entry]) -> None:
        columns, rows = [], []
        for i, (values, scale, c, version) in waiting.items():  # noqa: B007 (scale, c: those of all)
            if version is not None and values._version != version:
                text = "A gradient was overwritten during the backward pass: a `backward` or a hook of the model works "
                text += "in place on what it is given, which autograd shares. Let it return a new one."
                raise RuntimeError(text)
            columns.append((i, values.shape[1:]))
            rows.append(values.reshape(values.shape[0], values.shape[1:].numel()))
        values = torch.cat(rows, 1)  # [n, all]
        squares = values.square() if scale == 1.0 else (values / scale).square_()
        line, total = self._line(tuple(columns), rows[0], bool(c)), squares.sum(0)
        line.squares += total
        if c and line.fourths is not None:
            line.fourths += _sum_of_squares(squares).mul_(c)
        elif line.noiseless is not None:
            line.noiseless += total

    def _line(self, columns: Columns, like: Tensor, random: bool) -> _Line:
        """Return the sums of these parameters, zeros if they are new; too many lines are merged by parameter."""
        if columns not in self._lines and sum(len(known) > 1 for known in self._lines) >= _LINES:
            self.replace(self.squares(), self.fourths(), self.noiseless())  # each batch uses other parameters
        if columns not in self._lines:
            self._lines[columns] = _Line(like.new_zeros(sum(shape.numel() for _, shape in columns)))
        line = self._lines[columns]
        if random and line.fourths is None:
            line.fourths = torch.zeros_like(line.squares, dtype=torch.float64)
        if self._separate_noiseless and not random and line.noiseless is None:
            line.noiseless = torch.zeros_like(line.squares)
        return line

    def forget(self) -> None:
        """Drop the gradients that have been taken and not yet added."""
        self._waiting = {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all sums as they are: added up in another order they would be rounded differently."""
        self.flush()
        every = {f"{k}.{kind}": getattr(line, kind) for k, line in enumerate(self._lines.values()) for kind in _KINDS}
        layouts = [[(i, list(shape)) for i, shape in columns] for columns in self._lines]
        tensors = {name: value for name, value in every.items() if value is not None}
        return tensors, {"layouts": layouts, "moves": self.moves}

    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any], devices: Sequence[torch.device]) -> None:
        """Restore what `state` returned; `devices` are those of the parameters."""
        self._waiting, self._lines, self.moves = {}, {}, values["moves"]
        for k, entries in enumerate(values["layouts"]):
            columns = tuple((i, torch.Size(shape)) for i, shape in entries)
            device, found = devices[columns[0][0]], {kind: tensors.get(f"{k}.{kind}") for kind in _KINDS}
            copied = {kind: t.to(device, copy=True) for kind, t in found.items() if t is not None}
            self._lines[columns] = _Line(**copied)

    def replace(self, squares: dict[int, Tensor], fourths: dict[int, Tensor], noiseless: dict[int, Tensor]) -> None:
        """Take these sums, by parameter, in place of all that there are."""
        self._waiting, self.moves = {}, self.moves + 1
        others = {"fourths": fourths, "noiseless": noiseless}
        self._lines = {
            ((i, value.shape),): _Line(value.flatten(), **{k: of[i].flatten() for k, of in others.items() if i in of})
            for i, value in squares.items()
        }

    def merge(self, other: SmallSums) -> None:
        """Add the sums of other batches."""
        self.replace(**{kind: _added(getattr(self, kind)(), getattr(other, kind)()) for kind in _KINDS})

    def reduce(self, processes: Reducer, parameters: Sequence[Tensor]) -> None:
        """Add up the sums of all processes, many parameters in one message."""
        sums = {kind: getattr(self, kind)() for kind in _KINDS}
        of_all = processes.gather("small sums", {kind: sorted(found) for kind, found in sums.items()})
        for kind, found in sums.items():
            for i in sorted({i for one in of_all for i in one[kind]}):
                zeros = zero_sums(parameters[i])
                found[i] = found.get(i, zeros).to(torch.float64 if kind == "fourths" else zeros.dtype)
            for like in sorted({(str(value.dtype), str(value.device)) for value in found.values()}):
                some = {i: v for i, v in sorted(found.items()) if (str(v.dtype), str(v.device)) == like}
                line = torch.cat([value.flatten() for value in some.values()])
                processes.add(line)
                parts = torch.split(line, [value.numel() for value in some.values()])
                found.update({i: part.view(some[i].shape) for i, part in zip(some, parts, strict=True)})
        self.replace(**sums)

    def squares(self) -> dict[int, Tensor]:
        """Return Σ g² of each parameter with a gradient so far."""
        return self._by_parameter("squares")

    def fourths(self) -> dict[int, Tensor]:
        """Return Σ c g⁴ of each parameter with a random gradient so far."""
        return self._by_parameter("fourths")

    def noiseless(self) -> dict[int, Tensor]:
        """Return the part of Σ g² in which nothing is random, of each parameter with such a part."""
        return self._by_parameter("noiseless")

    def _by_parameter(self, kind: str) -> dict[int, Tensor]:
        """Return sums of each parameter, added over lines, as new tensors."""
        self.flush()
        found: dict[int, Tensor] = {}
        for columns, line in self._lines.items():
            if (sums := getattr(line, kind)) is not None:
                parts = torch.split(sums, [shape.numel() for _, shape in columns])
                for (i, shape), part in zip(columns, parts, strict=True):
                    found[i] = found[i] + part.view(shape) if i in found else part.view(shape).clone()
        return found


def _sum_of_squares(values: Tensor) -> Tensor:
    """Return Σ_n values², in float64; on a CPU, norms over a first dimension take twenty times as long."""
    if values.device.type != "cpu":
        norms: Tensor = torch.linalg.vector_norm(values, dim=0, dtype=torch.float64)
        return norms.square_()
    rows = max(1, _PART // max(1, values.shape[1]))
    parts = torch.split(values, rows) if len(values) > rows else [values]
    first, *others = [part.double().square_().sum(0) for part in parts]
    return sum(others, first)


def _added(a: dict[int, Tensor], b: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the sums of two mappings, of which either may have further entries."""
    return {**a, **b, **{i: a[i] + b[i] for i in a.keys() & b.keys()}}
