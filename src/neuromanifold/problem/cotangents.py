"""From outputs to cotangents of the logits' shape, one for each column or probe of an estimator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.estimators import Estimator
from neuromanifold.kernels.values import Probe
from neuromanifold.problem.batches import Outputs
from neuromanifold.problem.validation import Found, LateValidation


class Cotangent(NamedTuple):
    """One cotangent, and c with Var(g²) <= c E[g⁴] for squares of whole batches and of single samples."""

    values: Tensor  # [B, ..., C]
    noise: float
    sample_noise: float
    left: int  # how many are left of the batch, this one included


def cotangents(
    outputs: Outputs, estimator: Estimator, generator: torch.Generator, validation: LateValidation, number: int
) -> Iterator[Cotangent]:
    """All cotangents of batch `number`; at positions that do not count they are zero."""
    shape = outputs.logits.shape
    logits, labels, valid = outputs.logits.detach(), outputs.labels if estimator.needs_labels else None, outputs.valid
    core = validation.unchecked(logits, number)
    probes = None if core is None else estimator.fused(core, generator, valid)
    if core is not None and probes is not None:
        yield from _fused(core, logits, estimator, probes, validation, number)
        return
    rows = rows_that_count(logits, valid)
    if labels is not None:
        every = valid is None or logits.ndim == 2
        labels = labels.reshape(len(rows), *labels.shape[len(shape) - 1 :]) if every else labels[valid]
    fits = None
    if core is not None and labels is not None and labels.shape == rows.shape[:-1]:  # class labels, on a GPU
        fits = ((labels >= 0) & (labels < shape[-1])).all()
        labels = labels.clamp(0, shape[-1] - 1)
    core = validation.core(rows, number, fits)
    try:
        noise = estimator.pass_noise(core, alone=False)
        sample_noise = estimator.pass_noise(core, alone=len(shape) == 2)
        for i, columns in enumerate(estimator.cotangents(core, labels, generator)):
            yield Cotangent(spread(columns, shape, valid), noise[i], sample_noise[i], len(noise) - i)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Batch {number} of `data`: {error}") from error


def _fused(
    core: Core,
    logits: Tensor,
    estimator: Estimator,
    probes: Iterator[Probe],
    validation: LateValidation,
    number: int,
) -> Iterator[Cotangent]:
    """From a kernel that skips positions and looks for NaN by itself: the cotangent is all that is allocated."""
    noise = estimator.pass_noise(core, alone=False)
    sample_noise = estimator.pass_noise(core, alone=logits.ndim == 2)
    for i, (values, finite) in enumerate(probes):
        if i == 0:
            validation.look_later(Found(finite), number)
        yield Cotangent(values, noise[i], sample_noise[i], len(noise) - i)


def rows_that_count(logits: Tensor, valid: Tensor | None) -> Tensor:
    """The distributions that count, [rows, C]."""
    if valid is None:
        return logits.reshape(-1, logits.shape[-1])
    if logits.ndim == 2:  # every row; those that do not count get a zero, without waiting for a GPU
        return torch.where(valid[:, None], logits, 0.0)
    return logits[valid]  # padding may be most of them


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


def spread(columns: Tensor, shape: torch.Size, valid: Tensor | None) -> Tensor:
    """Put cotangents of the positions that count into a tensor of the logits' shape, zero elsewhere."""
    if valid is None:
        return columns.view(shape)
    if len(shape) == 2:
        return torch.where(valid[:, None], columns, 0.0)
    cotangent = columns.new_zeros(shape)
    cotangent[valid] = columns
    return cotangent
