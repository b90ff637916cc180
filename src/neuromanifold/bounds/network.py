"""Section 3 of the paper, one distribution x at a time: all that follows from K(x) = J Jᵀ [C, C] and p(y | x).

F(θ) = Σ_x Jᵀ M J with M = diag(p) - ppᵀ = Σ_i λ_i v_i v_iᵀ, and K has the squared singular values σ_1² <= ... <= σ_C²
of J = ∂z/∂θ as its eigenvalues.  Whatever the statements say of one x is a function of K and p:

    ‖Jᵀ E J‖_F² = tr (K E)²          ‖Jᵀ D J‖_σ = the largest |eigenvalue| of K^½ D K^½

Adding the same number to all logits changes nothing: M e = 0 and (e_y - p)ᵀe = 0.  So J may be replaced by ΠJ with
Π = I - eeᵀ/C wherever M, its eigenvectors or R(y) stand, and its C - 1 singular values on e's complement, called
*centred* here, give bounds that are never worse than the paper's, mostly better.

Letters: n distribution, c class, k rank.  Ranks stand in the last dimension: entry k - 1 is for rank k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.bounds.norms import spectral_norm
from neuromanifold.core import Categorical

_BLOCK = 2**22  # numbers that are worked on at a time
_HALVINGS = 60  # of intervals that hold an eigenvalue


class Terms(NamedTuple):
    """The terms of each distribution, in float64, whose sums are the two sides of the statements."""

    # Prop. 5 and Cor. 6: traces
    trace: Tensor  # [n]  tr F(x)
    upper_trace: Tensor  # [n]  Σ_y p_y ‖∂z_y/∂θ‖²
    lower_trace: Tensor  # [n, k]  tr F^LR(k)
    smallest: Tensor  # [n]  λ_C σ_1²
    paired: Tensor  # [n]  Σ_i λ_i σ²_(C+1-i)
    smallest_centred: Tensor  # [n]
    paired_centred: Tensor  # [n]
    # Prop. 7: F^DG - F = Jᵀppᵀ J
    upper_error: Tensor  # [n]  ‖Jᵀp‖², the error of one x
    upper_bound: Tensor  # [n]  ‖p‖² σ_C²
    # Prop. 8: F - F^LR(k)
    lower_error: Tensor  # [n, k]  the error of one x
    lower_bound: Tensor  # [n, k]  (Σ_i σ⁴_(i+k) p_(i)²)^½
    lower_relaxed: Tensor  # [n, k]  σ_C² (Σ_i p_(i)²)^½
    lower_centred: Tensor  # [n, k]  (Σ_i σ⁴_(i+k) λ_i²)^½, centred
    # Prop. 9: given labels; NaN without
    empirical_error: Tensor  # [n]  ‖Jᵀ(M - R(y))J‖_σ, the error of one x
    empirical_bound: Tensor  # [n]  (1 + ‖p‖²) σ_C²
    empirical_centred: Tensor  # [n]  max(1 + ‖p‖² - 2p_y, λ_C) σ_C², centred
    # Prop. 10: the worst label
    worst_error: Tensor  # [n]
    worst_bound: Tensor  # [n]  σ_1² (1 + ‖p‖² - λ_C - 2p_(1))
    worst_centred: Tensor  # [n]

    @classmethod
    def cat(cls, parts: list[Terms]) -> Terms:
        """Return the terms of several batches as one."""
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def network_terms(K: Tensor, core: Categorical, labels: Tensor | None) -> Terms:
    """Return all terms for Gram matrices K [n, C, C] and the core at the logits [n, C], in float64."""
    p = core.probs
    spectrum = core.spectrum(core.dim - 1)
    values, scaled = spectrum.values, spectrum.factor()  # descending: values[:, i] is the paper's λ_(C-i)
    inside = scaled @ K @ scaled.mT  # [n, C-1, C-1]  ⟨√λ_i Jᵀv_i, √λ_j Jᵀv_j⟩
    traces = inside.diagonal(dim1=-2, dim2=-1)
    total = traces.sum(-1)
    # as pᵀKp, what the trace of the upper bound adds; so the order of Prop. 5 survives rounding
    gap = (p[:, None] @ K @ p[..., None])[:, 0, 0].clamp(min=0)
    sigma2 = _eigenvalues(K)  # ascending
    centred2 = _eigenvalues(_centred(K))[:, 1:]  # ascending, C - 1 of them
    norm2, largest, smallest_p = p.square().sum(-1), values[:, 0], p.amin(-1)
    adverse = (1 + norm2 - largest - 2 * smallest_p).clamp(min=0)
    ascending = p.sort(-1).values
    label_errors = _label_errors(K, core)
    given = _given_label(p, labels, label_errors, largest, centred2[:, -1])
    return Terms(
        trace=total,
        upper_trace=total + gap,
        lower_trace=traces.cumsum(-1),
        smallest=largest * sigma2[:, 0],
        paired=(values * sigma2[:, :-1]).sum(-1),
        smallest_centred=largest * centred2[:, 0],
        paired_centred=(values * centred2).sum(-1),
        upper_error=gap,
        upper_bound=norm2 * sigma2[:, -1],
        lower_error=_tails(inside.square()).sqrt(),
        lower_bound=_paired_tails(sigma2[:, 1:], ascending[:, 1:-1]),
        lower_relaxed=_tail_norms(ascending[:, 1:-1]) * sigma2[:, -1:],
        lower_centred=_paired_tails(centred2, values.flip(-1)[:, :-1]),
        empirical_error=given.error,
        empirical_bound=given.bound * sigma2[:, -1],
        empirical_centred=given.centred,
        worst_error=label_errors.amax(-1),
        worst_bound=adverse * sigma2[:, 0],
        worst_centred=adverse * centred2[:, 0],
    )


def pair_products(gram: Tensor, core: Categorical) -> tuple[Tensor, Tensor]:
    """Inner products between distributions x, from the Gram matrix [n·C, n·C] of all ∂z_c(x)/∂θ.

    For Prop. 7 those of w_x = Jᵀp, [n, n], since F^DG - F = Σ w wᵀ has their non-zero eigenvalues.  For Prop. 8
    ⟨A_x, A_x'⟩_F with A_x = Jᵀ E J and E the eigenpairs below the k-th, [k, n, n]: their sum is ‖F - F^LR(k)‖_F².
    """
    p, scaled, n = core.probs, core.spectrum(core.dim - 1).factor(), core.probs.shape[0]
    whole = gram.view(n, core.dim, n, core.dim)
    along = torch.einsum("nc,ncmd->nmd", p, whole)
    upper = torch.einsum("nmd,md->nm", along, p)
    left = torch.einsum("nic,ncmd->nimd", scaled, whole)
    squares = torch.einsum("nimd,mjd->nmij", left, scaled).square()
    return upper, _tails(squares).permute(2, 0, 1)


def empirical_spectral_error(gram: Tensor, core: Categorical, labels: Tensor, generator: torch.Generator) -> float:
    """‖Σ_x Jᵀ(M - R(y))J‖_σ (Prop. 9) from the Gram matrix [n·C, n·C] of all ∂z_c(x)/∂θ."""
    difference = core.fisher() - core.empirical_fisher(labels)  # [n, C, C]

    def apply(u: Tensor) -> Tensor:
        """Σ Jᵀ D J on Jᵀu, again as coefficients of Jᵀ."""
        return (difference @ (gram @ u).view(len(difference), -1, 1)).flatten()

    start = torch.randn(len(gram), generator=generator, dtype=torch.float64).to(gram.device)
    return spectral_norm(apply, start, metric=lambda u: gram @ u).value


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Return the eigenvalues of positive semidefinite matrices, ascending and >= 0."""
    found: Tensor = torch.linalg.eigvalsh(matrices)
    return found.clamp(min=0)


