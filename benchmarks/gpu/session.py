"""A run of the GPU benchmark: its options, device and clock, what may fail, and what has been found so far."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from common import keep, setting
from gpu_models import PRECISIONS, TASKS, full_task, small_task
from models import Task

SECTIONS = ("checks", "exact", "times", "kernels", "larger", "device")
MESSAGE = 200  # characters of an error in a table
_ORDER = [*TASKS, "Larger batches", "Memory", "Exact diagonal", "Checks", "Fused kernels"]


class Clocked(NamedTuple):
    """What has been timed by the clock, for those who know more about it to fill in."""

    task: str
    times: int  # the samples
    which: str  # precision
    row: str
    heading: str  # of the section
    line: list[str]  # of its table
    seconds: float  # of a batch


class Session:
    """The options, the device and the clock of this run, and what it has found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.texts: dict[str, str] = {}  # by heading
        self.tables: dict[str, tuple[list[str], list[list[str]]]] = {}  # header and lines, of those that are not done
        self.clocked: list[Clocked] = []

    def tell(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", flush=True)

    @property
    def over(self) -> bool:
        """Whether no new row may begin."""
        return time.perf_counter() - self.start > self.options.budget

    def guarded(self, name: str, function: Callable[[], object]) -> object:
        """The function's value, or in one line why there is none; the whole story goes to stderr."""
        if self.over:
            return "not run: out of time"
        try:
            return function()
        except Exception as error:
            text = f"fails: {type(error).__name__}: {' '.join(str(error).split())[:MESSAGE]}".replace("|", "/")
            print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        self.tell(f"{name} · {text}")
        self.free()
        return text

    def free(self) -> None:
        """Give back what is not used any more; also after an error that the device does not recover from."""
        gc.collect()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, with nothing under way before and after."""
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def task(self, name: str, times: int = 1) -> Task:
        """Full size, or small for --quick; perhaps with so many times the samples."""
        if self.options.quick:
            return small_task(TASKS[name][0], self.device, times)
        return full_task(name, self.device, times)

    def keep(self, heading: str, text: str) -> None:
        """Add a section and write everything down."""
        self.texts[heading] = text
        if self.options.copy:
            Path(self.options.copy).write_text(self.text + "\n")
        if self.whole:
            with contextlib.redirect_stdout(io.StringIO()):  # all of it is printed once, at the end
                keep("gpu-h200", self.text)

    @property
    def whole(self) -> bool:
        """Whether this run is the whole result; a part does not replace it."""
        o = self.options
        return not (
            o.quick
            or o.main
            or o.only
            or o.skip_checks
            or set(o.precision) != set(PRECISIONS)
            or o.sections != SECTIONS
        )

    @property
    def text(self) -> str:
        """All sections so far, in the order of reading."""
        command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
        head = f"{setting(command, self.device)} · transformers {transformers.__version__}"
        head += f" · {time.perf_counter() - self.start:.0f} s"
        order = sorted(self.texts, key=lambda heading: _ORDER.index(heading.split(":")[0]))
        title = "# On a GPU: time and memory over plain forward + backward"
        note = "Times are per batch, without what happens once a call (“fixed”); ± is half the range over the turns. "
        note += "“Device” is the sum of all kernels of a batch, “busy” its share of the time by the clock: well below "
        note += "100 %, the clock has timed the host, not the device.  Goals are for times by the clock."
        return "\n\n".join([title, head, note, *(f"## {heading}\n\n{self.texts[heading]}" for heading in order)])
