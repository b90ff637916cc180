"""Parameters in FSDP2 (`fully_shard`), of which each process holds a part, and sums of which each keeps its part.

A module computes with whole parameters, which are in memory during its forward and its backward pass alone.  These are
the ones that autograd knows, so that its gradients, before FSDP reduces them, are those of this process's batch.  What
is computed from them has the full size for a moment; it is then added up over processes and divided among them as FSDP
does with gradients (reduce-scatter), one layer after the other:

    rule ─► Σ_n g_n² over the local batch, full size ─► LayerSums ─► Σ over processes, this process's part

Processes need not have the same parameters at the same time, such as experts without tokens: what arrives in a layer is
agreed on before it is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.problem.fingerprint import Thinned, fingerprint

_FINGERPRINTED = 1024  # numbers of each parameter


class Shards:
    """The chosen parameters of a model in FSDP2: what modules hold, and what they compute with."""

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], processes: Any) -> None:
        """Gather each FSDP module once; all processes must do so together."""
        from torch.distributed.fsdp import FSDPModule  # which takes long to import

        self.processes = processes
        self.held: list[Any] = list(parameters.values())
        """The parts, as DTensors: what modules hold while they do not compute."""
        self._modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        numbers = {id(parameter): i for i, parameter in enumerate(self.held)}
        places = [
            (module, name, numbers[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in numbers
        ]
        whole: dict[int, nn.Parameter] = {}
        self.units: dict[int, int] = {}
        """Which FSDP module gathers each parameter."""
        self.thinned: dict[str, Thinned] = {}
        """Some numbers of each whole parameter, for fingerprints."""
        names = list(parameters)
        for unit, module in enumerate(self._modules):
            module.unshard()
            for owner, name, i in places:
                gathered: Any = owner._parameters[name]
                if i not in whole and gathered is not self.held[i]:
                    whole[i], self.units[i] = gathered, unit
                    self.thinned[names[i]] = Thinned.of(gathered, _FINGERPRINTED)
            module.reshard()
        self._check(names, whole)
        self.thinned = {name: self.thinned[name] for name in names}
        self.whole = [whole[i] for i in range(len(names))]
        """What modules compute with, and autograd knows; their memory is there only while they do."""

    def _check(self, names: list[str], whole: dict[int, nn.Parameter]) -> None:
        advice = "Use fully_shard on a mesh of all processes, without tensor parallelism, or leave it out with "
        advice += "`parameters`."
        world = len(self.processes.gather("sharded", True))
        for i, name in enumerate(names):
            got = ""
            if i not in whole:
                got = f"{name!r}, which no FSDP module gathers"
            elif hasattr(whole[i], "placements"):
                got = f"{name!r}, which is tensor parallel besides"
            elif self.held[i].device_mesh.size() != world:
                got = f"{name!r} sharded over {self.held[i].device_mesh.size()} of {world} processes"
            elif whole[i].dtype == torch.float16:
                got, advice = f"{name!r} in float16", "Use bfloat16 or float32."
            if got:
                raise ValueError(message("model", "sharded by FSDP2 (fully_shard) alone", got, advice))

    @property
    def fingerprint(self) -> str:
        """Of all parameters: that of the same model on one process."""
        return fingerprint(*self.thinned.items())

    def reshard(self) -> None:
        """Free whole parameters that FSDP keeps after a forward pass."""
        for module in self._modules:
            module.reshard()

    def part(self, i: int) -> Tensor:
        """The part of a parameter that this process holds."""
        local: Tensor = self.held[i].to_local()
        return local

    def reduced(self, i: int, whole: Tensor) -> Tensor:
        """Add up tensors of a parameter's full size, or of its rows' number, over processes; return this one's part."""
        from torch.distributed.tensor import DTensor, Partial

        held = self.held[i]
        mesh = held.device_mesh
        summed = DTensor.from_local(whole.contiguous(), mesh, [Partial()] * mesh.ndim, run_check=False)
        part: Tensor = summed.redistribute(placements=self._placements(i, whole)).to_local()
        return part.to(held.device)

    def part_of(self, i: int, whole: Tensor) -> Tensor:
        """Return this process's part of a tensor of a parameter's size, or of its rows' number, that all have."""
        from torch.distributed.tensor import distribute_tensor

        held = self.held[i]
        given = whole.to(held.to_local().device)
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

    @contextmanager
    def streamed(self, numbers: list[int], take: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Hand autograd's gradients of some parameters to `take` as they come: `autograd.grad` returns zeros."""

        def hook(i: int) -> Callable[[Tensor], Tensor]:
            def hand_over(g: Tensor) -> Tensor:
                take(i, g.to_dense() if g.layout != torch.strided else g)
                return g.new_zeros(()).expand(g.shape)  # which has no memory of its own

            return hand_over

        wholes: list[Any] = self.whole  # whose method has no types
        handles = [wholes[i].register_hook(hook(i)) for i in numbers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def row_placements(placements: Any) -> list[Any]:
    """Return where numbers for each row of a distributed tensor are: in parts, along whatever the tensor is divided."""
    from torch.distributed.tensor import Shard

    return [Shard(0) if one.is_shard() else one for one in placements]


def any_process(shards: Shards | None, what: str, flag: bool) -> bool:
    """Whether a flag is set in any of the processes that have parts of the parameters; without parts, in this one."""
    return flag if shards is None else any(shards.processes.gather(what, flag))


def union_of_processes(shards: Shards | None, what: str, numbers: Set[int]) -> frozenset[int]:
    """Return the numbers of all processes that have parts of the parameters; without parts, those of this one."""
    return frozenset(numbers if shards is None else chain(*shards.processes.gather(what, sorted(numbers))))


Take = Callable[[int, str, Tensor], None]
"""Takes this process's part of a sum over processes: the parameter's number, what it is, and the part."""


class LayerSums:
    """Full-size tensors of one layer's parameters, added up over processes once those of another layer come."""

    def __init__(self, shards: Shards, take: Take) -> None:
        self._shards, self._take = shards, take
        self._unit = -1
        self._waiting: dict[tuple[int, str], Tensor] = {}

    def put(self, i: int, kind: str, whole: Tensor) -> None:
        """Take a tensor of a parameter's size, or of its rows' number; those of one kind and parameter are added."""
        self.reach(i)
        before = self._waiting.get((i, kind))
        self._waiting[i, kind] = whole if before is None else before.add_(whole)

    def reach(self, i: int) -> None:
        """Come to the layer of a parameter; what is waiting of another one is added up."""
        unit = self._shards.units[i]
        if unit != self._unit:
            self.flush()
            self._unit = unit

    @torch.no_grad()
    def flush(self) -> None:
        """Add up what is waiting; all processes must come here as often."""
        processes = self._shards.processes
        mine = [[i, kind, str(whole.dtype), *whole.shape] for (i, kind), whole in self._waiting.items()]
        of_all = processes.gather("layer", [self._unit, mine])
        if len({unit for unit, _ in of_all}) > 1:
            expected = "one whose gradients come to the same layers on all processes, in the same order"
            raise ValueError(message("model", expected, f"FSDP modules {[unit for unit, _ in of_all]} at a time"))
        waiting, self._waiting, self._unit = self._waiting, {}, -1
        for i, kind, dtype, *shape in sorted({tuple(one) for _, some in of_all for one in some}):
            whole = waiting.pop((i, kind), None)
            if whole is None:
                like = self._shards.whole[i]
                whole = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=like.device)
            self._take(i, kind, self._shards.reduced(i, whole))
