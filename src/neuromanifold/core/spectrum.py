"""Top eigenpairs of diag(p) - p pᵀ by the secular equation.

The matrix is diagonal plus rank one, so no matrix is ever iterated on.  Sort p in descending order: eigenvalue number j
lies between its two *poles*, p_(j) >= λ >= p_(j+1) (Cauchy's interlacing), where it is the only root of

    g(λ) = Σ_i p_i / (p_i - λ) = 0,                 with eigenvector  x_i = p_i / (p_i - λ).

This is the textbook equation Σ p_i²/(p_i - λ) = 1 with Σ p_i = 1 subtracted from both sides.  Without the constant 1
nothing cancels near a one-hot p, and g = 0 says at once that x is orthogonal to e, the kernel.  Three precautions make
every eigenvalue accurate *relatively*, and the eigenvectors orthogonal without any orthogonalisation:

* λ is kept as (nearer pole) + offset, so that p_i - λ = (p_i - pole) - offset never cancels;
* differences are taken first and then divided by p_(j+1), so that nothing overflows or underflows on the way;
* p_(j) = p_(j+1) is an eigenvalue as it stands, with an eigenvector inside the tied block, and λ = 0 if p_(j+1) = 0.

The flow, for a block of samples and eigenvalues at once:

    block = p with its largest entries sorted   the poles
    roots = find_roots(block)                   λ = pole + offset, about five evaluations of g in O(C) each
    x = _eigenvectors(block, roots)             normalised; ties and zeros in closed form

Axis letters: n sample, k eigenpair, c class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.sums import average_derivatives_over_ties, is_differentiated, square_root

# How many elements of [n, k, c] are worked on at once: on a CPU what its cache holds, on a GPU what keeps it busy.
_BLOCK_ELEMENTS = {"cpu": 2**17, "cuda": 2**26}
_MAX_STEPS = 40  # convergence is quadratic: four or five steps are usual, seven the most that was ever seen
_STEPS_ON_A_GPU = 8  # which is not asked whether they were enough: the host would wait for it


class Spectrum(NamedTuple):
    """Eigenpairs of M in descending order: values [..., k], and orthonormal vectors [..., k, C] as rows.

    It unpacks as (values, vectors).

    Example:
        >>> values, vectors = nm.Categorical(torch.tensor([2.0, 0.0, -1.0])).spectrum(2)
        >>> values.shape, vectors.shape
        (torch.Size([2]), torch.Size([2, 3]))
    """

    values: Tensor  #: [..., k]
    vectors: Tensor  #: [..., k, C], orthonormal rows

    def factor(self) -> Tensor:
        """√λ_i v_i as rows, [..., k, C]: their outer products add up to `dense()`."""
        return square_root(self.values)[..., None] * self.vectors

    def matvec(self, v: Tensor) -> Tensor:
        """The product Σ_i λ_i v_i (v_iᵀ v) with a vector v [..., C].  O(kC)."""
        with torch.autocast(v.device.type, enabled=False):
            along = (self.vectors @ v[..., None]) * self.values[..., None]  # [..., k, 1]
            return (self.vectors.mT @ along)[..., 0]

    def dense(self) -> Tensor:
        """The matrix Σ_i λ_i v_i v_iᵀ of shape [..., C, C]."""
        with torch.autocast(self.values.device.type, enabled=False):
            return self.vectors.mT @ (self.values[..., None] * self.vectors)


class Roots(NamedTuple):
    """Eigenvalues λ = pole + unit·offset.  `regular` is False where λ = p_(j+1) exactly (a tie, or a zero)."""

    pole: Tensor  # [n, k]  the probability next to λ
    offset: Tensor  # [n, k]  in units of
    unit: Tensor  # [n, k]  p_(j+1), or 1 where not regular
    regular: Tensor  # [n, k]

    def values(self) -> Tensor:
        """The eigenvalues λ = pole + unit·offset, [n, k]."""
        return self.pole + self.unit * self.offset

    def distances(self, p: Tensor) -> Tensor:
        """(p_i - λ)/unit for p [n, c], as [n, k, c]; nothing cancels."""
        return (p[:, None, :] - self.pole[..., None]) / self.unit[..., None] - self.offset[..., None]


class Block(NamedTuple):
    """Some eigenvalues of some samples, with what encloses them."""

    p: Tensor  # [n, c]
    top: Tensor  # [n, ≥ stop+1]  largest entries of p, descending
    classes: Tensor  # same shape: where they stand in p
    start: int  # eigenvalues number start, ..., stop-1
    stop: int

    @property
    def high(self) -> Tensor:
        """The pole above each eigenvalue, p_(j)."""
        return self.top[:, self.start : self.stop]  # [n, k]

    @property
    def low(self) -> Tensor:
        """The pole below each eigenvalue, p_(j+1)."""
        return self.top[:, self.start + 1 : self.stop + 1]  # [n, k]


def eigenpairs(p: Tensor, k: int) -> Spectrum:
    """The k largest eigenpairs for probabilities p [n, c], 1 <= k <= c - 1.  O(kC) per sample."""
    if p.shape[-1] == 2:
        return Spectrum(_value_of_two_classes(p), _vector_of_two_classes(p))
    values, vectors = [], []
    for block in blocks(p, k):
        roots = find_roots(block)
        values.append(roots.values().flatten())
        vectors.append(_eigenvectors(block, roots).flatten(0, 1))
    return Spectrum(torch.cat(values).view(-1, k), torch.cat(vectors).view(-1, k, p.shape[-1]))


def eigenvalues(p: Tensor, k: int) -> Tensor:
    """The k largest eigenvalues alone, [n, k].  O(kC) per sample."""
    if p.shape[-1] == 2:
        return _value_of_two_classes(p)
    return torch.cat([find_roots(block).values().flatten() for block in blocks(p, k)]).view(-1, k)


def _value_of_two_classes(p: Tensor) -> Tensor:
    """The root 2 p_1 p_2/(p_1 + p_2) of g: [n, 1]."""
    p = torch.where(p < torch.finfo(p.dtype).tiny, 0.0, p)
    value: Tensor = 2 * p[:, :1] * (p[:, 1:] / p.sum(-1, keepdim=True))
    return value


def _vector_of_two_classes(p: Tensor) -> Tensor:
    """(1, -1)/√2, positive at the more likely class: [n, 1, 2]."""
    sign = torch.where(p[:, :1] >= p[:, 1:], 1.0, -1.0).to(p.dtype)
    return torch.stack([sign, -sign], dim=-1) * math.sqrt(0.5)


def blocks(p: Tensor, k: int) -> Iterator[Block]:
    """Cut [n, k, c] into blocks of bounded size: whole samples, or parts of one sample where that is too large."""
    p = torch.where(p < torch.finfo(p.dtype).tiny, 0.0, p)  # subnormal numbers have no relative accuracy left
    if is_differentiated(p):
        p = average_derivatives_over_ties(p)
    top, classes = p.detach().topk(k + 1, dim=-1)
    room = max(1, _BLOCK_ELEMENTS.get(p.device.type, 2**22) // p.shape[-1])
    samples, columns = max(1, room // k), min(k, room)
    for n in range(0, max(1, p.shape[0]), samples):
        some = slice(n, n + samples)
        for start in range(0, k, columns):
            yield Block(p[some], top[some], classes[some], start, min(start + columns, k))


def find_roots(block: Block) -> Roots:
    """The roots of g, differentiable in p.

    Where a derivative is asked for, autograd records two steps of Newton.  They do not move the root, but they have
    its derivatives: those of first order are right after one step, those of second order after two.  (m tied entries
    make m - 1 eigenvalues, which move with the mean of the tie; only their sum has a derivative if m > 2.)
    """
    pole, offset, unit, regular = _solve(block)
    roots = Roots(block.p.gather(1, pole), offset, unit, regular)
    for _ in range(2 if is_differentiated(block.p) else 0):
        distances = torch.where(regular[..., None], roots.distances(block.p), 1.0)
        terms = block.p[:, None, :] / unit[..., None] / distances
        step = terms.sum(-1) / (terms / distances).sum(-1)
        roots = roots._replace(offset=roots.offset - torch.where(regular, step, 0.0))
    return roots


@torch.no_grad()
def _solve(block: Block) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the root of g between each pair of poles: (class of the nearer pole, offset, unit, regular), [n, k] each.

    With x = λ - low and y = high - λ, split g = H - L into the terms with poles above and below λ, and model both by
    their nearest pole and a constant that match value and slope (Li 1993 calls it the middle way):

        L ≈ a + s/x,    H ≈ b + t/y,    s = -x² L'(x),   t = -y² H'(y).

    Written in W = gap·x/y, the root of the model is the positive one of (t/gap²) W² + (c + t/gap - s/gap) W - s = 0
    with c = b - a.  So no step ever leaves the interval, W gives both x and y to full relative accuracy, and neither L
    nor H contains a difference that could cancel.  Convergence is quadratic, from the middle of the interval.
    """
    regular = (block.high > block.low) & (block.low > 0)
    low = torch.where(regular, block.low, 1.0)  # the unit of every length below
    high = torch.where(regular, block.high, 2.0)  # 1 and 2 stand in where there is nothing to solve
    gap = (high - low) / low
    upper = block.top[:, None, : block.stop]
    weight = (upper / low[..., None]).tril(block.start)  # [n, k, <= stop]  the poles from `high` up
    beyond = ((upper - high[..., None]) / low[..., None]).tril(block.start)  # how far they lie beyond `high`
    p = block.p.detach()[:, None, :]
    beneath = (low[..., None] - p).div_(low[..., None])  # [n, k, c]  how far the others lie beneath `low`
    beneath.masked_fill_(beneath < 0, torch.inf)
    one, tolerance = torch.ones_like(low)[..., None], math.sqrt(8 * torch.finfo(p.dtype).eps)

    W = gap
    waits = _may_wait(p)
    for _ in range(_MAX_STEPS if waits else _STEPS_ON_A_GPU):
        v = 1 + W / gap
        x, y = W / v, gap / v
        ratio = torch.addcmul(one, beneath, (1 / x)[..., None])  # (λ - p_i)/x
        terms = p / ratio
        xL, s = terms.sum(-1) / low, terms.div_(ratio).sum(-1) / low
        ratio = y[..., None] / (beyond + y[..., None])
        terms = weight * ratio
        yH, t = terms.sum(-1), terms.mul_(ratio).sum(-1)

        t_gap = t / gap
        linear = (yH - t) / y - (xL - s) / x + t_gap - s / gap
        root = linear.abs() + torch.sqrt(linear.square() + (4 / gap) * s * t_gap)
        previous, W = W, torch.where(linear > 0, 2 * s / root, root / (2 * t_gap) * gap)
        if waits and not bool((((W - previous).abs() > tolerance * W) & regular).any()):
            break

    v = 1 + W / gap
    near_low = (gap >= W) | ~regular
    high_class = block.classes[:, block.start : block.stop]
    low_class = block.classes[:, block.start + 1 : block.stop + 1]
    offset = torch.where(near_low, W / v, -gap / v)
    return torch.where(near_low, low_class, high_class), torch.where(regular, offset, 0.0), low, regular


