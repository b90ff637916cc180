"""Taking a batch apart into fewer samples at a time, where the model says the same about them then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from neuromanifold.run.batches import Batch, Outputs


@torch.no_grad()
def split(evaluate: Callable[[Batch], Outputs], batch: Batch, logits: Tensor, samples: int) -> list[Batch]:
    """Batches of at most so many samples; empty if that does not work.

    Every tensor whose first dimension is as long as the batch is cut.  That is a guess: a table may be as long by
    chance, and samples may depend on each other.  So the logits of the parts must be those of the whole.
    """
    total, parts = len(logits), []
    allowed = 1e3 * torch.finfo(logits.dtype).eps * float(logits.abs().amax()) if logits.numel() else 0.0
    for start in range(0, total, samples):
        rows = slice(start, min(start + samples, total))
        part = Batch(*(_cut(value, total, rows) for value in batch))
        try:
            found = evaluate(part).logits
        except Exception:  # whatever the model says to a batch that has been cut in the wrong way
            return []
        same = found.shape == logits[rows].shape and float((found - logits[rows]).abs().amax()) <= allowed
        if not same:
            return []
        parts.append(part)
    return parts


def _cut(value: Any, total: int, rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if value.ndim and len(value) == total else value
    if isinstance(value, Mapping):
        return {key: _cut(entry, total, rows) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(entry, total, rows) for entry in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(entry, total, rows) for entry in value)
    return value
