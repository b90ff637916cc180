"""Gradients of single samples, in the form in which a layer has them: never as one tensor [samples, *parameter].

A layer's rule turns its input and the gradient of its output into one of these for each of its parameters.  What is
done with them (squares, fourth powers, norms) is done here, a few samples and a tile of the parameter at a time.

    Dense        the gradients themselves [n, ...]: biases, scales, everything small
    Product      Σ_t left_t ⊗ right_t: linear layers, t the positions of a sample
    Rows         Σ_t g_t into row id_t: embeddings
    Convolution  Product with the windows of the input, which are not written out

Letters: n sample, t position, o/i out/in features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

# How many numbers of single samples' gradients are held at a time: of several samples, what stays in a CPU's nearer
# cache; of one sample, what stays in the large one; on a GPU, what keeps it busy.
CPU_TILE, CPU_ROWS, GPU_TILE = 2**20, 2**22, 2**25


@dataclass(frozen=True)
class Accumulators:
    """Where squares of one parameter go: Σ g², and in units of `unit` weighted Σ g⁴ for the error bars."""

    squares: Tensor
    fourths: Tensor | None = None
    unit: float = 1.0
    weight: float = 1.0  # of these fourth powers
    scale: float = 1.0  # the gradients are so many times too large

    @property
    def factor(self) -> float:
        """What gradients are multiplied by before they are squared."""
        return 1 / (self.scale * self.unit)

    def narrow(self, start: int, stop: int) -> Accumulators:
        """Those of some rows of the parameter."""
        return self._with(lambda tensor: tensor[start:stop])

    def view(self, *shape: int) -> Accumulators:
        """The same numbers in another shape."""
        return self._with(lambda tensor: tensor.view(shape))

    def _with(self, change: Callable[[Tensor], Tensor]) -> Accumulators:
        fourths = None if self.fourths is None else change(self.fourths)
        return replace(self, squares=change(self.squares), fourths=fourths)

    def add(self, gradients: Tensor) -> None:
        """Take gradients [n, *shape], already multiplied by `factor`; they are overwritten."""
        if len(gradients) == 1:
            one = gradients[0]
            self.squares.addcmul_(one, one, value=self.unit**2)
            if self.fourths is not None:
                one.mul_(one)
                self.fourths.addcmul_(one, one, value=self.weight)
            return
        squares = gradients.mul_(gradients)
        self.squares.add_(squares.sum(0), alpha=self.unit**2)
        if self.fourths is not None:
            self.fourths.add_(squares.mul_(squares).sum(0), alpha=self.weight)


class Form(ABC):
    """The gradients of some samples with respect to one parameter."""

    samples: int
    shape: torch.Size
    """Of the parameter."""

    thins: ClassVar[bool] = True
    """Whether fourth powers cost so much that they should be taken now and then only."""

    @abstractmethod
    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Those of a few samples, [stop - start, *shape], as a new tensor."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """About how large the gradients are."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are."""

    def add_squares(self, to: Accumulators) -> None:
        """Σ_n g_n², and fourth powers."""
        for start, stop in self.pieces():
            to.add(self.gradients(start, stop, to.squares.dtype).mul_(to.factor))

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """‖g_n‖², [n]."""
        norms = [self.gradients(*piece, dtype).flatten(1).square().sum(1) for piece in self.pieces()]
        return torch.cat(norms) if norms else torch.zeros(0, dtype=dtype, device=self.device)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of samples whose gradients together make about one tile."""
        step = max(1, tile_size(self.device) // max(1, self.shape.numel()))
        return ((start, min(start + step, self.samples)) for start in range(0, self.samples, step))


def tile_size(device: torch.device) -> int:
    """How many numbers make a tile."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def row_limit(device: torch.device) -> int:
    """How many numbers of a single sample make a tile."""
    return max(CPU_TILE, CPU_ROWS) if device.type == "cpu" else GPU_TILE


@dataclass
class Dense(Form):
    """The gradients themselves, [n, *shape]."""

    values: Tensor
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.samples, self.shape = self.values.shape[0], self.values.shape[1:]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.values.device

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """A part of them."""
        return self.values[start:stop].to(dtype, copy=True)

    def magnitude(self) -> Tensor:
        """Their root mean square."""
        return root_mean_square(self.values)


