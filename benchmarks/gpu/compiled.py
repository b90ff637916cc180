"""Compile every Triton kernel to machine code for a GPU that is not there: what a compiler refuses, and registers.

    PYTHONPATH=src:benchmarks python -m gpu.compiled [--capability 90 80] [--precision bf16] [--keep]

The operations of `kernels.dispatch` are called on a CPU, in every precision, with the shapes of `gpu.kernels` and those
of language models; each kernel that they launch is compiled, by Triton and ptxas, and not run.  So numbers are not
looked at: Triton's interpreter does that in the tests.  Spilled: bytes of a thread's stack; tensor cores: instructions
of the program for Hopper's.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from common import keep, setting
from common import table as as_table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gpu import kernels
from gpu.models import HALF, precision
from neuromanifold.kernels import dispatch
from neuromanifold.kernels.values import PowerSums

SETTINGS = {"TRITON_INTERPRET": "0", "NEUROMANIFOLD_KERNELS": "interpret"}  # Triton's kernels, for tensors on a CPU
SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB of a program, at most, by compute capability
USUAL = 99
FLAGS = ("FOURTHS", "ROWS", "SKIP", "SCALED", "STEPS", "DEFLATE", "MASKED", "ENDING")
PRECISIONS = ("fp32", "tf32", *HALF)
SHAPES = {"GPT-2 mlp": (2, 512, 3072, 768), "Llama-1B mlp": (2, 1024, 8192, 2048), "tied head": (2, 1024, 20000, 896)}


class Absent:
    """A GPU of some compute capability, as Triton asks for it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return device


@contextmanager
def compiled_only(capability: int) -> Iterator[list[tuple[str, dict[str, Any], Any]]]:
    """Compile what is launched inside, and note kernels, their compile-time arguments, and what became of them."""
    found: list[tuple[str, dict[str, Any], Any]] = []
    run = JITFunction.run

    def compile_it(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        one = run(self, *arguments, grid=grid, warmup=True, **options)
        found.append((self.__name__, {key: value for key, value in options.items() if key in FLAGS}, one))
        return one

    driver.set_active(Absent(capability))
    with mock.patch.object(JITFunction, "run", compile_it):
        yield found


def launches(precisions: list[str]) -> Iterator[tuple[str, str, partial[Any]]]:
    """Yield what is called, in which precision, and the call."""
    device = torch.device("cpu")
    for which in precisions:
        dtype = HALF.get(which, torch.float32)
        for name, check in kernels._checks().items():
            yield name, which, partial(check, dtype, device)
        for name, shape in SHAPES.items():
            for bars in ("none", "entries", "rows"):
                yield f"{name}, error bars: {bars}", which, partial(_product, shape, dtype, bars)
    for deflate in (True, False):
        yield "hutchinson_probes", "fp32", partial(kernels._covariance, deflate, 64, device)


def _product(shape: tuple[int, int, int, int], dtype: torch.dtype, bars: str) -> None:
    n, t, o, i = shape
    fourths = torch.empty(o, i) if bars == "entries" else None
    to = PowerSums(torch.empty(o, i), fourths, row_fourths=torch.empty(o) if bars == "rows" else None)
    left, right = torch.empty(n, t, o, dtype=dtype), torch.empty(n, t, i, dtype=dtype)
    kernels._done(dispatch.add_squares_of_products(left, right, to))


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills to memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return int(used["REG"]), int(used["STACK"])


def rows(capability: int, precisions: list[str]) -> list[list[str]]:
    """Compile everything, and return a row for each kernel and its compile-time arguments, once."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, which, call in launches(precisions):
        with precision(which), compiled_only(capability) as found:
            try:
                call()
            except Exception as error:
                lines[name, which, "fails"] = [name, which, f"fails: {type(error).__name__}: {str(error)[:120]}"]
        for kernel, flags, one in found:
            registers, stack = resources(one.asm["cubin"])
            shown = ", ".join(f"{key}={value}" for key, value in flags.items() if value not in (False, 0))
            cores = one.asm["ptx"].count("wgmma.mma_async") + one.asm["ptx"].count("mma.sync")
            numbers = [registers, stack, one.metadata.shared, cores]
            lines[name, which, kernel, shown] = [name, which, f"{kernel} {shown}".strip(), *map(str, numbers)]
    return list(lines.values())


def main() -> int:
    """Print the table for each capability, and return 1 if a kernel does not compile or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", nargs="+", type=int, default=[90])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/compiled-kernels.md")
    options = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in SETTINGS.items()):  # Triton reads them when it is imported
        command = [sys.executable, "-W", "ignore", "-m", "gpu.compiled", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **SETTINGS}, check=False).returncode
    header = ["operation", "precision", "kernel", "registers", "spilled", "shared memory", "tensor cores"]
    parts, bad = [], 0
    for capability in options.capability:
        lines = rows(capability, options.precision)
        most = SHARED.get(capability, USUAL) * 2**10
        wrong = [line for line in lines if len(line) < len(header) or int(line[5]) > most]
        bad += len(wrong)
        verdict = f"{len(lines)} variants, {len(wrong)} of which do not compile or fit."
        parts.append(f"## Compute capability {capability / 10:.1f}\n\n{verdict}\n\n{as_table(header, lines)}")
    head = setting(" ".join(["python -m gpu.compiled", *sys.argv[1:]]).replace(" --keep", ""), torch.device("cpu"))
    text = f"# Kernels compiled for GPUs, and not run\n\n{head}\n\n" + "\n\n".join(parts)
    keep("compiled-kernels", text) if options.keep else print(text)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
