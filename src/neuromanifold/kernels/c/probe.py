"""Logits and noise, as the kernel takes them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.kernels.c import build

SOURCE = Path(__file__).with_name("probe.c")
_ALONE = 2**14  # numbers that one thread does before others are woken


class _Job(ctypes.Structure):
    """As in probe.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "noise", "u", "left")),
        *((name, ctypes.c_int64) for name in ("N", "C", "wide", "signs", "next", "ties", "bad")),
    )


class Deflated(NamedTuple):
    """A probe for each distribution, but for those that are left out: tied at the top, or bad."""

    cotangent: Tensor  # [..., C]
    left_out: Tensor | None  # [...] bool; None: there are none
    bad: int  # how many have NaN or +inf, or no possible class


def usable(logits: Tensor) -> bool:
    """Single or double precision on a CPU, a compiler, and nobody who records or transforms torch's operations."""
    if type(logits) is not Tensor or logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.is_functorch_wrapped_tensor(logits):
        return False
    return build.library(SOURCE, "probe") is not None and (torch.get_num_threads() == 1 or build.parallel() is not None)


def deflated_probe(logits: Tensor, noise: Tensor) -> Deflated:
    """√λ v ξ_1 + (I - vvᵀ) S ξ_2 at `usable` logits [..., C] with noise (ξ_1, ξ_2) [..., 1 + C].

    Noise of type int8 is bits that stand for signs.  v, the leading eigenvector, is positive at the likeliest class, as
    `core.spectrum` has it.
    """
    logits, noise = logits.contiguous().resolve_neg(), noise.contiguous()  # in memory as they are
    u, left_out = torch.empty_like(logits), torch.empty(logits.shape[:-1], dtype=torch.bool, device="cpu")
    pointers = (tensor.data_ptr() for tensor in (logits, noise, u, left_out))
    kinds = logits.dtype == torch.float64, noise.dtype == torch.int8
    job = _Job(*pointers, logits.shape[:-1].numel(), logits.shape[-1], *kinds)
    library = build.library(SOURCE, "probe")
    assert library is not None
    threads = torch.get_num_threads() if logits.numel() > _ALONE else 1
    if not library.probe(ctypes.byref(job), build.parallel(), threads):
        raise MemoryError("There is no memory for a row of logits.")
    return Deflated(u, left_out if job.ties or job.bad else None, job.bad)
