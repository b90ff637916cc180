"""Looking out for gradients where a trial has seen nothing but zeros."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

_EVERY = 16  # batches, a device is waited for
_TRIALS = 3  # so many batches are tried in any case, where that does not make a device wait


class Watch:
    """Whether anything else than zero comes by, found out for each use on its own, without making a device wait.

    What comes is squared as if rows were samples.  It has come late: from then on it is tried out with each batch,
    until a trial sees it, and says that this was right, or not.
    """

    def __init__(self) -> None:
        self.quiet: set[object] = set()  # kinds of uses at which a trial has seen nothing so far
        self.here: dict[Any, object] = {}  # records of the last graph where they are
        self._flags: dict[object, Tensor] = {}  # by use; kept for a whole run, since recorded work goes on writing
        self._late: set[object] = set()  # those of which it is known already
        self._trials = self._asked = 0  # so far; since the last one
        self.may_wait = True  # for a device, now and then

    def tried(self, seen: set[object], zero: set[object]) -> None:
        """What a trial has seen, and where there was nothing to be seen."""
        self._trials, self._asked = self._trials + 1, 0
        self.quiet = (self.quiet | zero) - seen
        self._late -= seen
        for use in seen & self._flags.keys():
            self._flags[use].zero_()

    def calls_for_a_trial(self, uses: set[object]) -> bool:
        """Whether one is not quiet, or no longer: on a GPU, looked up after 1, 2, 4, 8, 16, 32, 48, ... batches."""
        if not uses <= self.quiet or uses & self._late:
            return True
        if not self.may_wait:
            return False
        self._asked += 1
        due = self._asked & (self._asked - 1) == 0 or self._asked % _EVERY == 0
        if all(flag.device.type == "cpu" for flag in self._flags.values()):
            due = True
            if self._trials < _TRIALS:
                return True
        return due and bool(uses & self.late())

    def take(self, record: object, g: Tensor) -> None:
        """A gradient on its way."""
        use = self.here.get(record)
        if use is not None:
            if use not in self._flags:
                self._flags[use] = torch.zeros((), dtype=torch.bool, device=g.device)
            self._flags[use].logical_or_((g != 0).any())

    def late(self) -> set[object]:
        """The uses at which something else than zero has come by, and which no trial has seen yet."""
        self._late |= {use for use, flag in self._flags.items() if use in self.quiet and bool(flag)}
        return self._late

    def set_late(self, uses: set[object]) -> None:
        """Go on from there."""
        self._late = set(uses)
        self.quiet |= self._late

    def finish(self) -> None:
        """Say so if it came too late to be tried."""
        if self.late():
            text = "Gradients that were zero in the first batches came only with later ones, and not when it was tried "
            text += "out whether their rows are the samples. To be sure, begin with a batch in which they are not zero."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
