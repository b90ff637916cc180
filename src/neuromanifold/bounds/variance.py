"""The variance of a random estimate of the diagonal, exactly: Theorem 11, its propositions, and their neighbours.

A probe mixes the columns of a factor S of the core with white noise ξ.  Let a = SᵀJ [n, r, p] be the derivatives along
these columns, J = ∂z/∂θ [n, c, p].  Then F = Σ_x F_x with F_x = Σ_r a², entry by entry, and

    granularity   estimate of F        variance, Rademacher ξ        variance, Gaussian ξ
    "batch"       (Σ_x Σ_r a ξ)²       2F² - 2 Σ_x Σ_r a⁴            2F²
    "sample"      Σ_x (Σ_r a ξ)²       Σ_x (2F_x² - 2 Σ_r a⁴)        Σ_x 2F_x²

divided by the number of independent probes whose mean is taken; `orthogonal_variance` is for those that are orthogonal
to each other.  The first row is Theorem 11; every other statement of the paper is a choice of the columns:

    hutchinson_variance   S with S Sᵀ = M         the full core, Theorem 11
    upper_variance        diag(√ζ)                the diagonal core, last appendix
    lower_variance        √λ_i v_i, i = 1..k      the low-rank core, last appendix (there for k = 1)
    deflated_variance     √λ_i v_i, (I - VVᵀ) S   not in the paper
    orthogonal_variance   √λ_i v_i; S B           not in the paper: columns in passes of their own, or shared by probes
    adaptive_variance     u_k, k > m; the rest    not in the paper: other u_k have rows; probes are left out at times
    monte_carlo_variance  no columns: the labels are what is random

This is the noise of the probe on given data; other data would give another F, which is a different error.  All results
are float64 [P]: fourth powers of small derivatives leave the range of float32.  The work is that of J itself, O(NCP),
so these functions are for small problems, for understanding and for tests; a run estimates its own standard errors.

Axis letters: n sample, c class, r column of a factor, k eigenpair, p parameter.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import float_tensor, integer_in_range, message, number_of_passes, one_of
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.core.sums import divide, square_root, sum_of_others
from neuromanifold.estimators.choices import Choices
from neuromanifold.estimators.orthogonal import leading_columns, remainder

Noise = Literal["rademacher", "gaussian"]
Granularity = Literal["batch", "sample"]

CV_BOUND: Final = math.sqrt(2)
"""The coefficient of variation Std/F of a Hutchinson estimate is at most √2, whatever network, data and entry.

