"""Splitting a batch into smaller ones, where the model computes the same for their samples."""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.operators.stochastic import sign_columns
from neuromanifold.problem.batches import Batch, cut
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.suspicions import same_logits

# Relative rounding errors of sums that are added in another order.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def split(problem: Problem, batch: Batch, logits: Tensor, samples: int) -> list[Batch]:
    """Return batches of at most so many samples; none if that does not work.

    Every tensor whose first dimension is as long as the batch is cut.  That is a guess: a table may be as long by
    chance, and samples may depend on each other.  So the logits of the parts must be those of the whole; and so must
    the gradients of the first part, since what adds nothing yet (position embeddings that begin as zeros) has some.
    """
    total, parts = len(logits), []
    for start in range(0, total, samples):
        rows = slice(start, min(start + samples, total))
        part = cut(batch, total, rows)
        try:
            same = same_logits(problem, problem.outputs(part).logits, logits[rows])
            if not same or (start == 0 and not _same_gradients(problem, batch, part, rows)):
                return []
        except Exception:  # of any kind: the model may fail on a batch that cannot be split like this
            return []
        parts.append(part)
    return parts


def _same_gradients(problem: Problem, whole: Batch, part: Batch, rows: slice) -> bool:
    """Whether a random cotangent of these samples has the same gradients in the whole batch and in the part."""
    found = []
    for one, its in ((whole, rows), (part, slice(None))):
        with torch.enable_grad():
            logits = problem.evaluate(one).logits[its]
            cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            gradients = torch.autograd.grad(logits, list(problem.parameters.values()), cotangent, allow_unused=True)
        found.append(torch.stack([_sketch(g) for g in gradients]))
        rounding = _ROUNDING[logits.dtype]
        del logits, gradients
    sizes = found[0][:, 0] + found[1][:, 0]
    allowed = rounding * (sizes + 0.1 * torch.linalg.vector_norm(sizes))  # some gradients are nothing but rounding
    return bool(((found[0] - found[1]).abs() <= allowed[:, None]).all())


@torch.no_grad()
def _sketch(g: Tensor | None) -> Tensor:
    """Return the length of a gradient, and its product with random signs."""
    if g is None:
        return torch.zeros(2, dtype=torch.float64)
    flat = (g if g.layout == torch.strided else g.to_dense()).flatten().cpu()
    wide = flat.to(promoted(flat.dtype))
    signs = sign_columns(wide, 1, torch.Generator().manual_seed(1))[:, 0]
    return torch.stack([torch.linalg.vector_norm(wide), wide @ signs]).double()
