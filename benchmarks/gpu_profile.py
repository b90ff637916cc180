"""Kernels of a task's batches: how long the device works, and on what.

Batches are profiled once a run is steady: the passes of the trial are over, and of 128 samples all fourth powers have
been taken, so that now they are taken in one batch of four (`pullback/sums.py`).  Four batches are one such turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import torch
from common import table
from gpu_session import Session
from models import Task
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

COUNTED, ALL_OF, LONGEST = 4, 128, 16  # batches that count; samples, or else batches, that do not

Work = Callable[[Iterable[object]], object]
"""Goes through batches."""


def device_seconds(session: Session, task: Task, work: Work) -> float:
    """Of all kernels and copies of a batch together; without a GPU, of all operations."""
    cuda = session.device.type == "cuda"
    found = _profiled(session, task, work, [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    return sum(_microseconds(event) for event in _on(found, cuda)) / 1e6 / COUNTED


def print_profile(session: Session, title: str, task: Task, work: Work, top: int = 40) -> None:
    """Kernels, launches and processor time of a batch."""
    cuda = session.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    found = _profiled(session, task, work, activities)
    shown, on_cpu = _on(found, cuda), _on(found, False)
    launches = sum(event.count for event in on_cpu if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    cpu, total = (sum(_microseconds(event) for event in events) / 1000 / COUNTED for events in (on_cpu, shown))  # ms
    print(f"\n## {title}, per batch (mean of {COUNTED})\n")
    where = f"device {total:.2f} ms · " if cuda else ""
    print(f"{where}processor {cpu:.2f} ms · {launches / COUNTED:.0f} launches\n")
    rows = []
    for event in sorted(shown, key=lambda event: -_microseconds(event))[:top]:
        own = _microseconds(event) / 1000 / COUNTED
        rows.append([f"{own:.3f}", f"{100 * own / total:.1f} %", f"{event.count / COUNTED:.1f}", event.key[:110]])
    print(table(["ms", "share", "calls", "kernel" if cuda else "operation"], rows), flush=True)


def _profiled(session: Session, task: Task, work: Work, activities: list[ProfilerActivity]) -> profiler:
    found = profiler(activities=activities)
    before = min(LONGEST, COUNTED * math.ceil(ALL_OF / len(task.labels) / COUNTED))

    def data() -> Iterator[object]:
        for _ in range(before):
            yield task.batch
        session.wait()
        with found:
            for _ in range(COUNTED):
                yield task.batch
            session.wait()

    with closing(data()) as batches:  # an error ends the profile, too
        work(batches)
    return found


def _on(found: profiler, cuda: bool) -> list[torch.autograd.profiler_util.FunctionEventAvg]:
    """What ran on the GPU, or on the processor; no ranges that somebody named, which count their kernels again."""
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    return [event for event in found.key_averages() if event.device_type == device and not event.is_user_annotation]


def _microseconds(event: torch.autograd.profiler_util.FunctionEventAvg) -> float:
    on_cpu = event.device_type == torch.autograd.DeviceType.CPU
    return event.self_cpu_time_total if on_cpu else event.self_device_time_total