def _centred(K: Tensor) -> Tensor:
    """ΠKΠ, whose smallest eigenvalue is the zero of e."""
    K = K - K.mean(-1, keepdim=True)
    return K - K.mean(-2, keepdim=True)


def _tails(squares: Tensor) -> Tensor:
    """Σ_(i, j >= k) of squares [..., C-1, C-1], for k = 1, ..., C-1: [..., C-1], the last one 0."""
    summed = squares.flip(-1).cumsum(-1).flip(-1).flip(-2).cumsum(-2).flip(-2).diagonal(dim1=-2, dim2=-1)
    return torch.cat([summed[..., 1:], torch.zeros_like(summed[..., :1])], -1).clamp(min=0)


def _tail_norms(ascending: Tensor) -> Tensor:
    """(Σ_(i=2)^(C-k) p_(i)²)^½ for k = 1, ..., C-1 from p_(2), ..., p_(C-1)."""
    sums = ascending.square().cumsum(-1).flip(-1)
    return torch.cat([sums, ascending.new_zeros(len(ascending), 1)], -1).sqrt()


def _paired_tails(sigma2: Tensor, weights: Tensor) -> Tensor:
    """(Σ_(i=2)^(C-k) σ⁴_(i+k) w_i²)^½ for k = 1, ..., C-1, from σ²_2, ..., σ²_C and w_2, ..., w_(C-1) ascending."""
    most = weights.shape[-1]  # C - 2, for k = 1
    found = [  # C - k - 1 terms: the largest σ's, with the smallest w's
        (sigma2[:, sigma2.shape[-1] - count :] * weights[:, :count]).square().sum(-1).sqrt()
        for count in range(most, -1, -1)
    ]
    return torch.stack(found, -1)


