"""An estimator is a choice of cotangents on the logits, nothing else.

F(θ) = Σ_x Jᵀ M(x) J with J = ∂z/∂θ.  An estimator yields, for each output distribution, one or several vectors u with

    Σ_passes E[u uᵀ] = M        (or a stated approximation of M),

one for each backward pass, which turns it into Jᵀu (`persample/backward.py`); accumulators square and add.  So no
estimator knows of a network, of `detach()` or of a log-softmax in the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.kernels.values import Probe


class NoiseFactors(NamedTuple):
    """c with Var(g²) <= c E[g⁴] for g a gradient of one pass, of a whole batch, a sample or a token; 0: not random."""

    batch: float = 0.0
    sample: float = 0.0
    token: float = 0.0


class Estimator(ABC):
    """Base class of all estimators: how cotangents u with E[u uᵀ] = M are made from a core.

    Estimators are values: frozen dataclasses, equal if their settings are.  Pass one as `estimator=`; its `target` says
    whether it is exact, unbiased or biased for F.

    Example:
        >>> nm.Hutchinson() == nm.Hutchinson(probes=1)
        True
        >>> [estimator.target for estimator in (nm.Exact(), nm.Hutchinson(), nm.Empirical())]
        ['exact', 'unbiased', "biased (given labels instead of the model's)"]
    """

    centred: ClassVar[bool]
    """E[u] = 0 and independent over distributions: then gradients may be summed over a batch before squaring."""

    needs_labels: ClassVar[bool] = False
    """Whether the data's labels are used."""

    target: ClassVar[str]
    """What the expectation of the estimate is, for tables and messages: "exact", "unbiased", "biased (why)"."""

    noise_factor: ClassVar[float] = 0.0
    """c such that c·E[g⁴] is (at least) the variance of the square g² of one pass: 0 where nothing is random."""

    window: int = 1
    """How many batches are taken together, as adaptive passes do."""

    @abstractmethod
    def passes(self, core: Core) -> int:
        """How many backward passes a batch takes."""

    @abstractmethod
    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """One cotangent [..., C] for each pass, scaled so that the sum of the passes' squares is the estimate."""

    def fused(self, core: Core, generator: torch.Generator, valid: Tensor | None = None) -> Iterator[Probe] | None:
        """Return cotangents made by one kernel each, in the outputs' precision, or None without such a kernel.

        The kernel also says which outputs were finite.  `valid` [...]: outputs where it is False are not read, and
        their cotangents are zero.
        """
        del core, generator, valid
        return None

    def pass_noise(self, core: Core, alone: bool) -> list[float]:
        """For each pass, c such that the estimate's variance is at most Σ_passes c E[g⁴].

        `alone`: each square belongs to a single output distribution.
        """
        del alone
        return [self.noise_factor] * self.passes(core)

    def noise_shares(self, core: Core) -> tuple[Tensor, Tensor] | None:
        """Return Σ Var(g²) and Σ c E[g⁴] over distributions, up to a factor, on average over directions of J.

        Their ratio says how much of the bound c E[g⁴], which holds for any direction, is noise.  None: all of it.
        """
        del core
        return None

    @property
    def independent_passes(self) -> bool:
        """Whether the passes of a batch are independent copies of each other."""
        return self.noise_factor > 0

    def for_batches(self) -> Estimator:
        """What to use where whole batches are squared: the same, unless something else has less noise there."""
        return self


def random_signs(core: Core, size: int, generator: torch.Generator) -> Tensor:
    """Draw ±1 with even odds for each distribution, [..., size]."""
    return _signs((*core.batch_shape, size), generator, core.dtype, core.device)


def signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw ±1 with even odds, of a tensor's dtype and on its device."""
    return _signs(shape, generator, like.dtype, like.device)


def _signs(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=device)
    return bits.to(dtype).mul_(2).sub_(1)
