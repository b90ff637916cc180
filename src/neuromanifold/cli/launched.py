"""The process group of a command that torchrun has started several times: made and destroyed here."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from neuromanifold.core.checks import message


@dataclass(frozen=True)
class Launched:
    """One of the processes of a command, and the device that is its own."""

    rank: int
    world: int
    device: str

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    def barrier(self) -> None:
        """Wait for the others."""
        if self.several:
            dist.barrier()


def world_size() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdigit() and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() else 1


def this_rank() -> int:
    """Return which of them this process is."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def end(code: object) -> NoReturn:
    """End this process as `sys.exit` does, but for the interpreter's own end.

    Threads of a process group may still drop tensors of its last collectives, for which they need the interpreter.
    Once that ends, they abort ("terminate called without an active exception", pytorch/pytorch#190489).  Destroying
    the group ends its threads, unless something holds it, as all models in FSDP2 do.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def process_group(device: str) -> Iterator[Launched]:
    """Yield this process of those that torchrun has started, inside of a process group: NCCL on GPUs, gloo on CPUs.

    Of the GPUs of a machine each process has the one with its local rank.
    """
    if world_size() < 2:
        yield Launched(0, 1, device)
        return
    gpus = device in ("auto", "cuda") and torch.cuda.is_available()
    if gpus:
        local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= there:
            advice = f"Use --nproc-per-node {there}, or --device cpu."
            raise ValueError(message("nproc-per-node", f"at most {there}, the number of GPUs", f"{local + 1}", advice))
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    elif device not in ("auto", "cpu"):
        advice = "Leave it out: each process takes the GPU with its local rank."
        raise ValueError(message("device", "auto, cuda or cpu with several processes", device, advice))
    dist.init_process_group("nccl" if gpus else "gloo")
    try:
        yield Launched(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
