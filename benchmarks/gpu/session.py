"""A session on a GPU: its options, device and clock, what failed, and what has been found so far.

Results are rows of named cells.  They are written as JSON and as Markdown after each section, so that a session that
is killed has still said what it knows.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from common import Times, processor, seconds, synchronize, table, versions
from models import Task

from gpu.models import TASKS, full_task, small_task

T = TypeVar("T")
Row = dict[str, str | float | bool | None]
MESSAGE = 200  # characters of an error in a table
_ABOUT = (
    "Times are wall-clock seconds of a batch in a run, without what happens once a call (“fixed”), over those of "
    "forward + backward (eager, summed cross-entropy into .grad); ± is half the range over the turns.  fp32: no TF32; "
    "tf32: products and convolutions of float32 in TF32; bf16 and fp16: model and inputs in that type."
)


class Missing(NamedTuple):
    """Why there is no value."""

    reason: str


class Section(NamedTuple):
    """Rows under a heading."""

    rows: list[Row]
    note: str = ""


class Session:
    """Runs what may fail, keeps the time, and writes down what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.failures: list[str] = []
        self.not_run: list[str] = []
        self.sections: dict[str, Section] = {}
        self._deadline = self.start + options.budget

    # ------------------------------------------------------------------------------------------------------- control

    def tell(self, text: str) -> None:
        """Print progress, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", flush=True)

    @property
    def left(self) -> float:
        """Seconds until no new row may begin."""
        return self._deadline - time.perf_counter()

    @contextlib.contextmanager
    def share(self, part: float) -> Iterator[None]:
        """Give what is inside a part of the time that is left; what it does not use is left to others."""
        before = self._deadline
        self._deadline = time.perf_counter() + part * max(0.0, self.left)
        try:
            yield
        finally:
            self._deadline = before

    def guarded(self, name: str, function: Callable[[], T]) -> T | Missing:
        """Return the function's value, or in one line why there is none; the traceback goes to stderr."""
        if self.left <= 0:
            self.not_run.append(name)
            return Missing("not run: out of time")
        try:
            return function()
        except Exception as error:
            text = f"fails: {type(error).__name__}: {' '.join(str(error).split())[:MESSAGE]}".replace("|", "/")
            print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        self.failures.append(f"{name}: {text}")
        self.tell(f"{name} · {text}")
        self.free()
        return Missing(text)

    def checked(self, name: str, row: Row, passed: bool, rows: list[Row]) -> None:
        """Add a row with its verdict; one that does not pass is a failure of the session."""
        rows.append({**row, "verdict": "PASS" if passed else "FAIL"})
        if not passed:
            self.failures.append(f"{name}: FAIL")
        self.tell(f"{name} · " + " · ".join(f"{key} {cell(value)}" for key, value in rows[-1].items()))

    # -------------------------------------------------------------------------------------------------------- device

    def free(self) -> None:
        """Give back what is not used any more; also after an error that the device does not recover from."""
        gc.collect()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object]) -> Times:
        """Return the seconds of one call."""
        return seconds(work, self.device)

    def wait(self) -> None:
        """Wait for the device."""
        synchronize(self.device)

    def task(self, name: str) -> Task:
        """Return a task at full size, or small for --quick."""
        return small_task(TASKS[name][0], self.device) if self.options.quick else full_task(name, self.device)

    # ------------------------------------------------------------------------------------------------------- results

    def add(self, heading: str, rows: list[Row], note: str = "") -> None:
        """Set the rows of a section and write everything."""
        if rows:
            self.sections[heading] = Section(rows, note)
        self.write()

    def write(self) -> None:
        """Write JSON and Markdown into the folder of --out."""
        out = Path(self.options.out)
        out.mkdir(parents=True, exist_ok=True)
        facts = {"failures": self.failures, "not_run": self.not_run}
        found = {heading: section._asdict() for heading, section in self.sections.items()}
        whole = {**self.setting, **facts, "sections": found}
        (out / "gpu.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
        (out / "gpu.md").write_text(self.text + "\n")

    @property
    def setting(self) -> dict[str, object]:
        """Date, command, versions, device and seconds."""
        return {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python benchmarks/gpu_session.py", *_without_folder(sys.argv[1:])]),
            "versions": versions(),
            "device": processor(self.device),
            "seconds": round(time.perf_counter() - self.start),
        }

    @property
    def text(self) -> str:
        """All sections so far, as Markdown."""
        facts = self.setting
        used = ", ".join(f"{name} {version}" for name, version in versions().items())
        head = f"{facts['date']} · `{facts['command']}` · {used} · {facts['device']} · {facts['seconds']} s"
        parts = ["# On a GPU: checks, and time and memory over forward + backward", head, _ABOUT]
        for title, names in (("Failures", self.failures), ("Not run, out of time", self.not_run)):
            if names:
                parts.append(f"{title}:\n\n" + "\n".join(f"- {name}" for name in names))
        for heading, (rows, note) in self.sections.items():
            header = list(dict.fromkeys(key for row in rows for key in row))
            lines = [[cell(row.get(key)) for key in header] for row in rows]
            parts += [f"## {heading}", *([note] if note else []), table(header, lines)]
        return "\n\n".join(parts)


def cell(value: str | float | bool | None) -> str:
    """Return a value as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:.4g}"


def _without_folder(arguments: list[str]) -> list[str]:
    """Leave out --out and its folder: where results are written is no part of them."""
    kept, skip = [], False
    for argument in arguments:
        if not (skip or argument.startswith("--out")):
            kept.append(argument)
        skip = argument == "--out"
    return kept
