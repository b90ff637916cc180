"""The diagonal of a model in FSDP2: each process has a part of every parameter, none the whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from neuromanifold.results.diagonal import DiagonalFisher


class ShardedFisher(DiagonalFisher):
    """A `DiagonalFisher` whose tensors are DTensors, divided among processes as the parameters are.

    What needs values of all processes (`trace`, `save`, `gathered`) is called by all of them.
    """

    @override
    def _total(self, tensor: Any) -> float:
        return float(tensor.double().sum().full_tensor())

    def gathered(self) -> DiagonalFisher:
        """Return the whole result on each process, which must have the memory for it."""
        sums, noise = ({name: _whole(t) for name, t in d.items()} for d in (self.sums, self.noise))
        return DiagonalFisher(sums, noise, self.count, self.positions, self.provenance, self.reduction)


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor()
    return found
