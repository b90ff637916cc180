"""Peak memory of a run on a CPU, free memory of a device, and the largest batch size that fits into it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that operations inside have returned: at the moment, and at the most.

    For a CPU, where torch keeps no account.  The system's allocator may hold up to about three times as much, since
    what is free is in pieces.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.most: int = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


def free(device: torch.device) -> int | None:
    """Bytes that a run may use, those reserved by this process included; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return min(filter(None, (_machine_memory(), _container_memory())), default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of CUDA, Python, or torch on a CPU is about memory."""
    worded = isinstance(error, RuntimeError) and any(
        phrase in str(error).lower() for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )
    return worded or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _machine_memory() -> int | None:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return None


def _container_memory() -> int | None:
    folder = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no such limit, or "max"
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    return None


def largest_that_fits(attempt: Callable[[int], bool], most: int) -> int:
    """The largest of 1, 2, 4, ... <= most for which `attempt` is true, and does not run out of memory; 0: none."""
    best = 0
    while max(1, 2 * best) <= most:
        try:
            fits = attempt(max(1, 2 * best))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        if not fits:
            break
        best = max(1, 2 * best)
    return best
