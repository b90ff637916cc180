"""Does a model do what a Fisher information takes for granted: the same twice, and each sample by itself?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs

Evaluate = Callable[[Batch], Outputs]


class CannotSliceError(ValueError):
    """Inputs that samples cannot be taken out of."""


@dataclass(frozen=True)
class ModelChecks:
    """What two forward passes, and some of single samples, say."""

    repeats: bool
    apart: bool | None  # None: not looked at, and `why` says why
    why: str = ""


@torch.no_grad()
def check_model(evaluate: Evaluate, batch: Batch, outputs: Outputs, batch_dim: int) -> ModelChecks:
    """Evaluate a batch once more, then three of its samples alone."""
    repeats = same_logits(evaluate(batch), outputs)
    n = len(outputs.logits)
    if not repeats:
        return ModelChecks(False, None, "the model does not repeat itself")
    if n < 2:
        return ModelChecks(True, None, "the first batch has a single sample")
    try:
        alone = [(i, cut(batch._replace(labels=None), n, i, i + 1, batch_dim)) for i in sorted({0, n // 2, n - 1})]
    except CannotSliceError as error:
        return ModelChecks(True, None, str(error))
    for i, one in alone:
        try:
            found = evaluate(one)
        except Exception as error:
            return ModelChecks(True, None, f"the model fails on a single sample ({type(error).__name__}: {error})")
        valid = None if outputs.valid is None else outputs.valid[i : i + 1]
        if not same_logits(found, Outputs(outputs.logits[i : i + 1], None, valid)):
            return ModelChecks(True, False)
    return ModelChecks(True, True)


def same_logits(found: Outputs, expected: Outputs) -> bool:
    """Whether logits agree where they count, but for rounding."""
    a, b = found.logits.detach(), expected.logits.detach()
    if a.shape != b.shape:
        return False
    if expected.valid is not None:
        a, b = a[expected.valid], b[expected.valid]
    if not b.numel():
        return True
    return bool((a - b).abs().max() <= torch.finfo(b.dtype).eps ** 0.5 * b.abs().max().clamp(min=1e-30))


def cut(batch: Batch, samples: int, start: int, stop: int, batch_dim: int = 0) -> Batch:
    """Some samples of a batch; an error where it is not clear which part of an input belongs to them."""

    def each(value: Any, where: str) -> Any:
        if isinstance(value, Tensor) and value.ndim:
            dim = batch_dim if value.ndim > 2 else 0
            if value.shape[dim] != samples:
                shape = f"input {where} has shape {list(value.shape)}"
                raise CannotSliceError(f"{shape}, in which the {samples} samples cannot be told apart")
            return value.narrow(dim, start, stop - start)
        if isinstance(value, Mapping):
            return {key: each(entry, f"{key!r}") for key, entry in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(each(entry, where) for entry in value))
        if isinstance(value, (tuple, list)):
            return type(value)(each(entry, where) for entry in value)
        if value is None or isinstance(value, (bool, int, float, Tensor)):
            return value
        raise CannotSliceError(f"input {where} is a {type(value).__name__}")

    args = tuple(each(value, f"number {i}") for i, value in enumerate(batch.args))
    return Batch(args, each(batch.kwargs, ""), None if batch.labels is None else each(batch.labels, "'labels'"))


def model_notes(checks: ModelChecks, model: nn.Module) -> list[str]:
    """In words."""
    kind = type(model).__name__
    if not checks.repeats:
        text = f"Two evaluations of the same batch in eval mode differ: something in {kind} is random or remembers. "
        return [text + "No two numbers below are about the same network."]
    if checks.apart is None:
        return [f"Whether samples influence each other was not looked at: {checks.why}."]
    if checks.apart:
        return []
    text = (
        "A sample's logits change with the other samples of its batch: gradients of single samples are not what they "
    )
    return [text + "seem, and every number depends on how the data are batched."]
