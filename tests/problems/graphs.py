"""A stand-in for CUDA graphs on a CPU: it captures operations with their memory, and takes them back."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.run.graphs import CapturedSteps, GraphRecorder
from neuromanifold.run.methods import Method


class Graph(TorchDispatchMode):
    """Operations on memory: what is captured is taken back, and done again in the same memory by a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[Tensor, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        given = {_memory(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if func._schema.is_mutable:
            for where, t in given.items():
                if where not in self._own:
                    self._before.setdefault(where, (t, t.untyped_storage().clone()))
        out = func(*args, **kwargs)
        self._own |= {_memory(t) for t in tree_leaves(out) if isinstance(t, Tensor)} - set(given)
        self.done.append((func, args, kwargs, out))
        return out

    def take_back(self) -> None:
        for tensor, values in self._before.values():
            tensor.untyped_storage().copy_(values)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.done:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CpuRecorder:
    def __init__(self, generator: torch.Generator, seconds: Iterator[tuple[float, float]] | None = None) -> None:
        """`seconds` that timed work takes to launch, and to finish."""
        self.generator, self.seconds = generator, seconds or repeat((1.0, 1.0))

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        """As if it had taken the next of the given times."""
        noted: list[float] = []
        yield noted
        noted.extend(next(self.seconds))

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        state, graph = self.generator.get_state(), Graph()
        try:
            with graph:
                yield graph
        finally:
            graph.take_back()
            self.generator.set_state(state)

    @contextmanager
    def watch_synchronization(self) -> Iterator[list[str]]:
        """As torch warns of what waits for the device."""
        noted: list[str] = []
        with NoteReads(noted):
            yield noted

    @contextmanager
    def reported_as(self, capturing: bool) -> Iterator[None]:
        """As on a GPU."""
        with GraphRecorder.reported_as(self, capturing):  # type: ignore[arg-type]
            yield

    def recover(self) -> None:
        """Nothing to do."""


class NoteReads(TorchDispatchMode):
    """Notes what reads values back."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.noted.append(str(func))
        return func(*args, **(kwargs or {}))


class CapturedOnCpu(CapturedSteps):
    last: "CapturedOnCpu"

    def __init__(self, method: Method, sums: GradientSums, wanted: Any = True) -> None:
        super().__init__(method, sums, wanted, CpuRecorder(method.generator))
        CapturedOnCpu.last = self