It follows from Theorem 11 for the full core, and from the propositions of the last appendix for both envelopes.  It
holds for Rademacher and Gaussian noise, per batch and per sample.  A Monte Carlo estimate has no such bound.
"""


def probe_variance(
    columns: Tensor, noise: Noise = "rademacher", granularity: Granularity = "batch", probes: int = 1
) -> Tensor:
    """The variance [P] of each entry, given the derivatives a [N, r, P] along the columns of any factor.  O(NrP).

    The table at the head of this module.  A sample that has several output distributions (tokens) has the columns of
    all of them.  2F² - 2 Σ a⁴ is summed as 2 Σ a²·(sum of the other a²), which is never negative and does not cancel.
    """
    a = checked_columns(columns, noise, granularity)
    number_of_passes(probes, "probes")
    squares = a.square().permute(2, 0, 1)  # [p, n, r]
    if granularity == "batch":
        squares = squares.reshape(a.shape[2], 1, a.shape[0] * a.shape[1])  # one sample with all columns
    if noise == "gaussian":
        return 2 * squares.sum(-1).square().sum(-1) / probes
    return 2 * _sum_of_products(squares).sum(-1) / probes


def hutchinson_variance(
    core: Core, jacobian: Tensor, noise: Noise = "rademacher", granularity: Granularity = "batch", probes: int = 1
) -> Tensor:
    """Theorem 11: 2F² - 2 Σ_x Σ_y p_y² (∂ℓ_xy/∂θ)⁴ for Rademacher noise, 2F² for Gaussian noise, [P].

    Column y of Jᵀ S is √p_y ∂ℓ_y, with ∂ℓ_y = ∂z_y - Σ_c p_c ∂z_c.  For a core with a diagonal metric it is √ζ_y ∂z_y,
    which is the proposition on the diagonal core with ζ = p(1-p) (multi-label) or 1/variance (regression).

    `core` is a batch of N distributions, `jacobian` [N, C, P] has the derivatives ∂z_y/∂θ of their outputs.
    """
    J = _checked(core, jacobian)
    return probe_variance(_full_columns(core, J), noise, granularity, probes)


def upper_variance(
    core: Core, jacobian: Tensor, noise: Noise = "rademacher", granularity: Granularity = "batch", probes: int = 1
) -> Tensor:
    """The proposition on the diagonal core: 2(F^DG)² - 2 Σ_x Σ_y ζ_y² (∂z_y/∂θ)⁴, around F^DG and not F, [P].

    ζ is the upper envelope: p for a categorical core, and the metric itself where that is diagonal.
    """
    J = _checked(core, jacobian)
    columns = square_root(core.upper_envelope().double())[..., None] * J
    return probe_variance(columns, noise, granularity, probes)


def lower_variance(
    core: Core,
    jacobian: Tensor,
    rank: int = 1,
    noise: Noise = "rademacher",
    granularity: Granularity = "batch",
    probes: int = 1,
) -> Tensor:
    """The proposition on the low-rank core: 2(F^LR)² - 2 Σ_x Σ_i λ_i² (v_iᵀ ∂z/∂θ)⁴, around F^LR(k) and not F, [P].

    The paper states it for rank 1; its proof holds for every rank.  At rank 1 a per-sample estimate has no variance.
    """
    J = _checked(core, jacobian)
    integer_in_range(rank, "rank", 1, core.dim, f"the dimension is {core.dim}")
    return probe_variance(_leading_columns(core, J, rank)[0], noise, granularity, probes)


def deflated_variance(
    core: Core,
    jacobian: Tensor,
    deflate: int = 1,
    noise: Noise = "rademacher",
    granularity: Granularity = "batch",
    probes: int = 1,
) -> Tensor:
    """The deflated probe V√Λ ξ₁ + (I - VVᵀ) S ξ₂, which is unbiased for F: the same formula for its k + C columns, [P].

    Not in the paper.  With two classes and k = 1 a single column is left, so that a per-sample estimate is exact.
    `deflate=0` is Theorem 11; from C - 1 on nothing is left to deflate.
    """
    J = _checked(core, jacobian)
    integer_in_range(deflate, "deflate", 0, 10**9, "how many leading eigenpairs")
    if not deflate:
        return probe_variance(_full_columns(core, J), noise, granularity, probes)
    leading, rest = _leading_columns(core, J, min(deflate, core.dim))
    return probe_variance(torch.cat([leading, _full_columns(core, rest)], dim=1), noise, granularity, probes)


def orthogonal_variance(
    core: Core,
    jacobian: Tensor,
    probes: int,
    deflate: int = 0,
    noise: Noise = "rademacher",
    granularity: Granularity = "batch",
) -> Tensor:
    """`Hutchinson(probes, deflate=k, noise=noise)` with orthogonal probes, unbiased for F, [P].  Not in the paper.

    Leading eigenvectors in passes of their own have no variance per-sample; the other m passes have that of
    `orthogonal_probe_variance` in the d dimensions that are left, and a single one that of `probe_variance` for
    further eigenvectors and axes of what is left.  How many of the k eigenvectors have their own is
    decided as in `Hutchinson`, for all N distributions together: they are one batch.  From the rank on every column has
    its pass: per-sample nothing is left.  A single probe is the one of `deflated_variance`.
    """
    J = _checked(core, jacobian)
    number_of_passes(probes, "probes")
    integer_in_range(deflate, "deflate", 0, 10**9, "how many leading eigenpairs")
    if probes == 1:
        return deflated_variance(core, jacobian, deflate, noise, granularity)
    if probes >= core.rank:
        columns = torch.stack([core.column(i) for i in range(core.rank)])  # [r, n, c]
        return orthogonal_probe_variance(_derivatives_along(columns, J), core.rank, noise, granularity)
    own, signed = leading_columns(core, deflate, probes)  # [n, k, c]
    k, m = own.shape[1], probes - own.shape[1]
    single = m == 1 and noise == "rademacher"
    d, mix = remainder(core, torch.cat([own, signed], dim=1) if single else own)
    axes = torch.eye(d, dtype=core.dtype, device=core.device)[:, None, :].expand(d, len(J), d)
    rest = _derivatives_along(mix(axes), J) if d else J.new_zeros(len(J), 0, J.shape[-1])
    if single:
        columns = torch.cat([_derivatives_along(signed.transpose(0, 1), J), rest], dim=1)
        variance = probe_variance(columns, noise, granularity)
    else:
        variance = orthogonal_probe_variance(rest, m, noise, granularity)
    return variance + orthogonal_probe_variance(
        _derivatives_along(own.transpose(0, 1), J), max(1, k), noise, granularity
    )


def adaptive_variance(core: Core, jacobian: Tensor, keep: Tensor, own: Tensor) -> Tensor:
    """The first m [N] columns (`own`) have rows; probes of the rest are kept with probabilities π [N] (`keep`), [P].

    Columns u_k with Σ u_k u_kᵀ = M are those of `estimators/choices.py`.  Nothing is random in their rows; a probe has
    the weight 1/π.  With Var that of a probe, and F_x' what it estimates,

        Σ_x [Var/π + (1/π - 1) F_x'²],        F_x' = F_x - Σ_{k<=m} (u_kᵀ ∂z/∂θ)²,

    by E[X²]/π - F_x'² = (Var + F_x'²)/π - F_x'² for an estimate X of F_x'.  The probe has random signs of the columns
    that are left and of all other classes; for m = 0 it is that of `deflated_variance` with one eigenpair.  Not in the
    paper.

    So if each is kept independently of the others.  `Adaptive` keeps a given number of them, which takes out most of
    the noise that similar samples have in common.
    """
    J, n, choices = _checked(core, jacobian), core.batch_shape[0], Choices.of(core)
    if choices is None:
        raise TypeError(message("core", "a nm.Categorical, nm.Bernoulli or nm.Gaussian", type(core).__name__))
    pi, m, k = torch.as_tensor(keep).double().to(J.device), torch.as_tensor(own).to(J.device), choices.count
    for value, argument in ((pi, "keep"), (m, "own")):
        if value.shape != (n,):
            raise ValueError(message(argument, f"of shape [{n}]: one for each sample", f"shape {list(value.shape)}"))
    if m.is_floating_point() or not bool(((m >= 0) & (m <= k)).all()):
        raise ValueError(message("own", f"whole numbers between 0 and {k}, the number of columns", f"{m.tolist()}"))
    first, others = _leading_columns(core, J, 1)
    default = torch.cat([first, _full_columns(core, others)], 1).square()  # [n, 1 + c, p]
    left = torch.arange(k, device=J.device) >= m[:, None]
    along = _derivatives_along(choices.columns().transpose(0, 1), J) * left[..., None]
    axes = torch.eye(core.dim, dtype=core.dtype, device=core.device)[:, None, :].expand(-1, n, -1)
    other = torch.cat([along, _derivatives_along(choices.mix(axes), J)], 1).square()  # [n, k + c, p]
    any_own = m[:, None] > 0
    noise = 2 * torch.where(any_own, _sum_of_products(other.mT), _sum_of_products(default.mT))  # Var [n, p]
    F = torch.where(any_own, other.sum(1), default.sum(1))  # F' [n, p]
    nothing = F.amax(-1) <= 1e-20 * _full_columns(core, J).square().sum(1).amax(-1) if F.numel() else pi > 0
    if not bool(((pi <= 1) & ((pi > 0) | ((pi == 0) & nothing))).all()):
        expected = "probabilities above 0 (0 only where nothing is left), at most 1: otherwise the estimate is biased"
        raise ValueError(message("keep", expected, f"{float(pi.amin()):g} to {float(pi.amax()):g}"))
    return divide(noise + (1 - pi[:, None]) * F.square(), pi[:, None]).sum(0)


def orthogonal_probe_variance(
    columns: Tensor, probes: int, noise: Noise = "rademacher", granularity: Granularity = "batch"
) -> Tensor:
    """The variance [P] of m orthogonal probes √(d/m) A h_j, given the derivatives a [N, d, P] along the columns of A.

    Per sample it is the sum over x of the following, with q = a², F = Σ q, κ = Σ q², f = F² - κ:

        Gaussian     (2F²/m) (d-m)/(d+2)                                 the h_j a uniformly random frame
        Rademacher   (2f/m) (d-m)/(d-1) + (η/2m²)(κ - 3f/(d-1))          h_j(i) = ±cas(2πσ(i)j/d)/√d, columns in pairs

    The first term of the latter is Theorem 11's 2F² - 2κ for m independent probes, times (d-m)/(d-1).  The second is
    due to a column without a partner: η is 0 for even m and even d, 1 - gcd(4, d)/d for odd m and even d; for odd d it
    is the probability that there is such a column, m/d for even m and 1 - m/d for odd m.

    Proof.  Let b_j = (h_jᵀa)²; all of them add to F, whatever the signs, so that only the draw of columns counts.  With
    B and D the sum and the difference of the b of a pair, n = ⌊d/2⌋ pairs, and weights w = 1, 0, or 1/2 for the pair of
    a single column, (m/d)² Var = Σ(w - w̄)²/(n-1) Σ E[(B - B̄)²] + P(single)/(4n) Σ E[D²], and for odd d the variance of
    (d b_0 - F)/(d-1) times whether column 0 is in.  The sums over pairs are trigonometric, and on average over the
    orders σ of the axes they depend on f and κ alone.  O(NdP).

    Per batch the cross terms 2 Σ_{x≠y} E[g_x²] E[g_y²] of each pass are added, with E[g_x²] = F_x/m.  From m = d on, a
    pass is a column: then E[g_x²] = a².
    """
    a = checked_columns(columns, noise, granularity)
    m, d = number_of_passes(probes, "probes"), a.shape[1]
    squares = a.square().permute(2, 0, 1)  # [p, n, d]
    if m >= d:
        variance, of_passes = squares.new_zeros(a.shape[2]), squares.mT  # [p], [p, d, n]
    else:
        variance = _variance_of_orthogonal_probes(squares, m, noise).sum(-1)
        of_passes = (squares.sum(-1) / m)[:, None, :].expand(-1, m, -1)  # [p, m, n]
    if granularity == "batch":
        variance = variance + 2 * _sum_of_products(of_passes).sum(-1)
    return variance


def monte_carlo_variance(core: Core, jacobian: Tensor, granularity: Granularity = "batch", samples: int = 1) -> Tensor:
    """The variance [P] of the estimate from `samples` labels drawn for each x, which is unbiased.

    With the score s = ∂ log p(y)/∂θ of a drawn label and Var(s²) = E[s⁴] - F_x²,

        "batch"    2F² - 2 Σ_x F_x² + Σ_x Var(s²),
        "sample"   Σ_x Var(s²).

    The first two terms are the products between samples, bounded as in Theorem 11; Var(s²)/F_x² has no bound.  Not in
    the paper, whose section 4.1 draws the data instead: it is the lemma of appendix A, carried to the parameters.
    """
    J = _checked(core, jacobian)
    one_of(granularity, "granularity", "batch", "sample")
    number_of_passes(samples, "samples")
    columns = _full_columns(core, J)
    squares = columns.square()
    variance = _variance_of_squared_score(core, J, columns).sum(0)  # [p]
    if granularity == "batch":
        variance = variance + 2 * _sum_of_products(squares.sum(1).mT)
    return variance / samples


def minibatch_variance_bound(fisher: Tensor, probes: int = 1) -> Tensor:
    """The remark on minibatches: Var <= 2 Σ_j (F^(j))² for the diagonals F^(j) of J batches, [J, P] to [P].

    It is at most 2F², and 2F²/J if the batches contribute equally.  So J batches are worth (Σ F^(j))²/Σ (F^(j))² equal
    ones, entry by entry: a single one if a single batch touches the parameter.
    """
    diagonals = float_tensor(fisher, "fisher").double()
    if diagonals.ndim != 2:
        raise ValueError(message("fisher", "of shape [J, P]: batch, parameter", f"shape {list(diagonals.shape)}"))
    if bool((diagonals < 0).any()):
        raise ValueError(message("fisher", "a diagonal of the metric, which is >= 0", "a negative entry"))
    number_of_passes(probes, "probes")
    return 2 * diagonals.square().sum(0) / probes


def cantelli(alpha: float, cv: float = CV_BOUND) -> float:
    """Section 4.1: P(X >= αμ) <= 1/(1 + ((α-1)/cv)²) for any X >= 0 with mean μ > 0 and Std(X) <= cv·μ, α > 1."""
    if not alpha > 1:
        raise ValueError(message("alpha", "above 1 (it is a multiple of the mean)", repr(alpha)))
    if not 0 <= cv < math.inf:
        raise ValueError(message("cv", "a coefficient of variation, finite and >= 0", repr(cv)))
    return 1 / (1 + ((alpha - 1) / cv) ** 2) if cv else 0.0


def _full_columns(core: Core, J: Tensor) -> Tensor:
    """Return the derivatives SᵀJ along the columns of the factor S, [n, c, p]."""
    return core.factor_transpose(J.permute(2, 0, 1)).permute(1, 2, 0)


def _leading_columns(core: Core, J: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(√Λ VᵀJ [n, k, p], J - V VᵀJ [n, c, p]) with the k leading eigenvectors V."""
    values, vectors = core.spectrum(k)  # [n, k], [n, k, c]
    along = torch.einsum("nkc,ncp->nkp", vectors.double(), J)
    rest = J - torch.einsum("nkc,nkp->ncp", vectors.double(), along)
    return square_root(values.double())[..., None] * along, rest


