"""Probabilities and noise, as the kernel takes them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.estimators.native import build

SOURCE = Path(__file__).with_name("probe.c")
_ALONE = 2**14  # numbers that one thread does before others are woken


class _Job(ctypes.Structure):
    """As in probe.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("p", "noise", "u", "tied")),
        *((name, ctypes.c_int64) for name in ("N", "C", "wide", "next", "ties")),
    )


class Deflated(NamedTuple):
    """A probe for each distribution, but for those whose largest probabilities are tied."""

    cotangent: Tensor  # [..., C]
    tied: Tensor | None  # [...] bool; None: there are none


def deflated_probe(p: Tensor, noise: Tensor) -> Deflated | None:
    """√λ v ξ_1 + (I - vvᵀ) S ξ_2 at probabilities p [..., C] with noise (ξ_1, ξ_2) [..., 1 + C]; None: torch has to.

    v, the leading eigenvector, is positive at the likeliest class, as `core.spectrum` has it.
    """
    if not (_suits(p) and _suits(noise) and p.dtype == noise.dtype):
        return None
    threads = torch.get_num_threads() if p.numel() > _ALONE else 1
    library = build.library(SOURCE, "probe")
    if library is None or (threads > 1 and build.parallel() is None):
        return None
    p, noise = p.detach().contiguous(), noise.detach().contiguous()
    u, tied = torch.empty_like(p), torch.empty(p.shape[:-1], dtype=torch.bool)
    pointers = (tensor.data_ptr() for tensor in (p, noise, u, tied))
    job = _Job(*pointers, p.shape[:-1].numel(), p.shape[-1], p.dtype == torch.float64)
    if not library.probe(ctypes.byref(job), build.parallel(), threads):
        return None
    return Deflated(u, tied if job.ties else None)


def _suits(tensor: Tensor) -> bool:
    """Single or double precision on a CPU; and nobody who records or transforms torch's operations."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return plain and not watched
