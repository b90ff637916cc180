"""Calls powers.c, which adds powers of per-sample gradients of many small parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from neuromanifold.kernels.c import build

SOURCE = Path(__file__).with_name("powers.c")
_ALONE = 2**17  # numbers that one thread does before others are woken


class _PowersPart(ctypes.Structure):
    """The struct of one parameter's gradients in powers.c."""

    _fields_ = (("values", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("width", "stride", "at")))


class _PowersJob(ctypes.Structure):
    """The struct of a whole job in powers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "squares", "fourths")),
        *((name, ctypes.c_int64) for name in ("count", "N")),
        *((name, ctypes.c_double) for name in ("factor", "weight")),
        ("next", ctypes.c_int64),
    )


def call_powers(values: Sequence[Tensor], scale: float, weight: float, squares: Tensor, fourths: Tensor | None) -> bool:
    """Add powers as `dispatch.add_powers` says; return whether there is a kernel for these gradients."""
    threads = torch.get_num_threads() if squares.numel() * values[0].shape[0] > _ALONE else 1
    kernel = build.kernel(SOURCE, "add_powers", threads)
    if kernel is None or any(gradients.dtype != torch.float32 for gradients in values):
        return False
    rows = [v.reshape(v.shape[0], v.shape[1:].numel()) for v in values]
    rows = [row if row.stride(1) == 1 else row.contiguous() for row in rows]
    places = accumulate((row.shape[1] for row in rows), initial=0)
    found = (
        _PowersPart(row.data_ptr(), row.shape[1], row.stride(0), at) for row, at in zip(rows, places, strict=False)
    )
    parts = (_PowersPart * len(rows))(*found)
    job = _PowersJob(
        ctypes.addressof(parts), squares.data_ptr(), None if fourths is None else fourths.data_ptr(), len(rows)
    )
    job.N, job.factor, job.weight = rows[0].shape[0], 1 / scale, weight
    return bool(kernel.add_powers(ctypes.byref(job), build.parallel(), threads))
