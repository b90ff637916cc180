"""Kernels for a GPU, in Triton, which is imported when the first tensor on a GPU is seen and not before."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor


class Probe(NamedTuple):
    """A cotangent for every row, and which rows could be evaluated."""

    cotangent: Tensor  # [..., C]
    finite: Tensor  # [...] bool  False: NaN, +inf, or no possible class


def usable(tensor: Tensor) -> bool:
    """Whether kernels can take this tensor: on a GPU with Triton, in single or half precision."""
    return (
        tensor.is_cuda
        and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and _works(tensor.get_device())
    )


@cache
def _works(index: int) -> bool:
    """Not before Volta, nor where NEUROMANIFOLD_KERNELS=0 leaves everything to torch, nor in Triton's interpreter."""
    unwanted = os.environ.get("NEUROMANIFOLD_KERNELS") == "0" or os.environ.get("TRITON_INTERPRET") == "1"
    if unwanted or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(index) < (7, 0):
        return False
    try:
        from triton.runtime import driver

        driver.active.get_current_device()  # builds its driver, for which some machines lack a compiler or headers
    except Exception:
        return False
    return True
