"""How far one diagonal is from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from neuromanifold.core.checks import message

_RANKED = 1_000_000  # ranks are taken over at most so many entries, evenly spaced


@dataclass(frozen=True)
class Comparison:
    """An estimate against a reference, over all entries (n of them, `positive` with a reference above zero)."""

    relmae: float  # mean of |a - b|/(b + ε): the paper's RelMAE
    relmae_positive: float  # the same over entries with b > 0
    mae: float  # mean of |a - b|
    mean_ratio: float  # Σa/Σb: 1 if the overall scale is right
    cosine: float
    rank_correlation: float  # Spearman's
    entries: int
    positive: int

    def __str__(self) -> str:
        return (
            f"RelMAE {self.relmae:.4g} (positive entries {self.relmae_positive:.4g}), MAE {self.mae:.4g}, "
            f"scale {self.mean_ratio:.4g}, cosine {self.cosine:.4f}, rank correlation {self.rank_correlation:.4f} "
            f"({self.entries} entries, {self.positive} positive)"
        )


def compare(estimate: Mapping[str, Tensor], reference: Mapping[str, Tensor], epsilon: float) -> Comparison:
    """Compare entry by entry, in float64; both must have the same names and shapes."""
    shapes, theirs = ({(name, value.shape) for name, value in d.items()} for d in (estimate, reference))
    if shapes != theirs:
        different = sorted(name for name, _ in shapes ^ theirs)[0]
        raise ValueError(message("other", "a result for the same parameters", f"a difference at {different!r}"))
    a = torch.cat([estimate[name].detach().cpu().flatten() for name in estimate]).double()
    b = torch.cat([reference[name].detach().cpu().flatten() for name in estimate]).double()
    error, positive = (a - b).abs(), b > 0
    relative = error / (b + epsilon)
    norms = float(a.norm() * b.norm())
    return Comparison(
        relmae=float(relative.mean()),
        relmae_positive=float(relative[positive].mean()) if bool(positive.any()) else 0.0,
        mae=float(error.mean()),
        mean_ratio=float(a.sum() / b.sum()) if bool(positive.any()) else float("nan"),
        cosine=float(a @ b) / norms if norms else float("nan"),
        rank_correlation=_spearman(a, b),
        entries=a.numel(),
        positive=int(positive.sum()),
    )


def _spearman(a: Tensor, b: Tensor) -> float:
    step = max(1, a.numel() // _RANKED)
    ranks = torch.stack([_ranks(values[::step]) for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1]) if ranks.shape[1] > 1 else float("nan")


def _ranks(values: Tensor) -> Tensor:
    """Ranks with ties sharing their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    mean_rank: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return mean_rank[inverse]
