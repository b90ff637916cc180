"""What ends a run before the data do: enough accuracy, another process, or Ctrl-C; always between batches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.run.counts import Counts
from neuromanifold.run.dealing import Dealing, Window
from neuromanifold.run.processes import Processes
from neuromanifold.run.settings import RunProgress


class Accuracy(NamedTuple):
    """How accurate a result is, and should be."""

    rtol: float | None  # None: go through all the data
    relative_error: Callable[[Counts, Any], float | None]  # Σ stderr / Σ F so far; None: nothing is random

    def reached(self, counts: Counts, sums: object) -> str:
        """Return the reason to stop if `rtol` is reached, else nothing."""
        error = self.relative_error(counts, sums) if counts.batches else None
        if self.rtol is None or error is None or error > self.rtol:
            return ""
        reason = f"relative standard error {error:.3g} <= rtol {self.rtol:g}"
        return f"stopped after {counts.batches} batches: {reason}"


class Stopping:
    """Asks less and less often whether `rtol` is reached: all processes, at the end of the same rounds of windows."""

    def __init__(
        self,
        accuracy: Accuracy,
        counts: Counts,
        sums: GradientSums,
        processes: Processes,
        dealing: Dealing,
        begins_at: int,
    ) -> None:
        """`begins_at`: the number of the first batch that was not done in an earlier run."""
        self.reason = ""
        """Why the run should end; "" while it should not."""
        self._accuracy, self._counts, self._sums = accuracy, counts, sums
        self._processes, self._dealing = processes, dealing
        self._first = 0 if dealing.own_data else dealing.turn(begins_at // dealing.window)[0]
        self._round, self._all_ended = 0, False

    def after(self, window: Window) -> None:
        """Set `reason` if the run should end after this window."""
        self._processes.check()
        self._round = self._dealing.turn(window.place)[0] + 1
        self._ask(ended=False)

    def after_the_data(self) -> None:
        """Take part in decisions on `rtol` until the data of all processes have ended: each round needs all of them."""
        while self._accuracy.rtol is not None and not (self.reason or self._all_ended):
            self._round += 1
            self._ask(ended=True)

    def interrupt(self) -> None:
        """End the run on all processes with what they have."""
        self.reason = f"interrupted after {self._counts.batches} batches"
        self._processes.stop(self.reason)

    def progress(self) -> RunProgress:
        """Return how far this process has come, and the accuracy unless it is that of a part."""
        alone = not self._processes.several
        return self._counts.progress(self._accuracy.relative_error(self._counts, self._sums) if alone else None)

    def _ask(self, ended: bool) -> None:
        self.reason = self.reason or self._processes.stopped
        waits = self.reason or self._accuracy.rtol is None or self._round < self._first
        if waits or not is_due(self._round * self._dealing.window):
            return
        found = self._processes.gather_unless_stopped(f"round {self._round}", [self._counts.shared(), ended])
        if found is None:
            self.reason = self._processes.stopped
            return
        self._all_ended = all(one[1] for one in found)
        if not self._all_ended:
            total = Counts.total([one[0] for one in found])
            reason = self._accuracy.reached(total, self._processes.sum_of(self._sums))
            self.reason = self._processes.gather("reason", reason)[0]


def is_due(batches: int) -> bool:
    """Whether accuracy, which costs time, is evaluated after so many batches of a process: 1, ..., 16, 18, 20, ..."""
    return batches % max(1, batches // 8) == 0


class Interrupts:
    """Lets a batch that has begun come to its end first.  A second Ctrl-C does not wait.

    Python's own handler is replaced, for the time of a run; one of the user's is left alone, and so are other threads,
    where signals do not arrive.  There an exception may come within a batch: `in_batch` is then still true.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        """Whether Ctrl-C waits for the end of the batch."""
        self.in_batch = False
        """Whether a batch has begun and not ended, so that sums may hold a part of it; stays True after an error."""
        self.asked = False
        """Whether Ctrl-C has come and waits."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, Ctrl-C only sets `asked`: the processes of the run then decide together.  A second one raises."""
        self.in_batch = True
        with self.watched():
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace Python's handler of Ctrl-C while inside, if that is wanted and possible."""
        main = threading.current_thread() is threading.main_thread()
        if not (self.wanted and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
            yield
            return
        try:
            signal.signal(signal.SIGINT, self._handle)
            yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._handle:  # else somebody has set another one in the meantime
                signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Ctrl-C waits while inside, and raises KeyboardInterrupt at the end; not after an error, which goes on."""
        self.in_batch = True
        yield
        self.in_batch = False
        if self.asked:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self.in_batch:
            signal.default_int_handler(number, frame)
        self.asked = True
