"""Parameters in tensor parallelism: each process computes with its part of them, and all have the same batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from neuromanifold.core.checks import message
from neuromanifold.persample.gradients import Form
from neuromanifold.persample.shards.base import (
    FINGERPRINTED,
    Shards,
    Take,
    any_process,
    is_distributed,
    union_of_processes,
)
from neuromanifold.problem.fingerprint import Thinned, fingerprint

_ALIKE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative difference of what should be the same on all processes
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorParallel(Shards):
    """The parameters of a model in tensor parallelism: DTensors, and whole ones that are the same on all processes."""

    one_replica = True

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], processes: Any) -> None:
        """Make each parameter whole once, for its fingerprint; all processes must do so together."""
        super().__init__(parameters, processes)
        self._check(model)
        for name, held in zip(self.names, self.held, strict=True):
            value = held.detach()
            self.thinned[name] = Thinned.of(value.full_tensor() if is_distributed(value) else value, FINGERPRINTED)
        self.partial = frozenset(
            self.names.index(name)
            for module in model.modules()
            if _adds_gradients(module)
            for parameter in module._parameters.values()
            for name, chosen in parameters.items()
            if chosen is parameter
        )
        self._differ = False  # whether logits differ by rounding

    def _check(self, model: nn.Module) -> None:
        expected = "tensor parallel on a mesh of all processes, with weights that are sharded or replicated"
        world = len(self.processes.gather("parallel", True))
        for name, parameter in model.named_parameters():
            value: Any = parameter
            if not is_distributed(value):
                continue
            self._mesh, got = value.device_mesh, ""
            if self._mesh.ndim > 1 or self._mesh.size() != world:
                shape = "x".join(map(str, self._mesh.shape))
                got = f"{name!r} on a mesh of {shape} for {world} processes"
            elif value.placements[0].is_partial():
                got = f"{name!r} as {value.placements[0]}"
            elif value.placements[0].is_shard() and (own := _own_range(value)) is not None:
                length = value.detach().to_local().shape[own[0]]
                got = f"{name!r} in parts of unusual sizes" if length != own[2] else ""
            if got:
                raise ValueError(message("model", expected, got))
        for name, parameter in zip(self.names, self.held, strict=True):
            if parameter.dtype == torch.float16:
                raise ValueError(message("model", "in bfloat16 or float32", f"{name!r} in float16"))

    @override
    def squared(self, i: int) -> Tensor:
        return self.part(i)

    @override
    def sums(self, take: Take) -> OwnSums:
        return OwnSums(take)

    @override
    def is_counted(self, i: int) -> bool:
        return self.processes.all.rank == 0 or not self._is_replicated(i)

    def _is_replicated(self, i: int) -> bool:
        held = self.held[i]
        return not is_distributed(held) or held.placements[0].is_replicate()

    @override
    def own_gradient(self, i: int, g: Any) -> Tensor:
        if is_distributed(g):
            g = g.redistribute(placements=self.held[i].placements).to_local()
        elif i in self.partial:
            g = g.clone()
            dist.all_reduce(g)
        return super().own_gradient(i, g)

    @override
    def as_whole(self, i: int, part: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        if is_distributed(self.held[i]):
            return super().as_whole(i, part)
        return DTensor.from_local(part, self._mesh, [Replicate()], run_check=False)

    @override
    def compare(self, gradients: dict[int, Tensor]) -> None:
        """Refuse replicated parameters whose gradients differ: each process uses them on its own heads or positions."""
        mine = [i for i in gradients if not is_distributed(self.held[i])]
        wrong = set[int]()
        for i in sorted(union_of_processes(self, "replicated", set(mine))):
            own = gradients[i] if i in gradients else torch.zeros_like(self.held[i])
            if self._farthest(own) > _ALIKE.get(self.held[i].dtype, 5e-2) * float(torch.linalg.vector_norm(own)):
                wrong.add(i)
        if failed := union_of_processes(self, "differing", wrong):
            names = ", ".join(repr(self.names[i]) for i in sorted(failed)[:3])
            advice = "Each process uses it on a part of the heads or positions: make it a DTensor (SequenceParallel), "
            advice += "or leave it out with `parameters`."
            raise ValueError(
                message(
                    "parameters", "ones with the same gradient on all processes", f"different ones for {names}", advice
                )
            )

    @override
    def agree_on(self, logits: Tensor) -> None:
        """Refuse different logits; where they differ by rounding, `agreed` gives all processes rank 0's cotangents."""
        sums = [logits.detach().view(_INTEGERS[logits.dtype.itemsize]).sum(d, dtype=torch.int64) for d in (0, -1)]
        of_all = self.processes.gather("logits", [list(logits.shape), str(logits.dtype), fingerprint(("", sums))])
        self._differ = any(one != of_all[0] for one in of_all)
        if not self._differ:
            return
        alike = all(one[:2] == of_all[0][:2] for one in of_all)
        if alike:
            difference = self._farthest(logits.detach())
            size = float(torch.linalg.vector_norm(logits.detach()))
            alike = not any_process(self, "others", difference > _ALIKE.get(logits.dtype, 5e-2) * size)
        if not alike:
            advice = "Make the last layer's output whole (ColwiseParallel(output_layouts=Replicate())), and give all "
            advice += "processes the same data."
            raise ValueError(message("logits", "the same on all processes", "different ones", advice))

    @override
    def agreed(self, cotangent: Tensor) -> Tensor:
        """That of rank 0, where logits differ by rounding."""
        if self._differ:
            cotangent = cotangent.contiguous()
            dist.broadcast(cotangent, 0)
        return cotangent

    def _farthest(self, values: Tensor) -> float:
        """Return the norm of the difference to the values of rank 0."""
        theirs = values.contiguous().clone()
        dist.broadcast(theirs, 0)
        return float(torch.linalg.vector_norm(theirs.sub_(values)))


