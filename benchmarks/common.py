"""Timing side by side, and writing down what was measured, when, and with what."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import neuromanifold

RESULTS = Path(__file__).parent / "results"


def interleaved_medians(
    functions: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a noisy moment hits all of them.

    Each turn begins with a call that is not timed, so that no function pays for the caches and threads of the last one.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            function()
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def setting(command: str, device: torch.device) -> str:
    """Date, command, versions and processor, as the head of a result."""
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
