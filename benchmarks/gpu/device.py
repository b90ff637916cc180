"""How long the device works on a batch: the sum of all kernels, and which ones.

Last in a session: a profiler that has been used may make launching kernels slower for the rest of the process.  Batches
are profiled once a run is steady: none of them is verified, and one of four takes fourth powers for the error bars.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import torch
from common import BASELINE, Run, table
from models import Task
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from gpu.models import PRECISIONS, TASKS, in_precision, precision
from gpu.session import Missing, Row, Session
from gpu.times import PER_SAMPLE, runs_of

COUNTED, ALL_OF, LONGEST = 4, 128, 12  # batches that count; samples, or else batches, that do not
PROFILED = ("DistilBERT-2", "ResNet-50", "GPT-2")


def run_device(session: Session) -> None:
    """Sum of all kernels of a batch, over that of forward + backward."""
    rows: list[Row] = []
    chosen = [name for name in session.options.only or PROFILED if name in TASKS]
    for name in chosen:
        task = session.guarded(f"{name}, device", partial(session.task, name))
        for which in [] if isinstance(task, Missing) else [w for w in PRECISIONS if w in session.options.precision]:
            with precision(which):
                row = session.guarded(f"{name} {which}, device", partial(_row, session, name, which, task))
            rows.append({"task": name, "precision": which, "why": row.reason} if isinstance(row, Missing) else row)
        del task
        session.free()
        session.add("Device: the sum of all kernels of a batch", rows)


def _row(session: Session, name: str, which: str, task: Task) -> Row:
    cast = in_precision(task, which)
    runs = runs_of(cast, name)
    base, own = (device_seconds(session, cast, runs[row]) for row in (BASELINE, PER_SAMPLE))
    session.tell(f"{name} {which} · device · {1000 * base:.2f} and {1000 * own:.2f} ms · {own / base:.3f}")
    numbers = {"forward + backward, ms": 1000 * base, "per sample, ms": 1000 * own, "ratio": own / base}
    return {"task": name, "precision": which, **numbers}


def device_seconds(session: Session, task: Task, run: Run) -> float:
    """Return the seconds of all kernels and copies of a batch together; without a GPU, of all operations."""
    cuda = session.device.type == "cuda"
    found = _profiled(session, task, run, [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    return sum(_microseconds(event) for event in _on(found, cuda)) / 1e6 / COUNTED


def print_profile(session: Session, name: str, which: str, top: int = 40) -> None:
    """Print kernels, launches and processor time of a batch, for forward + backward and per sample."""
    cuda = session.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with precision(which):
        task = in_precision(session.task(name), which)
        for row in (BASELINE, PER_SAMPLE):
            found = _profiled(session, task, runs_of(task, name)[row], activities)
            shown, on_cpu = _on(found, cuda), _on(found, False)
            names = ("cudaLaunchKernel", "cuLaunchKernel")
            launches = sum(event.count for event in on_cpu if event.key.startswith(names)) / COUNTED
            cpu, total = (sum(_microseconds(event) for event in part) / 1000 / COUNTED for part in (on_cpu, shown))
            print(f"\n## {name} {which} · {row}, per batch (mean of {COUNTED})\n")
            where = f"device {total:.2f} ms · " if cuda else ""
            print(f"{where}processor {cpu:.2f} ms · {launches:.0f} launches\n")
            rows = []
            for event in sorted(shown, key=lambda event: -_microseconds(event))[:top]:
                own = _microseconds(event) / 1000 / COUNTED
                rows.append(
                    [f"{own:.3f}", f"{100 * own / total:.1f} %", f"{event.count / COUNTED:.1f}", event.key[:110]]
                )
            print(table(["ms", "share", "calls", "kernel" if cuda else "operation"], rows), flush=True)


def _profiled(session: Session, task: Task, run: Run, activities: list[ProfilerActivity]) -> profiler:
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
        run(batches)
    return found


def _on(found: profiler, cuda: bool) -> list[torch.autograd.profiler_util.FunctionEventAvg]:
    """Return what ran on the GPU, or on the processor; no ranges that somebody named, which count kernels again."""
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    return [event for event in found.key_averages() if event.device_type == device and not event.is_user_annotation]


def _microseconds(event: torch.autograd.profiler_util.FunctionEventAvg) -> float:
    on_cpu = event.device_type == torch.autograd.DeviceType.CPU
    return event.self_cpu_time_total if on_cpu else event.self_device_time_total