def _derivatives_along(vectors: Tensor, J: Tensor) -> Tensor:
    """Return the derivatives [n, r, p] of the outputs along vectors [r, n, c]."""
    return torch.einsum("rnc,ncp->nrp", vectors.double(), J)


def _variance_of_orthogonal_probes(squares: Tensor, m: int, noise: Noise) -> Tensor:
    """The variance of each sample's estimate from m < d probes, from a² [p, n, d]: [p, n].  Nothing cancels."""
    d = squares.shape[-1]
    if noise == "gaussian":
        return 2 * squares.sum(-1).square() * ((d - m) / (m * (d + 2)))
    eta = _without_a_partner(m, d)
    products = _sum_of_products(squares) * ((4 * m * (d - m) - 3 * eta) / (2 * m * m * (d - 1)))
    return products + squares.square().sum(-1) * (eta / (2 * m * m))


def _without_a_partner(m: int, d: int) -> float:
    """Return η of `orthogonal_probe_variance`: the weight of a column without a partner."""
    if d % 2:
        return 1 - m / d if m % 2 else m / d
    return 1 - math.gcd(4, d) / d if m % 2 else 0.0


def _variance_of_squared_score(core: Core, J: Tensor, columns: Tensor) -> Tensor:
    """E[s⁴] - F_x² for s = ∂ log p(y)/∂θ, [n, p]."""
    squares = columns.square()
    if isinstance(core, Categorical):
        p = core.probs.double()[..., None]  # [n, c, 1]
        score = divide(columns, square_root(p))  # ∂ℓ_y; a class that cannot occur has none
        return (p * (score.square() - squares.sum(1, keepdim=True)).square()).sum(1)
    if isinstance(core, DiagonalCore):  # s is a sum of independent terms (∂ log p(y_c)/∂z_c) ∂z_c
        of_outputs = core.score_variance().variance.diagonal(dim1=-2, dim2=-1).double()  # [n, c]
        return 2 * _sum_of_products(squares.mT) + (of_outputs[..., None] * J.square().square()).sum(1)
    raise TypeError(message("core", "a nm.Categorical, nm.Bernoulli or nm.Gaussian", type(core).__name__))


