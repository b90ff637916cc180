"""One run: its settings, its callbacks, and the folder of its results, all of it made with the same settings.

OUT/settings.json           settings, versions, and for each task its model, its data and what was found about them
OUT/TASK/rows.json          which rows of the data, in their order
OUT/TASK/exact.safetensors  diagonals; those of the columns likewise, if they are kept
OUT/TASK/COLUMN.json        errors against the exact diagonal: its presence says that the column is finished
OUT/TASK/speed.json         seconds for a batch
OUT/TASK/*.png, *.pdf       plots: histograms, error against passes
OUT/table.txt, .csv, .tex
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from neuromanifold._version import __version__
from neuromanifold.core.checks import integer_in_range, message, random_seed
from neuromanifold.results.files import load_json, save_json, without_nan
from neuromanifold.run.settings import Observer

TIMING_ROUNDS = 5
_PACKAGES = ("transformers", "datasets", "numpy", "triton")

ProgressContext = Callable[[str, object], AbstractContextManager[Observer | bool]]
"""Returns a context with the argument `progress` of `fisher_diagonal`, such as one that draws a progress bar."""


@dataclass(frozen=True)
class PaperSettings:
    """The settings that all tasks of a folder share."""

    batches: int = 128
    batch_size: int = 64
    dtype: str = "float32"
    device: str = "auto"
    seed: int = 0  # of the rows, of a new classifier and of the probes

    def __post_init__(self) -> None:
        integer_in_range(self.batches, "batches", 1, 10**9, "how many batches")
        integer_in_range(self.batch_size, "batch_size", 1, 10**9, "samples in a batch")
        random_seed(self.seed)


class Folder:
    """A folder of results: checks its settings, reads and writes the numbers of each step."""

    def __init__(self, path: Path, settings: PaperSettings) -> None:
        """Check that the folder was begun with the same settings; it is created with the first task."""
        self.path, self.settings, self._file = path, settings, path / "settings.json"
        if self._file.exists():
            head = load_json(self._file)
            if head.get("kind") != "reproduce":
                raise ValueError(message("out", "a folder of an earlier run", f"{path} with another settings.json"))
            if head["tasks"]:  # else nothing has been done in it
                self._must_agree(asdict(settings), head["settings"], "")
        elif path.is_dir() and any(path.iterdir()):
            got = f"{path} with {', '.join(sorted(entry.name for entry in path.iterdir())[:4])}"
            raise ValueError(message("out", "an empty folder, or one of an earlier run", got, "Give another."))

    def claim(self, task: str, identity: dict[str, Any]) -> None:
        """Enter a task, or check that model and data are those it was begun with."""
        self.check(task, identity)
        tasks = self._tasks()
        if task not in tasks:
            (self.path / task).mkdir(parents=True, exist_ok=True)
            tf32 = {"products": torch.backends.cuda.matmul.allow_tf32, "convolutions": torch.backends.cudnn.allow_tf32}
            values: dict[str, object] = {"settings": asdict(self.settings), "tasks": {**tasks, task: identity}}
            save_json(self._file, "reproduce", {**values, "versions": versions(), "tf32": tf32})

    def check(self, task: str, identity: dict[str, Any]) -> None:
        """Refuse a model or data other than those that the task was begun with."""
        before = self.task(task)
        if before is not None:
            self._must_agree(identity, before, f" of {task}")

    def task(self, name: str) -> dict[str, Any] | None:
        """The identity of a task's model and data; None if it has not been begun."""
        return self._tasks().get(name)

    def _tasks(self) -> dict[str, Any]:
        return dict(load_json(self._file)["tasks"]) if self._file.exists() else {}

    def file(self, task: str, name: str) -> Path:
        """The path of a file of a task."""
        return self.path / task / name

    def numbers(self, task: str, key: str) -> dict[str, Any] | None:
        """The numbers of a finished step of a task; None if it is not finished."""
        path = self.file(task, f"{key}.json")
        if not path.exists():
            return None
        self.file(task, f"{key}.checkpoint").unlink(missing_ok=True)  # of a run that was killed right after it finished
        return load_json(path)

    def keep(self, task: str, key: str, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """Write the numbers of a finished step, which marks it as finished, and remove its checkpoint."""
        save_json(self.file(task, f"{key}.json"), kind, without_nan(values))
        self.file(task, f"{key}.checkpoint").unlink(missing_ok=True)
        return values

    def _must_agree(self, now: dict[str, Any], before: dict[str, Any], whose: str) -> None:
        different = [f"{name} ({before.get(name)}, now {now[name]})" for name in now if now[name] != before.get(name)]
        if different:
            got = f"one with other settings{whose}: {', '.join(different)}"
            advice = "Give another folder with --out, or the settings it was begun with."
            raise ValueError(message("out", f"a folder of the same run ({self.path})", got, advice))


@dataclass(frozen=True)
class PaperRun:
    """One call of `reproduce`: its folder, its callbacks, and what it leaves out."""

    folder: Folder
    log: Callable[[str], None]  # called with a line about what has been found
    progress: ProgressContext  # called with the name of an estimate and its data
    keep: bool = True  # the diagonals of the table's columns, and not only the exact one
    rounds: int = TIMING_ROUNDS  # of timing; 0: no timing
    most_probes: int | None = None  # last point of the curve over probes; None: C - 1


def versions() -> dict[str, str]:
    """Versions of everything that numbers depend on."""
    found = {"neuromanifold": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
