"""Hutchinson's estimate 𝔽: random combinations of the factor's columns.  Section 4 of the paper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.core.sums import square_root
from neuromanifold.estimators.base import Estimator
from neuromanifold.estimators.parts import Full, Mixer, Part, check_part

Noise = Literal["rademacher", "gaussian"]


@dataclass(frozen=True)
class Hutchinson(Estimator):
    """u = S ξ with white noise ξ: E[u uᵀ] = S Sᵀ, so the squared gradient is unbiased, in one pass for each probe.

    Variance of an entry, for one probe and a batch squared as a whole (Theorem 11; Props. of appendix E for the other
    cores): 2F² with Gaussian noise, 2F² - 2 Σ a⁴ with Rademacher noise, a the columns' derivatives.  So the coefficient
    of variation is at most √2 for a batch, √(2/J) for J even batches.

    * `core`: Full() is the paper's 𝔽, Upper() its 𝔽^DG, Lower(k) its 𝔽^LR(k); the last two are unbiased for their
      envelope, hence biased for F.
    * `deflate=k` adds nothing to the cost and keeps 𝔽 unbiased: u = V√Λ ξ₁ + (I - VVᵀ) S ξ₂ with the k leading
      eigenpairs, which has the small variance of 𝔽^LR(k) on confident models.  At C = 2, k = 1 only a sign is random.
    * The paper's 𝔽^sqrt (appendix B), the gradient of 2 Σ √p ξ, is this very u: there is nothing to choose.
    """

    probes: int = 1
    noise: Noise = "rademacher"
    core: Part = field(default_factory=Full)
    deflate: int = 0

    centred: ClassVar[bool] = True
    noise_factor: ClassVar[float] = 2 / 3  # E[g⁴] = 3F² - 2κ and Var(g²) = 2F² - 2κ <= (2/3) E[g⁴], κ >= 0

    def __post_init__(self) -> None:
        check_part(self.core)
        integer_in_range(self.probes, "probes", 1, 10**9, "one backward pass each")
        integer_in_range(self.deflate, "deflate", 0, 10**9, "how many leading eigenpairs")
        if self.noise not in ("rademacher", "gaussian"):
            raise ValueError(message("noise", "'rademacher' or 'gaussian'", repr(self.noise)))
        if self.deflate and not isinstance(self.core, Full):
            advice = "An envelope has no remainder to deflate; leave out one of the two."
            raise ValueError(message("deflate", "0 unless core=Full()", f"{self.deflate} with {self.core}", advice))

    @property
    def target(self) -> str:  # type: ignore[override]
        """Unbiased for F, or for the envelope that was asked for."""
        return "unbiased" if isinstance(self.core, Full) else f"unbiased for the envelope {self.core}, biased for F"

    def passes(self, core: Core) -> int:
        """One for each probe."""
        del core
        return self.probes

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """S ξ/√probes, with fresh noise for each probe."""
        del labels
        noise_dim, mix = self._deflated(core) if self.deflate else self.core.mixer(core)
        for _ in range(self.probes):
            yield mix(self._noise(core, noise_dim, generator)) / math.sqrt(self.probes)

    def _deflated(self, core: Core) -> Mixer:
        """(ξ₁, ξ₂) to V√Λ ξ₁ + (I - VVᵀ) S ξ₂."""
        values, vectors = core.spectrum(min(self.deflate, core.rank))  # [..., k], [..., k, C]
        roots, k = square_root(values), values.shape[-1]

        def mix(xi: Tensor) -> Tensor:
            rest = core.factor(xi[..., k:])
            along = roots * xi[..., :k] - (vectors * rest[..., None, :]).sum(-1)
            return rest + (along[..., None] * vectors).sum(-2)

        return Mixer(k + core.dim, mix)

    def _noise(self, core: Core, size: int, generator: torch.Generator) -> Tensor:
        shape = (*core.batch_shape, size)
        if self.noise == "gaussian":
            return torch.randn(shape, generator=generator, dtype=core.dtype, device=core.device)
        bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=core.device)
        return (2 * bits - 1).to(core.dtype)