class _GivenLabel(NamedTuple):
    """Prop. 9 at the labels of the data, [n] each."""

    error: Tensor  # ‖Jᵀ(M - R(y))J‖_σ
    bound: Tensor  # over σ²: the paper's 1 + ‖p‖²
    centred: Tensor  # from its proof max(‖e_y - p‖², λ_C), times σ²


def _given_label(p: Tensor, labels: Tensor | None, errors: Tensor, largest: Tensor, top2: Tensor) -> _GivenLabel:
    norm2 = p.square().sum(-1)
    if labels is None:
        return _GivenLabel(*[torch.full_like(norm2, torch.nan)] * 3)
    likely, error = (values.gather(-1, labels[:, None])[:, 0] for values in (p, errors))
    return _GivenLabel(error, 1 + norm2, torch.maximum(1 + norm2 - 2 * likely, largest) * top2)


def _label_errors(K: Tensor, core: Categorical) -> Tensor:
    """Return ‖Jᵀ(M - R(y))J‖_σ of each distribution for all labels, [n, y].

    One decomposition K^½ M K^½ = Q diag(a) Qᵀ serves them all: with w = QᵀK^½(e_y - p), the eigenvalues of
    diag(a) - wwᵀ solve Σ_i w_i²/(a_i - λ) = 1.  The left side grows between poles, so intervals are halved that hold
    the only one below zero, and the largest one, which lies between the two largest a_i.
    """
    step = max(1, _BLOCK // core.dim**2)
    if len(K) > step:
        parts = zip(torch.split(K, step), torch.split(core.logits, step), strict=True)
        return torch.cat([_label_errors(part, Categorical(logits)) for part, logits in parts])
    values, vectors = torch.linalg.eigh(K)
    root = vectors * values.clamp(min=0).sqrt()[:, None]  # R Rᵀ = K
    a, Q = torch.linalg.eigh(root.mT @ core.fisher() @ root)  # ascending
    rotated = root @ Q
    squares = (rotated - core.probs[:, None] @ rotated).square()  # [n, y, i]
    a = a.clamp(min=0)[:, None]
    zeros = torch.zeros_like(squares[..., 0])
    low = torch.stack([-squares.sum(-1), a[..., -2] + zeros])  # [2, n, y]: of the lowest eigenvalue, of the largest
    high = torch.stack([zeros, a[..., -1] + zeros])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = (squares / (a - middle[..., None])).sum(-1) > 1
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return ((low + high) / 2).abs().amax(0)
