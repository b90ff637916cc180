"""Kernels for a GPU, in Triton, which is imported when the first tensor on a GPU is seen and not before."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.checks import message


class Probe(NamedTuple):
    """A cotangent for every row, and which rows could be evaluated."""

    cotangent: Tensor  # [..., C]
    finite: Tensor  # [...] bool  False: NaN, +inf, or no possible class


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