def _sum_of_products(x: Tensor) -> Tensor:
    """Σ_{i≠j} x_i x_j = (Σ x)² - Σ x² over the last dimension, for x >= 0 and without cancellation."""
    return (x * sum_of_others(x)).sum(-1) if x.shape[-1] else x.sum(-1)


def _checked(core: object, jacobian: object) -> Tensor:
    """The Jacobian in float64, if it is one of this core's outputs."""
    if not isinstance(core, Core):
        raise TypeError(message("core", "a core such as nm.Categorical(logits)", type(core).__name__))
    if len(core.batch_shape) != 1:
        expected = "a batch of shape [N], one distribution for each sample"
        raise ValueError(message("core", expected, f"batch shape {list(core.batch_shape)}"))
    J = float_tensor(jacobian, "jacobian")
    if J.ndim != 3 or J.shape[:2] != (*core.batch_shape, core.dim):
        expected = f"of shape [{core.batch_shape[0]}, {core.dim}, P]: sample, output, parameter"
        raise ValueError(message("jacobian", expected, f"shape {list(J.shape)}"))
    return J.double()


def checked_columns(columns: object, noise: object, granularity: object) -> Tensor:
    """Derivatives along columns in float64, if noise and granularity are what they should be as well."""
    a = float_tensor(columns, "columns")
    if a.ndim != 3:
        expected = "of shape [N, r, P]: sample, column of the factor, parameter"
        raise ValueError(message("columns", expected, f"shape {list(a.shape)}"))
    one_of(noise, "noise", "rademacher", "gaussian")
    one_of(granularity, "granularity", "batch", "sample")
    return a.double()