def _may_wait(tensor: Tensor) -> bool:
    """Whether reading a value back costs nothing: not on a GPU, whose queue would run empty."""
    return not tensor.is_cuda


def _eigenvectors(block: Block, roots: Roots) -> Tensor:
    """x_i = p_i/(p_i - λ), normalised; in closed form where λ is a tie or a zero."""
    distances = torch.where(roots.regular[..., None], roots.distances(block.p), 1.0)
    x = block.p[:, None, :] / roots.unit[..., None] / distances
    vectors: Tensor = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if _may_wait(vectors) and bool(roots.regular.all()):
        return vectors
    tied = (block.high == block.low)[..., None]
    zero = ((block.low == 0) & (block.high > 0))[..., None]
    return torch.where(tied, _tied_vectors(block), torch.where(zero, _zero_vectors(block), vectors))


def _tied_vectors(block: Block) -> Tensor:
    """For λ = p_(j) = p_(j+1): (1, ..., 1, -m, 0, ...)/√(m(m+1)) on the sorted tied block, m members before j+1.

    They sum to zero on the block, hence F x = λ x, and are orthogonal to each other (Helmert) and to every vector that
    is constant on the block, as all others are.
    """
    columns = torch.arange(block.stop + 1, device=block.p.device)
    last = columns[block.start + 1 :, None]  # [k, 1]  where p_(j+1) stands
    before = (block.top[:, None, : block.stop + 1] == block.low[..., None]) & (columns < last)
    members = before.sum(-1, keepdim=True).to(block.p.dtype)  # [n, k, 1]
    length = (members * (members + 1)).sqrt().clamp(min=1.0)
    entries = torch.where(columns == last, -members, before.to(length.dtype)) / length
    index = block.classes[:, None, : block.stop + 1].expand_as(entries)
    return block.p.new_zeros(entries.shape[:2] + block.p.shape[-1:]).scatter(-1, index, entries)


def _zero_vectors(block: Block) -> Tensor:
    """For λ = p_(j+1) = 0 < p_(j): constant on the classes with p = 0 and on the others, and orthogonal to e."""
    zeros = block.p == 0
    count = zeros.sum(-1, keepdim=True).to(block.p.dtype).clamp(min=1.0)  # [n, 1]
    others = block.p.shape[-1] - count
    vector = torch.where(zeros, -others / count, torch.ones_like(count)) / (others + others**2 / count).sqrt()
    return vector[:, None, :]
