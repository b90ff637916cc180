"""Forms of per-sample gradients: the gradients themselves, and sums of outer products."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import is_readable, message, promoted
from neuromanifold.kernels import dispatch
from neuromanifold.kernels.values import BOUND, PowerSums

# How many numbers of single samples' gradients are held at a time: of several samples, what stays in a CPU's nearer
# cache; of one sample, what stays in the large one; on a GPU, what keeps it busy.
CPU_TILE, CPU_ROWS, GPU_TILE = 2**20, 2**22, 2**25
_ORDINARY = 4  # inputs of a size from 2⁻⁴ to 2⁴ need no unit: their fourth powers lose little of float32's range
_LEFT_BOUND = 2.0**50  # largest l² in the unit: l⁴ is in float32's range, and so is its product with r⁴


class Form(ABC):
    """The gradients g_n of some samples with respect to one parameter."""

    samples: int
    shape: torch.Size  # of the parameter
    device: torch.device

    fourths_are_costly: ClassVar[bool] = True
    """Whether fourth powers cost so much more than squares that only some batches take them."""

    @abstractmethod
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the gradients of the samples `start` to `stop - 1`, [stop - start, ...], as a new tensor."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """Return about the root mean square of the gradients: right to a power of two or so."""

    def add_squares(self, to: PowerSums) -> None:
        """Add Σ_n g_n² to the sums, and fourth powers where they are kept."""
        for start, stop in self.pieces():
            to.add(self.gradients(start, stop, to.squares.dtype).mul_(to.factor))

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """Return ‖g_n‖² for each sample, [n]."""
        norms = [
            self.gradients(start, stop, dtype).reshape(stop - start, self.shape.numel()).square().sum(1)
            for start, stop in self.pieces()
        ]
        return torch.cat(norms) if norms else torch.zeros(0, dtype=dtype, device=self.device)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n for weights c [n], in their precision."""
        total = torch.zeros(self.shape, dtype=weights.dtype, device=self.device)
        for start, stop in self.pieces():
            total += torch.tensordot(weights[start:stop], self.gradients(start, stop, weights.dtype), 1)
        return total

    def product_of(self, start: int, stop: int) -> Product | None:
        """Return the gradients of the samples `start` to `stop - 1` as a Product; None where they are no such sum."""
        del start, stop
        return None

    def product_with(self, start: int, stop: int, matrix: Tensor, constant: Tensor | None) -> Product | None:
        """Return `product_of` with right @ matrix + constant for the right side; None where that saves nothing."""
        del start, stop, matrix, constant
        return None

    def part(self, dim: int, start: int, length: int) -> Form:
        """Return the gradients of a part of the parameter: `length` entries of dimension `dim`, from `start` on."""
        raise NotImplementedError(f"A part of {type(self).__name__} gradients.")

    def product_pieces(self) -> Iterator[tuple[int, int]]:
        """Return ranges of samples that `product_of` should be asked for: all at once where factors are at hand."""
        return ranges(self.samples, self.samples)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Return ranges of samples whose gradients together make about one tile."""
        return ranges(self.samples, tile_size(self.device) // max(1, self.shape.numel()))


@dataclass
class Dense(Form):
    """The gradients themselves, [n, ...]: a sample first, then the shape of the parameter."""

    values: Tensor
    fourths_are_costly: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.samples, self.shape, self.device = self.values.shape[0], self.values.shape[1:], self.values.device

    @classmethod
    def summed(cls, values: Tensor, dims: tuple[int, ...]) -> Dense:
        """Return the sum of values [n, ...] over dimensions, in float32 or better; those of size one are dropped."""
        dtype, alone = promoted(values.dtype), values.squeeze(dims)
        return cls(alone.to(dtype) if alone.ndim == values.ndim - len(dims) else values.sum(dims, dtype=dtype))

    @override
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self.values[start:stop].to(dtype, copy=True)

    @override
    def part(self, dim: int, start: int, length: int) -> Dense:
        return Dense(self.values.narrow(dim + 1, start, length))

    def values_for(self, parameter: Tensor) -> Tensor:
        """Return the gradients in the parameter's shape, in float64 if it has that, else in float32."""
        if self.shape.numel() != parameter.shape.numel():
            got = f"{list(self.shape)} for each sample"
            advice = "A rule's Dense has the samples first, then the parameter's shape."
            raise ValueError(message("gradients", f"of the parameter's shape {list(parameter.shape)}", got, advice))
        dtype = promoted(parameter.dtype)
        values = self.values if self.shape == parameter.shape else self.values.reshape(self.samples, *parameter.shape)
        return values if values.dtype == dtype else values.to(dtype)

    @override
    def magnitude(self) -> Tensor:
        return root_mean_square(self.values)


