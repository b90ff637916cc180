"""The spectrum of diag(p) - p pᵀ in arbitrary precision, from the logits, by bisection.  Slow and obvious."""

import mpmath
import torch
from mpmath import mp, mpf

mp.dps = 50


def probabilities(logits: torch.Tensor) -> list[mpf]:
    """softmax of the exact values of the logits [C]; no underflow in mpmath."""
    weights = [mpmath.exp(mpf(z)) if z != -float("inf") else mpf(0) for z in logits.tolist()]
    total = mpmath.fsum(weights)
    return [w / total for w in weights]


def eigenvalues(p: list[mpf], k: int) -> list[mpf]:
    """The k <= C-1 largest eigenvalues: the root of Σ p_i/(p_i - λ) between neighbours in sorted order."""
    ordered = sorted(p, reverse=True)
    positive = [q for q in ordered if q > 0]

    def root(high: mpf, low: mpf) -> mpf:
        if high == low or low == 0:
            return low
        small = min(low, high - low) / (4 * len(p))  # the root is at least this far above `low`
        inner, outer = small, high - low
        for _ in range(110):  # geometric bisection of λ - low
            middle = mpmath.sqrt(inner * outer)
            if mpmath.fsum(q / (q - low - middle) for q in positive) > 0:
                outer = middle
            else:
                inner = middle
        return low + inner

    return [root(ordered[j], ordered[j + 1]) for j in range(k)]


def residual(p: list[mpf], value: float, vector: torch.Tensor) -> mpf:
    """‖F v - λ v‖ for F from exact probabilities, with (F v)_i = p_i Σ_j p_j (v_i - v_j)."""
    v = [mpf(x) for x in vector.tolist()]
    products = [q * mpmath.fsum(r * (x - y) for r, y in zip(p, v, strict=True)) for q, x in zip(p, v, strict=True)]
    return mpmath.norm([product - mpf(value) * x for product, x in zip(products, v, strict=True)])
