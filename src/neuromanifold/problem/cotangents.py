"""From outputs to their distributions, checked for NaN without waiting for a GPU, and on to cotangents and their seeds.

outputs ─► core at the positions that count, labels ─► cotangents of the logits' shape, one for each column or probe
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian
from neuromanifold.core.checks import message
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.estimators import Estimator, NoiseFactors
from neuromanifold.kernels.values import Probe
from neuromanifold.problem.outputs import Outputs

Likelihood = Callable[[Tensor], Core]
_WORD, _HALF = 2**64 - 1, 2**32 - 1


class Distributions(NamedTuple):
    """The output distributions at the positions that count, as `Outputs.select` orders them."""

    core: Core  # of batch shape [R]
    labels: Tensor | None  # [R] classes, or [R, C] targets


class Validity(NamedTuple):
    """Which outputs of a batch are finite, and whether its labels are classes: still on the device."""

    finite: Tensor  # [rows] bool
    labels_fit: Tensor | None = None  # bool: whether all labels are classes
    classes: int = 0

    def clone(self) -> Validity:
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
        self._waiting: tuple[_Answer, Validity, int] | None = None  # whether all is good, the details, of which batch
        self._postponed: list[Validity] | None = None  # collects what would have been read, inside of `postponed`

    def core(self, rows: Tensor, number: int, labels_fit: Tensor | None = None) -> Core:
        """The core of these outputs, of batch `number`; on a GPU, whether labels are classes is read later."""
        core = self.unchecked(rows, number)
        if core is None:
            return self._named(rows, number)
        extreme = rows.amax(-1) if self.likelihood is Categorical else rows.sum(-1, dtype=torch.float32)
        self.check_later(Validity(torch.isfinite(extreme), labels_fit, core.dim), number)
        return core

    def unchecked(self, outputs: Tensor, number: int) -> Core | None:
        """The core where the search can be left for later, by `check_later`; None where it cannot."""
        if outputs.device.type == "cpu" or self.likelihood not in (Categorical, Bernoulli, Gaussian):
            return None
        return self._named(outputs, number, validate=False)

    def _named(self, outputs: Tensor, number: int, **options: bool) -> Core:
        """Make a core; an error begins with the batch's number."""
        try:
            core = self.likelihood(outputs, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Batch {number} of `data`: {error}") from error
        if not isinstance(core, Core):
            raise TypeError(message("likelihood", "a function from outputs to a core", f"one to {type(core).__name__}"))
        return core

    @contextmanager
    def postponed(self) -> Iterator[list[Validity]]:
        """Read nothing inside, as in the capture of a CUDA graph; yield a list of what would have been read."""
        self._postponed = []
        try:
            yield self._postponed
        finally:
            self._postponed = None

    def check_later(self, found: Validity, number: int) -> None:
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


def _raise_if_bad(batch: tuple[_Answer, Validity, int] | None) -> None:
    if batch is None or bool(batch[0]):
        return
    _, (finite, labels_fit, classes), number = batch
    where = f"Batch {number} of `data`: "
    if labels_fit is not None and not bool(labels_fit):
        advice = "Positions that do not count are marked by `ignore_index`."
        raise ValueError(where + message("labels", f"between 0 and {classes - 1}", "some that are not", advice))
    bad = (~finite).flatten()
    got = f"NaN or infinity at index {[int(bad.nonzero()[0])]}"
    advice = f"{int(bad.sum())} of {bad.numel()} rows are affected; look for overflow in half precision or a bad input."
    expected = "free of NaN and +inf, with a possible class in each row"
    raise ValueError(where + message("logits", expected, got, advice))


class Cotangent(NamedTuple):
    """One cotangent of a batch, which has one backward pass."""

    values: Tensor  # [B, ..., C]
    noise_factors: NoiseFactors
    to_come: int  # how many cotangents of the batch are still to come, this one included
    passes: int = 1  # how many there are
    weights: Tensor | None = None  # [B] 1/π, for samples that were kept with probability π


def cotangents(
    outputs: Outputs, estimator: Estimator, generator: torch.Generator, validation: LateValidation
) -> Iterator[Cotangent]:
    """All cotangents of a batch; at positions that do not count they are zero."""
    core = validation.unchecked(outputs.logits.detach(), outputs.number)
    probes = None if core is None else estimator.fused(core, generator, outputs.valid)
    if core is not None and probes is not None:
        yield from _fused(core, outputs, estimator, probes, validation)
        return
    core, labels = distributions(outputs, validation, labels=estimator.needs_labels)
    try:
        factors = _noise_factors(core, outputs, estimator)
        for i, rows in enumerate(estimator.cotangents(core, labels, generator)):
            yield Cotangent(outputs.scatter(rows), factors[i], len(factors) - i, len(factors))
    except (TypeError, ValueError) as error:
        raise ValueError(f"Batch {outputs.number} of `data`: {error}") from error


def weighted(drawn: Iterator[Cotangent], keep: Tensor, mean_keep: float) -> Iterator[Cotangent]:
    """Cotangents of samples that were kept with probability π [B], times 1/√π: squares are unbiased.

    Let X = Σ g² over the m passes of a sample.  The variance of X/π, where it is kept at all, has the unbiased estimate
    (π Var(X) + (1 - π) X²)/π² <= Σ (π c + (1 - π) m) (g/√π)⁴.  `mean_keep` stands for π here.
    """
    for one in drawn:
        roots = keep.to(one.values.device).rsqrt().to(one.values.dtype)
        values = one.values * roots.view(-1, *[1] * (one.values.ndim - 1))
        missed = (1 - mean_keep) * one.passes
        batch, sample, token = one.noise_factors
        factors = NoiseFactors(mean_keep * batch + missed, mean_keep * sample + missed, token)
        yield one._replace(values=values, noise_factors=factors, weights=1 / keep)


def _fused(
    core: Core, outputs: Outputs, estimator: Estimator, probes: Iterator[Probe], validation: LateValidation
) -> Iterator[Cotangent]:
    """Yield cotangents of a kernel that skips positions and finds NaN by itself: it allocates nothing else."""
    check_labels(core, outputs, wanted=False)
    factors = _noise_factors(core, outputs, estimator)
    for i, (values, finite) in enumerate(probes):
        if i == 0:
            validation.check_later(Validity(finite), outputs.number)
        yield Cotangent(values, factors[i], len(factors) - i, len(factors))


def _noise_factors(core: Core, outputs: Outputs, estimator: Estimator) -> list[NoiseFactors]:
    """Return the noise factors of each pass; a sample has a single output distribution only for logits [B, C]."""
    together, alone = estimator.pass_noise(core, alone=False), estimator.pass_noise(core, alone=True)
    samples = alone if outputs.logits.ndim == 2 else together
    return [NoiseFactors(*each) for each in zip(together, samples, alone, strict=True)]


def by_position(cotangent: Tensor, valid: Tensor | None) -> Iterator[Tensor]:
    """Yield the cotangent restricted to one position of all samples, for one position after the other.

    So gradients of different positions are squared before they are added.
    """
    if cotangent.ndim == 2:
        yield cotangent
        return
    flat = cotangent.flatten(1, -2)  # [B, T, C]
    counts = None if valid is None else valid.flatten(1).any(0).tolist()
    for t in range(flat.shape[1]):
        if counts is None or counts[t]:
            one = torch.zeros_like(flat)
            one[:, t] = flat[:, t]
            yield one.view(cotangent.shape)


def by_sample(cotangent: Tensor) -> Iterator[Tensor]:
    """The cotangent restricted to one sample after the other."""
    for n in range(len(cotangent)):
        one = torch.zeros_like(cotangent)
        one[n] = cotangent[n]
        yield one


def batch_seed(seed: int, batch: int) -> int:
    """The seed of 64 bits for the noise of one batch, mixed so that neighbours have nothing in common.

    It depends on nothing that was drawn before: a run can be taken up again in the middle, and parts of the data
    (`shard=(i, n)`) draw what one run would have drawn.
    torch's generator on a CPU looks at the lower 32 bits only: these differ between any two batches of one seed, since
    XOR and the mixing are one to one; the upper ones are the seed's.
    """
    mixed = _mix_word(seed)
    return (mixed & ~_HALF & _WORD) | _mix_half((mixed ^ batch) & _HALF)


def _mix_word(x: int) -> int:
    """The finaliser of SplitMix64, one to one on 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _mix_half(x: int) -> int:
    """The finaliser of MurmurHash3, one to one on 32 bits."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _HALF
    x = (x ^ x >> 13) * 0xC2B2AE35 & _HALF
    return x ^ x >> 16
