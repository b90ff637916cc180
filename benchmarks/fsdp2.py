"""Memory that a run takes with a model in FSDP2, by processes on one machine: gloo, float32, one thread each.

    MALLOC_MMAP_THRESHOLD_=65536 PYTHONPATH=src:benchmarks python benchmarks/fsdp2.py

Sixteen layers of 1024 × 1024, each an FSDP module.  Memory is the largest growth of a process's anonymous memory
(RssAnon, sampled each millisecond) from before the call, so without the weights that the process has.
"""

from __future__ import annotations

import json
import platform
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import RESULTS
from torch import nn
from torch.distributed.fsdp import fully_shard

import neuromanifold as nm
from neuromanifold.results.error_bars import ErrorBars

WIDTH, LAYERS, SAMPLES, BATCHES = 1024, 16, 16, 3
MIB = 2**20


def model(sharded: bool) -> nn.Sequential:
    """The network, whole or in FSDP2."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    network = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    if sharded:
        for layer in network:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(network)
    return network


def anonymous() -> int:
    """Return the bytes of this process's anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def growth(work: Callable[[], object]) -> float:
    """Return by how many MiB memory grows at the most while some work is done."""
    before, largest, ended = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            largest[0] = max(largest[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    kept = work()
    ended.set()
    thread.join()
    del kept
    return max(0, largest[0] - before) / MIB


def measure(rank: int, world: int, folder: str, sharded: bool, error_bars: ErrorBars) -> None:
    """Measure both kinds of work in this process, and write the largest of all processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    network, data = model(sharded), list(torch.randn(BATCHES * world, SAMPLES, WIDTH))

    def plain() -> None:
        for batch in data[rank::world]:
            network(batch).logsumexp(1).sum().backward()
            network.zero_grad()

    found = torch.tensor([growth(plain), growth(lambda: nm.fisher_diagonal(network, data, error_bars=error_bars))])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found.tolist()))
    dist.destroy_process_group()


def main() -> None:
    """Write benchmarks/results/fsdp2-cpu.md."""
    size = sum(parameter.numel() for parameter in model(False).parameters())
    lines = ["# Models in FSDP2: memory", ""]
    lines += [f"`{__doc__.splitlines()[2].strip()}` · neuromanifold {nm.__version__}, torch {torch.__version__}, "]
    lines[-1] += f"Python {platform.python_version()} · CPU, gloo, 1 thread for each process"
    lines += ["", f"{size / 1e6:.1f} M parameters in float32, {4 * size / MIB:.0f} MiB; {LAYERS} layers of "]
    lines[-1] += f"{4 * WIDTH * (WIDTH + 1) / MIB:.1f} MiB; {BATCHES} batches of {SAMPLES} for each process."
    lines += [
        "",
        "Growth of a process from before the call, without weights; sums and error bars are two numbers for each ",
    ]
    lines[-1] += "parameter, or one with error bars of rows."
    lines += ["", "| model | processes | forward + backward, MiB | fisher_diagonal, MiB |", "| --- | --- | --- | --- |"]
    kinds: tuple[ErrorBars, ...] = (True, "rows")
    for error_bars in kinds:
        for sharded, world in ((False, 1), (True, 1), (True, 2), (True, 4)):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, args=(world, folder, sharded, error_bars), nprocs=world)
                before, after = json.loads(Path(folder, "found.json").read_text())
            name = ("FSDP2" if sharded else "whole") + (", rows" if error_bars == "rows" else "")
            lines.append(f"| {name} | {world} | {before:.0f} | {after:.0f} |")
            print(lines[-1])
    (RESULTS / "fsdp2-cpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
