"""Taking a batch apart into fewer samples at a time, where the model says the same about them then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs

Evaluate = Callable[[Batch], Outputs]

# What rounding may do to sums that are made in another order, relative to their size.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def split(
    evaluate: Evaluate, batch: Batch, logits: Tensor, samples: int, parameters: Sequence[Tensor] = ()
) -> list[Batch]:
    """Batches of at most so many samples; empty if that does not work.

    Every tensor whose first dimension is as long as the batch is cut.  That is a guess: a table may be as long by
    chance, and samples may depend on each other.  So the logits of the parts must be those of the whole; and so must
    the gradients of the first part, since what adds nothing yet (position embeddings that begin as zeros) has some.
    """
    total, parts = len(logits), []
    for start in range(0, total, samples):
        rows = slice(start, min(start + samples, total))
        part = Batch(*(_cut(value, total, rows) for value in batch))
        try:
            with torch.no_grad():
                same = _close(evaluate(part).logits, logits[rows])
            if same and parameters and start == 0:
                same = _same_gradients(evaluate, batch, part, rows, parameters)
        except Exception:  # whatever the model says to a batch that has been cut in the wrong way
            return []
        if not same:
            return []
        parts.append(part)
    return parts


def _close(found: Tensor, expected: Tensor) -> bool:
    """But for rounding, which is as large as the ordinary logits: a class that is masked by -1e9 hides nothing."""
    if found.shape != expected.shape:
        return False
    size = expected.abs()
    scale = torch.where(expected >= expected.amax(-1, keepdim=True) - 100, size, 0).amax()
    allowed = _ROUNDING[expected.dtype] * torch.maximum(size, scale)
    return bool(((found == expected) | ((found - expected).abs() <= allowed)).all())


def _same_gradients(evaluate: Evaluate, whole: Batch, part: Batch, rows: slice, parameters: Sequence[Tensor]) -> bool:
    """Whether a random cotangent of these samples has the same gradients in the whole batch and in the part."""
    found = []
    for one, its in ((whole, rows), (part, slice(None))):
        with torch.enable_grad():
            logits = evaluate(one).logits[its]
            cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            gradients = torch.autograd.grad(logits, list(parameters), cotangent, allow_unused=True)
        found.append(torch.stack([_sketch(g) for g in gradients]))
        rounding = _ROUNDING[logits.dtype]
        del logits, gradients
    sizes = found[0][:, 0] + found[1][:, 0]
    allowed = rounding * (sizes + 0.1 * torch.linalg.vector_norm(sizes))  # some gradients are nothing but rounding
    return bool(((found[0] - found[1]).abs() <= allowed[:, None]).all())


@torch.no_grad()
def _sketch(g: Tensor | None) -> Tensor:
    """Its length and its product with random signs."""
    if g is None:
        return torch.zeros(2, dtype=torch.float64)
    flat = (g if g.layout == torch.strided else g.to_dense()).flatten().cpu()
    wide = flat if flat.dtype == torch.float64 else flat.float()
    bits = torch.randint(0, 2, wide.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    return torch.stack([torch.linalg.vector_norm(wide), wide @ (2 * bits - 1).to(wide)]).double()


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
