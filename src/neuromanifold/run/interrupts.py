"""Ctrl-C between batches, not within them: then the sums are those of whole batches, and can be kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

OnInterrupt = Literal["raise", "return"]
"""What Ctrl-C does to a run: KeyboardInterrupt goes on, or the result of the batches done is given."""


class Interrupts:
    """Lets a batch that has begun come to its end first.  A second Ctrl-C does not wait.

    Python's own handler is replaced, for the time of a run; one of the user's is left alone, and so are other threads,
    where signals do not arrive.  There an exception may come within a batch, which is then `spoiled`.
    """

    def __init__(self, wanted: bool) -> None:
        self.spoiled = False
        """Whether a batch has begun and not ended."""
        self._wanted, self._asked = wanted, False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ctrl-C is handled while inside."""
        main = threading.current_thread() is threading.main_thread()
        if not (self._wanted and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
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
        self.spoiled = True
        yield
        self.spoiled = False
        if self._asked:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked or not self.spoiled:
            signal.default_int_handler(number, frame)
        self._asked = True
