"""Looking for NaN without making a GPU wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian
from neuromanifold.core.checks import message


class Found(NamedTuple):
    """What a search has found, still on the device."""

    finite: Tensor  # [rows] bool
    labels_fit: Tensor | None = None  # bool: whether all labels are classes
    classes: int = 0

    def clone(self) -> Found:
        """With memory of its own."""
        fit = None if self.labels_fit is None else self.labels_fit.clone()
        return self._replace(finite=self.finite.clone(), labels_fit=fit)

    def all_is_good(self) -> Tensor:
        """One bool."""
        finite = self.finite.all()
        return finite if self.labels_fit is None else finite & self.labels_fit


class _Answer:
    """A bool on its way from a device: reading it waits for what has made it, and for nothing that was queued since."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._made: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(value, non_blocking=True)
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record()

    def __bool__(self) -> bool:
        if self._made is not None:
            self._made.synchronize()
        return bool(self._value)


class LateValidation:
    """Makes a core from outputs; on a GPU the search for NaN is looked at one batch later.

    Reading a value back waits for all that is queued: the backward pass would not be launched before the forward pass
    has run.  So on a GPU the answer for a batch is sent to the host's memory, and read there when the next batch has
    been queued; `finish` reads the last one.  An error names its batch all the same, and no result has been given out
    by then.
    """

    def __init__(self, likelihood: Callable[[Tensor], Core]) -> None:
        self.likelihood = likelihood
        self._waiting: tuple[_Answer, Found, int] | None = None  # whether all is good, what was found, in which batch
        self._postponed: list[Found] | None = None

    def core(self, rows: Tensor, number: int, labels_fit: Tensor | None = None) -> Core:
        """The core of these outputs, of batch `number`; whether labels are classes is looked at later, on a GPU."""
        core = self.unchecked(rows, number)
        if core is None:
            return _named(number, lambda: self.likelihood(rows))
        extreme = rows.amax(-1) if self.likelihood is Categorical else rows.sum(-1, dtype=torch.float32)
        self.look_later(Found(torch.isfinite(extreme), labels_fit, core.dim), number)
        return core

    def unchecked(self, outputs: Tensor, number: int) -> Core | None:
        """The core where the search can be left for later, by `look_later`; None where it cannot."""
        if outputs.device.type == "cpu" or self.likelihood not in (Categorical, Bernoulli, Gaussian):
            return None
        return _named(number, lambda: self.likelihood(outputs, validate=False))  # type: ignore[call-arg]

    @contextmanager
    def postponed(self) -> Iterator[list[Found]]:
        """While work is recorded, nothing is looked at; what would have been is given out."""
        self._postponed = []
        try:
            yield self._postponed
        finally:
            self._postponed = None

    def look_later(self, found: Found, number: int) -> None:
        """Remember what a search found; look at what was found in the batch before."""
        if self._postponed is not None:
            self._postponed.append(found)
            return
        before, self._waiting = self._waiting, (_Answer(found.all_is_good()), found, number)
        self._look_at(before)

    def finish(self) -> None:
        """Read what is still open."""
        before, self._waiting = self._waiting, None
        self._look_at(before)

    def _look_at(self, batch: tuple[_Answer, Found, int] | None) -> None:
        if batch is None or bool(batch[0]):
            return
        _, (finite, labels_fit, classes), number = batch
        if labels_fit is not None and not bool(labels_fit):
            got = "others; drop ignored positions (such as -100) first"
            raise ValueError(f"Batch {number} of `data`: " + message("labels", f"between 0 and {classes - 1}", got))
        bad = (~finite).flatten()
        got = f"NaN or infinity at index {[int(bad.nonzero()[0])]}"
        advice = (
            f"{int(bad.sum())} of {bad.numel()} rows are affected; look for overflow in half precision or a bad input."
        )
        expected = "free of NaN and +inf, with a possible class in each row"
        raise ValueError(f"Batch {number} of `data`: " + message("logits", expected, got, advice))


def _named(number: int, make: Callable[[], Core]) -> Core:
    """Put the batch's number in front of an error."""
    try:
        core = make()
    except (TypeError, ValueError) as error:
        raise ValueError(f"Batch {number} of `data`: {error}") from error
    if not isinstance(core, Core):
        raise TypeError(message("likelihood", "a function from outputs to a core", f"one to {type(core).__name__}"))
    return core
