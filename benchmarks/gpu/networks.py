"""Whole networks on this device against a float64 loop over samples and classes, in every precision.

`neuromanifold.reference` says what is right, for the very weights and inputs that were used (rounded ones for bf16).
Wide ones have layers of real size, of which a kernel does many tiles; there the loop takes given labels only.
An error is ‖a - b‖/‖b‖ of a parameter, the worst one counts; where b is zero by symmetry (the keys' biases), it is
divided by the norm of the largest parameter.  "Loop" is the same error of autograd by itself in the same precision, a
backward pass for each sample (and class) of the same batch: what rounding costs without this library, which in half
precision can be much (a ReLU that rounding switches on).  "From loop" is the distance to that loop.  One of the two,
error or distance, must be below the limit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from models import Task
from torch import Tensor

import neuromanifold as nm
from gpu.models import HALF, PRECISIONS, WIDE, cast_inputs, in_precision, logits, precision, small_task, wide_task
from gpu.session import Missing, Row, Session
from neuromanifold.reference import network as reference

LIMITS = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 5e-2, "fp16": 2e-2}
FLOAT16 = ("DistilBERT", "ResNet-50")  # checked in float16, too
ZERO = 1e-20  # of the largest norm: float64's rounding, squared, is 1e-32
ROUNDING = 1e-9  # the same for float32, squared 1e-14, with room for many of them

Diagonal = dict[str, Tensor]
Scores = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities [T, C] and labels [T] of a sample to what is differentiated."""


def run_networks(session: Session, architectures: list[str]) -> None:
    """Check small and wide networks in every precision."""
    rows: list[Row] = []
    wanted = [*PRECISIONS, *(which for which in HALF if which not in PRECISIONS)]
    for name in architectures:
        for size, make in (("small", _small), ("wide", _wide)):
            for which in wanted if size == "small" or name in WIDE else []:
                if which == "fp16" and (name not in FLOAT16 or session.device.type != "cuda"):
                    continue
                title = f"{name}, {size}, {which}"
                found = session.guarded(f"check {title}", partial(make, name, which, session.device))
                start: Row = {"network": f"{name}, {size}", "precision": which}
                for row, passed in [] if isinstance(found, Missing) else found:
                    session.checked(f"check {title}", {**start, **row}, passed, rows)
                if isinstance(found, Missing):
                    rows.append({**start, "verdict": found.reason})
        session.add("Networks against a float64 loop", rows)


def _small(name: str, which: str, device: torch.device) -> list[tuple[Row, bool]]:
    """Return a row for each estimator."""
    task = in_precision(small_task(name, device), which)
    inputs = cast_inputs(task.inputs, torch.float64)
    exact = reference.reference_diagonal(task.model, lambda model: logits(model, inputs))
    empirical = reference.empirical_diagonal(task.model, lambda model: logits(model, inputs), task.labels)
    return [_errors(task, which, nm.Exact(), exact, _all), _errors(task, which, nm.Empirical(), empirical, _given)]


def _wide(name: str, which: str, device: torch.device) -> list[tuple[Row, bool]]:
    """Return a row; the loop is that of `_loop`, in float64, since a Jacobian of all classes would be large."""
    task = in_precision(wide_task(name, device), which)
    model = copy.deepcopy(task.model).double()
    truth = _loop(task._replace(model=model, inputs=cast_inputs(task.inputs, torch.float64)), _given, torch.float64)
    return [_errors(task, which, nm.Empirical(), truth, _given)]


def _errors(task: Task, which: str, estimator: nm.Estimator, truth: Diagonal, scores: Scores) -> tuple[Row, bool]:
    """Return errors of this library and of the loop, how far apart they are, and whether it passes.

    It does if the error is small, or the loop's own in the same precision is as large.
    """
    limit = LIMITS[which]
    with precision(which):
        loop = _loop(task, scores)
        found = nm.fisher_diagonal(task.model, [task.batch], estimator, shift_labels=False).sum  # as the loop does
    (error, where), (own, _), (apart, _) = (
        worst(truth, *pair) for pair in ((found, truth), (loop, truth), (found, loop))
    )
    row: Row = {"estimator": repr(estimator), "worst error": error, "of": where, "loop": own, "from loop": apart}
    return {**row, "limit": limit}, min(error, apart) <= limit or error <= own


def worst(truth: Diagonal, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest distance of a from b in norms of the truth, and of which parameter."""
    norms = {key: float(torch.linalg.vector_norm(value)) for key, value in truth.items()}
    largest, errors = max(norms.values()), {}
    for key in truth:
        scale = norms[key] if norms[key] > ZERO * largest else largest
        error = float(torch.linalg.vector_norm(a[key].double() - b[key].double())) / scale
        errors[key] = error if math.isfinite(error) else math.inf  # also what is not a number
    where = max(errors, key=errors.__getitem__)
    return errors[where], where


def _loop(task: Task, scores: Scores, dtype: torch.dtype = torch.float32) -> Diagonal:
    """Return Σ_n Σ (∂ score/∂θ)², one forward pass, a backward pass for each score, squares in float32 or better."""
    named = dict(task.model.named_parameters())
    total = {key: torch.zeros_like(parameter, dtype=dtype) for key, parameter in named.items()}
    z = logits(task.model, task.inputs)  # [B, C] or [B, T, C]
    for n in range(len(z)):
        for score in scores(z[n].view(-1, z.shape[-1]).log_softmax(-1), task.labels[n].view(-1)):
            gradients = torch.autograd.grad(score, list(named.values()), retain_graph=True, allow_unused=True)
            for key, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    total[key] += gradient.to(dtype).square()
    return total


def _all(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return √p · log p of every position and class."""
    del labels
    return (log_p * (log_p.detach() / 2).exp()).flatten()


def _given(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood of a sample's labels, of all positions together."""
    return log_p.gather(-1, labels[:, None]).sum()[None]


def without_rounding(found: Mapping[str, Tensor]) -> Diagonal:
    """Return zero where the truth is zero (biases of keys in attention) and float32 has squares of rounding errors."""
    largest = max(float(torch.linalg.vector_norm(value)) for value in found.values())
    return {key: value * (float(torch.linalg.vector_norm(value)) > ROUNDING * largest) for key, value in found.items()}
