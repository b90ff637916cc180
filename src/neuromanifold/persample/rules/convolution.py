"""Convolutions in one, two and three dimensions, and transposed ones, with every option of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import mul

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from neuromanifold.kernels import dispatch
from neuromanifold.kernels.values import Windows
from neuromanifold.persample.gradients import (
    Dense,
    Form,
    PowerSums,
    Product,
    ranges,
    root_mean_square,
    row_limit,
    tile_size,
)
from neuromanifold.persample.rules.registry import Call, NotApplicableError, rule

_FEW = 100  # positions


@dataclass
class Convolution(Form):
    """∂/∂W = Σ_t g_t ⊗ (the window of x at t), for x [n, m, c, *space] and g [n, m, o, *space], summed over m, too.

    One kernel squares all of them where there is one.  Else, on a CPU, torch computes the weight gradient of several
    samples at once, as groups of one convolution.  For small images, windows are written out for a few samples at a
    time and multiplied.
    """

    x: Tensor
    g: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    def __post_init__(self) -> None:
        self.samples, self.device = self.x.shape[0], self.x.device
        self.slid, self.fixed = (self.g, self.x) if self.transposed else (self.x, self.g)
        """What windows are taken of, [n, m, c, *space] (a transposed one's output), and what multiplies them."""
        self.windows = Windows(tuple(self.shape[2:]), self.stride, self.padding, self.dilation, self.groups)
        """The geometry of the windows, in the form that kernels take."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n as the gradient of a single sample that has all rows."""
        g = self.g.to(weights.dtype) * weights.view(-1, *[1] * (self.g.ndim - 1))
        x, g = (t.flatten(0, 1)[None] for t in (self.x, g))
        return replace(self, x=x, g=g).gradients(0, 1, weights.dtype)[0]

    def magnitude(self) -> Tensor:
        """Return the root mean square that the gradients have if positions are uncorrelated."""
        positions = self.fixed[0:1, :, 0].numel()
        size: Tensor = root_mean_square(self.x) * root_mean_square(self.g) * positions**0.5
        return size

    @property
    def _by_windows(self) -> bool:
        """Whether windows are written out: on a GPU, and where there are few, for which torch's kernel is slow."""
        positions = self.fixed.shape[3:].numel()
        return self.groups == 1 and (self.device.type != "cpu" or positions <= _FEW)

    @override
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if self._by_windows and start < stop:
            return self._product(start, stop).gradients(0, stop - start, dtype)
        if self.device.type != "cpu" and self.groups > 1 and start < stop:
            apart = self._groups_as_samples(start, stop)
            return apart.gradients(0, apart.samples, dtype).view(stop - start, *self.shape)
        return self._weight_gradient(self.x[start:stop].to(dtype), self.g[start:stop].to(dtype), self.shape)

    def _groups_as_samples(self, start: int, stop: int) -> Convolution:
        """Return each group of each sample as a sample: for many groups, torch's kernel is slow on a GPU."""
        x, g = (
            torch.unflatten(t[start:stop], 2, (self.groups, -1)).movedim(2, 1).flatten(0, 1)  # [n·groups, m, c, *space]
            for t in (self.x, self.g)
        )
        return replace(self, x=x, g=g, shape=torch.Size((self.shape[0] // self.groups, *self.shape[1:])), groups=1)

    def add_squares(self, to: PowerSums) -> None:
        """Use a kernel, written-out windows, or torch's weight gradient; large weights on a CPU by blocks of rows."""
        if dispatch.add_squares_of_convolution(self.slid, self.fixed, to, self.windows):
            return
        if self._by_windows:
            for start, stop in self.product_pieces():
                self._product(start, stop).add_squares(to)
        elif self.shape.numel() <= row_limit(self.device) or self.groups > 1:
            super().add_squares(to)
        else:
            self._add_squares_by_rows(to)

    def _add_squares_by_rows(self, to: PowerSums) -> None:
        dtype, rows = to.squares.dtype, max(1, row_limit(self.device) // self.shape[1:].numel())
        for row in range(0, self.shape[0], rows):
            block, stop = to.narrow(row, row + rows), min(row + rows, self.shape[0])
            shape = torch.Size((stop - row, *self.shape[1:]))
            for n in range(self.samples):
                x, g = self.x[n : n + 1].to(dtype), self.g[n : n + 1].to(dtype)
                x, g = (x[:, :, row:stop], g) if self.transposed else (x, g[:, :, row:stop])
                block.add(self._weight_gradient(x, g, shape).mul_(to.factor))

    def _weight_gradient(self, x: Tensor, g: Tensor, shape: torch.Size) -> Tensor:
        """Return the weight gradient of each sample, [n, *shape], by torch with samples as groups."""
        n = x.shape[0]
        if not n:
            return torch.zeros(0, *shape, dtype=x.dtype, device=x.device)
        weight = torch.empty((), dtype=x.dtype, device=x.device).expand(n * shape[0], *shape[1:])
        found = torch.ops.aten.convolution_backward(
            g.transpose(0, 1).flatten(1, 2),  # [m, n·o, *space]
            x.transpose(0, 1).flatten(1, 2),
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self._output_padding(),
            n * self.groups,
            [False, True, False],
        )[1]
        gradients: Tensor = found.view(n, *shape)
        return gradients

    def _output_padding(self) -> list[int]:
        """Return the output padding of a transposed convolution, from the sizes of its input and output."""
        if not self.transposed:
            return [0] * len(self.stride)
        found = []
        for d, size in enumerate(self.g.shape[3:]):
            covered = (self.x.shape[3 + d] - 1) * self.stride[d] + self.dilation[d] * (self.shape[2 + d] - 1) + 1
            found.append(size + 2 * self.padding[d] - covered)
        return found

    def _product(self, start: int, stop: int) -> Product:
        """Return the same gradients with windows written out; those of a transposed one are of its output."""
        slid, fixed = self.slid[start:stop], self.fixed[start:stop]
        n, m = slid.shape[:2]
        space = fixed.shape[3:]
        slid = _pad(slid.flatten(0, 1), self.padding)
        kernel, steps = self.shape[2:], slid.stride()
        windows = slid.as_strided(
            (n * m, slid.shape[1], *kernel, *space),
            (*steps[:2], *map(mul, steps[2:], self.dilation), *map(mul, steps[2:], self.stride)),
        ).reshape(n, m, slid.shape[1] * kernel.numel(), space.numel())  # [n, m, c·k, t]
        left = fixed.flatten(3).transpose(2, 3).flatten(1, 2)  # [n, m·t, o]
        return Product(left, windows.transpose(2, 3).flatten(1, 2), self.shape, turned=self.transposed)

    @override
    def product_of(self, start: int, stop: int) -> Product:
        product = self._product(start, stop)
        if self.groups > 1:  # [n, t, G·d] as [n, G, t, d]
            left, right = (t.view(*t.shape[:2], self.groups, -1).movedim(2, 1) for t in (product.left, product.right))
            product = Product(left, right, self.shape, turned=self.transposed)
        return product

    @override
    def product_with(self, start: int, stop: int, matrix: Tensor, constant: Tensor | None) -> Product | None:
        """Multiply the windows as a convolution with the columns of the matrix [c·k, m] as filters, on a CPU."""
        if self.groups > 1 or self.device.type != "cpu":
            return None
        slid, fixed = self.slid[start:stop], self.fixed[start:stop]
        image = slid.flatten(0, 1).to(matrix.dtype)
        if image.ndim == 4:
            image = image.contiguous(memory_format=torch.channels_last)
        filters, none = matrix.mT.reshape(-1, slid.shape[2], *self.shape[2:]), [0] * len(self.stride)
        options = self.stride, self.padding, self.dilation, False, none, 1
        found = torch.convolution(image, filters, constant, *options)
        for d, size in enumerate(fixed.shape[3:]):  # a transposed one may leave out the last windows
            found = found.narrow(2 + d, 0, size)
        right = found.view(*slid.shape[:2], *found.shape[1:])
        left, right = (side.flatten(3).transpose(2, 3).flatten(1, 2) for side in (fixed, right))  # [n, m·t, ...]
        return Product(left, right, self.shape, turned=self.transposed)

    @override
    def product_pieces(self) -> Iterator[tuple[int, int]]:
        one = self.slid[:1].numel() * self.shape[2:].numel()
        return ranges(self.samples, tile_size(self.device) // max(1, one))


@rule(*(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), extra_dims=True)
def convolution(call: Call) -> dict[str, Form]:
    """Return the weight's gradients as a Convolution, and the bias's as sums over positions."""
    module = call.module
    assert isinstance(module, nn.modules.conv._ConvNd)
    space = len(module.kernel_size)
    if call.g.ndim < space + 2:
        raise NotApplicableError("The input of the convolution is an image without a batch dimension.")
    x, g = _with_rows(call.x, space), _with_rows(call.g, space)  # [n, m, c, *space]
    found: dict[str, Form] = {}
    if "weight" in call.wanted:
        x, padding = _padded(module, x)
        options = (tuple(module.stride), padding, tuple(module.dilation), module.transposed, module.groups)
        weight = Convolution(x, g, module.weight.shape, *options)
        dense = dispatch.depthwise_gradients(weight.slid, weight.fixed, weight.windows)
        found["weight"] = weight if dense is None else Dense(dense.view(weight.samples, *weight.shape))
    if "bias" in call.wanted:
        found["bias"] = Dense.summed(g, (1, *range(3, g.ndim)))
    return found


def _with_rows(values: Tensor, space: int) -> Tensor:
    """Return [n, ..., c, *space] as [n, m, c, *space]; n may be 0."""
    last = values.shape[-space - 1 :]
    return values.reshape(values.shape[0], values.shape[1 : -space - 1].numel(), *last)


def _pad(values: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor with zeros added on both sides of each dimension of space."""
    amounts = [amount for size in reversed(padding) for amount in (size, size)]
    return functional.pad(values, amounts).contiguous() if any(amounts) else values.contiguous()


def _padded(module: nn.modules.conv._ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input with padding that is not zeros, and the zero padding that the convolution adds."""
    none = (0,) * len(module.kernel_size)
    if module.padding == "valid":
        return x, none
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, tuple(module.padding)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    amounts = module._reversed_padding_repeated_twice
    padded = functional.pad(x.flatten(0, 1), amounts, mode)
    return padded.view(*x.shape[:2], *padded.shape[1:]), none
