"""Parameters of which each process holds a part: in FSDP2 (`fully_shard`), or in tensor parallelism (DTensors).

Each process keeps its part of all sums.

**FSDP2.**  A module computes with whole parameters, which are in memory during its forward and its backward pass alone.
These are the ones that autograd knows, so that its gradients, before FSDP reduces them, are those of this process's
batch.  What is computed from them has the full size for a moment; it is then added up over processes and divided among
them as FSDP does with gradients (reduce-scatter), one layer after the other:

    rule ─► Σ_n g_n² over the local batch, full size ─► LayerSums ─► Σ over processes, this process's part

Processes need not have the same parameters at the same time, such as experts without tokens: what arrives in a layer is
agreed on before it is reduced.

**Tensor parallelism.**  All processes are one replica of the model: each computes with its part of a parameter, on the
same batches, with the same cotangents.  A layer's input and the gradient of its output are whole on each process, or
parts of features, so that rules give the gradients of this process's part, or whole ones of which it takes its part
(`own_part`).  Nothing is added up over processes:

    rule ─► Σ_n g_n² of this process's part
"""

from __future__ import annotations

from typing import Any

from torch import nn

from neuromanifold.persample.shards.base import Shards, any_process, is_distributed, row_placements, union_of_processes
from neuromanifold.persample.shards.fully_shard import FullyShard, LayerSums
from neuromanifold.persample.shards.tensor_parallel import TensorParallel, on_this_process, own_part

__all__ = [
    "LayerSums",
    "Shards",
    "any_process",
    "is_distributed",
    "on_this_process",
    "own_part",
    "row_placements",
    "shards_of",
    "union_of_processes",
]


def shards_of(model: nn.Module, parameters: dict[str, nn.Parameter], processes: Any) -> Shards:
    """Return the parts of a model's parameters; all processes must call this together."""
    from torch.distributed.fsdp import FSDPModule

    fully = any(isinstance(module, FSDPModule) for module in model.modules())
    return (FullyShard if fully else TensorParallel)(model, parameters, processes)
