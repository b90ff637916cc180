"""How work is divided among the programs of a launch."""

from __future__ import annotations

import functools

import torch


def ceil_div(a: int, b: int) -> int:
    """Return ⌈a/b⌉; `triton.cdiv` takes microseconds."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 4 on a CPU, where Triton is interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def split_samples(tiles: int, samples: int, steps: int, slots: int, overhead: float = 4.0) -> int:
    """Return in how many parts to divide the samples, so that all multiprocessors are busy to the end.

    A part costs its steps and `overhead` more: it begins with empty pipelines and ends with adding to memory.
    """

    def cost(parts: int) -> float:
        waves = ceil_div(tiles * parts, slots)
        return waves * (ceil_div(samples, parts) * steps + overhead)

    return min(range(1, min(samples, 64) + 1), key=cost)
