"""How work is cut into programs."""

from __future__ import annotations

import functools

import torch


def ceil_div(a: int, b: int) -> int:
    """⌈a/b⌉.  (Triton's own takes microseconds.)"""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at the same time, at least.  Triton's interpreter on a CPU has one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def split_samples(tiles: int, samples: int, steps: int, slots: int, overhead: float = 4.0) -> int:
    """In how many parts to cut the samples, so that all multiprocessors work and none waits long for the last.

    A part costs its steps and `overhead` more: it begins with empty pipelines and ends with adding to memory.
    """

    def cost(parts: int) -> float:
        waves = ceil_div(tiles * parts, slots)
        return waves * (ceil_div(samples, parts) * steps + overhead)

    return min(range(1, min(samples, 64) + 1), key=cost)
