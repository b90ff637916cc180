"""Several processes and FSDP2 on one GPU.

gloo       two processes that share the GPU against one: sums and standard errors of a run whose batches are dealt
NCCL       the collectives of a run in a group of one, which is all that NCCL allows on one GPU
FSDP2      a model that is sharded among one process, with NCCL, against the same as it is
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist

import neuromanifold as nm
from gpu.language import Errors, distances, random_batches, run_comparisons, tiny
from gpu.session import Session
from neuromanifold.estimators import NoiseFactors
from neuromanifold.persample.accumulate import DiagonalSums, Pass
from neuromanifold.run.processes import Processes

ROOT = Path(__file__).parents[2]
RANKS, BATCHES = 2, 6
LIMIT = 60.0  # seconds for two processes


def run_processes(session: Session) -> None:
    """Run all three where there is a GPU; on a CPU the first alone."""
    checks = {"gloo": partial(_two, session.device)}
    if session.device.type == "cuda":
        checks |= {"NCCL": partial(_nccl, session.device), "FSDP2": partial(_sharded, session.device)}
    run_comparisons(session, "Several processes", checks)


def _two(device: torch.device) -> Errors:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "gpu.processes", "--device", str(device), "--folder", folder, "--rank"]
        environment = {**os.environ, "PYTHONPATH": path}
        ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment) for rank in range(RANKS)]
        try:
            codes = [rank.wait(LIMIT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"exit statuses {codes}")
        found = nm.load(Path(folder) / "fim.safetensors")
    assert isinstance(found, nm.DiagonalFisher)
    assert found.provenance.processes == RANKS
    return distances("one process", found, _run(device), 1e-5)


def _run(device: torch.device) -> nm.DiagonalFisher:
    return nm.fisher_diagonal(tiny("llama", 50).to(device), random_batches(50, BATCHES, 12), cuda_graphs=False)


def _rank(rank: int, device: torch.device, folder: Path) -> None:
    """One of the processes: `python -m gpu.processes --rank 0 --device cuda --folder DIR`."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    try:
        found = _run(device)
        if rank == 0:
            found.save(folder / "fim.safetensors")
    finally:
        dist.destroy_process_group()


class _Alone(Processes):
    """A group of one that takes part in collectives as several do."""

    @property
    def several(self) -> bool:
        """So that its collectives are run."""
        return True


def _nccl(device: torch.device) -> Errors:
    _begin_nccl()
    try:
        from torch.distributed import distributed_c10d

        alone = _Alone(0, 1, distributed_c10d.PrefixStore("check", distributed_c10d._get_default_store()))
        with alone.watched():
            joined = alone.join("here", device)
            values = torch.arange(5.0, device=device)
            alone.add(values)
            sums = DiagonalSums([torch.ones(3, device=device)], fourth_powers=False)
            sums.add([torch.full((3,), 2.0, device=device)], Pass(1.0, NoiseFactors(0.0, 0.0, 0.0)))
            alone.reduce(sums)
            with alone.in_step() as step:
                gathered = step.gather("value", [1, "two"])
    finally:
        dist.destroy_process_group()
    assert joined == ["here"]
    assert gathered == [[1, "two"]]
    expected = torch.arange(5.0)
    error = float((values.cpu() - expected).norm() + (sums.squares[0].cpu() - 4.0).norm())
    return [("sums of a group of one", error, 0.0)]


def _sharded(device: torch.device) -> Errors:
    from torch.distributed.fsdp import fully_shard

    model, batches = tiny("llama", 50).to(device), random_batches(50, 4, 12)
    expected = nm.fisher_diagonal(model, batches, cuda_graphs=False)
    _begin_nccl()
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        found = nm.fisher_diagonal(fully_shard(model), batches).gathered()
    finally:
        dist.destroy_process_group()
    return distances("whole", found, expected, 1e-5)


def _begin_nccl() -> None:
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=_rank.__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    _rank(options.rank, options.device, options.folder)