def _adds_gradients(module: nn.Module) -> bool:
    """Whether a norm of transformers has all of its weight and its own heads: in training, gradients are added up."""
    name = getattr(vars(module).get("forward"), "__qualname__", "")
    return name.startswith("ReplicatedWithGradAllReduce.")


class OwnSums:
    """Tensors of this process's parts of parameters, which are sums over all samples."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def put(self, i: int, kind: str, part: Tensor) -> None:
        """Hand a tensor of a parameter's part on."""
        self._take(i, kind, part)

    def reach(self, i: int) -> None:
        """Do nothing: no process has passes that others have not."""

    def flush(self) -> None:
        """Do nothing: all that was put has been handed on."""


def on_this_process(tensor: Any) -> Tensor:
    """Return a DTensor as this process computes with it: all of it, or its part of the last dimension, the features.

    What a collective is still under way for is waited for: a kernel takes its memory.
    """
    if not is_distributed(tensor):
        return tensor.trigger_wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor  # type: ignore[no-any-return]
    (placement,), last = tensor.placements, tensor.ndim - 1
    here: Tensor = tensor.to_local() if placement.is_replicate() or placement.is_shard(last) else tensor.full_tensor()
    return here


def own_part(form: Form, parameter: Any) -> Form:
    """Return the gradients of this process's part of a parameter, from those of the whole or of that part."""
    own = _own_range(parameter) if is_distributed(parameter) else None
    if own is None or len(form.shape) != parameter.ndim or form.shape[own[0]] == own[2]:
        return form
    if form.shape[own[0]] != parameter.shape[own[0]]:
        raise ValueError("Gradients of another part of the parameter.")
    return form.part(*own)


def _own_range(parameter: Any) -> tuple[int, int, int] | None:
    """Return which part of a DTensor this process has: dimension, first entry, how many; None for all of it."""
    (placement,) = parameter.placements
    if placement.is_replicate():
        return None
    if not placement.is_shard():
        raise NotImplementedError("A part of several pieces, as of fused matrices.")
    size: int = parameter.shape[placement.dim]
    chunk = -(-size // parameter.device_mesh.size())  # as torch.chunk divides it
    start = min(size, parameter.device_mesh.get_local_rank() * chunk)
    return placement.dim % parameter.ndim, start, min(chunk, size - start)
