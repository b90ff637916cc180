"""Timing side by side, and writing down what was measured, when, and with what."""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved_medians(
    functions: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a noisy moment hits all of them.

    Each turn begins with a call that is not timed, so that no function pays for the caches and threads of the last one.
    """
    return {name: times.wall for name, times in interleaved(functions, repeats, device).items()}


class Times(NamedTuple):
    """Median seconds of a call: by the clock, and of all threads of this process together."""

    wall: float
    cpu: float


def interleaved(
    functions: dict[str, Callable[[], object]], repeats: int, device: torch.device, slow: dict[str, int] | None = None
) -> dict[str, Times]:
    """As `interleaved_medians`, with processor time.

    `slow` names functions that take part in the first few turns only (how many) and are so long that they need no
    call before the timed one.
    """
    slow = slow or {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for turn in range(repeats):
        for name, function in functions.items():
            if turn >= slow.get(name, repeats):
                continue
            if name not in slow:
                function()
            _wait(device)
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            _wait(device)
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    columns = {name: zip(*values, strict=True) for name, values in times.items()}
    return {name: Times(*(statistics.median(column) for column in columns[name])) for name in functions}


def peak_memory(target: str, *arguments: str, limit: float | None = None) -> float:
    """Peak memory in MiB of one call, over what the process held before it; in a fresh process.

    `target` is "module:function" of this folder; the function gets `arguments`, does all that does not count (imports,
    models, data) and returns what is to be called.  Resident memory as Linux counts it (VmHWM, which is reset before
    the call), so whatever is allocated, by whatever tool, is seen.  An exception there is raised here, in one line;
    so is the end of memory, which is `limit` GiB of address space.
    """
    command = [sys.executable, "-W", "ignore", __file__, str(limit or 0), target, *arguments]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _measure_peak(limit: str, target: str, *arguments: str) -> float:
    if float(limit) > 0:
        resource.setrlimit(resource.RLIMIT_AS, (int(float(limit) * 2**30),) * 2)
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)(*arguments)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    kept = function()
    peak = _status("VmHWM")
    del kept
    return (peak - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))  # in KiB


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def setting(command: str, device: torch.device) -> str:
    """Date, command, versions and processor, as the head of a result."""
    import neuromanifold  # here, because measuring other tools does not need it

    processor = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    versions = (
        f"neuromanifold {neuromanifold.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    return f"{datetime.date.today().isoformat()} · `{command}` · {versions} · {processor}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def keep(name: str, text: str) -> None:
    """Print a result and write it to benchmarks/results/NAME.md."""
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    print(json.dumps(_measure_peak(*sys.argv[1:])))
