"""Sums and roots that keep their digits, and whose derivatives exist at zero; derivatives at equal entries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def sum_of_others(x: Tensor) -> Tensor:
    """Σ_{j≠i} x_j for x >= 0 [..., C], each accurate relatively.  O(C).

    Subtracting x_i from the total is accurate for all but the largest entry, which may be nearly all of the total; that
    one is summed without it.  For probabilities this is 1 - p, right down to the smallest: 1 - 0.99… has lost digits.
    """
    largest = x.argmax(-1, keepdim=True)
    rest = x.scatter(-1, largest, 0.0).sum(-1, keepdim=True)
    return (x.sum(-1, keepdim=True) - x).scatter(-1, largest, rest)


def square_root(x: Tensor) -> Tensor:
    """√x for x >= 0, with the derivative 0 where x = 0 instead of infinity, which times 0 would be NaN."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def divide(x: Tensor, y: Tensor) -> Tensor:
    """x/y, and 0 with derivative 0 where y = 0."""
    nonzero = y != 0
    return torch.where(nonzero, x / torch.where(nonzero, y, 1.0), 0.0)


def euclidean_norm(x: Tensor) -> Tensor:
    """‖x‖ over the last dimension, for entries of any size: 1e-200 has no square in float64."""
    if not x.shape[-1]:
        return x.sum(-1)
    scale = x.detach().abs().amax(-1, keepdim=True)
    return scale[..., 0] * square_root(divide(x, scale).square().sum(-1))


def norm_of_others(x: Tensor) -> Tensor:
    """(Σ_{j≠i} x_j²)^½ for x >= 0 [..., C], each accurate relatively.  O(C)."""
    largest = x.argmax(-1, keepdim=True)
    rest = euclidean_norm(x.scatter(-1, largest, 0.0))[..., None]
    whole = euclidean_norm(x)[..., None]
    return (whole * square_root((1 - divide(x, whole).square()).clamp(min=0.0))).scatter(-1, largest, rest)


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
