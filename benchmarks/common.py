"""Timing side by side, and writing down what was measured, when, and with what.

    interleaved       median seconds of functions that take turns
    interleaved_runs  the same for runs over few and over many batches
    slope_turn        seconds of a batch and of what happens once, of one turn of such a run
    peak_memory       of one call, in a process of its own

The baseline of all ratios is `forward_backward`: what a training step does before its optimizer.
"""

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
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

RESULTS = Path(__file__).parent / "results"
BASELINE = "forward + backward"

K = TypeVar("K", bound=Hashable)
Run = Callable[[Iterable[object]], object]
"""Goes through batches."""


def forward_backward(model: nn.Module, batches: Iterable[object]) -> None:
    """Forward and backward of the summed cross-entropy into .grad, for batches (inputs, labels) or {..., "labels"}."""
    for batch in batches:
        model.zero_grad(set_to_none=True)
        if isinstance(batch, Mapping):
            output = model(**{key: value for key, value in batch.items() if key != "labels"})
            labels = batch["labels"]
        else:
            inputs, labels = batch  # type: ignore[misc]
            output = model(inputs)
        logits = output.logits if hasattr(output, "logits") else output
        cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum").backward()


# ----------------------------------------------------------------------------------------------------------- seconds


class Times(NamedTuple):
    """Median seconds of a call: wall-clock, and of all threads of this process together."""

    wall: float
    cpu: float


def seconds(work: Callable[[], object], device: torch.device) -> Times:
    """Return the seconds of one call, with nothing under way on the device before and after."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    synchronize(device)
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def interleaved(
    functions: Mapping[K, Callable[[], object]],
    repeats: int,
    device: torch.device,
    slow: Mapping[K, int] | None = None,
) -> dict[K, Times]:
    """Return median seconds of each function; they take turns, so that a noisy moment hits all of them.

    Each turn begins with a call that is not timed, so that no function pays for the caches and threads of the last one.
    `slow` names functions that take part in the first few turns only (how many) and are so long that they need no
    call before the timed one.
    """
    slow = slow or {}
    times: dict[K, list[Times]] = {name: [] for name in functions}
    for turn in range(repeats):
        for name, function in functions.items():
            if turn >= slow.get(name, repeats):
                continue
            if name not in slow:
                function()
            times[name].append(seconds(function, device))
    return {name: Times(*map(statistics.median, zip(*taken, strict=True))) for name, taken in times.items()}


class Slope(NamedTuple):
    """Seconds of a batch and of what happens once a call, for each turn."""

    batch: list[float]
    fixed: list[float]

    @property
    def median(self) -> float:
        """Median seconds of a batch."""
        return statistics.median(self.batch)

    def over(self, baseline: Slope) -> tuple[float, float]:
        """Return the ratio of the medians, and half the range of the turns' ratios."""
        ratios = [own / other for own, other in zip(self.batch, baseline.batch, strict=False)]
        return self.median / baseline.median, (max(ratios) - min(ratios)) / 2


def slope_turn(run: Run, batch: object, counts: tuple[int, int], device: torch.device, into: Slope) -> None:
    """Time a run over few and over many batches: fixed + k·batch each; `into` takes both unknowns."""
    few, many = counts
    short, long = (seconds(partial(run, [batch] * k), device).wall for k in counts)
    one = (long - short) / (many - few)
    into.batch.append(one)
    into.fixed.append(short - few * one)


def interleaved_runs(
    runs: Mapping[str, Run], batch: object, counts: tuple[int, int], repeats: int, device: torch.device
) -> dict[str, dict[int, Times]]:
    """Return median seconds of each run over each number of batches; they take turns, after an untimed call."""
    functions = {(name, k): partial(run, [batch] * k) for name, run in runs.items() for k in counts}
    for function in functions.values():
        function()
    times = interleaved(functions, repeats, device, slow=dict.fromkeys(functions, repeats))
    return {name: {k: times[name, k] for k in counts} for name in runs}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------------------------ memory


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


# ----------------------------------------------------------------------------------------------------------- results


def versions() -> dict[str, str]:
    """Return the versions of what the numbers depend on."""
    import neuromanifold  # here, because measuring other tools does not need it

    found = {"neuromanifold": neuromanifold.__version__, "torch": torch.__version__}
    for name in ("triton", "transformers"):
        if name in sys.modules:
            found[name] = sys.modules[name].__version__
    return {**found, "Python": platform.python_version()}


def processor(device: torch.device) -> str:
    """Return the name of a GPU, or the number of threads on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def setting(command: str, device: torch.device) -> str:
    """Return date, command, versions and processor, as the head of a result."""
    date, used = datetime.date.today().isoformat(), ", ".join(f"{name} {one}" for name, one in versions().items())
    return f"{date} · `{command}` · {used} · {processor(device)}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def keep(name: str, text: str, folder: Path | None = None) -> None:
    """Print a result and write it to NAME.md, usually in benchmarks/results."""
    print(text)
    folder = RESULTS if folder is None else folder
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    print(json.dumps(_measure_peak(*sys.argv[1:])))
