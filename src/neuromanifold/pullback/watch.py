"""Looking out for gradients where a trial has seen nothing but zeros."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

_EVERY = 16  # batches, a device is waited for
_TRIALS = 3  # so many batches are tried in any case, where that does not make a device wait


class Watch:
    """Whether anything else than zero comes by, found out without making a device wait.

    What comes is squared as if rows were samples, and tried out in the first batch after it has been seen.
    """

    def __init__(self) -> None:
        self.quiet: set[object] = set()  # kinds of uses
        self.here: set[Any] = set()  # records and meetings of the last graph where they are
        self._flags: dict[torch.device, Tensor] = {}  # kept for a whole run: recorded work goes on writing to them
        self._trials = self._asked = 0  # so far; since the last one

    def begin(self, quiet: set[object]) -> None:
        """These have just been tried, and nothing was seen."""
        self.quiet, self._trials, self._asked = quiet, self._trials + 1, 0
        for flag in self._flags.values():
            flag.zero_()

    def calls_for_a_trial(self, uses: set[object]) -> bool:
        """Whether one is not quiet, or no longer: on a GPU, looked up after 1, 2, 4, 8, 16, 32, 48, ... batches."""
        if not uses <= self.quiet:
            return True
        self._asked += 1
        if all(device.type == "cpu" for device in self._flags):
            return self._trials < _TRIALS or self.seen()
        due = self._asked & (self._asked - 1) == 0 or self._asked % _EVERY == 0
        return due and self.seen()

    def take(self, what: object, g: Tensor) -> None:
        """A gradient on its way."""
        if what in self.here:
            if g.device not in self._flags:
                self._flags[g.device] = torch.zeros((), dtype=torch.bool, device=g.device)
            self._flags[g.device].logical_or_((g != 0).any())

    def seen(self) -> bool:
        """Whether anything else than zero has come by since the last trial."""
        return any(bool(flag) for flag in self._flags.values())

    def finish(self) -> None:
        """Say so if it came too late to be tried."""
        if self.seen():
            text = "Gradients that were zero in the first batches came only with the last ones, so that it could not "
            text += "be tried out whether their rows are the samples. Use granularity='batch' if they may not be."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
