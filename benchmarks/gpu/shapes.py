"""The fused kernels against the ordinary weight gradient, by layer shape and precision; and choosing their tiles.

    PYTHONPATH=src:benchmarks python -m gpu.shapes            the table
    PYTHONPATH=src:benchmarks python -m gpu.shapes --tune     time of every candidate, best first

"Weight gradient" is torch's.  Times are medians, with a cold cache.  The floor is counted: multiplications at the rate
of a large product in the same precision, squares at one fused multiply-add each, or reading both operands once at the
copy bandwidth, if that is more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from common import table
from torch import Tensor

from neuromanifold.kernels.triton import convolution, product
from neuromanifold.kernels.triton.pack import pack
from neuromanifold.kernels.triton.tiles import CONFIGS
from neuromanifold.kernels.values import Windows

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class Linear(NamedTuple):
    """Sizes of a linear layer: samples, positions, out and in features."""

    name: str
    n: int
    t: int
    o: int
    i: int


class Conv(NamedTuple):
    """Sizes of a convolution: samples, channels in and out, side of the image, of the kernel, stride."""

    name: str
    n: int
    c: int
    o: int
    size: int
    kernel: int
    stride: int = 1


LINEAR = [
    Linear("attention, T=128", 64, 128, 768, 768),
    Linear("up, T=128", 64, 128, 3072, 768),
    Linear("down, T=128", 64, 128, 768, 3072),
    Linear("GPT-2 qkv, T=512", 8, 512, 2304, 768),
    Linear("GPT-2 head, T=512", 8, 512, 50257, 768),
    Linear("audio, T=49", 64, 49, 3072, 768),
]
CONVS = [
    Conv("3×3, 64→64, 56²", 64, 64, 64, 56, 3),
    Conv("1×1, 64→256, 56²", 64, 64, 256, 56, 1),
    Conv("3×3, 128→128, 28²", 64, 128, 128, 28, 3),
    Conv("1×1, 512→128, 28²", 64, 512, 128, 28, 1),
    Conv("3×3, 256→256, 14²", 64, 256, 256, 14, 3),
    Conv("1×1, 1024→256, 14²", 64, 1024, 256, 14, 1),
    Conv("3×3, 512→512, 7²", 64, 512, 512, 7, 3),
    Conv("1×1, 512→2048, 7²", 64, 512, 2048, 7, 1),
    Conv("7×7, 3→64, 224², stride 2", 64, 3, 64, 224, 7, 2),
]


def microseconds(function: Callable[[], object], repeats: int = 15) -> float:
    """Return the median time on the device, of a CUDA graph, so that launching does not count, with a cold cache."""
    flush = torch.empty(2**25, device="cuda")
    for _ in range(2):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(start.elapsed_time(end) for start, end in pairs)


class Device(NamedTuple):
    """What the hardware gives: measured rates of multiplications by precision, of squares, of bytes."""

    flops: dict[str, float]
    squares: float
    bytes: float

    @classmethod
    def measured(cls) -> Device:
        """Measure the rates of a few large operations."""
        flops = {}
        for precision, dtype in PRECISIONS.items():
            _allow_tf32(precision)
            a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
            flops[precision] = 2 * 8192**3 / microseconds(lambda a=a: a @ a, 3)
        block = torch.empty(2**28, device="cuda", dtype=torch.uint8)
        copied = 2 * block.numel() / microseconds(block.clone, 3)
        properties = torch.cuda.get_device_properties(0)
        clock = getattr(properties, "clock_rate", 1_980_000) / 1e3  # MHz: multiply-adds in a microsecond and lane
        return cls(flops, properties.multi_processor_count * 128 * clock, copied)

    def floor(self, precision: str, multiplications: float, squares: float, numbers: float) -> float:
        """Return the microseconds that the hardware needs at least."""
        size = 2 if precision == "bf16" else 4
        return max(2 * multiplications / self.flops[precision] + squares / self.squares, size * numbers / self.bytes)


def linear_row(case: Linear, precision: str, device: Device) -> list[str]:
    left, right, squares = _operands(case, precision)
    torch_time = microseconds(lambda: left.flatten(0, 1).T @ right.flatten(0, 1))
    fused = microseconds(lambda: _linear(left, right, squares, None, precision))
    with_fourths = microseconds(lambda: _linear(left, right, squares, torch.zeros_like(squares), precision))
    floor = device.floor(
        precision, case.n * case.t * case.o * case.i, case.n * case.o * case.i, left.numel() + right.numel()
    )
    return _line(case.name, precision, torch_time, fused, with_fourths, floor)


def conv_row(case: Conv, precision: str, device: Device) -> list[str]:
    x, g, squares, shape = _images(case, precision)
    padding = case.kernel // 2

    def weight_gradient() -> Tensor:
        return torch.ops.aten.convolution_backward(
            g, x, shape, None, [case.stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [False, True, False]
        )[1]

    torch_time = microseconds(weight_gradient)
    fused = microseconds(lambda: _conv(case, x, g, squares, None, precision))
    with_fourths = microseconds(lambda: _conv(case, x, g, squares, torch.zeros_like(squares), precision))
    positions = g.shape[2:].numel()
    floor = device.floor(
        precision, case.n * positions * squares.numel(), case.n * squares.numel(), x.numel() + g.numel()
    )
    return _line(case.name, precision, torch_time, fused, with_fourths, floor)


def _line(name: str, precision: str, torch_time: float, fused: float, with_fourths: float, floor: float) -> list[str]:
    figures = [f"{torch_time:.0f}", f"{fused:.0f}", f"{fused / torch_time:.2f}", f"{with_fourths / torch_time:.2f}"]
    return [name, precision, *figures, f"{floor:.0f}", f"{floor / torch_time:.2f}"]


def _operands(case: Linear, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    _allow_tf32(precision)
    dtype = PRECISIONS[precision]
    left = torch.randn(case.n, case.t, case.o, device="cuda", dtype=dtype)
    right = torch.randn(case.n, case.t, case.i, device="cuda", dtype=dtype)
    return left, right, torch.zeros(case.o, case.i, device="cuda")


def _images(case: Conv, precision: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _allow_tf32(precision)
    dtype, out = PRECISIONS[precision], case.size // case.stride
    x = torch.randn(case.n, case.c, case.size, case.size, device="cuda", dtype=dtype)
    g = torch.randn(case.n, case.o, out, out, device="cuda", dtype=dtype)
    weight = torch.empty(case.o, case.c, case.kernel, case.kernel, device="cuda", dtype=dtype)
    return x, g, torch.zeros(case.o, case.c * case.kernel**2, device="cuda"), weight


def _linear(
    left: Tensor, right: Tensor, squares: Tensor, fourths: Tensor | None, precision: str, **options: object
) -> None:
    sides = (pack(left), pack(right)) if precision == "tf32" else (left, right)
    product.launch_product_squares(*sides, squares, fourths, **options)


def _conv(
    case: Conv, x: Tensor, g: Tensor, squares: Tensor, fourths: Tensor | None, precision: str, **options: object
) -> None:
    windows = Windows((case.kernel,) * 2, (case.stride,) * 2, (case.kernel // 2,) * 2, (1, 1), 1)
    convolution.add_squares(x, g, squares, fourths, windows, tf32=precision == "tf32", **options)


def _allow_tf32(precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def kernels(options: argparse.Namespace) -> str:
    """Return the table, in Markdown."""
    device = Device.measured()
    rows = []
    for precision in options.precision:
        for make, cases in ((linear_row, LINEAR), (conv_row, CONVS)):
            for case in cases:
                try:
                    rows.append(make(case, precision, device))
                except Exception as error:
                    rows.append([case.name, precision, f"fails: {str(error).splitlines()[0][:80]}"] + [""] * 5)
                torch.cuda.empty_cache()
    rates = ", ".join(f"{name} {rate / 1e6:.0f} TFLOP/s" for name, rate in device.flops.items())
    head = (
        f"Large products: {rates}; copies {device.bytes / 1e6:.1f} TB/s.  Times in µs; ratios to the weight gradient."
    )
    names = ["layer", "precision", "weight gradient", "fused", "ratio", "with error bars", "floor", "floor's ratio"]
    return f"{head}\n\n{table(names, rows)}"


HALF_CONFIGS = [
    *((128, 128, 64, 8, 3, 1), (128, 128, 64, 8, 4, 1), (128, 128, 128, 8, 2, 1), (128, 128, 128, 8, 3, 1)),
    *((64, 128, 64, 4, 3, 2), (128, 64, 64, 4, 3, 2), (64, 128, 64, 4, 4, 2), (128, 128, 32, 8, 4, 1)),
]
SINGLE_CONFIGS = [
    *((64, 64, 32, 4, 3, 4), (64, 64, 16, 4, 3, 4), (64, 64, 16, 4, 4, 4), (64, 64, 32, 4, 2, 4)),
    *((64, 64, 32, 2, 3, 4), (64, 64, 32, 8, 3, 2), (128, 64, 16, 8, 3, 2), (64, 64, 64, 4, 2, 4)),
]


def tune(precision: str, case: Linear | Conv, timed: bool = True) -> None:
    """Every candidate for a shape.  `timed=False` compiles them only, which may be done by several processes."""
    warnings.simplefilter("ignore")
    if isinstance(case, Linear):
        left, right, squares = _operands(case, precision)
        sizes = SINGLE_CONFIGS if precision == "fp32" else HALF_CONFIGS
        candidates = {
            config: lambda config=config: _linear(left, right, squares, None, precision, config=config)
            for config in (product.ProductTiles(*size) for size in sizes)
        }
        torch_time = microseconds(lambda: left.flatten(0, 1).T @ right.flatten(0, 1)) if timed else 0.0
    else:
        x, g, squares, _ = _images(case, precision)
        candidates = {
            config: lambda config=config: _conv(case, x, g, squares, None, precision, config=config)
            for config in CONFIGS["ieee" if precision == "fp32" else "half"]
        }
        torch_time = float(conv_row(case, precision, Device({precision: 1.0}, 1.0, 1.0))[2]) if timed else 0.0
    found = [(_time(run, 7 if timed else 1), config) for config, run in candidates.items()]
    if timed:
        print(f"{case} {precision}: weight gradient {torch_time:.0f} µs")
        for time, config in sorted(found, key=lambda pair: pair[0])[:5]:
            print(f"    {time:.0f} µs, {time / torch_time:.2f}  {tuple(config)}", flush=True)


def _time(function: Callable[[], object], repeats: int) -> float:
    try:
        return microseconds(function, repeats)
    except Exception as error:
        print("   ", str(error).splitlines()[0][:100])
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--precision", nargs="*", choices=list(PRECISIONS), default=list(PRECISIONS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.tune:
        print(kernels(options))
        return
    jobs = [(precision, case) for precision in options.precision for case in (*LINEAR, *CONVS)]
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(tune, *zip(*jobs, strict=True), [False] * len(jobs)))
    for job in jobs:
        tune(*job)


if __name__ == "__main__":
    main()
