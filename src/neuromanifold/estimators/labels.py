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
    """Squared scores ∂ log p(ŷ)/∂z of labels ŷ drawn from the model: unbiased.

    Scores of drawn labels are centred and independent over the samples, so one pass serves a whole batch (the paper
    counts one pass for each sample).  Variance of an entry, per batch: 2F² - 3 Σ F_x² + Σ E[s_x⁴]; its coefficient of
    variation has no bound (section 4.1, appendix A), because a rare label can have a large score. Cost: one backward
    pass for each drawn label of a batch.

    Args:
        samples: labels drawn for each output distribution.

    Example:
        >>> fim = nm.fisher_diagonal(model, data, nm.MonteCarlo(samples=2))
        >>> fim.provenance.passes  # four batches
        8
    """

    samples: int = 1

    centred: ClassVar[bool] = True
    target: ClassVar[str] = "unbiased"
    noise_factor: ClassVar[float] = 1.0  #: Var(g²) <= E[g⁴] for any distribution

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
    """The empirical Fisher Σ_x (∂ log p(y|x)/∂θ)² with the labels of the data, squared per sample.

    The cotangent is u = ∂ log p(y)/∂z = e_y - p.  Deterministic, and biased however much data there is: diag(p) - ppᵀ
    is replaced by R(y) = (e_y - p)(e_y - p)ᵀ (Lemma 4, Props. 9 and 10).  A sample with several labels (tokens) has one
    log-likelihood, the sum of theirs, which is squared once.  Cost: one backward pass for each batch; parameters
    without a per-sample rule take one for each sample.

    Example:
        >>> empirical = nm.fisher_diagonal(model, data, nm.Empirical())
        >>> exact = nm.fisher_diagonal(model, data, nm.Exact())
        >>> f"{empirical.compare(exact).relmae:.2f}"
        '0.17'
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
    """The squared loss gradient of whole batches, (Σ_x ∂ℓ/∂θ)²: not a Fisher estimate, though often used as one.

    Gradients of given labels are not centred, so the samples of a batch do not cancel on average: the number depends on
    the batch size, and tends to zero at a minimum of the loss.  Other tools compute it; it is here for comparison.  Do
    not use it as a Fisher information.  Cost: one backward pass for each batch.

    Example:
        >>> whole = [(inputs, labels)]  # the same samples as one batch
        >>> trace = lambda data: nm.fisher_trace(model, data, nm.SquaredBatchGradient()).value
        >>> f"{trace(data):.2f} {trace(whole):.2f}"
        '2.58 1.13'
    """

    target: ClassVar[str] = "not a Fisher information (depends on the batch size)"
