"""Functions run by several real processes: with gloo on the CPU, and a file to meet at, so that no port is needed."""

import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 120.0  # seconds after which all processes are killed
GRACE = 5.0  # seconds that the others have to say what went wrong, where all must succeed


def _work(rank: int, world: int, meeting: str, pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        pipe.send((True, function(rank, *args)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}"))
    finally:
        dist.destroy_process_group()


def outcomes(
    world: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT, grace: float | None = None
) -> list[tuple[bool, Any]]:
    """Return what `function(rank, *args)` returned in each process, (True, value) or (False, error); None if killed.

    The function must be importable, and its value can be pickled.  Results are exchanged through the file system of
    tensors' own memory, so they are copied to plain lists or saved to files by the functions themselves.
    `grace`: so many seconds after a process has failed, the others are killed, since they may wait for it forever.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        pipes, workers = [], []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(rank, world, meeting, theirs, function, args))
            worker.start()
            theirs.close()
            pipes.append(mine)
            workers.append(worker)
        found: dict[int, Any] = {}
        until, failed = time.monotonic() + limit, False
        try:
            while len(found) < world:
                open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
                ready = wait(list(open_pipes), timeout=max(0.0, until - time.monotonic()))
                if not ready and failed:
                    found |= dict.fromkeys(open_pipes.values())
                elif not ready:
                    raise TimeoutError(f"Ranks {sorted(open_pipes.values())} have not ended within {limit:g} s.")
                for pipe in ready:
                    rank = open_pipes[pipe]  # type: ignore[index]
                    try:
                        found[rank] = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        found[rank] = None  # killed
                    if grace is not None and not failed and not (found[rank] and found[rank][0]):
                        failed, until = True, min(until, time.monotonic() + grace)
        finally:
            for worker in workers:
                worker.join(timeout=10 if len(found) == world and not failed else 0)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
    return [found[rank] for rank in range(world)]


def checked_values(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what the function returned in each process, all of which must succeed."""
    found = outcomes(world, function, *args, grace=GRACE)
    assert all(one and one[0] for one in found), found
    return [one[1] for one in found]
