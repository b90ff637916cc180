"""Parameters in FSDP2: modules hold parts, and compute with whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from neuromanifold.core.checks import message
from neuromanifold.persample.shards.base import FINGERPRINTED, Shards, Take
from neuromanifold.problem.fingerprint import Thinned


class FullyShard(Shards):
    """The parameters of a model in FSDP2: modules hold parts, and compute with whole ones."""

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], processes: Any) -> None:
        """Gather each FSDP module once; all processes must do so together."""
        from torch.distributed.fsdp import FSDPModule  # which takes long to import

        super().__init__(parameters, processes)
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
        names = self.names
        for unit, module in enumerate(self._modules):
            module.unshard()
            for owner, name, i in places:
                gathered: Any = owner._parameters[name]
                if i not in whole and gathered is not self.held[i]:
                    whole[i], self.units[i] = gathered, unit
                    self.thinned[names[i]] = Thinned.of(gathered, FINGERPRINTED)
            module.reshard()
        self._check(names, whole)
        self.thinned = {name: self.thinned[name] for name in names}
        self.whole = [whole[i] for i in range(len(names))]
        # their memory is there only while modules compute

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

    @override
    def squared(self, i: int) -> Tensor:
        return self.whole[i]

    @override
    def sums(self, take: Take) -> LayerSums:
        return LayerSums(self, take)

    @override
    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def reduced(self, i: int, whole: Tensor) -> Tensor:
        """Add up tensors of a parameter's full size, or of its rows' number, over processes; return this one's part."""
        from torch.distributed.tensor import DTensor, Partial

        held = self.held[i]
        mesh = held.device_mesh
        summed = DTensor.from_local(whole.contiguous(), mesh, [Partial()] * mesh.ndim, run_check=False)
        part: Tensor = summed.redistribute(placements=self._placements(i, whole)).to_local()
        return part.to(held.device)


class LayerSums:
    """Full-size tensors of one layer's parameters, added up over processes once those of another layer come."""

    def __init__(self, shards: FullyShard, take: Take) -> None:
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
