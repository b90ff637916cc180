"""What FSDP2 and tensor parallelism have in common: parameters of which each process holds a part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from neuromanifold.problem.fingerprint import Thinned, fingerprint

FINGERPRINTED = 1024  # numbers of each parameter
_PLAIN = (Tensor, nn.Parameter)

Take = Callable[[int, str, Tensor], None]
"""Takes this process's part of a sum over all samples: the parameter's number, what it is, and the part."""


class AddsParts(Protocol):
    """Adds tensors of parameters over all samples, and hands this process's part of each sum on."""

    def put(self, i: int, kind: str, tensor: Tensor) -> None:
        """Take a tensor of a parameter, of the size that `Shards.squared` has."""

    def reach(self, i: int) -> None:
        """Come to a parameter without a tensor of it."""

    def flush(self) -> None:
        """Hand on what is still waiting; all processes must come here as often."""


class Shards(ABC):
    """The chosen parameters of a model of which each process has a part."""

    one_replica = False
    """Whether all processes have the same batches, and count them once."""

    partial: frozenset[int] = frozenset()
    """Replicated parameters of whose gradient each process computes one term of a sum: they are left to autograd."""

    def __init__(self, parameters: dict[str, nn.Parameter], processes: Any) -> None:
        self.processes = processes
        self.names = list(parameters)
        self.held: list[Any] = list(parameters.values())
        """What modules hold while they do not compute: DTensors, but for those that each process has all of."""
        self.whole: list[nn.Parameter] = self.held
        """What modules compute with, and autograd knows."""
        self.thinned: dict[str, Thinned] = {}
        """Some numbers of each whole parameter, for fingerprints."""

    def of_replicas(self, of_all: list[Any]) -> list[Any]:
        """Return one value for each replica of the model: of every process, or of rank 0 if they are one replica."""
        return of_all[:1] if self.one_replica else of_all

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all parameters, the same as of the whole model on one process."""
        return fingerprint(*self.thinned.items())

    def part(self, i: int) -> Tensor:
        """The part of a parameter that this process holds."""
        held = self.held[i].detach()
        local: Tensor = held.to_local() if is_distributed(held) else held
        return local

    def part_of(self, i: int, whole: Tensor) -> Tensor:
        """Return this process's part of a tensor of a parameter's size, or of its rows' number, that all have."""
        from torch.distributed.tensor import distribute_tensor

        held, given = self.held[i], whole.to(self.part(i).device)
        if not is_distributed(held):
            return given.clone()
        placements = self._placements(i, whole)
        local: Tensor = distribute_tensor(given, held.device_mesh, placements, src_data_rank=None).to_local()
        return local.clone()

    def as_whole(self, i: int, part: Tensor) -> Any:
        """Return parts of all processes as one distributed tensor, of the parameter's shape or of its rows' number."""
        from torch.distributed.tensor import DTensor

        held, by_row = self.held[i], part.ndim < self.held[i].ndim
        shape = {"shape": held.shape[:1] if by_row else held.shape, "stride": (1,) if by_row else held.stride()}
        return DTensor.from_local(part, held.device_mesh, self._placements(i, part), run_check=False, **shape)

    def _placements(self, i: int, tensor: Tensor) -> Any:
        """Where the parts of such a tensor are: those of the parameter, or of one number for each of its rows."""
        placements = self.held[i].placements
        return placements if tensor.ndim == self.held[i].ndim else row_placements(placements)

    @abstractmethod
    def squared(self, i: int) -> Tensor:
        """Return a tensor with the shape and device of the squares of a parameter's gradients on this process."""

    @abstractmethod
    def sums(self, take: Take) -> AddsParts:
        """Return what adds tensors like `squared` over all samples, and hands this process's part to `take`."""

    def is_counted(self, i: int) -> bool:
        """Whether this process counts its part of a parameter in sums over processes."""
        del i
        return True

    def reshard(self) -> None:  # noqa: B027 (nothing to do in tensor parallelism)
        """Free whole parameters that are kept after a forward pass."""

    def compare(self, gradients: dict[int, Tensor]) -> None:  # noqa: B027
        """Raise an error if gradients are not the same on all processes where they must be."""

    def agree_on(self, logits: Tensor) -> None:  # noqa: B027
        """Raise an error if logits are not the same on all processes where they must be."""

    def agreed(self, cotangent: Tensor) -> Tensor:
        """Return a cotangent that is the same on all processes where it must be."""
        return cotangent

    def own_gradient(self, i: int, g: Any) -> Tensor:
        """Return what this process computes of autograd's gradient of a parameter."""
        del i
        dense: Tensor = g.to_dense() if g.layout != torch.strided else g
        return dense

    @contextmanager
    def streamed(self, numbers: list[int], take: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Hand autograd's gradients of some parameters to `take` as they come: FSDP2 then has zeros instead."""

        def hook(i: int) -> Callable[[Tensor], Tensor | None]:
            def hand_over(g: Tensor) -> Tensor | None:
                take(i, self.own_gradient(i, g))
                return None if self.one_replica else g.new_zeros(()).expand(g.shape)  # which has no memory of its own

            return hand_over

        wholes: list[Any] = self.whole  # whose method has no types
        handles = [wholes[i].register_hook(hook(i)) for i in numbers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def any_process(shards: Shards | None, what: str, flag: bool) -> bool:
    """Whether a flag is set in any of the processes that have parts of the parameters; without parts, in this one."""
    return flag if shards is None else any(shards.processes.gather(what, flag))


def union_of_processes(shards: Shards | None, what: str, numbers: Set[int]) -> frozenset[int]:
    """Return the numbers of all processes that have parts of the parameters; without parts, those of this one."""
    return frozenset(numbers if shards is None else chain(*shards.processes.gather(what, sorted(numbers))))


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, whose class takes long to import."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "placements")


def row_placements(placements: Any) -> list[Any]:
    """Return where numbers for each row of a distributed tensor are: in parts, along whatever the tensor is divided."""
    from torch.distributed.tensor import Shard

    return [Shard(0) if one.is_shard() else one for one in placements]
