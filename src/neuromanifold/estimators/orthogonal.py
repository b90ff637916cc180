"""Probes that are orthogonal to each other in the factor's inner space, so that together they tend to the exact metric.

A probe is u = S ξ with S Sᵀ = M.  S has a null direction n (√p for a categorical core, none for a diagonal one), and
its leading singular pairs (√λ_i, w_i) may get passes of their own.  On the d dimensions that are left, with an isometry
B of R^d onto the complement of n and the w_i, and orthonormal h_1, ..., h_m in R^d,

    u_j = √(d/m) S B h_j,        E[h_j h_jᵀ] = I/d   =>   E[Σ_j u_j u_jᵀ] = S B Bᵀ Sᵀ = M - Σ_i λ_i v_i v_iᵀ,

and all d of them give that matrix without any error.  The h_j are columns of a random orthogonal matrix, of which two
are offered: `hartley_columns` (random signs, like Rademacher noise) and `haar_columns` (a uniformly random frame).  No
d×d matrix is ever made.

Axis letters: c class, k eigenpair, d dimension that is left, m probe, b pair of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import message
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.core.spectrum import Spectrum
from neuromanifold.core.sums import divide, square_root
from neuromanifold.estimators.base import random_signs
from neuromanifold.estimators.envelopes import Mixer
from neuromanifold.estimators.isometry import complement

ORDERS_OF_THEIR_OWN = 256
"""Up to so many dimensions each distribution has a random order of the axes to itself."""


def remaining_noise(values: Tensor, trace: Tensor, squared_norm: Tensor, d: int, m: int) -> Tensor:
    """Predict the noise of m passes if 0, 1, ... leading eigenvectors have passes of their own, [..., own].

    `values`: λ [..., k].  With R = Σ λ and Q = Σ λ² over those that share the other m' passes in d' dimensions,

        S² = (d' - m')/(m' (d' - 1)) (R² - Q),

    which is half the variance of an entry (`bounds.orthogonal_probe_variance`) on average over directions of J, where
    the axes are eigenvectors.  One pass at least is for the rest.
    """
    values = values[..., : min(values.shape[-1], d)].double()
    k = values.shape[-1]
    last = values[..., -1] if k else trace.double()
    rest = (trace.double() - values.sum(-1)).clamp(min=0).minimum((d - k) * last)  # R after all k
    squares = (squared_norm.double() - values.square().sum(-1)).clamp(min=0).minimum(last * rest)  # Q
    products = [(rest.square() - squares).clamp(min=0)]
    for i in reversed(range(k)):  # (R + λ)² - (Q + λ²) = R² - Q + 2Rλ: nothing cancels
        products.append(products[-1] + 2 * rest * values[..., i])
        rest = rest + values[..., i]
    own = torch.arange(min(k + 1, m), device=values.device)
    left = torch.stack(products[::-1], -1)[..., : len(own)]
    return left * (max(0, d - m) / ((m - own) * (d - own - 1).clamp(min=1)))


def least_noise(left: Tensor, d: int, m: Tensor) -> Tensor:
    """The least S² of `remaining_noise` for each number of passes m [j], [n, j].

    `left`: R² - Q without 0, 1, ... of the d columns, [n, k + 1].
    """
    m, own = m.to(left)[:, None], torch.arange(left.shape[-1], device=left.device)
    factors = (d - m).clamp(min=0) / ((m - own).clamp(min=1) * (d - own - 1).clamp(min=1))  # [j, k + 1]
    return (left[:, None] * factors).masked_fill_(own >= m, math.inf).amin(-1)


class Leading(NamedTuple):
    """The leading eigenpairs of every distribution, how many of them get passes of their own, and the noise then."""

    spectrum: Spectrum
    own: int
    variance: float  # Σ 2S² over distributions
    fisher: float  # Σ (tr M)² + 2‖M‖², that is F² on average over directions of J and in the same units

    @property
    def relative_variance(self) -> float:
        """Var/F² of the batch, in which the distributions count that have the largest F."""
        return self.variance / self.fisher if self.fisher > 0 else 0.0


def leading(core: Core, k: int, passes: int) -> Leading:
    """The k >= 1 leading eigenpairs, and how many of them get one of so many passes for themselves.

    That is decided for the whole batch, by the predicted noise, and kept on the core: computed once, read back from a
    GPU once.  What was found under torch.no_grad() is kept apart, since it cannot be differentiated.
    """
    kept: dict[tuple[int, int, bool], Leading] = core.__dict__.setdefault("_leading_eigenpairs", {})
    key = k, passes, torch.is_grad_enabled()
    if key not in kept:
        spectrum = core.spectrum(k)
        with torch.no_grad():
            trace, squared_norm = core.trace().double(), core.squared_norm().double()
            noise = remaining_noise(spectrum.values, trace, squared_norm, core.rank, passes)
            fisher = (trace.square() + 2 * squared_norm).sum()
        sums = torch.cat([noise.reshape(-1, noise.shape[-1]).sum(0), fisher[None]])
        *total, square = sums.nan_to_num(0.0).tolist()
        best = min(total)
        kept[key] = Leading(spectrum, total.index(best), 2 * best, square)
    return kept[key]


def own_passes(core: Core, k: int, passes: int) -> int:
    """How many of the k leading eigenvectors get one of so many passes for themselves: where it pays for the batch."""
    return leading(core, min(k, core.rank), passes).own if k else 0


def leading_columns(core: Core, k: int, passes: int) -> tuple[Tensor, Tensor]:
    """√λ_i v_i of the eigenvectors that have passes of their own, and of those that have signs of their own, [..., C].

    The latter only if a single pass is left for all the rest: with signs along eigenvectors it has the least noise.
    """
    empty = torch.zeros((*core.batch_shape, 0, core.dim), dtype=core.dtype, device=core.device)
    if not k:
        return empty, empty
    spectrum, own, *_ = leading(core, min(k, core.rank), passes)
    columns = spectrum.factor()
    return columns[..., :own, :], columns[..., own:, :] if passes - own == 1 else empty


def peeled(core: Core, k: int, passes: int, generator: torch.Generator, noise: str = "rademacher") -> Iterator[Tensor]:
    """Eigenvectors √λ_i v_i where that pays (`leading`), then √(d/m) S B h_j for all the rest; without random signs."""
    own, signed = leading_columns(core, k, passes)  # [..., k, C]
    yield from own.unbind(-2)
    m = passes - own.shape[-2]
    if m == 1 and noise == "rademacher":
        yield all_the_rest(core, own, signed, generator)
        return
    noise_dim, mix = remainder(core, own)
    for h in orthonormal_noise(core, noise_dim, m, noise, generator):
        yield mix(h) * math.sqrt(noise_dim / m)


def remainder(core: Core, scaled: Tensor) -> Mixer:
    """h [..., d] to S B h: the metric without its leading k eigenpairs, given as √λ_i v_i [..., k, C].

    The inner singular vectors are w_i = Sᵀ v_i/√λ_i.  M v = λ v makes them √λ_i v_i/√ζ, ζ the upper envelope: for
    M = diag(p) - ppᵀ because √p∘(v - pᵀv) = (M v)/√p, and for a diagonal M because v is a unit vector.  Nothing is
    subtracted, and 0/0 is 0: an impossible class has no part in an eigenvector.
    """
    if not isinstance(core, (Categorical, DiagonalCore)):
        advice = "The inner space of its factor is not known; use orthogonal=False."
        raise TypeError(message("core", "a nm.Categorical, nm.Bernoulli or nm.Gaussian", type(core).__name__, advice))
    roots = square_root(core.upper_envelope())[..., None, :]  # [..., 1, c]
    directions = divide(scaled, roots)  # [..., k, c]
    if isinstance(core, Categorical):
        directions = torch.cat([roots, directions], dim=-2)
    basis = complement(directions)
    return Mixer(core.dim - directions.shape[-2], lambda h: core.factor(basis(h)))


def all_the_rest(core: Core, own: Tensor, signed: Tensor, generator: torch.Generator) -> Tensor:
    """One probe for all but the eigenvectors with passes of their own: Σ ±√λ_i v_i, and random signs for what is left.

    So it has the noise of white noise along eigenvectors, but for the smallest ones.
    """
    probe = (random_signs(core, signed.shape[-2], generator)[..., None] * signed).sum(-2)
    noise_dim, mix = remainder(core, torch.cat([own, signed], dim=-2))
    return probe + mix(random_signs(core, noise_dim, generator)) if noise_dim else probe


def orthonormal_noise(
    core: Core, noise_dim: int, count: int, noise: str, generator: torch.Generator
) -> Iterator[Tensor]:
    """h_1, ..., h_count [..., d], orthonormal, for each distribution on its own; count <= d = noise_dim."""
    make = haar_columns if noise == "gaussian" else hartley_columns
    return make(core, noise_dim, count, generator)


def hartley_columns(core: Core, noise_dim: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Columns of Hartley's matrix in pairs, with random signs of the axes and the axes in a random order.  O(d) each.

    Without that order, derivatives along the axes i and i + d/2 would be a bad case.  In many dimensions, where sorting
    takes time and few orders are bad, one order serves the whole batch.  Whatever it is, estimates are unbiased given
    it, so those of different distributions stay uncorrelated.
    """
    own_order = noise_dim <= ORDERS_OF_THEIR_OWN
    shape = (*(core.batch_shape if own_order else ()), noise_dim)
    order = torch.rand(shape, generator=generator, dtype=torch.float64, device=core.device).argsort(-1)
    signs = random_signs(core, noise_dim, generator)
    chosen = columns_in_pairs(core, noise_dim, count, generator)
    return (hartley_column(signs, j, order) for j in chosen.unbind(-1))


