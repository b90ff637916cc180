"""How parameters lie side by side in one vector, and the kinds of vectors that a metric takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.results.naming import layers

Vector = Tensor | Mapping[str, Tensor] | Sequence[Tensor] | NDArray[Any]
V = TypeVar("V", bound=Vector)


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """Parameters by name, flattened one after the other: θ = (θ_1, ..., θ_P)."""

    shapes: dict[str, torch.Size]

    def __eq__(self, other: object) -> bool:
        """Whether the same parameters come in the same order, which an equality of dicts ignores."""
        return isinstance(other, ParameterLayout) and list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> ParameterLayout:
        """The layout of tensors by name, in their order."""
        return cls({name: tensor.shape for name, tensor in tensors.items()})

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The range of indices of each parameter in the vector."""
        found, start = {}, 0
        for name, shape in self.shapes.items():
            found[name] = slice(start, start := start + shape.numel())
        return found

    @cached_property
    def size(self) -> int:
        """P, the length of the vector."""
        return sum(shape.numel() for shape in self.shapes.values())

    def flatten(self, values: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor for each parameter, as a vector [P]."""
        return torch.cat([values[name].detach().reshape(-1).to(device, dtype) for name in self.shapes])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """A vector [P] as one tensor for each parameter, of its shape; of a block [P, m], [*shape, m]."""
        rest = flat.shape[1:]
        return {name: flat[self.slices[name]].view((*shape, *rest)) for name, shape in self.shapes.items()}

    def layers(self) -> dict[str, list[str]]:
        """The parameters of each module, by the module's name."""
        return layers(self.shapes)

    def layer_indices(self, device: torch.device) -> dict[str, slice | Tensor]:
        """Where each layer's parameters are in the vector: a slice; indices if they lie apart, as in a user's dict."""
        found: dict[str, slice | Tensor] = {}
        for layer, names in self.layers().items():
            places = [self.slices[name] for name in names]
            if all(a.stop == b.start for a, b in pairwise(places)):
                found[layer] = slice(places[0].start, places[-1].stop)
            else:
                found[layer] = torch.cat([torch.arange(one.start, one.stop, device=device) for one in places])
        return found

    def read(
        self, v: Vector, argument: str, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """A vector of any kind as a block [P, m], and the function that turns a block back into that kind."""
        if isinstance(v, Mapping):
            self._check_names(v, argument)
            return self.flatten(v, dtype, device)[:, None], lambda block: self.split(block[:, 0])
        if isinstance(v, (list, tuple)) and all(isinstance(one, Tensor) for one in v):
            if len(v) != len(self.shapes):
                raise ValueError(message(argument, f"{len(self.shapes)} tensors, one for each parameter", f"{len(v)}"))
            columns, again = self.read(dict(zip(self.shapes, v, strict=True)), argument, dtype, device)
            return columns, lambda block: list(again(block).values())
        if isinstance(v, np.ndarray):
            columns, again = self.read(torch.as_tensor(v.copy()), argument, dtype, device)  # strides, read-only memory
            return columns, lambda block: again(block).cpu().numpy()
        expected = (
            f"a tensor or array of shape [{self.size}] or [{self.size}, m], or a dict by parameter name, or a list"
        )
        if not isinstance(v, Tensor):
            raise TypeError(message(argument, expected, type(v).__name__))
        if v.is_complex():
            raise TypeError(message(argument, "real", str(v.dtype)))
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise ValueError(message(argument, expected, f"shape {list(v.shape)}"))
        shape, columns = v.shape, v.detach().to(device, dtype)
        return columns if v.ndim == 2 else columns[:, None], lambda block: block.reshape(shape)

    def _check_names(self, v: Mapping[str, Tensor], argument: str) -> None:
        missing = [name for name in self.shapes if name not in v]
        foreign = [name for name in v if name not in self.shapes]
        if missing or foreign:
            got = f"a dict without {missing[0]!r}" if missing else f"one with {foreign[0]!r} too"
            raise ValueError(message(argument, f"a dict with the metric's {len(self.shapes)} parameters", got))
        for name, shape in self.shapes.items():
            if not isinstance(v[name], Tensor) or v[name].shape != shape:
                got = f"shape {list(v[name].shape)}" if isinstance(v[name], Tensor) else type(v[name]).__name__
                raise ValueError(message(f"{argument}[{name!r}]", f"a tensor of shape {list(shape)}", got))
