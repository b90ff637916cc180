"""Each Triton kernel, as `kernels.dispatch` runs it, against the obvious sums in float64, in every precision.

Operands are rounded to the precision first, so that an error is that of the kernel.  Probes are random: the mean of
u uᵀ over many rows with the same logits must be the metric, to a few standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import neuromanifold as nm
from gpu.models import HALF, precision
from gpu.session import Missing, Row, Session
from neuromanifold.kernels import dispatch
from neuromanifold.kernels.values import PowerSums, Windows

LIMITS = {"fp32": 1e-5, "tf32": 5e-3, "bf16": 1e-3, "fp16": 1e-3}  # ‖found - truth‖/‖truth‖
ERRORS = 8.0  # standard errors of the mean over rows, relative to the metric
ROWS, FEW_ROWS = 2**16, 2**9
WINDOWS = {
    "add_squares_of_convolution 3×3": (Windows((3, 3), (1, 1), (1, 1), (1, 1), 1), 48, 64),
    "add_squares_of_convolution 1×1, stride 2": (Windows((1, 1), (2, 2), (0, 0), (1, 1), 1), 64, 32),
    "add_squares_of_convolution 3×3, groups": (Windows((3, 3), (2, 2), (1, 1), (2, 2), 4), 64, 32),
    "depthwise_gradients 5×5": (Windows((5, 5), (1, 1), (2, 2), (1, 1), 32), 32, 32),
    "depthwise_gradients 7×7": (Windows((7, 7), (1, 1), (3, 3), (1, 1), 96), 96, 96),
}

Pairs = list[tuple[Tensor, Tensor]]
"""What a kernel found and what is true."""


class NoKernelError(RuntimeError):
    """The dispatcher has left an operation to torch."""


def run_kernels(session: Session) -> None:
    """Check every operation of the dispatcher that has a Triton kernel."""
    rows: list[Row] = []
    for which in ("fp32", "tf32", *HALF):
        dtype = HALF.get(which, torch.float32)
        if session.device.type == "cpu" and which == "bf16":
            continue  # Triton's interpreter has no such products
        for name, check in _checks().items():
            with precision(which):
                found = session.guarded(f"kernel {name} {which}", partial(_error, check, dtype, session.device))
            row: Row = {"operation": name, "precision": which}
            if isinstance(found, Missing):
                rows.append({**row, "verdict": found.reason})
            else:
                error = {"error": found, "limit": LIMITS[which]}
                session.checked(f"kernel {name} {which}", {**row, **error}, found <= LIMITS[which], rows)
    for name, deflate in (("hutchinson_probes, deflated", True), ("hutchinson_probes", False)):
        rows_of = ROWS if session.device.type == "cuda" else FEW_ROWS
        found = session.guarded(f"kernel {name}", partial(_covariance, deflate, rows_of, session.device))
        row = {"operation": name, "precision": "fp32"}
        if isinstance(found, Missing):
            rows.append({**row, "verdict": found.reason})
        else:
            limit = ERRORS / math.sqrt(rows_of)
            session.checked(f"kernel {name}", {**row, "error": found, "limit": limit}, found <= limit, rows)
    session.add("Kernels against float64", rows)


def _checks() -> dict[str, Callable[[torch.dtype, torch.device], Pairs]]:
    convolutions = {name: partial(_convolution, name) for name in WINDOWS}
    return {
        "add_squares_of_products": _products,
        "add_squares_of_products, T=1": partial(_products, t=1),
        "add_squares_of_products, T=1000": partial(_products, t=1000),
        "add_squares_of_products, norms of rows": _row_norms,
        "add_squares_of_products, rows left out": _left_out,
        **convolutions,
        "channel_norm_sums": _channel_norm,
    }


def _error(check: Callable[[torch.dtype, torch.device], Pairs], dtype: torch.dtype, device: torch.device) -> float:
    errors = [float((found.double() - truth).norm() / truth.norm()) for found, truth in check(dtype, device)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _noise(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def _powers(gradients: Tensor, to: PowerSums) -> Pairs:
    """Return both sums beside those of gradients [n, *shape]."""
    assert to.fourths is not None
    return [(to.squares, gradients.square().sum(0)), (to.fourths, gradients.pow(4).sum(0))]


def _accumulators(device: torch.device, *shape: int) -> PowerSums:
    return PowerSums(torch.zeros(shape, device=device), torch.zeros(shape, device=device))


def _done(done: bool) -> None:
    if not done:
        raise NoKernelError("the dispatcher left this operation to torch")


def _products(dtype: torch.dtype, device: torch.device, t: int = 40) -> Pairs:
    n, o, i = 9, 70, 130
    left, right, to = _noise(dtype, device, n, t, o), _noise(dtype, device, n, t, i), _accumulators(device, o, i)
    _done(dispatch.add_squares_of_products(left, right, to))
    return _powers(torch.einsum("nto,nti->noi", left.double(), right.double()), to)


def _row_norms(dtype: torch.dtype, device: torch.device) -> Pairs:
    n, t, o, i = 9, 600, 70, 130
    left, right = _noise(dtype, device, n, t, o), _noise(dtype, device, n, t, i)
    to = PowerSums(torch.zeros(o, i, device=device), row_fourths=torch.zeros(o, device=device))
    _done(dispatch.add_squares_of_products(left, right, to))
    assert to.row_fourths is not None
    squares = torch.einsum("nto,nti->noi", left.double(), right.double()).square()
    return [(to.squares, squares.sum(0)), (to.row_fourths, squares.sum(2).square().sum(0))]


def _left_out(dtype: torch.dtype, device: torch.device) -> Pairs:
    n, t, o, i = 4, 50, 90, 64
    left, right, to = _noise(dtype, device, n, t, o), _noise(dtype, device, n, t, i), _accumulators(device, o, i)
    skip = torch.randint(0, o, (n, t), generator=torch.Generator().manual_seed(0)).to(device)
    _done(dispatch.add_squares_of_products(left, right, to, skip=skip))
    kept = torch.ones(n, o, device=device, dtype=torch.float64).scatter_(1, skip, 0.0)
    return _powers(torch.einsum("nto,nti->noi", left.double(), right.double()) * kept[..., None], to)


def _convolution(name: str, dtype: torch.dtype, device: torch.device) -> Pairs:
    windows, channels, out = WINDOWS[name]
    kernel, stride, padding, dilation = windows[:4]
    x = _noise(dtype, device, 5, channels, 14, 14)
    size = [
        (14 + 2 * p - d * (k - 1) - 1) // s + 1 for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    ]
    g, shape = _noise(dtype, device, 5, out, *size), (out, channels // windows.groups, *kernel)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": windows.groups}
    pairs = zip(x.double().split(1), g.double().split(1), strict=True)
    truth = torch.stack([torch.nn.grad.conv2d_weight(a, shape, b, **options) for a, b in pairs])
    if name.startswith("depthwise"):
        found = dispatch.depthwise_gradients(x[:, None], g[:, None], windows)
        _done(found is not None)
        return [(found.view(truth.shape), truth)]
    to = _accumulators(device, *shape)
    _done(dispatch.add_squares_of_convolution(x[:, None], g[:, None], to, windows))
    return _powers(truth, to)


def _channel_norm(dtype: torch.dtype, device: torch.device) -> Pairs:
    x, g, eps = _noise(dtype, device, 5, 24, 9, 7), _noise(dtype, device, 5, 24, 9, 7), 1e-5
    mean, variance = _noise(dtype, device, 24), _noise(dtype, device, 24).square() + 0.5
    found = dispatch.channel_norm_sums(x, g, mean, variance, eps)
    _done(found is not None)
    shift, scale = (value.double()[:, None, None] for value in (mean, (variance.double() + eps).sqrt()))
    normed = (x.double() - shift) / scale
    return [(found[0], (g.double() * normed).sum((2, 3))), (found[1], g.double().sum((2, 3)))]


def _covariance(deflate: bool, rows: int, device: torch.device) -> float:
    """Return how far the mean of u uᵀ is from the metric, relative to it."""
    classes, generator = 7, torch.Generator(device).manual_seed(0)
    logits = _noise(torch.float32, device, classes)
    many = logits.expand(rows, classes).contiguous()
    probes = dispatch.hutchinson_probes(many, 1, generator, None, deflate=deflate)
    _done(probes is not None)
    u = next(probes).cotangent.double()
    truth = nm.Categorical(logits.double()).fisher()
    return float((u.T @ u / rows - truth).norm() / truth.norm())
