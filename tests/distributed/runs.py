"""What the processes of the tests run: each function takes the rank first, and is called in all of them."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import neuromanifold as nm
from neuromanifold.run import processes
from tests.run.killed_runs import BrokenError
from tests.run.killed_runs import failing as failing_data


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def batches(number: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Batches with labels, the last one shorter."""
    found = []
    for i in range(number):
        rows = size if i < number - 1 else max(1, size // 3)
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(i))
        found.append((x, (10 * x[:, 0]).long() % 5))
    return found


def diagonal(rank: int, path: Path, number: int, options: dict[str, Any]) -> None:
    """The result of every process in a file of its own."""
    nm.fisher_diagonal(network(), batches(number), **options).save(path / f"{rank}")


def kronecker(rank: int, path: Path, number: int, options: dict[str, Any]) -> None:
    """The result of every process, of a network with layers that share their inputs and parameters without factors."""
    nm.fisher_kronecker(heads(), batches(number), **options).save(path / f"{rank}")


def sampled_kronecker(rank: int, path: Path) -> None:
    """Half of the samples each, by a DistributedSampler."""
    nm.fisher_kronecker(heads(), loader(rank, 32, 2), nm.Exact()).save(path / f"{rank}")


class Heads(nn.Module):
    """Three layers with the same inputs, one of which is not used in all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.a, self.b, self.c = (nn.Linear(8, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.a(x) * self.b(x) + (self.c(x) if len(x) > 6 else 0)


def heads() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Heads()


def several(rank: int, calls: list[tuple[Any, ...]]) -> list[str]:
    """One call after the other, `(function, *arguments)`, in the same processes; the errors that were raised."""
    errors = []
    for function, *arguments in calls:
        try:
            function(rank, *arguments)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def traces(_: int, number: int, kinds: list[dict[str, Any]]) -> list[nm.TraceEstimate]:
    return [nm.fisher_trace(network(), batches(number), **options) for options in kinds]


class Counting(nn.Module):
    """DistributedDataParallel's own forward, which must not be called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def wrapped(rank: int, path: Path, number: int) -> list[str]:
    """In DistributedDataParallel; a training step afterwards must work, with gradients that are reduced."""
    model = nn.parallel.DistributedDataParallel(Counting())
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    data = batches(number)
    fim = nm.fisher_diagonal(model, data)
    assert not calls
    fim.save(path / f"{rank}")
    nn.functional.cross_entropy(model(data[rank][0]), data[rank][1]).backward()
    gradient = model.module.inner[0].weight.grad
    same = gradient.clone()
    dist.broadcast(same, 0)
    assert torch.equal(same, gradient)
    return list(fim)


def loader(rank: int, samples: int, world: int, rank_given: int | None = None) -> DataLoader[Any]:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (10 * x[:, 0]).long() % 5)
    sampler = DistributedSampler(data, world, rank if rank_given is None else rank_given, shuffle=False)
    return DataLoader(data, batch_size=8, sampler=sampler)


def sampled(rank: int, path: Path, samples: int, world: int, same: bool, options: dict[str, Any]) -> None:
    data = loader(rank, samples, world, 0 if same else None)
    nm.fisher_diagonal(network(), data, **options).save(path / f"{rank}")


def own_batches(rank: int, path: Path, options: dict[str, Any]) -> None:
    """Three batches in rank 0, two in rank 1, ...: none that another has."""
    data = batches(12)[rank * 4 : rank * 4 + 3 - rank]
    nm.fisher_diagonal(network(), data, **options).save(path / f"{rank}")


def alone(rank: int, path: Path, number: int) -> None:
    """Each process for itself, and not even all of them."""
    if rank == 0:
        nm.fisher_diagonal(network(), batches(number), distributed=False).save(path / f"{rank}")
        nm.fisher_operator(network(), batches(number))


def different(rank: int, what: str) -> None:
    """Something is not the same in all processes."""
    model, data, options = network(), batches(6), dict[str, Any]()
    if rank == 1:
        if what == "weights":
            model = network(1)
        elif what == "seed":
            options["seed"] = 1
        elif what == "estimator":
            options["estimator"] = nm.MonteCarlo()
        elif what == "first batch":
            data = data[::-1]
        elif what == "later batch":
            data[4] = data[3]
        elif what == "length":
            data = data[:5]
        elif what == "nothing":
            data = []
    nm.fisher_diagonal(model, data, **options)


