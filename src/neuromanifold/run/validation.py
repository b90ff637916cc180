"""Looking for NaN without making a GPU wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian
from neuromanifold.core.checks import message


class LateValidation:
    """Makes a core from outputs; on a GPU the search for NaN is looked at one batch later.

    Reading a value back stops the queue: the backward pass would not be launched before the forward pass has run.  So
    on a GPU the answer for a batch is read when the next batch has been queued, and `finish` reads the last one.  An
    error names its batch all the same, and no result has been given out by then.
    """

    def __init__(self, likelihood: Callable[[Tensor], Core]) -> None:
        self.likelihood = likelihood
        self._waiting: tuple[Tensor, Callable[[], Tensor] | None, int] | None = None
        self._postponed: dict[str, Tensor] | None = None

    def core(self, rows: Tensor, number: int, labels_fit: Tensor | None = None) -> Core:
        """The core of these outputs, of batch `number`; whether labels are classes is looked at later, on a GPU."""
        core = self.unchecked(rows, number)
        if core is None:
            return _named(number, lambda: self.likelihood(rows))
        extreme = rows.amax(-1) if self.likelihood is Categorical and len(rows) else rows.sum(dtype=torch.float32)
        good = torch.isfinite(extreme).all()
        self.look_later(good if labels_fit is None else good & labels_fit, lambda: rows, number)
        return core

    def unchecked(self, outputs: Tensor, number: int) -> Core | None:
        """The core where the search can be left for later, by `look_later`; None where it cannot."""
        if outputs.device.type == "cpu" or self.likelihood not in (Categorical, Bernoulli, Gaussian):
            return None
        return _named(number, lambda: self.likelihood(outputs, validate=False))  # type: ignore[call-arg]

    @contextmanager
    def postponed(self) -> Iterator[dict[str, Tensor]]:
        """While work is recorded, nothing is looked at; what was found is given out, under "good"."""
        self._postponed = {}
        try:
            yield self._postponed
        finally:
            self._postponed = None

    def look_later(self, good: Tensor, rows: Callable[[], Tensor] | None, number: int) -> None:
        """Remember what a search found, and what to search again for a message if it was not good."""
        if self._postponed is not None:
            self._postponed["good"] = good
            return
        before, self._waiting = self._waiting, (good, rows, number)
        self._look_at(before)

    def finish(self) -> None:
        """Read what is still open."""
        before, self._waiting = self._waiting, None
        self._look_at(before)

    def _look_at(self, batch: tuple[Tensor, Callable[[], Tensor] | None, int] | None) -> None:
        if batch is None or bool(batch[0]):
            return
        _, rows, number = batch
        if rows is None:
            advice = "Look for overflow in half precision or a bad input."
            raise ValueError(f"Batch {number} of `data`: " + message("logits", "finite", "NaN or infinity", advice))
        core = _named(number, lambda: self.likelihood(rows()))  # the outputs are good, hence
        got = "others; drop ignored positions (such as -100) first"
        raise ValueError(f"Batch {number} of `data`: " + message("labels", f"between 0 and {core.dim - 1}", got))


def _named(number: int, make: Callable[[], Core]) -> Core:
    """Put the batch's number in front of an error."""
    try:
        core = make()
    except (TypeError, ValueError) as error:
        raise ValueError(f"Batch {number} of `data`: {error}") from error
    if not isinstance(core, Core):
        raise TypeError(message("likelihood", "a function from outputs to a core", f"one to {type(core).__name__}"))
    return core
