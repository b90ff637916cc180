"""Calls probe.c, which makes deflated probes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from neuromanifold.kernels.c import build
from neuromanifold.kernels.values import Deflated

SOURCE = Path(__file__).with_name("probe.c")
_ALONE = 2**14  # numbers that one thread does before others are woken


class _ProbeJob(ctypes.Structure):
    """The struct of the same fields in probe.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "noise", "u", "left")),
        *((name, ctypes.c_int64) for name in ("N", "C", "wide", "next", "skipped")),
    )


def call_deflated_probe(logits: Tensor, noise: Tensor) -> Deflated | None:
    """Make the probe that `dispatch.deflated_probe` describes, in single or double precision; None without a kernel.

    v is positive at the likeliest class, as `core.spectrum` has it.
    """
    threads = torch.get_num_threads() if logits.numel() > _ALONE else 1
    kernel = build.kernel(SOURCE, "probe", threads)
    if kernel is None:
        return None
    logits, noise = logits.contiguous().resolve_neg(), noise.contiguous()  # in memory as they are
    u, left_out = torch.empty_like(logits), torch.empty(logits.shape[:-1], dtype=torch.bool, device="cpu")
    pointers = map(Tensor.data_ptr, (logits, noise, u, left_out))
    job = _ProbeJob(*pointers, left_out.numel(), logits.shape[-1], logits.dtype == torch.float64)
    if not kernel.probe(ctypes.byref(job), build.parallel(), threads):
        raise MemoryError("There is no memory for a row of logits.")
    return Deflated(u, left_out if job.skipped else None)
