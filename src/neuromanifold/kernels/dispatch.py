"""The only chooser of kernels: each operation below runs one, or returns None or False and torch does the same.

    operation                    GPU (Triton)      CPU (C)
    hutchinson_probes            probe.py                     probes with random signs, deflated or not
    deflated_probe                                 probe.c    a deflated probe from given noise
    add_squares_of_products      product.py        square.c   linear layers
    add_squares_of_convolution   convolution.py    square.c
    depthwise_gradients          depthwise.py                 convolutions with few channels in a group
    channel_norm_sums            norms.py                     BatchNorm with running statistics

The environment variable NEUROMANIFOLD_KERNELS is 1 (the default), 0 (torch does everything), or interpret (Triton's
kernels on a CPU, by its interpreter, which needs TRITON_INTERPRET=1: slow, for tests).  Triton is imported when the
first tensor that it takes is seen, and a C compiler is looked for likewise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.core.sums import is_differentiated
from neuromanifold.kernels.c import probe, square
from neuromanifold.kernels.values import Deflated, PowerSums, Probe, Windows

Backend = Literal["triton", "c"]

_TRITON = {torch.float32, torch.bfloat16, torch.float16}
_LEAST = 2**18  # multiplications of squares in C: for fewer, compiling does not pay
_THIN = 8  # pairs of channels in a group up to which a product of matrices is not worth it
_DEVICE = attrgetter("device")
_disabled: set[str] = set()


def hutchinson_probes(
    logits: Tensor, probes: int, generator: torch.Generator, valid: Tensor | None, *, deflate: bool
) -> Iterator[Probe] | None:
    """Return S η/√probes for each probe, with random signs η of the kernel's own; deflated by the leading eigenpair.

    `valid` [...]: rows where it is False are not read and get zeros.
    """
    if _backend("hutchinson_probes", logits) != "triton" or is_differentiated(logits):
        return None
    from neuromanifold.kernels.triton.probe import hutchinson_probe  # needs Triton

    return (hutchinson_probe(logits, deflate, 1 / math.sqrt(probes), generator, valid) for _ in range(probes))


def deflated_probe(logits: Tensor, noise: Tensor) -> Deflated | None:
    """Return √λ v ξ₁ + (I - vvᵀ) S ξ₂ at logits [..., C] for noise (ξ₁, ξ₂) [..., 1 + C], v the leading eigenvector."""
    if logits.dtype not in (torch.float32, torch.float64) or logits.dtype != noise.dtype or is_differentiated(logits):
        return None
    if _backend("deflated_probe", logits, noise) != "c":
        return None
    return probe.call_deflated_probe(logits, noise)


def add_squares_of_products(left: Tensor, right: Tensor, to: PowerSums, skip: Tensor | None = None) -> bool:
    """Add squares and fourth powers of Σ_t left[n, t, :] ⊗ right[n, t, :] to sums [o, i]; return whether it was done.

    left [n, t, o] and right [n, t, i], or [n, g, t, ...] with groups of rows.  `skip` [n, s] names rows of each sample
    that do not count.  On a GPU no sample's product is written to memory, and numbers of half precision are multiplied
    as they are; if only one side has it (autocast), the layer has worked with the other one rounded to it, too.
    """
    backend = _backend("add_squares_of_products", left, right)
    if backend == "c":
        if skip is not None or to.row_fourths is not None or left.numel() * right.shape[-1] < _LEAST:
            return False
        return square.call_product_squares(left.to(to.squares.dtype), right.to(to.squares.dtype), to)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if backend is None or left.ndim != 3 or (deterministic and to.row_fourths is not None):
        return False
    from neuromanifold.kernels.triton import product  # needs Triton
    from neuromanifold.kernels.triton.pack import pack

    if skip is not None:
        mask = torch.zeros(left.shape[0], left.shape[2], dtype=torch.uint8, device=left.device)
        skip = mask.scatter_(1, skip, 1)
    dtype = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    left, right = (_last_contiguous(side.to(dtype)) for side in (left, right))
    packs = dtype == torch.float32 and tf32_products()
    norms = None if to.row_fourths is None else torch.zeros(left.shape[::2], dtype=to.squares.dtype, device=left.device)
    product.launch_product_squares(
        pack(left) if packs else left,
        pack(right) if packs else right,
        to.squares,
        to.fourths,
        factors=to.kernel_factors,
        skip=skip,
        norms=norms,
        deterministic=deterministic,
    )
    if norms is not None:
        to.add_row_norms(norms)
    return True


def add_squares_of_convolution(slid: Tensor, fixed: Tensor, to: PowerSums, windows: Windows) -> bool:
    """Add squares and fourth powers of Σ_mt fixed_mt ⊗ (the window of slid at t) to sums [o, c, *kernel].

    slid [n, m, g·c, *space] is what windows are taken of, fixed [n, m, o, *positions] what they are multiplied by.
    Returns whether it was done.
    """
    backend = None if to.row_fourths is not None else _backend("add_squares_of_convolution", slid, fixed)
    if backend == "c":  # windows are read off the image, of whose dimensions m is one more
        if fixed.numel() * to.squares.shape[1:].numel() < _LEAST:
            return False
        dtype = to.squares.dtype
        slid, fixed = slid.transpose(1, 2).to(dtype), fixed.transpose(1, 2).to(dtype)
        kernel, stride, padding, dilation, groups = windows
        with_rows = Windows((1, *kernel), (1, *stride), (0, *padding), (1, *dilation), groups)
        return square.call_convolution_squares(slid, fixed, to, with_rows)
    if backend is None or slid.shape[1] != 1:
        return False
    from neuromanifold.kernels.triton import convolution  # needs Triton

    flat = to.view(to.squares.shape[0], to.squares.shape[1:].numel())
    convolution.add_squares(
        *(slid[:, 0], fixed[:, 0], flat.squares, flat.fourths, windows),
        factors=to.kernel_factors,
        tf32=tf32_convolutions(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return True


def depthwise_gradients(slid: Tensor, fixed: Tensor, windows: Windows) -> Tensor | None:
    """Return all gradients [n, o, c·kernel] of a convolution with few channels in a group, as above for m = 1."""
    pairs = fixed.shape[2] * slid.shape[2] // windows.groups**2
    if windows.groups == 1 or pairs > _THIN or slid.shape[1] != 1:
        return None
    if _backend("depthwise_gradients", slid, fixed) != "triton":
        return None
    from neuromanifold.kernels.triton import depthwise  # needs Triton

    return depthwise.gradients(slid[:, 0], fixed[:, 0], windows)


def channel_norm_sums(x: Tensor, g: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """Return Σ_t g∘x̂ and Σ_t g, [n, c] each, with x̂ = (x - mean)/√(variance + eps) by channel, the second dimension."""
    if _backend("channel_norm_sums", x, g, mean, variance) != "triton":
        return None
    from neuromanifold.kernels.triton import norms  # needs Triton

    x, g = (values.contiguous() for values in (x, g))
    x, g = (values.flatten(2) if values.ndim > 2 else values[..., None] for values in (x, g))
    return norms.launch_channel_norm(x, g, mean, variance, eps)


def tf32_products() -> bool:
    """Return whether matrix products of float32 may be rounded to 11 bits."""
    return bool(torch.backends.cuda.matmul.allow_tf32)


def tf32_convolutions() -> bool:
    """Return whether convolutions of float32 may be rounded to 11 bits."""
    return bool(torch.backends.cudnn.allow_tf32)


@contextmanager
def disabled(*operations: str) -> Iterator[None]:
    """Leave operations to torch, by the names above: for ablations and tests."""
    before = set(_disabled)
    _disabled.update(operations)
    try:
        yield
    finally:
        _disabled.clear()
        _disabled.update(before)


def _backend(operation: str, *tensors: Tensor) -> Backend | None:
    """Return which kernels can take these tensors: Triton's on the current GPU, C's on a CPU, or none."""
    device, wanted = tensors[0].device, wanted_kernels()
    if wanted == "0" or operation in _disabled or len({*map(_DEVICE, tensors)}) > 1:
        return None
    if device.type == "cuda":
        works = device.index == torch.cuda.current_device() and _triton_works(device.index)  # it launches there
    else:
        works = device.type == "cpu" and wanted == "interpret" and find_spec("triton") is not None
    if works:
        return "triton" if {tensor.dtype for tensor in tensors} <= _TRITON else None
    if device.type != "cpu" or wanted != "1" or torch._C._len_torch_dispatch_stack():
        return None  # nobody may be recording torch's operations, among which C's are none
    plain = {*map(type, tensors)} == {Tensor} and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    return "c" if plain else None


def wanted_kernels() -> str:
    """Return the value of NEUROMANIFOLD_KERNELS, if it is a valid one."""
    value = os.environ.get("NEUROMANIFOLD_KERNELS", "1")
    if value not in ("0", "1", "interpret"):
        raise ValueError(
            message("NEUROMANIFOLD_KERNELS", "0, 1 or interpret", repr(value), "It is read from the environment.")
        )
    return value


@cache
def _triton_works(index: int) -> bool:
    """Return whether Triton works on a GPU: not if it is interpreted, nor before Ampere, nor on AMD's."""
    if os.environ.get("TRITON_INTERPRET") == "1" or find_spec("triton") is None:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < (8, 0):
        return False
    try:
        from triton.runtime import driver

        driver.active.get_current_device()  # builds its driver, for which some machines lack a compiler or headers
    except Exception:
        return False
    return True


def _last_contiguous(values: Tensor) -> Tensor:
    return values if values.stride(-1) == 1 else values.contiguous()
