"""From outputs to cotangents of the logits' shape, one for each column or probe of an estimator, and their seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.estimators import Apart, Estimator, NoiseFactors
from neuromanifold.kernels.values import Probe
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.validation import Found, LateValidation, check_labels, distributions

_WORD, _HALF = 2**64 - 1, 2**32 - 1


class Cotangent(NamedTuple):
    """One cotangent of a batch, which has one backward pass."""

    values: Tensor  # [B, ..., C]
    noise_factors: NoiseFactors
    to_come: int  # how many cotangents of the batch are still to come, this one included
    passes: int = 1  # how many there are
    weights: Tensor | None = None  # [B] 1/π, for samples that were kept with probability π
    apart: Apart | None = None  # samples whose squares have another noise


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


def with_eigenvectors(drawn: Iterator[Cotangent], columns: Tensor, apart: Apart) -> Iterator[Cotangent]:
    """Cotangents of a single pass, in which some samples have ±√λ₁v₁ [k, C] in place of a probe: without noise."""
    for one in drawn:
        columns, rows = columns.to(one.values.dtype), apart.rows.to(one.values.device)
        yield one._replace(values=one.values.index_copy(0, rows, columns), apart=apart)


def _fused(
    core: Core, outputs: Outputs, estimator: Estimator, probes: Iterator[Probe], validation: LateValidation
) -> Iterator[Cotangent]:
    """From a kernel that skips positions and looks for NaN by itself: the cotangent is all that is allocated."""
    check_labels(core, outputs, wanted=False)
    factors = _noise_factors(core, outputs, estimator)
    for i, (values, finite) in enumerate(probes):
        if i == 0:
            validation.check_later(Found(finite), outputs.number)
        yield Cotangent(values, factors[i], len(factors) - i, len(factors))


def _noise_factors(core: Core, outputs: Outputs, estimator: Estimator) -> list[NoiseFactors]:
    """Return those of each pass: only without positions, a sample has a single output distribution."""
    together, alone = estimator.pass_noise(core, alone=False), estimator.pass_noise(core, alone=True)
    samples = alone if outputs.logits.ndim == 2 else together
    return [NoiseFactors(*each) for each in zip(together, samples, alone, strict=True)]


def by_position(cotangent: Tensor, valid: Tensor | None) -> Iterator[Tensor]:
    """The cotangent restricted to one position of every sample after the other: columns of positions do not add."""
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
