"""How far one diagonal is from another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from neuromanifold.core.checks import message

_RANKED = 1_000_000  # ranks are taken over at most so many entries, evenly spaced


@dataclass(frozen=True)
class Comparison:
    """How far one diagonal is from a reference: what `DiagonalFisher.compare` returns.

    Example:
        >>> exact = nm.fisher_diagonal(model, data, nm.Exact())
        >>> comparison = nm.fisher_diagonal(model, data).compare(exact)
        >>> f"{comparison.relmae:.2f} {comparison.rank_correlation:.2f} {comparison.entries}"
        '0.14 0.98 67'
    """

    relmae: float  #: mean of `|a - b|/(b + ε)`: the paper's RelMAE
    relmae_positive: float  #: the same over entries with b > 0
    mae: float  #: mean of `|a - b|`
    mean_ratio: float  #: Σa/Σb: 1 if the overall scale is right
    cosine: float
    rank_correlation: float  #: Spearman's
    entries: int
    positive: int

    def __str__(self) -> str:
        return (
            f"RelMAE {self.relmae:.4g} (positive entries {self.relmae_positive:.4g}), MAE {self.mae:.4g}, "
            f"scale {self.mean_ratio:.4g}, cosine {self.cosine:.4f}, rank correlation {self.rank_correlation:.4f} "
            f"({self.entries} entries, {self.positive} positive)"
        )


def compare(estimate: Mapping[str, Tensor], reference: Mapping[str, Tensor], epsilon: float) -> Comparison:
    """Compare entry by entry, in float64, a tensor at a time; both must have the same names and shapes.

    On a GPU if the estimate is there.
    """
    shapes, theirs = ({(name, value.shape) for name, value in d.items()} for d in (estimate, reference))
    if shapes != theirs:
        different = sorted(name for name, _ in shapes ^ theirs)[0]
        raise ValueError(message("other", "a result for the same parameters", f"a difference at {different!r}"))
    entries = sum(value.numel() for value in estimate.values())
    step, start, positive = max(1, entries // _RANKED), 0, 0  # every step-th entry is ranked
    sums, ranked = torch.zeros(8, dtype=torch.float64), [torch.zeros(2, 0, dtype=torch.float64)]  # on the CPU
    for name, value in estimate.items():
        device = value.device if value.is_cuda else torch.device("cpu")  # some others have no float64
        a, b = (tensor.detach().to(device).flatten().double() for tensor in (value, reference[name]))
        error, above = (a - b).abs(), b > 0
        relative = error / (b + epsilon)
        parts = (relative.sum(), relative[above].sum(), error.sum(), a.sum(), b.sum(), a @ a, b @ b, a @ b)
        sums += torch.stack(parts).cpu()
        positive += int(above.sum())
        ranked.append(torch.stack([a[start::step], b[start::step]]).cpu())
        start = (start - a.numel()) % step
    relmae, relmae_positive, mae, total, truth, aa, bb, ab = sums.tolist()
    norms = math.sqrt(aa) * math.sqrt(bb)
    return Comparison(
        relmae=relmae / entries if entries else math.nan,
        relmae_positive=relmae_positive / positive if positive else 0.0,
        mae=mae / entries if entries else math.nan,
        mean_ratio=total / truth if positive else math.nan,
        cosine=ab / norms if norms else math.nan,
        rank_correlation=_spearman(*torch.cat(ranked, 1)),
        entries=entries,
        positive=positive,
    )


def _spearman(a: Tensor, b: Tensor) -> float:
    ranks = torch.stack([_ranks(values) for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1]) if ranks.shape[1] > 1 else math.nan


def _ranks(values: Tensor) -> Tensor:
    """Ranks with ties sharing their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    mean_rank: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return mean_rank[inverse]
