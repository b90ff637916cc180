"""Output distributions of a batch, checked for NaN without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian
from neuromanifold.core.checks import message
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.problem.outputs import Outputs

Likelihood = Callable[[Tensor], Core]


class Distributions(NamedTuple):
    """The output distributions at the positions that count, as `Outputs.select` orders them."""

    core: Core  # of batch shape [R]
    labels: Tensor | None  # [R] classes, or [R, C] targets


class Found(NamedTuple):
    """What a search for bad values has found, still on the device."""

    finite: Tensor  # [rows] bool
    labels_fit: Tensor | None = None  # bool: whether all labels are classes
    classes: int = 0

    def clone(self) -> Found:
        """A copy in memory of its own."""
        fit = None if self.labels_fit is None else self.labels_fit.clone()
        return self._replace(finite=self.finite.clone(), labels_fit=fit)

    def all_good(self) -> Tensor:
        """One bool for all rows and labels."""
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
    """Makes cores from outputs; on a GPU the search for NaN is read one batch later.

    Reading a value back waits for all that is queued: the backward pass would not be launched before the forward pass
    has run.  So on a GPU the answer for a batch is sent to the host's memory, and read there when the next batch has
    been queued; `flush` reads the last one.  An error names its batch all the same, and no result has been given out
    by then.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self._waiting: tuple[_Answer, Found, int] | None = None  # whether all is good, what was found, in which batch
        self._postponed: list[Found] | None = None

    def core(self, rows: Tensor, number: int, labels_fit: Tensor | None = None) -> Core:
        """The core of these outputs, of batch `number`; on a GPU, whether labels are classes is read later."""
        core = self.unchecked(rows, number)
        if core is None:
            return _named(number, lambda: self.likelihood(rows))
        extreme = rows.amax(-1) if self.likelihood is Categorical else rows.sum(-1, dtype=torch.float32)
        self.check_later(Found(torch.isfinite(extreme), labels_fit, core.dim), number)
        return core

    def unchecked(self, outputs: Tensor, number: int) -> Core | None:
        """The core where the search can be left for later, by `check_later`; None where it cannot."""
        if outputs.device.type == "cpu" or self.likelihood not in (Categorical, Bernoulli, Gaussian):
            return None
        return _named(number, lambda: self.likelihood(outputs, validate=False))  # type: ignore[call-arg]

    @contextmanager
    def postponed(self) -> Iterator[list[Found]]:
        """Read nothing inside, as in the capture of a CUDA graph; give out what would have been read."""
        self._postponed = []
        try:
            yield self._postponed
        finally:
            self._postponed = None

    def check_later(self, found: Found, number: int) -> None:
        """Remember what was found in batch `number`, and read what was found in the batch before."""
        if self._postponed is not None:
            self._postponed.append(found)
            return
        before, self._waiting = self._waiting, (_Answer(found.all_good()), found, number)
        _raise_if_bad(before)

    def flush(self) -> None:
        """Read what has not been read yet; raises a ValueError if it is bad."""
        before, self._waiting = self._waiting, None
        _raise_if_bad(before)


def distributions(
    outputs: Outputs, validation: LateValidation, *, labels: bool = True, compact: bool = False
) -> Distributions:
    """The distributions at the positions that count, and their labels: the one place where these are selected.

    `labels`: whether they are wanted.  `compact`: as in `Outputs.select`.
    """
    logits = outputs.logits.detach()
    rows = outputs.select(logits, compact)
    targets = outputs.select(outputs.labels, compact) if labels and outputs.labels is not None else None
    fit, classes = None, logits.shape[-1]
    if targets is not None and targets.ndim == 1 and validation.unchecked(rows, outputs.number) is not None:
        fit = ((targets >= 0) & (targets < classes)).all()  # read later; until then the score must not fail
        targets = targets.clamp(0, classes - 1)
    core = validation.core(rows, outputs.number, fit)
    check_labels(core, outputs, labels)
    return Distributions(core, targets)


def check_labels(core: Core, outputs: Outputs, wanted: bool) -> None:
    """Refuse class labels that are no integers, among which no `ignore_index` would be found, and wrong targets."""
    labels, (*positions, classes) = outputs.labels, outputs.logits.shape
    if labels is None or labels.ndim > len(positions):
        return
    expected = advice = ""
    if isinstance(core, Categorical) and labels.is_floating_point():
        expected, advice = f"integers of shape {positions}", "Convert them with .long()."
    elif isinstance(core, DiagonalCore) and wanted:
        expected = f"targets of shape {[*positions, classes]}"
    if expected:
        got = f"{str(labels.dtype).removeprefix('torch.')} of shape {list(labels.shape)}"
        raise ValueError(f"Batch {outputs.number} of `data`: " + message("labels", expected, got, advice))


def _raise_if_bad(batch: tuple[_Answer, Found, int] | None) -> None:
    if batch is None or bool(batch[0]):
        return
    _, (finite, labels_fit, classes), number = batch
    where = f"Batch {number} of `data`: "
    if labels_fit is not None and not bool(labels_fit):
        advice = "Positions that do not count are marked by `ignore_index`."
        raise ValueError(where + message("labels", f"between 0 and {classes - 1}", "others", advice))
    bad = (~finite).flatten()
    got = f"NaN or infinity at index {[int(bad.nonzero()[0])]}"
    advice = f"{int(bad.sum())} of {bad.numel()} rows are affected; look for overflow in half precision or a bad input."
    expected = "free of NaN and +inf, with a possible class in each row"
    raise ValueError(where + message("logits", expected, got, advice))


def _named(number: int, make: Callable[[], Core]) -> Core:
    """Put the batch's number in front of an error."""
    try:
        core = make()
    except (TypeError, ValueError) as error:
        raise ValueError(f"Batch {number} of `data`: {error}") from error
    if not isinstance(core, Core):
        raise TypeError(message("likelihood", "a function from outputs to a core", f"one to {type(core).__name__}"))
    return core
