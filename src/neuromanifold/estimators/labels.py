"""Estimates from labels: drawn from the model (Monte Carlo), or given with the data (empirical)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core import Core
from neuromanifold.core.checks import number_of_passes
from neuromanifold.estimators.base import Estimator


@dataclass(frozen=True)
class MonteCarlo(Estimator):
    """u = ∂ log p(ŷ)/∂z with labels ŷ drawn from the model: unbiased, one pass for each sampled label.

    Scores of drawn labels are centred and independent over the samples, so one pass serves a whole batch (the paper
    counts one pass for each sample).  Variance of an entry, per batch: 2F² - 3 Σ F_x² + Σ E[s_x⁴]; its
    coefficient of variation has no bound (section 4.1, appendix A), because a rare label can have a large score.
    """

    samples: int = 1

    centred: ClassVar[bool] = True
    target: ClassVar[str] = "unbiased"
    noise_factor: ClassVar[float] = 1.0  # Var(g²) <= E[g⁴] for any distribution

    def __post_init__(self) -> None:
        number_of_passes(self.samples, "samples")

    @override
    def passes(self, core: Core) -> int:
        del core
        return self.samples

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the score of a drawn label, over √samples, for each pass."""
        del labels
        for _ in range(self.samples):
            yield core.score(core.sample(generator)) / math.sqrt(self.samples)


@dataclass(frozen=True)
class Empirical(Estimator):
    """u = ∂ log p(y)/∂z with the labels of the data: the empirical Fisher Σ (∂ℓ/∂θ)², squared per sample.

    Deterministic, and biased however much data there is: it replaces diag(p) - ppᵀ by R(y) (Lemma 4, Props. 9 and 10).
    A sample with several labels (tokens) has one log-likelihood, the sum of theirs, which is squared once.
    """

    centred: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = True
    target: ClassVar[str] = "biased (given labels instead of the model's)"

    @override
    def passes(self, core: Core) -> int:
        del core
        return 1

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the score of the given labels: one pass."""
        del generator
        assert labels is not None  # the data loop has checked it
        yield core.score(labels)


@dataclass(frozen=True)
class SquaredBatchGradient(Empirical):
    """(Σ_x ∂ℓ/∂θ)²: the squared gradient of a whole batch, often called the empirical Fisher, which it is not.

    The samples of a batch do not cancel on average, since gradients of given labels are not centred: the number depends
    on the batch size, and at a minimum of the loss it tends to zero.  Other tools compute it: it is
    here so that a table can show the difference.  Do not use it as a Fisher information.
    """

    target: ClassVar[str] = "not a Fisher information (depends on the batch size)"