@dataclass
class Product(Form):
    """Σ_t left[n, t, o] right[n, t, i], viewed as the parameter's shape.

    With a dimension for groups, [n, G, t, o] and [n, G, t, i], blocks of the parameter [G, o, i] have factors of their
    own.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size = field(default_factory=torch.Size)

    def __post_init__(self) -> None:
        if self.left.ndim == 3:
            self.left, self.right = self.left[:, None], self.right[:, None]
        self.samples = self.left.shape[0]
        self.shape = self.shape or torch.Size((self.left.shape[3], self.right.shape[3]))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.left.device

    @property
    def single(self) -> bool:
        """One position for each sample: then the square of the product is the product of the squares."""
        return self.left.shape[2] == 1 and self.left.shape[1] == 1

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """A batched product."""
        left, right = self.left[start:stop].to(dtype), self.right[start:stop].to(dtype)
        return (left.mT @ right).view(stop - start, *self.shape)

    def magnitude(self) -> Tensor:
        """As if positions added up at random."""
        size: Tensor = root_mean_square(self.left) * root_mean_square(self.right) * self.left.shape[2] ** 0.5
        return size

    def add_squares(self, to: Accumulators) -> None:
        """(left²)ᵀ(right²) if there is one position; else sample by sample, rows by rows, each tile squared at once."""
        groups, outs, ins = self.left.shape[1], self.left.shape[3], self.right.shape[3]
        dtype, flat = to.squares.dtype, to.view(groups * outs, ins)
        if self.single:
            squares = (self.left[:, 0, 0].to(dtype) * to.factor).square_()
            add_product_of_squares(squares, None, self.right[:, 0, 0].to(dtype), flat)
            return
        size = groups * outs * ins
        if size <= row_limit(self.device) or groups > 1:
            for start, stop in self.pieces():
                left, right = self.left[start:stop].to(dtype), self.right[start:stop].to(dtype)
                tile = (left * to.factor if left.numel() <= right.numel() else left).mT @ (
                    right if left.numel() <= right.numel() else right * to.factor
                )
                flat.add(tile.view(stop - start, groups * outs, ins))
            return
        rows = max(1, row_limit(self.device) // ins)
        buffer = torch.empty(1, min(rows, outs), ins, dtype=dtype, device=self.device)
        for n in range(self.samples):
            left, right = self.left[n, 0].to(dtype) * to.factor, self.right[n, 0].to(dtype)
            for start in range(0, outs, rows):
                tile = buffer[:, : min(rows, outs - start)]
                torch.mm(left[:, start : start + rows].T, right, out=tile[0])
                flat.narrow(start, start + rows).add(tile)

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """Σ_tt' (left_t·left_t')(right_t·right_t') where positions are fewer than features; else by tiles."""
        positions, outs, ins = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        if self.single:
            norms = [side[:, 0, 0].to(dtype).square().sum(1) for side in (self.left, self.right)]
            return norms[0] * norms[1]
        if positions * (outs + ins) > outs * ins:
            return super().squared_norms(dtype)
        norms = []
        step = max(1, tile_size(self.device) // max(1, self.left.shape[1] * positions**2))
        for start in range(0, self.samples, step):
            left, right = self.left[start : start + step].to(dtype), self.right[start : start + step].to(dtype)
            norms.append(((left @ left.mT) * (right @ right.mT)).sum((1, 2, 3)))
        return torch.cat(norms) if norms else torch.zeros(0, dtype=dtype, device=self.device)


@dataclass
class SquaredProduct(Form):
    """What several cotangents leave of a product with one position: Σ_c left_c² [n, o], to be multiplied once."""

    squares: Tensor  # Σ_c (left_c/unit)², [n, o]
    fourths: Tensor  # Σ_c weight_c (left_c/unit)⁴
    right: Tensor  # [n, i]
    unit: Tensor  # a power of two; 0 as long as all have been zero
    shape: torch.Size

    @classmethod
    def of(cls, product: Product, dtype: torch.dtype) -> SquaredProduct:
        """An empty sum."""
        left, right = product.left[:, 0, 0], product.right[:, 0, 0]
        zeros = torch.zeros(left.shape, dtype=dtype, device=left.device)
        return cls(zeros, zeros.clone(), right, torch.zeros((), dtype=dtype, device=left.device), product.shape)

    def __post_init__(self) -> None:
        self.samples = self.right.shape[0]

    def add_cotangents(self, left: Tensor, scale: float, weight: float) -> None:
        """Take the factors [..., n, o] of one or several cotangents; overwrites nothing."""
        size = (root_mean_square(left) / scale).to(self.unit.dtype)
        first = (self.unit == 0) & (size > 0)  # of the cotangents that reach this layer
        self.unit = torch.where(first, torch.exp2(torch.log2(size).round()), self.unit)
        squares = (left.to(self.squares.dtype) / (scale * torch.where(self.unit == 0, 1.0, self.unit))).square_()
        self.squares += squares if left.ndim == 2 else squares.sum(0)
        if weight:
            squares.square_()
            self.fourths.add_(squares if left.ndim == 2 else squares.sum(0), alpha=weight)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.right.device

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Gone: only squares are left."""
        raise NotImplementedError

    def magnitude(self) -> Tensor:
        """As of the product."""
        return self.squares.mean().sqrt() * self.unit * root_mean_square(self.right)

    def add_squares(self, to: Accumulators) -> None:
        """One product."""
        right = self.right.to(to.squares.dtype) * (self.unit / to.unit)
        add_product_of_squares(self.squares, self.fourths, right, replace(to.view(*self.shape), weight=1.0))


@dataclass
class Rows(Form):
    """Σ_t g[n, t] into row ids[n, t] of a table [rows, d]."""

    values: Tensor  # [n, t, d]
    ids: Tensor  # [n, t]
    rows: int
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.samples, self.shape = self.values.shape[0], torch.Size((self.rows, self.values.shape[2]))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.values.device

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Full tables for a few samples."""
        table = torch.zeros(stop - start, *self.shape, dtype=dtype, device=self.device)
        ids = self.ids[start:stop, :, None].expand_as(self.values[start:stop])
        return table.scatter_add_(1, ids, self.values[start:stop].to(dtype))

    def magnitude(self) -> Tensor:
        """The root mean square of what is put in."""
        return root_mean_square(self.values)

    def add_squares(self, to: Accumulators) -> None:
        """Add up what a sample has for a row, square, and add to the row; nothing for rows that a sample lacks."""
        sums, rows, _ = self._touched(to.squares.dtype)
        squares = sums.mul_(to.factor).square_()
        to.squares.index_add_(0, rows, squares, alpha=to.unit**2)
        if to.fourths is not None:
            to.fourths.index_add_(0, rows, squares.square_(), alpha=to.weight)

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """Of the rows that a sample has."""
        sums, _, owners = self._touched(dtype)
        return torch.zeros(self.samples, dtype=dtype, device=self.device).index_add_(0, owners, sums.square().sum(1))

    def _touched(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """For each pair of a sample and a row that it has: the sum [pairs, d], the row, the sample."""
        samples = torch.arange(self.samples, device=self.device)[:, None]
        pairs, inverse = torch.unique(samples * self.rows + self.ids, return_inverse=True)
        sums = torch.zeros(len(pairs), self.values.shape[2], dtype=dtype, device=self.device)
        sums.index_add_(0, inverse.flatten(), self.values.flatten(0, 1).to(dtype))
        return sums, pairs % self.rows, pairs // self.rows


@dataclass
class Sum(Form):
    """The sum of several: a parameter that is used several times has its gradients added before they are squared."""

    parts: Sequence[Form]

    def __post_init__(self) -> None:
        self.samples, self.shape = self.parts[0].samples, self.parts[0].shape

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.parts[0].device

    def gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Added up."""
        total = self.parts[0].gradients(start, stop, dtype)
        for part in self.parts[1:]:
            total += part.gradients(start, stop, dtype).view_as(total)
        return total

    def magnitude(self) -> Tensor:
        """Of the largest."""
        return torch.stack([part.magnitude() for part in self.parts]).amax()


def add(forms: Sequence[Form]) -> Form:
    """The sum of the gradients.  Products of the same shape are one product over the positions of all of them."""
    if len(forms) == 1:
        return forms[0]
    kinds = {type(form) for form in forms}
    if kinds == {Product}:
        products = [form for form in forms if isinstance(form, Product)]
        if len({(p.left.shape[1], p.left.shape[3], p.shape) for p in products}) == 1:
            left, right = (torch.cat([getattr(p, side) for p in products], 2) for side in ("left", "right"))
            return Product(left, right, products[0].shape)
    if kinds == {Rows}:
        tables = [form for form in forms if isinstance(form, Rows)]
        values, ids = torch.cat([t.values for t in tables], 1), torch.cat([t.ids for t in tables], 1)
        return Rows(values, ids, tables[0].rows)
    if kinds == {Dense}:
        return Dense(torch.stack([form.values for form in forms if isinstance(form, Dense)]).sum(0))
    return Sum(forms)


def add_product_of_squares(left2: Tensor, left4: Tensor | None, right: Tensor, to: Accumulators) -> None:
    """squares += (left²)ᵀ(right²) [o, i], and fourth powers; left² and left⁴ [n, o] may be sums over cotangents."""
    right2 = right.square()
    to.squares.addmm_(left2.T, right2, alpha=to.unit**2)
    if to.fourths is not None:
        left4 = left2.square() if left4 is None else left4
        to.fourths.addmm_(left4.T, right2.square_(), alpha=to.weight)


def root_mean_square(values: Tensor) -> Tensor:
    """In float32 or better; 0 for nothing."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    values = values if values.dtype == torch.float64 else values.float()
    size: Tensor = torch.linalg.vector_norm(values) / values.numel() ** 0.5
    return size