def failing(rank: int, path: Path, at: int, who: int) -> str:
    """An error before batch `at` in one process; what the others are told, and after how many seconds."""
    begun = time.monotonic()

    def data() -> Iterator[Any]:
        nonlocal begun
        for number, batch in enumerate(batches(400)):
            if number == at:
                begun = time.monotonic()
                if rank == who:
                    raise BrokenError(f"no batch {number}")
            time.sleep(0.05 if number > at else 0)
            yield batch

    try:
        nm.fisher_diagonal(network(), data(), checkpoint=path / "state")
    except processes.ProcessError as error:
        return f"{error} [{time.monotonic() - begun < 10}]"
    return "nothing"


def broken_in_all(_: int, path: Path, at: int, number: int) -> None:
    """Data that fail in all processes before batch `at`, with a checkpoint."""
    checkpoint = nm.Checkpoint(path / "state", every=0)
    nm.fisher_diagonal(network(), failing_data(batches(number), at), checkpoint=checkpoint)


def threads_of_gloo() -> int:
    """Threads of process groups of gloo in this process, on Linux."""
    tasks = Path("/proc/self/task")
    return sum((task / "comm").read_text().startswith("pt_gloo") for task in tasks.iterdir())


def group_of_its_own(rank: int) -> tuple[bool, bool, list[int]]:
    """Small values of processes that have another backend than gloo: whether threads come and go with their group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: "nccl")
        dist.barrier()
        before = threads_of_gloo()
        with processes.Processes(rank, dist.get_world_size()).in_step() as in_step:
            found, inside = in_step.gather("rank", rank), threads_of_gloo()
        return inside > before, threads_of_gloo() == before, found


def wrong_in_one(rank: int) -> None:
    """Rank 0 finds a wrong number, and rank 1 goes on to the next run."""
    nm.fisher_diagonal(network(), batches(2))
    assert rank, "a wrong number"
    nm.fisher_diagonal(network(), batches(2))


def resumed(rank: int, path: Path, number: int, options: dict[str, Any]) -> None:
    checkpoint = nm.Checkpoint(path / "state", every=0)
    fim = nm.fisher_diagonal(network(), batches(number), checkpoint=checkpoint, **options)
    fim.save(path / f"result{rank}")


def kill_this_process(after: float) -> None:
    """Kill -9, some seconds from now."""
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, path: Path, who: int, after: float, number: int, pause: float, silent: float = 2.0) -> None:
    """One process is killed some seconds after the first batch; with a checkpoint of every batch."""
    processes._SILENT = silent

    def data() -> Iterator[Any]:
        for i, batch in enumerate(batches(number)):
            if i == 1 and rank == who:
                threading.Thread(target=kill_this_process, args=(after,), daemon=True).start()
            time.sleep(pause)
            yield batch

    fim = nm.fisher_diagonal(network(), data(), checkpoint=nm.Checkpoint(path / "state", every=0))
    fim.save(path / f"result{rank}")


def interrupted(rank: int, path: Path, at: int, number: int) -> None:
    """Ctrl-C in rank 1 alone."""

    def data() -> Iterator[Any]:
        for i, batch in enumerate(batches(number)):
            if rank == 1 and i == at:
                signal.raise_signal(signal.SIGINT)
            if i > at:
                time.sleep(0.1)
            yield batch

    fim = nm.fisher_diagonal(network(), data(), on_interrupt="return", checkpoint=path / "state")
    fim.save(path / f"{rank}")


def late(rank: int) -> tuple[list[str], str]:
    """Rank 0 calls for a run that rank 1 does not come to: what it is told, first by a warning."""
    processes._PATIENCE, processes._JOIN = 0.2, 0.6
    if rank:
        time.sleep(1.5)
        return [], ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            nm.fisher_diagonal(network(), batches(3))
        except processes.ProcessError as error:
            return [str(one.message) for one in told], str(error)
    return [], ""


def fully_sharded(_: int, new: bool, run: int) -> None:
    """A model in FSDP2 (`fully_shard`) or in FSDP1, in each of three functions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = network()
    if new:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    functions: list[Any] = [nm.fisher_diagonal, nm.fisher_operator, lambda model, _: nm.RunningFisher(model)]
    functions[run](model, batches(3))


def killed_on_joining(rank: int) -> None:
    """Rank 1 dies when all have begun the run, before any batch."""

    def barrier(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        processes.Processes.barrier = barrier  # type: ignore[method-assign]
    nm.fisher_diagonal(network(), batches(5))
