"""One Hutchinson probe of the lower envelope Σ_{j<=k} λ_j v_j v_jᵀ, in one kernel that reads logits and writes u.

u = Σ_j √λ_j v_j ξ_j with the k leading eigenpairs of diag(p) - ppᵀ and random signs ξ_j.  A program has one row, whole
and in float64, and goes through its eigenpairs in descending order (cf. `core.spectrum`):

    the pole below, p_(j+1)      the largest logit that is left; the pole above, p_(j), is the one before it
    a tie, p_(j) = p_(j+1) = λ   an eigenvector inside the tie, (1, ..., 1, -m, 0, ...) over its m + 1 classes so far
    otherwise                    λ between the poles by the secular equation, and v_i ∝ p_i/(p_i - λ)
    an impossible class          λ = 0, nothing to add

Lengths are in units of the pole below: λ = p_(j+1) (1 + x), and for every class D_i = p_i/p_(j+1) - 1, which is found
from the difference of two logits.  So ties are what is tied in the logits, nothing is ever subtracted from 1, and all
is accurate relatively, also for p = 1 - 1e-30.  At the root 0 < x, and y >= x/C for the distance y to the pole above
(compare the largest terms of the two sums below), so D_i - x keeps its digits.

The equation is Σ_i r_i/(D_i - x) = 0 with r_i = D_i + 1, solved by the step in `probing`.  It converges quadratically:
of a million eigenvalues of random problems, 3 <= C <= 4096, none took more than five steps from the middle of the
interval, or was left with a relative error of w above 1e-10.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.probing import buffers, positive_root, random_words, row_mask, sign
from neuromanifold.kernels.values import Probe

MOST_STEPS = tl.constexpr(20)
TOLERANCE = tl.constexpr(1e-5)  # for the relative change of w in a step; the error that is left is about its square
IMPOSSIBLE = tl.constexpr(600.0)  # how far a logit is below the largest: e^-600 = 1e-261 is below any output's square


def lower_probe(
    logits: Tensor, rank: int, scale: float, generator: torch.Generator, counts: Tensor | None = None
) -> Probe:
    """Return scale · Σ_j √λ_j v_j ξ_j at logits [..., C] with C <= 4096, without synchronizing.

    `rank`: how many eigenpairs, at most 32; from C - 1 on they are all that there are.  `counts` and types: as for
    `neuromanifold.kernels.triton.probe.hutchinson_probe`.
    """
    rows, u, finite, seed = buffers(logits, generator)
    classes = logits.shape[-1]
    if len(rows):
        block = triton.next_power_of_2(classes)
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _lower[len(rows),](
                rows, u, finite.view(torch.uint8), row_mask(finite, counts), seed, classes, rows.stride(0), scale,
                RANK=min(rank, classes - 1), MASKED=counts is not None, BLOCK=block,
                num_warps=max(1, min(16, block // 128)),
            )  # fmt: skip
    return Probe(u.view(logits.shape), finite.view(logits.shape[:-1]))


@triton.jit
def _lower(
    logits, u, finite, counts, seed, classes, stride, scale,
    RANK: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make the probe of one row.  Vectors are over classes [c]; all else is one number for the row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    length = classes
    if MASKED:
        length = tl.where(tl.load(counts + row) != 0, classes, 0)  # nothing to read if the row does not count
    start = row.to(tl.int64)
    z = tl.load(logits + start * stride + column, mask=column < length, other=float("-inf"))
    z = z.to(tl.float32).to(tl.float64)
    word = random_words(tl.load(seed), row, 0, 0)

    z_a = tl.max(z, 0)
    likely = tl.min(tl.where(z == z_a, column, BLOCK), 0)
    R = tl.sum(tl.where(column == likely, 0.0, tl.exp(z - z_a)), 0)  # p_a = 1/(1 + R)
    good = (R >= 0.0) & (z_a > float("-inf")) & (z_a < float("inf"))
    tl.store(finite + row, (good | (length == 0)).to(tl.uint8))

    out = tl.zeros([BLOCK], tl.float64)
    place = tl.where(column == likely, 0, RANK + 1)  # of a class in descending order, as far as it is known
    z_high = z_a
    for j in range(RANK):
        left = tl.where(place > RANK, z, float("-inf"))
        z_low = tl.max(left, 0)
        last = tl.min(tl.where((left == z_low) & (place > RANK), column, BLOCK), 0)
        possible = z_a - z_low < IMPOSSIBLE
        tied = z_high == z_low
        d = z - tl.where(possible, z_low, z_a)
        r = tl.exp(d)
        D = _minus_one(r, d)
        above = z >= z_high
        d = tl.where(possible & (z_high > z_low), z_high - z_low, 1.0)
        gap = _minus_one(tl.exp(d), d)

        w = 0.0 * gap + 1.0
        steps = 0
        moves = possible & (z_high > z_low)
        while moves:
            x, y = gap * (w / (1.0 + w)), gap / (1.0 + w)
            q = 1.0 / (D - x)
            rq = r * q
            t = tl.sum(tl.where(above, rq * (y * q) * y, 0.0), 0)
            s = tl.sum(tl.where(above, 0.0, rq * (x * q) * x), 0)
            b_a = tl.sum(rq * (q * tl.where(above, D - gap, D)), 0)
            previous = w
            w = positive_root(1.0, (b_a * gap - s) / t + 1.0, s / t)
            steps += 1
            moves = (tl.abs(w - previous) > TOLERANCE * w) & (steps < MOST_STEPS)

        before = (z == z_low) & (place <= j)
        members = tl.sum(before.to(tl.float64), 0)
        inner = tl.where(column == last, -members, before.to(tl.float64))
        x = tl.where(tied, 0.0, gap * (w / (1.0 + w)))
        v = tl.where(tied, inner, r / (D - tl.where(tied, -1.0, x)))
        value = tl.exp(z_low - z_a) / (1.0 + R) * (1.0 + x)
        out = tl.where(possible, out + tl.sqrt(value / tl.sum(v * v, 0)) * sign(word, j) * v, out)
        place = tl.where(column == last, j + 1, place)
        z_high = z_low
    out = (out * scale).to(tl.float32).to(u.dtype.element_ty)
    tl.store(u + start * classes + column, out, mask=column < classes)


@triton.jit
def _minus_one(r, d):
    """r - 1 for r = e^d, accurate relatively also for small d, and of the sign of d."""
    series = d * (1.0 + d / 2.0 * (1.0 + d / 3.0 * (1.0 + d / 4.0 * (1.0 + d / 5.0))))
    return tl.where(tl.abs(d) < 0.01, series, r - 1.0)
