"""Seconds and memory of batches in the middle of a run, and which kernels they take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from neuromanifold.run import loop
from neuromanifold.run.graphs import CapturedSteps

GIB = 2**30


class Measured(NamedTuple):
    """A run over `warm` batches and those that were timed."""

    seconds: float  # of one batch
    fixed: float  # seconds that the warm batches took in addition
    peak: float  # GiB allocated by the timed batches, over what there was before the run, without its result
    first_peak: float  # of the warm batches
    reserved: float  # GiB that the allocator held, of all batches, the model included
    replayed: int  # batches that CUDA graphs have done

    def over(self, batches: int) -> float:
        """Return the seconds of a batch in a run over so many, all that happens once included."""
        return self.seconds + self.fixed / batches


def free(device: torch.device) -> None:
    """Give all memory back, and begin to count anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(
    run: Callable[[Iterable[Any]], Any], batch: Any, warm: int, count: int, device: torch.device, found: Any = None
) -> Measured:
    """Run over `warm + count` batches; `found` is a profiler for the last ones.

    The result's own tensors are not counted as memory of the run.
    """
    cuda, made = device.type == "cuda", list[CapturedSteps]()
    times, peaks = list[float](), list[int]()

    def data() -> Iterator[Any]:
        for i in range(warm + count):
            if i == warm:
                note()
                if found is not None:
                    found.start()
            yield batch
        note()
        if found is not None:
            found.stop()

    def note() -> None:
        if cuda:
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        times.append(time.perf_counter())

    def watched(*arguments: Any) -> CapturedSteps:
        made.append(CapturedSteps(*arguments))
        return made[-1]

    free(device)
    before = torch.cuda.memory_allocated() if cuda else 0
    times.append(time.perf_counter())
    with mock.patch.object(loop, "CapturedSteps", watched), closing(data()) as batches:
        result = run(batches)
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    own = sum(
        t.numel() * t.element_size() for kind in ("sums", "noise") for t in dict(getattr(result, kind, {})).values()
    )
    first, steady = (peak - before - own for peak in peaks) if cuda else (0, 0)
    seconds = (times[2] - times[1]) / count
    replayed = sum(one.replayed for one in made)
    fixed = times[1] - times[0] - warm * seconds
    return Measured(seconds, fixed, steady / GIB, first / GIB, reserved / GIB, replayed)


def kernels(
    run: Callable[[Iterable[Any]], Any], batch: Any, warm: int, device: torch.device, batches: int = 2, top: int = 45
) -> str:
    """Return the kernels of a batch, those that take longest first."""
    found = profiler(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])
    measured = measure(run, batch, warm, batches, device, found)
    events = [e for e in found.key_averages() if device.type != "cuda" or e.device_type.name == "CUDA"]
    time_of = (lambda e: e.self_device_time_total) if device.type == "cuda" else (lambda e: e.self_cpu_time_total)
    ranked = sorted(events, key=time_of, reverse=True)
    total = sum(map(time_of, events)) / batches / 1e3
    lines = [f"{time_of(e) / batches / 1e3:9.3f} ms {e.count / batches:7.1f} x  {e.key[:150]}" for e in ranked[:top]]
    return "\n".join([f"{total:.2f} ms of kernels a batch, {1e3 * measured.seconds:.2f} ms wall-clock", *lines])
