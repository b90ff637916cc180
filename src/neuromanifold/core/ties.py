"""Derivatives of functions of p that pick one of several equal entries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_differentiated(p: Tensor) -> bool:
    """Whether p is differentiated, in reverse mode (autograd records it) or in forward mode (it has a tangent)."""
    forward = forward_ad.unpack_dual(p).tangent is not None  # type: ignore[no-untyped-call]
    return forward or (p.requires_grad and torch.is_grad_enabled())


def average_derivatives_over_ties(p: Tensor) -> Tensor:
    """p [n, c] itself, whose derivative at tied entries is the mean over the tie.  O(C log C).

    What depends on p as a set (eigenvalues, norms) treats tied entries alike, but code that picks *one* of them as a
    pole does not.  Where the derivative exists, it is symmetric in the tied entries, so averaging repairs the choice.
    """
    values, order = p.sort(dim=-1)
    starts = torch.nn.functional.pad(values[:, 1:] != values[:, :-1], (1, 0)).cumsum(-1)  # number of the tie
    count = torch.zeros_like(values).scatter_add(-1, starts, torch.ones_like(values))
    total = torch.zeros_like(values).scatter_add(-1, starts, values)
    mean = total.gather(-1, starts) / count.gather(-1, starts)
    return torch.zeros_like(p).scatter(-1, order, values.detach() + (mean - mean.detach()))
