"""The two envelopes of the core's metric M, and a factor of M or of one of them (Lemma 2, Prop. 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.core.sums import square_root

BLOCK = 2**22  # numbers in a block of columns: 16 MiB in float32


class Mixer(NamedTuple):
    """A map from noise to a cotangent; all that does not depend on the noise is computed once."""

    noise_dim: int  # how many random numbers it takes
    mix: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Upper:
    """The upper envelope diag(ζ) ⪰ M: diag(p) for a categorical core (Lemma 2).

    Pass it as `envelope=`.  For independent outputs it is the metric itself.

    Example:
        >>> fim = nm.fisher_diagonal(model, data, nm.Hutchinson(envelope=nm.Upper()))  # 𝔽^DG
        >>> fim.provenance.target
        'unbiased for the envelope Upper(), biased for F'
    """

    def size(self, core: Core) -> int:
        """The number of columns: one for each output."""
        return core.dim

    def columns(self, core: Core) -> Iterator[Tensor]:
        """Yield √ζ_y e_y for each output y, [..., C]."""
        roots = square_root(core.upper_envelope())
        for y in range(core.dim):
            column = roots.new_zeros(roots.shape)
            column[..., y] = roots[..., y]
            yield column

    def mixer(self, core: Core) -> Mixer:
        """Return the map from ξ [..., C] to √ζ∘ξ."""
        roots = square_root(core.upper_envelope())
        return Mixer(core.dim, lambda xi: roots * xi)


@dataclass(frozen=True)
class Lower:
    """The lower envelope of rank k: M's leading eigenpairs Σ_{i<=k} λ_i v_i v_iᵀ ⪯ M (Lemma 2).

    Pass it as `envelope=`.  The eigenpairs come from the secular equation in O(kC) for each distribution.

    Args:
        rank: k; at most C - 1 have a part in M.

    Example:
        >>> fim = nm.fisher_diagonal(model, data, nm.Hutchinson(envelope=nm.Lower(1)))  # 𝔽^LR
        >>> fim.provenance.target
        'unbiased for the envelope Lower(rank=1), biased for F'
    """

    rank: int = 1

    def __post_init__(self) -> None:
        integer_in_range(self.rank, "rank", 1, 10**9, "at least one eigenpair")

    def size(self, core: Core) -> int:
        """The rank, or all of M where that is less."""
        return min(self.rank, core.rank)

    def columns(self, core: Core) -> Iterator[Tensor]:
        """Return √λ_i v_i for each of the leading eigenpairs, [..., C]."""
        return iter(core.spectrum(self.size(core)).factor().unbind(-2))

    def mixer(self, core: Core) -> Mixer:
        """Return the map from ξ [..., k] to Σ_i √λ_i v_i ξ_i."""
        scaled = core.spectrum(self.size(core)).factor()
        return Mixer(scaled.shape[-2], lambda xi: (xi[..., None] * scaled).sum(-2))


Envelope = Upper | Lower


def factor_columns(core: Core, envelope: Envelope | None) -> Iterator[Tensor]:
    """Yield the columns [..., C] of a factor of M (None) or of an envelope; those of M are computed in blocks."""
    if envelope is not None:
        yield from envelope.columns(core)
        return
    step = max(1, BLOCK // max(1, core.batch_shape.numel() * core.dim))
    for start in range(0, core.rank, step):
        yield from core.columns(start, min(start + step, core.rank)).unbind()


def factor_mixer(core: Core, envelope: Envelope | None) -> Mixer:
    """Return the map from noise ξ to S ξ with S Sᵀ = M (None), or equal to an envelope."""
    return Mixer(core.dim, core.factor) if envelope is None else envelope.mixer(core)


def check_envelope(envelope: object) -> None:
    """Raise unless this is None or an envelope: the `envelope` argument of estimators and operators."""
    if envelope is not None and not isinstance(envelope, Envelope):
        advice = "Mind the parentheses." if isinstance(envelope, type) else ""
        raise TypeError(message("envelope", "None, nm.Upper() or nm.Lower(rank)", repr(envelope), advice))