def columns_in_pairs(core: Core, noise_dim: int, count: int, generator: torch.Generator) -> Tensor:
    """Which columns of Hartley's matrix are taken, [..., m]: each with probability m/d, without replacement.

    An entry of column j has the square (1 + sin(4πij/d))/d, and that of column d - j has the minus sign.  So the pair
    {j, d - j} is flat, like {0, d/2} if d is even and 0 alone if d is odd: a derivative along one axis has no noise.

        d even   d/2 pairs, taken one after the other in random order; if m is odd, one of the last pair at random
        d odd    the column 0 with probability m/d, then pairs as before

    For j > 0 and odd d that is (m/d)(m-1)/(d-1) + (1-m/d) m/(d-1) = m/d.  Each pass on its own has E[h hᵀ] = I/d, since
    of a pair either column comes first.
    """
    pairs, odd = noise_dim // 2, noise_dim % 2
    keys = torch.rand((*core.batch_shape, pairs), generator=generator, dtype=torch.float64, device=core.device)
    one = keys.topk(min((count + 1) // 2, pairs), dim=-1).indices + odd  # [..., b]
    other = torch.where(one == 0, pairs, noise_dim - one)
    pair = torch.stack([one, other], dim=-1)  # [..., b, 2]
    swap = torch.randint(0, 2, one.shape, generator=generator, device=core.device).bool()
    columns = torch.where(swap[..., None], pair.flip(-1), pair).flatten(-2)  # [..., 2b]
    if not odd:
        return columns[..., :count]
    draw = torch.randint(0, noise_dim, (*core.batch_shape, 1), generator=generator, device=core.device)
    first = (draw >= count).long()  # [..., 1]  from 0 the column 0 is in, from 1 it is not
    return torch.nn.functional.pad(columns, (1, 0)).gather(-1, first + torch.arange(count, device=core.device))


def hartley_column(signs: Tensor, j: Tensor, order: Tensor) -> Tensor:
    """Signs ε [..., d] times column j [...] of Hartley's matrix: ε_i cas(2πσ(i)j/d)/√d, cas = cos + sin.  O(d).

    The matrix is orthogonal for every d and every order σ [..., d], so the columns add to Σ_j h_j h_jᵀ = I.  A column
    drawn at random has E[h hᵀ] = I/d, over the columns alone.  σj is reduced modulo d as an integer, hence no digits
    are lost.
    """
    d = signs.shape[-1]
    angles = torch.arange(d, device=signs.device).double() * (2 * math.pi / d)
    table = ((angles.cos() + angles.sin()) / math.sqrt(d)).to(signs.dtype)  # [d]
    return signs * table[(j[..., None] * order) % d]


def haar_columns(core: Core, noise_dim: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The first columns of a uniformly random orthogonal matrix, apart from their signs: QR of Gaussian noise.  O(dm²).

    LAPACK chooses the signs by what it finds in the first rows, so the columns are *not* centred before they are given
    random signs.
    """
    shape = (*core.batch_shape, noise_dim, count)
    gaussian = torch.randn(shape, generator=generator, dtype=core.dtype, device=core.device)
    return iter(torch.linalg.qr(gaussian).Q.unbind(-1))