@dataclass
class Product(Form):
    """Σ_t left[n, t, o] right[n, t, i], viewed as the parameter's shape.

    With a dimension for groups, [n, G, t, o] and [n, G, t, i], blocks of the parameter [G, o, i] have factors of their
    own.  One side holds gradients of outputs, which differ from pass to pass, the other inputs, which do not.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size = field(default_factory=torch.Size)
    turned: bool = False  #: gradients of outputs are on the right, as of a weight stored as [i, o]

    def __post_init__(self) -> None:
        self.samples, self.device = self.left.shape[0], self.left.device
        self.shape = self.shape or torch.Size((self.left.shape[-1], self.right.shape[-1]))
        self.single = self.left.ndim == 3 and self.left.shape[1] == 1
        """Whether each sample has one position: then the square of the product is the product of the squares."""

    @override
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        left, right = self.left[start:stop].to(dtype), self.right[start:stop].to(dtype)
        return (left.mT @ right).view(stop - start, *self.shape)

    @override
    def product_of(self, start: int, stop: int) -> Product:
        whole = (start, stop) == (0, self.samples)
        return self if whole else replace(self, left=self.left[start:stop], right=self.right[start:stop])

    @override
    def part(self, dim: int, start: int, length: int) -> Form:
        left, right = self.left, self.right
        if self.shape != (left.shape[-1], right.shape[-1]):
            return super().part(dim, start, length)
        left, right = (left, right.narrow(-1, start, length)) if dim else (left.narrow(-1, start, length), right)
        return Product(left, right, turned=self.turned)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_n c_n g_n by one product over all samples and positions."""
        total: Tensor | None = None
        for start, stop in ranges(self.samples, tile_size(self.device) // max(1, self.left[:1].numel())):
            scaled = self.left[start:stop] * weights[start:stop].view(-1, *[1] * (self.left.ndim - 1))
            left, right = scaled.to(weights.dtype), self.right[start:stop].to(weights.dtype)
            left, right = (t.movedim(0, -3).flatten(-3, -2) for t in (left, right))  # [G, n·t, o]
            if total is None:
                total = left.mT @ right
            else:
                (total.addmm_ if total.ndim == 2 else total.baddbmm_)(left.mT, right)
        if total is None:
            return torch.zeros(self.shape, dtype=weights.dtype, device=self.device)
        return total.view(self.shape)

    def magnitude(self) -> Tensor:
        """Return the root mean square that the gradients have if positions are uncorrelated."""
        size: Tensor = root_mean_square(self.left) * root_mean_square(self.right) * self.left.shape[-2] ** 0.5
        return size

    def add_squares(self, to: PowerSums) -> None:
        """Add (left²)ᵀ(right²) if there is one position; else use a kernel, or write out and square tiles."""
        ins = self.right.shape[-1]
        outs = self.shape.numel() // ins if ins else 0  # of all groups
        if not to.takes_rows(outs):
            super().add_squares(to)
            return
        flat = to.view(outs, ins)
        if self.single:
            add_squares_of_rank_one(self.left[:, 0], self.right[:, 0], flat, tile_size(self.device))
        elif not dispatch.add_squares_of_products(self.left, self.right, flat):
            self._add_squares_by_tiles(flat)

    def _add_squares_by_tiles(self, to: PowerSums) -> None:
        """Write out a few samples at a time; for a large weight, a few rows of one sample."""
        (outs, ins), dtype = to.squares.shape, to.squares.dtype
        whole_rows = to.row_fourths is None or len(to.row_fourths) == outs
        if outs * ins > row_limit(self.device) and self.left.ndim == 3 and whole_rows:
            self._add_squares_by_rows(to, max(1, row_limit(self.device) // ins))
            return
        for start, stop in self.pieces():
            left, right = self.left[start:stop].to(dtype), self.right[start:stop].to(dtype)
            tile = (left * to.factor if left.numel() <= right.numel() else left).mT @ (
                right if left.numel() <= right.numel() else right * to.factor
            )
            to.add(tile.view(stop - start, outs, ins))

    def _add_squares_by_rows(self, to: PowerSums, rows: int) -> None:
        outs, ins = to.squares.shape
        buffer = torch.empty(1, min(rows, outs), ins, dtype=to.squares.dtype, device=self.device)
        for n in range(self.samples):
            left, right = self.left[n].to(buffer.dtype) * to.factor, self.right[n].to(buffer.dtype)
            for start in range(0, outs, rows):
                tile = buffer[:, : min(rows, outs - start)]
                torch.mm(left[:, start : start + rows].T, right, out=tile[0])
                to.narrow(start, start + rows).add(tile)

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """Return Σ_tt' (left_t·left_t')(right_t·right_t') where positions are fewer than features; else use tiles."""
        positions, outs, ins = self.left.shape[-2], self.left.shape[-1], self.right.shape[-1]
        if self.single:
            found = torch.ones((), dtype=dtype, device=self.device)
            for side in (self.left, self.right):  # of whose numbers no copies in float32 are made
                found = found * torch.linalg.vector_norm(
                    side[:, 0], dim=1, dtype=torch.promote_types(side.dtype, dtype)
                )
            return found.square().to(dtype)
        if positions * (outs + ins) > outs * ins:
            return super().squared_norms(dtype)
        norms = []
        step = tile_size(self.device) // max(1, self.left.shape[1:-2].numel() * positions**2)
        for start, stop in ranges(self.samples, step):
            left, right = self.left[start:stop].to(dtype), self.right[start:stop].to(dtype)
            norms.append(((left @ left.mT) * (right @ right.mT)).flatten(1).sum(1))
        return torch.cat(norms) if norms else torch.zeros(0, dtype=dtype, device=self.device)


@dataclass
class SquaredProduct(Form):
    """Squares of products with one position, summed over cotangents: Σ_c left_c² [n, o], multiplied by right² once."""

    squares: Tensor  # Σ_c (left_c/unit)², [n, o]
    fourths: Tensor  # Σ_c weight_c (left_c/unit)⁴
    right: Tensor  # [n, i]
    unit: Tensor  # a power of two; 0 as long as all have been zero
    shape: torch.Size
    unit_is_known: bool = False  # known to be nonzero; never on a GPU, which would have to be synchronized
    random: bool = False  # whether a cotangent had a weight

    @classmethod
    def of(cls, product: Product, dtype: torch.dtype) -> SquaredProduct:
        """Return a sum without any cotangent yet, for products that share this one's right factor."""
        left, right = product.left[:, 0], product.right[:, 0]
        zeros = torch.zeros(left.shape, dtype=dtype, device=left.device)
        return cls(zeros, zeros.clone(), right, torch.zeros((), dtype=dtype, device=left.device), product.shape)

    def __post_init__(self) -> None:
        self.samples, self.device = self.right.shape[0], self.right.device

    def goes_on_with(self, product: Product) -> bool:
        """Return whether the product of another cotangent has the same right factor, in the same memory."""
        return self.right.data_ptr() == product.right.data_ptr() and self.right.shape == product.right[:, 0].shape

    def add_cotangents(self, left: Tensor, scale: float, weight: float) -> None:
        """Add the squares of the left factors [..., n, o] of one or several cotangents; `left` is not changed."""
        if not self.unit_is_known:
            size = (root_mean_square(left) / scale).to(self.unit.dtype)
            first = (self.unit == 0) & (size > 0)  # of the cotangents that reach this layer
            self.unit = torch.where(first, torch.exp2(torch.log2(size).round()), self.unit)
            self.unit_is_known = is_readable(self.unit) and bool(self.unit)
        self.random |= weight > 0
        unit = self.unit if self.unit_is_known else torch.where(self.unit == 0, 1.0, self.unit)
        scaled = left.to(self.squares.dtype) / (scale * unit)
        if left.ndim == 2 and not weight:
            self.squares.addcmul_(scaled, scaled)
            return
        squares = scaled.square_()
        self.squares += squares if left.ndim == 2 else squares.sum(0)
        if weight:
            squares.square_()
            self.fourths.add_(squares if left.ndim == 2 else squares.sum(0), alpha=weight)

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Raise: only the squares of these gradients are known."""
        raise NotImplementedError

    def magnitude(self) -> Tensor:
        """Return the root mean square of the left factors times that of the right one."""
        return self.squares.mean().sqrt() * self.unit * root_mean_square(self.right)

    @override
    def add_squares(self, to: PowerSums) -> None:
        right = self.right.to(to.squares.dtype) * (self.unit / to.unit)
        add_product_of_squares(self.squares, self.fourths, right.square_(), to.view(*self.shape))


def add_squares_of_rank_one(left: Tensor, right: Tensor, to: PowerSums, numbers: int) -> None:
    """Add Σ_n (l_n ⊗ r_n)² [o, i], and fourth powers, for l [n, o] and r [n, i]; about `numbers` numbers at a time.

    As (l ⊗ r)² = l² ⊗ r², the squares of all samples, each of which has one position, are a product of matrices.
    On a GPU, squares of bfloat16 stay in it, as products of an ordinary backward pass do: rounding them adds as much to
    the error as rounding l and r has made.  Elsewhere all is done in the precision of the sums.

    Fourth powers of small inputs r would underflow, and those of l in the gradients' unit overflow: r is taken in a
    unit of its own size, and l in the rest of that of the gradients.
    """
    (outs, ins), dtype = to.squares.shape, left.dtype if _keeps_bfloat16(left, right) else to.squares.dtype
    factor: float | Tensor = to.factor
    if to.fourths is not None and (unit := _unit_of(right)) is not None:
        factor, right = factor * unit, right / unit
    right2 = right.to(dtype).square()
    step = max(1, numbers // max(1, len(left), ins)) if to.row_fourths is None or len(to.row_fourths) == outs else outs
    for start in range(0, outs, step):
        part = left[:, start : start + step].to(dtype)
        left2 = part.square() if to.fourths is None and factor == 1.0 else (part * factor).square_()
        add_product_of_squares(left2, None, right2, to.narrow(start, start + step) if step < outs else to)


def add_product_of_squares(left2: Tensor, left4: Tensor | None, right2: Tensor, to: PowerSums) -> None:
    """Add (l²)ᵀ(r²) [o, i], and fourth powers; l² and l⁴ [n, o] may be sums over cotangents."""
    _add_product(left2, right2, to.squares, to.unit**2)
    if to.row_fourths is not None:
        norms2 = right2.sum(1, keepdim=True, dtype=to.row_fourths.dtype)
        if left4 is None:
            to.add_row_norms(left2 * norms2)
        else:
            powers = left4.T @ norms2[:, 0].clamp_(max=BOUND**0.5).square_()
            parts = len(powers) // len(to.row_fourths)  # (Σ_k a_k)² <= K Σ_k a_k²
            to.row_fourths.add_(powers.view(len(to.row_fourths), parts).sum(1), alpha=parts * to.weight)
    if to.fourths is not None:
        left4 = left2.clamp(max=_LEFT_BOUND).square() if left4 is None else left4
        _add_product(left4, right2.square(), to.fourths, to.weight)


def _unit_of(values: Tensor) -> float | Tensor | None:
    """Return a power of two near the size of some numbers; None for one near 1, where looking costs nothing."""
    size = root_mean_square(values)
    if is_readable(size):
        power = math.frexp(float(size))[1]  # 0 for zero, infinity and NaN
        return None if abs(power) <= _ORDINARY else math.ldexp(0.5, power)
    nearest = torch.exp2(torch.log2(size).round())
    return torch.where((nearest > 0) & nearest.isfinite(), nearest, 1.0)


def _keeps_bfloat16(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cuda"


def _add_product(left: Tensor, right: Tensor, to: Tensor, factor: float) -> None:
    """Add leftᵀ right times a factor, in the precision of the product."""
    if left.dtype == to.dtype:
        to.addmm_(left.T, right, alpha=factor)
    else:
        to.add_(left.T @ right, alpha=factor)


def ranges(samples: int, step: int) -> Iterator[tuple[int, int]]:
    """Return the ranges (start, stop) of `step` samples each, at least one, that make up all samples."""
    step = max(1, step)
    return ((start, min(start + step, samples)) for start in range(0, samples, step))


def tile_size(device: torch.device) -> int:
    """Return how many numbers of several samples are held at a time."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def row_limit(device: torch.device) -> int:
    """Return how many numbers of a single sample are held at a time."""
    return max(CPU_TILE, CPU_ROWS) if device.type == "cpu" else GPU_TILE


def root_mean_square(values: Tensor) -> Tensor:
    """Return √(mean of squares), evaluated in float32 or better; 0 for an empty tensor."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    dtype = promoted(values.dtype)
    if values.device.type == "cpu" and values.is_contiguous() and values.dtype == dtype:
        norm = torch.dot(values.view(-1), values.view(-1)).sqrt_()  # several times as fast
    else:
        norm = torch.linalg.vector_norm(values, dtype=dtype)
    size: Tensor = norm / values.numel() ** 0.5
    return size
