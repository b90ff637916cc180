"""Kernels for a GPU, in Triton, which is imported when the first tensor on a GPU is seen and not before."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.checks import message

LARGEST_RANK, LARGEST_ROW = 8, 4096
"""Eigenpairs and classes up to which `kernels.lower` is used: it has a whole row at once."""


class Probe(NamedTuple):
    """A cotangent for every row, and which rows could be evaluated."""

    cotangent: Tensor  # [..., C]
    finite: Tensor  # [...] bool  False: NaN, +inf, or no possible class


class Buffers(NamedTuple):
    """What kernels for probes read and write."""

    rows: Tensor  # [n, C]  the logits, contiguous along C
    cotangent: Tensor  # [n, C]  to be written, as the next
    finite: Tensor  # [n] bool
    seed: Tensor  # [1] int64


def buffers(logits: Tensor, generator: torch.Generator) -> Buffers:
    """Rows of logits [..., C] with room for their cotangents, and a seed from the generator; nothing is waited for.

    u has the type of the logits, but float32 for float16, which has no room for small entries before the pullback
    scales them up.
    """
    rows = logits.detach().reshape(-1, logits.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    return Buffers(
        rows,
        torch.empty(rows.shape, dtype=dtype, device=rows.device),
        torch.empty(len(rows), dtype=torch.bool, device=rows.device),
        torch.empty(1, dtype=torch.int64, device=rows.device).random_(generator=generator),
    )


def usable(tensor: Tensor) -> bool:
    """Whether kernels can take this tensor: on a GPU with Triton, in single or half precision."""
    return (
        tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and works(tensor.get_device())
    )


def wish() -> str:
    """NEUROMANIFOLD_KERNELS: 1, 0 to leave everything to torch, or interpret (on a CPU, slow, for tests)."""
    value = os.environ.get("NEUROMANIFOLD_KERNELS", "1")
    if value not in ("0", "1", "interpret"):
        raise ValueError(
            message("NEUROMANIFOLD_KERNELS", "0, 1 or interpret", repr(value), "It is read from the environment.")
        )
    return value


@cache
def works(index: int) -> bool:
    """Whether Triton works on a GPU: not if it is unwanted or interpreted, nor before Ampere, nor on AMD's."""
    if wish() == "0" or os.environ.get("TRITON_INTERPRET") == "1" or find_spec("triton") is None:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < (8, 0):
        return False
    try:
        from triton.runtime import driver

        driver.active.get_current_device()  # builds its driver, for which some machines lack a compiler or headers
    except Exception:
        return False
    return True
