"""Trying out whether rows belong to samples: by what happens to them when cotangents of samples are scaled.

Backward is linear: if the cotangent of each sample is multiplied by a power of two of its own, so is every row of a
gradient that belongs to one sample.  A first pass leaves a few samples out altogether: their rows must be exactly zero.
A second pass has all samples, with other powers: every other row must be that of the first times the quotient of the
powers.  Powers of two are exact, and far apart, so even a small part of another sample shows.

Of a gradient only a sketch is kept: the length of each row, and its product with two random vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-1}
_EXPONENT = 8  # powers of two from 2^-8 to 2^8; fewer in half precision


class Sketch(NamedTuple):
    """What is kept of a gradient [n, ...]."""

    nonzero: Tensor  # [n]
    length: Tensor  # [n]
    products: Tensor  # [n, 2]
    tolerance: float
    floor: float  # what rounding near zero may do to a product


class Sketches:
    """Made of gradients; random vectors are drawn once for each width."""

    def __init__(self) -> None:
        self._vectors: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def of(self, rows: Tensor) -> Sketch:
        """Of the gradient's rows."""
        flat = rows.reshape(len(rows), rows.shape[1:].numel())
        wide = flat if flat.dtype == torch.float64 else flat.float()
        floor = 6e-8 * flat.shape[1] ** 0.5 if rows.dtype == torch.float16 else 0.0
        largest = torch.maximum(wide.amax(1), -wide.amin(1)) if flat.shape[1] else wide.new_zeros(len(wide))
        length = torch.maximum(torch.linalg.vector_norm(wide, dim=1), largest)  # very small numbers have no squares
        products = torch.stack([wide @ vector for vector in self._of_width(wide)], 1)
        return Sketch(largest != 0, length, products, _TOLERANCE[rows.dtype], floor)  # NaN is not zero

    def _of_width(self, wide: Tensor) -> Tensor:
        """Two random vectors, [2, width]; not of signs, which are orthogonal to sums and differences of few entries."""
        width, dtype, device = key = wide.shape[1], wide.dtype, wide.device
        if key not in self._vectors:
            generator = torch.Generator(device).manual_seed(0)
            self._vectors[key] = torch.randn((2, width), generator=generator, device=device, dtype=dtype)
        return self._vectors[key]


class Trial:
    """Two cotangents, and what must be true of the gradients that they lead to."""

    def __init__(self, logits: Tensor) -> None:
        samples, device = logits.shape[0], logits.device
        generator = torch.Generator().manual_seed(samples)
        left_out = torch.randperm(samples, generator=generator)[: max(1, samples // 8) if samples > 1 else 0]
        self.included = torch.ones(samples, dtype=torch.bool)
        self.included[left_out] = False
        largest = _EXPONENT if logits.dtype.itemsize >= 4 else 2
        first, second = torch.randint(-largest, largest + 1, (2, samples), generator=generator).double()
        self.included = self.included.to(device)
        self.quotient = torch.exp2(second - first).to(device)
        self._logits, self._seed = logits.detach(), samples
        self._scales = torch.exp2(first).to(device) * self.included, torch.exp2(second).to(device)

    def cotangents(self) -> Iterator[Tensor]:
        """The same noise with other scales; one after the other, since for many classes they are large."""
        logits = self._logits
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        for scale in self._scales:
            generator = torch.Generator(logits.device).manual_seed(self._seed)
            noise = torch.randn(logits.shape, generator=generator, device=logits.device, dtype=dtype)
            yield noise.mul_(scale.to(dtype).view(-1, *[1] * (logits.ndim - 1))).to(logits.dtype)

    def judge(self, first: Sketch, second: Sketch) -> tuple[bool, bool]:
        """Whether the rows are the samples, and whether there was anything to be seen."""
        outside = first.nonzero & ~self.included
        quotient = self.quotient.to(first.length.dtype)
        difference = (second.products - quotient[:, None] * first.products).abs().amax(1)
        allowed = first.tolerance * (quotient * first.length + second.length) + first.floor * (1 + quotient)
        wrong = outside.any() | ((difference > allowed) & self.included).any()
        return not bool(wrong), bool(second.nonzero.any())
