"""What every step of a run needs: the folder, where to report, and what to leave out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from neuromanifold.experiments.paper.folder import Folder
from neuromanifold.problem.progress import Observer

TIMING_ROUNDS = 5
ProgressContext = Callable[[str, object], AbstractContextManager[Observer | bool]]
"""Returns a context with the argument `progress` of `fisher_diagonal`, such as one that draws a progress bar."""


@dataclass(frozen=True)
class PaperRun:
    """One call of `reproduce`: its folder, its callbacks, and what it leaves out."""

    folder: Folder
    log: Callable[[str], None]  # called with a line about what has been found
    progress: ProgressContext  # called with the name of an estimate and its data
    keep: bool = True  # the diagonals of the table's columns, and not only the exact one
    rounds: int = TIMING_ROUNDS  # of timing; 0: no timing
    most_probes: int | None = None  # last point of the curve over probes; None: C - 1
