"""Kernels for a GPU, in Triton; where it is missing, or for a shape that is unsuitable, torch's operations do the same.

    product      linear layers, 1×1 and other convolutions as products
    convolution  k×k convolutions without writing out windows (tiles: their sizes; images: how operands lie in memory)
    depthwise    one channel at a time
    rows         embeddings
    norms        scales and shifts
    pack         float32 as scaled float16, where TF32 is allowed

Nothing here is imported before a tensor on a GPU is seen: import the modules where they are used.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from neuromanifold.kernels.dispatch import wish, works

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _capable(device: torch.device) -> bool:
    """A GPU on which Triton works; or a CPU, with NEUROMANIFOLD_KERNELS=interpret and TRITON_INTERPRET=1, for tests."""
    if device.type == "cuda":
        return works(device.index)
    return device.type == "cpu" and wish() == "interpret" and importlib.util.find_spec("triton") is not None


def suit(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors: on one GPU, in single or half precision."""
    device = tensors[0].device
    if not _capable(device) or (device.type == "cuda" and device.index != torch.cuda.current_device()):
        return False  # Triton launches on the current device
    return all(tensor.dtype in _DTYPES and tensor.device == device for tensor in tensors)


def tf32_products() -> bool:
    """Whether matrix products of float32 may be rounded to 11 bits."""
    return bool(torch.backends.cuda.matmul.allow_tf32)


def tf32_convolutions() -> bool:
    """Whether convolutions of float32 may be rounded to 11 bits."""
    return bool(torch.backends.cudnn.allow_tf32)


def deterministic() -> bool:
    """Whether sums must always be made in the same order."""
    return torch.are_deterministic_algorithms_enabled()
