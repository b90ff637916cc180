"""Squares of an embedding's gradients: what a sample has for a row is added up, squared, and added to the row.

A program has one position of one sample.  If an earlier position of the sample looks up the same row, it ends; else
it adds up all positions with that row, mostly its own alone.  Nothing is sorted, and nothing synchronizes the host.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from neuromanifold.kernels.triton.launch import ceil_div, power_of_two

_POSITIONS, _COLUMNS = 32, 512


@triton.jit
def _square_rows(
    values, ids, squares, fourths, T, D, v_n, v_t, square_factor, fourth_factor, factor,
    POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, FOURTHS: tl.constexpr,
):  # fmt: skip
    """Square some columns of the row that one position looks up."""
    n, own = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    d, t = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, POSITIONS)
    row = tl.load(ids + n * T + own)
    before = tl.zeros((POSITIONS,), tl.int32)
    for first in range(0, own, POSITIONS):
        same = tl.load(ids + n * T + first + t, mask=first + t < own, other=-1) == row
        before += same.to(tl.int32)
    if tl.sum(before, axis=0) == 0:
        acc = tl.load(values + n * v_n + own.to(tl.int64) * v_t + d, mask=d < D, other=0.0).to(tl.float32)
        for first in range((own + 1) // POSITIONS * POSITIONS, T, POSITIONS):
            here = (first + t > own) & (first + t < T)
            same = tl.load(ids + n * T + first + t, mask=here, other=-1) == row
            if tl.sum(same.to(tl.int32), axis=0) > 0:
                at = values + n * v_n + (first + t).to(tl.int64)[:, None] * v_t + d[None, :]
                tile = tl.load(at, mask=same[:, None] & (d < D)[None, :], other=0.0)
                acc += tl.sum(tile.to(tl.float32), axis=0)
        acc = acc * factor
        acc = acc * acc
        tl.atomic_add(squares + row * D + d, acc * square_factor, mask=d < D, sem="relaxed")
        if FOURTHS:
            acc = tl.minimum(acc, 2.0**60)
            tl.atomic_add(fourths + row * D + d, acc * acc * fourth_factor, mask=d < D, sem="relaxed")


def launch_row_squares(
    values: Tensor, ids: Tensor, squares: Tensor, fourths: Tensor | None, factors: tuple[float, float, float]
) -> None:
    """squares[r] += a Σ_n (f Σ_{t: id = r} v[n, t])², and fourths with b, for values [n, t, d] and ids [n, t].

    `factors` are (a, b, f).  The last stride of `values` is 1, ids are contiguous int64.
    """
    n, t, d = values.shape
    if not values.numel():
        return
    columns, positions = (min(most, max(16, power_of_two(size))) for most, size in ((_COLUMNS, d), (_POSITIONS, t)))
    a, b, f = factors
    _square_rows[(n * t, ceil_div(d, columns))](
        values, ids, squares, fourths, t, d, values.stride(0), values.stride(1), a, b, f,
        POSITIONS=positions, COLUMNS=columns, FOURTHS=fourths is not None, num_warps=4,
    )  # fmt: skip
