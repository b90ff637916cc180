"""Hutchinson's estimate 𝔽: random combinations of the factor's columns.  Section 4 of the paper."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import integer_in_range, message, number_of_passes, one_of
from neuromanifold.core.sums import square_root
from neuromanifold.estimators.base import Estimator, random_signs
from neuromanifold.estimators.envelopes import (
    Envelope,
    Mixer,
    check_envelope,
    factor_columns,
    factor_mixer,
)
from neuromanifold.estimators.orthogonal import leading, orthonormal_noise, own_passes, peeled
from neuromanifold.kernels import dispatch
from neuromanifold.kernels.values import Probe

Noise = Literal["rademacher", "gaussian"]


@dataclass(frozen=True)
class Hutchinson(Estimator):
    """Squared gradients of probes u = S ξ with white noise ξ: unbiased, since E[u uᵀ] = S Sᵀ = M.

    Variance of an entry, for one probe and squares per batch (Theorem 11; Props. 13 and 14 for the other cores): 2F²
    with Gaussian noise, 2F² - 2 Σ a⁴ with Rademacher noise, a the columns' derivatives.  So the coefficient of
    variation is at most √2 for a batch, √(2/J) for J batches that contribute equally.  Squares per sample have less:
    see `fisher_diagonal`. Cost: one backward pass for each probe of a batch.

    * `Hutchinson()` is deflated by the leading eigenpair; `Hutchinson(deflate=0)` is the paper's 𝔽.  The paper's 𝔽^sqrt
      (appendix B), the gradient of 2 Σ √p ξ, is this very u: there is nothing to choose.
    * Deflation adds nothing to the cost and keeps 𝔽 unbiased: u = V√Λ ξ₁ + (I - VVᵀ) S ξ₂ with the k leading
      eigenpairs, which has the small variance of 𝔽^LR(k) on confident models.  At C = 2, k = 1 only a sign is random.
      With two or more orthogonal probes, leading eigenvectors have passes of their own, without noise, and the others
      share what is left. How many of them (at most k, at most m - 1) is decided for the batch by the predicted noise:
      for near-uniform predictions none is worth a pass.  Where a single pass is left, further eigenvectors have signs
      of their own in it.
    * Orthogonal probes make `probes` one dial from a single pass to the exact metric.  With squares per sample, the
      variance is ∝ (1/m) (d - m)/(d - 1) with m probes in d dimensions (d = C - 1 for C classes), instead of 1/m; from
      the rank r on there is none: r passes with the factor's columns are made, and no more.  Random signs come in pairs
      of probes that have no noise for an entry that depends on a single inner axis; a probe without a partner (m or d
      odd) adds at most F²/2m² for such an entry.  `bounds.orthogonal_variance` is the exact variance.
    * Independent probes have 1/m of the variance of one.  Where whole batches are squared (`granularity="batch"`) they
      are drawn in any case: cross terms between samples are most of the noise there, and are divided by the number of
      passes that a sample's F_x is spread over.

    Args:
        probes: m, the number of backward passes for each batch.
        deflate: k, the number of leading eigenpairs that are treated apart; 1 unless given, 0 with an envelope.
        noise: "rademacher" (random signs) or "gaussian".
        envelope: None for F; `nm.Upper()` is the paper's 𝔽^DG and `nm.Lower(k)` its 𝔽^LR(k): unbiased for their
            envelope, hence biased for F.
        orthogonal: make two or more probes of a distribution orthogonal to each other.

    Raises:
        TypeError, ValueError: an argument is out of range, or two of them exclude each other.

    Example:
        >>> fim = nm.fisher_diagonal(model, data, nm.Hutchinson())  # the default
        >>> fim.relative_error > 0
        True
        >>> exact = nm.fisher_diagonal(model, data, nm.Hutchinson(probes=2))  # three classes: as many as the rank
        >>> exact.relative_error
        0.0
    """

    probes: int = 1
    deflate: int | None = None  #: once made, always a number
    noise: Noise = "rademacher"
    envelope: Envelope | None = None
    orthogonal: bool = True

    centred: ClassVar[bool] = True
    noise_factor: ClassVar[float] = 2 / 3  #: E[g⁴] = 3F² - 2κ and Var(g²) = 2F² - 2κ <= (2/3) E[g⁴], κ >= 0

    def __post_init__(self) -> None:
        if self.envelope is not None:
            check_envelope(self.envelope)
        if self.deflate is None:
            object.__setattr__(self, "deflate", 1 if self.envelope is None else 0)
        number_of_passes(self.probes, "probes")
        integer_in_range(self.deflate, "deflate", 0, 10**9, "how many leading eigenpairs")
        one_of(self.noise, "noise", "rademacher", "gaussian")
        if self.deflate and self.envelope is not None:
            advice = "An envelope has no remainder to deflate; leave out one of the two."
            raise ValueError(message("deflate", "0 for an envelope", f"{self.deflate} with {self.envelope}", advice))
        if not isinstance(self.orthogonal, bool):
            raise TypeError(message("orthogonal", "True or False", repr(self.orthogonal)))

    @property
    def target(self) -> str:  # type: ignore[override]
        """Unbiased for F, or for the envelope that was asked for."""
        return "unbiased" if self.envelope is None else f"unbiased for the envelope {self.envelope}, biased for F"

    def passes(self, core: Core) -> int:
        """One for each probe; orthogonal ones are exact once there are as many as the factor has columns."""
        return min(self.probes, self._columns(core)) if self._depend else self.probes

    def cotangents(self, core: Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield S ξ/√probes with fresh noise for each probe, or orthogonal probes."""
        del labels
        fused = self.fused(core, generator)
        if fused is not None:
            yield from (probe.cotangent for probe in fused)
            return
        if self._depend:
            for cotangent in self._orthogonal(core, generator):
                yield cotangent * random_signs(core, 1, generator)
            return
        noise_dim, mix = self._deflated(core) if self.deflate else factor_mixer(core, self.envelope)
        for _ in range(self.probes):
            cotangent = mix(self._noise(core, noise_dim, generator))
            yield cotangent / math.sqrt(self.probes) if self.probes > 1 else cotangent

    def fused(self, core: Core, generator: torch.Generator, valid: Tensor | None = None) -> Iterator[Probe] | None:
        """Return the same probes from one kernel each: for classes, independent ones with random signs.

        With at most one eigenpair deflated, and of no envelope.
        """
        if type(core) is not Categorical or type(self).cotangents is not Hutchinson.cotangents:
            return None  # a likelihood or an estimator of the user's own
        pairs = self._eigenpairs
        if self.noise != "rademacher" or self._depend or pairs > 1 or self.envelope is not None:
            return None
        return dispatch.hutchinson_probes(core.given, self.probes, generator, valid, deflate=pairs == 1)

    def pass_noise(self, core: Core, alone: bool) -> list[float]:
        """2/3 for each pass, and less where a square belongs to a single distribution and probes are orthogonal.

        Let q_i = a_i² be the squared derivatives along the d inner axes, F = Σ q, κ = Σ q², f = F² - κ <= (d-1)κ.  For
        Hartley's columns the variance of m passes (`bounds.orthogonal_probe_variance`) and their fourth powers are

            Var = (2/m) (d-m)/(d-1) f + (η/2m²)(κ - 3f/(d-1)),              0 <= η <= 1,
            E[Σ g⁴] = (1/m) (3f + κ + e(κ - 3f/(d-1))),                     0 <= e <= 1/2, and η = e = 0 if m = 1.

        So Var <= (2/3) (d-m)/(d-1) E[Σ g⁴]: both sides are linear in f, and m(d-m) >= d-1 shows it for f = 0 and for
        f = (d-1)κ.  For a uniformly random frame Var = 2F² (d-m)/(m(d+2)) and E[Σ g⁴] = 3d F²/(m(d+2)), whose ratio is
        (2/3)(1 - m/d), exactly.  Of a column, or a single inner dimension with a random sign, the square is not random
        at all.

        Neither is that of an eigenvector with a pass of its own.  But the noise is then in the other passes alone, and
        by chance their squares may be next to nothing for a sample that contributes most of F, which would look like
        an exact value.  So Var/F², as predicted for the batch, is taken of eigenvectors' fourth powers too: error bars
        are somewhat too large on average, and hold for single entries.

        Otherwise cross terms between distributions come in.  Every pass has a random sign of its own for each of them,
        so cross terms of different passes are uncorrelated, and those of one pass have the variance 2 Σ_{x≠y} E[g_x²]
        E[g_y²], which is 2/3 of what they add to E[g⁴].
        """
        if not self._depend:
            return [0.0 if alone and self._only_a_sign(core) else self.noise_factor] * self.probes
        passes = self.passes(core)
        if not alone:
            return [self.noise_factor] * passes
        if self.probes >= self._columns(core):
            return [0.0] * passes
        own = own_passes(core, self._eigenpairs, passes)
        m, d = passes - own, self._columns(core) - own
        left = (d - m) / (d - 1 if self.noise == "rademacher" else d)
        relative = leading(core, min(self._eigenpairs, core.rank), passes).relative_variance if own else 0.0
        return [relative] * own + [self.noise_factor * left] * m

    def noise_shares(self, core: Core) -> tuple[Tensor, Tensor] | None:
        """Return Σ (tr M)² - ‖M‖² and Σ (tr M)² for independent probes along eigenvectors.

        With signs along eigenvectors and a row of J that has no preferred direction, q_i = λ_i times a squared normal
        number: Var(g²) = 2 E[(Σq)² - Σq²] = 2((tr M)² - ‖M‖²), and E[g⁴] = E[3(Σq)² - 2Σq²] = 3(tr M)².  Where one
        eigenvalue dominates, as for confident predictions, next to nothing of the bound (2/3) E[g⁴] is noise.

        Orthogonal ones, with passes of their own for eigenvectors (`pass_noise`): 2S², and what their fourth powers
        3λ² add to the bound, which for a single pass of the rest is 2(tr M - Σλ)².
        """
        if not self._eigenpairs or self.noise != "rademacher":
            return None
        if self._depend:
            if self.probes >= self._columns(core):
                return None
            first = leading(core, min(self._eigenpairs, core.rank), self.probes)
            values = first.spectrum.values[..., : first.own].double()
            noise = torch.tensor(first.variance, dtype=torch.float64, device=values.device)
            last = (
                2 * (core.trace().double() - values.sum(-1)).square().sum() if self.probes - first.own == 1 else noise
            )
            return noise, last + 3 * first.relative_variance * values.square().sum()
        squares = core.trace().double().square()
        return (squares - core.squared_norm().double()).sum(), squares.sum()

    @property
    def independent_passes(self) -> bool:
        """Whether the probes of a batch are drawn independently: not if they are orthogonal."""
        return not self._depend

    def for_batches(self) -> Hutchinson:
        """The same with independent probes: the more of them, the smaller are cross terms between samples."""
        return replace(self, orthogonal=False)

    @functools.cached_property
    def _eigenpairs(self) -> int:
        """`deflate` as the number that it is once the estimator is made."""
        return self.deflate or 0

    @functools.cached_property
    def _depend(self) -> bool:
        """Whether the probes of a distribution depend on each other, as orthogonal ones do."""
        return self.orthogonal and self.probes > 1

    def _columns(self, core: Core) -> int:
        """How many columns a factor of M, or of the envelope, needs."""
        return core.rank if self.envelope is None else self.envelope.size(core)

    def _only_a_sign(self, core: Core) -> bool:
        """Whether one independent probe is ± a fixed vector.  (Several eigenvectors in one pass have cross terms.)"""
        one_column = self._eigenpairs > 0 or core.dim == 1 or self.envelope is not None
        return self.noise == "rademacher" and self._columns(core) == 1 and one_column

    def _orthogonal(self, core: Core, generator: torch.Generator) -> Iterator[Tensor]:
        """The columns, or some eigenvectors √λ_i v_i and then √(d/m) S B h_j; each still without its random sign."""
        if self.probes >= self._columns(core):
            yield from factor_columns(core, self.envelope)
            return
        if self.envelope is None:
            yield from peeled(core, self._eigenpairs, self.probes, generator, self.noise)
            return
        noise_dim, mix = factor_mixer(core, self.envelope)
        for h in orthonormal_noise(core, noise_dim, self.probes, self.noise, generator):
            yield mix(h) * math.sqrt(noise_dim / self.probes)

    def _deflated(self, core: Core) -> Mixer:
        """Return the map from (ξ₁, ξ₂) to V√Λ ξ₁ + (I - VVᵀ) S ξ₂."""
        k = min(self._eigenpairs, core.rank)
        pairs = functools.cache(lambda: core.spectrum(k))

        def by_torch(xi: Tensor) -> Tensor:
            values, vectors = pairs()  # [..., k], [..., k, C]
            rest = core.factor(xi[..., k:])
            along = square_root(values) * xi[..., :k] - (vectors * rest[..., None, :]).sum(-1)
            return rest + (along[..., None] * vectors).sum(-2)

        def mix(xi: Tensor) -> Tensor:
            done = dispatch.deflated_probe(core.given, xi) if k == 1 and type(core) is Categorical else None
            if done is None:
                return by_torch(xi)
            if done.left_out is None:
                return done.cotangent
            return torch.where(done.left_out[..., None], by_torch(xi), done.cotangent)

        return Mixer(k + core.dim, mix)

    def _noise(self, core: Core, size: int, generator: torch.Generator) -> Tensor:
        if self.noise == "rademacher":
            return random_signs(core, size, generator)
        shape = (*core.batch_shape, size)
        return torch.randn(shape, generator=generator, dtype=core.dtype, device=core.device)
