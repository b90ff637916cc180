"""The gradients of single samples for several cotangents (the classes), and the inner products between them.

J Jᵀ for one parameter is a matrix of inner products, which rarely needs the gradients themselves:

    Factors    Σ_t left_ct ⊗ right_t: the right side is the same for all classes, so ⟨g_c, g_d⟩ = ⟨left_c, G left_d⟩
               with G_ts = right_t·right_s (for one position ‖a‖² δ_c·δ_d); for embeddings G_ts = [id_t = id_s]
    Flat       the gradients themselves: biases, scales, everything small
    Several    sums of these: tied weights
    Forms      anything else: gradients are written out, a few samples and rows of the parameter at a time

All of it under `torch.no_grad`: activations are part of autograd's graph.

Letters: n sample, c/d class, t/s position, o/i out/in features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import promoted
from neuromanifold.persample.gradients import Dense, Form, Product, Rows, Sum
from neuromanifold.persample.rules.convolution import Convolution

_TILE = {True: 2**22, False: 2**25}  # numbers of gradients that are written out at a time, on a CPU and on a GPU


class Stack(ABC):
    """The gradients of some samples for all classes with respect to one parameter."""

    samples: int
    classes: int
    shape: torch.Size  # of the parameter
    device: torch.device
    dtype: torch.dtype  # of products; sums over parameters are float64

    @property
    def rows(self) -> int:
        """The size of the parameter's first dimension."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """The number of entries in one row of the parameter."""
        return self.shape[1:].numel()

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many numbers are kept in memory for these gradients."""

    @abstractmethod
    def block(self, samples: slice, rows: slice) -> Tensor:
        """Return the gradients of some samples and some rows of the parameter, [n, c, rows, width]."""

    @abstractmethod
    def take(self, index: Tensor) -> Stack:
        """Return the gradients of some samples alone, as a copy."""

    @torch.no_grad()
    def inner(self) -> Tensor:
        """Return ⟨g_nc, g_nd⟩ for each sample, [n, c, d] in float64."""
        found = torch.zeros(self.samples, self.classes, self.classes, dtype=torch.float64, device=self.device)
        for samples, rows in self._tiles():
            g = self.block(samples, rows).flatten(2)
            found[samples] += (g @ g.mT).double()
        return found

    def _tiles(self) -> list[tuple[slice, slice]]:
        """Return pieces of about one tile each: several samples, or some rows of one."""
        tile, one = _TILE[self.device.type == "cpu"], max(1, self.classes * self.shape.numel())
        samples = _slices(self.samples, max(1, tile // one))
        return [(n, rows) for n in samples for rows in _slices(self.rows, max(1, tile * self.rows // one))]


@dataclass
class Factors(Stack):
    """Σ_t left_ct ⊗ right_t, [o, i] viewed as the parameter; for embeddings `right` is the ids [n, t] of rows."""

    lefts: list[Tensor | None]  # [n, t, o] for each class; None: zero
    right: Tensor  # [n, t, i], or ids [n, t]
    shape: torch.Size
    turned: bool = False  # the parameter is [i, o]

    def __post_init__(self) -> None:
        some = next(left for left in self.lefts if left is not None)
        self.samples, self.classes, self.device = some.shape[0], len(self.lefts), some.device
        self.positions, self.outs = some.shape[1], some.shape[2]
        self.dtype = promoted(some.dtype)

    @property
    @override
    def numbers(self) -> int:
        return sum(left.numel() for left in self.lefts if left is not None) + self.right.numel()

    @property
    def looks_up(self) -> bool:
        """Whether this is an embedding, so that `right` is the ids of rows."""
        return not self.right.is_floating_point()

    def left(self, samples: slice) -> Tensor:
        """Return the left factors of some samples for all classes, [n, c, t, o]."""
        some = next(left for left in self.lefts if left is not None)[samples]
        lefts = [torch.zeros_like(some) if one is None else one[samples] for one in self.lefts]
        return torch.stack(lefts, 1).to(self.dtype)

    @torch.no_grad()
    def inner(self) -> Tensor:
        """Use the Gram matrix of the positions, unless writing gradients out is less work."""
        c, t, o = self.classes, self.positions, self.outs
        i = 0 if self.looks_up else self.right.shape[-1]
        if not self.looks_up and c * t * o * i + c * c * o * i < t * t * (c * o + i) + c * c * t * o:
            return super().inner()
        found = torch.empty(self.samples, c, c, dtype=torch.float64, device=self.device)
        for samples in _slices(self.samples, max(1, _TILE[self.device.type == "cpu"] // max(1, t * (c * o + t)))):
            left, right = self.left(samples), self.right[samples]
            if self.looks_up:
                products = (right[:, :, None] == right[:, None, :]).to(self.dtype)
            else:
                right = right.to(self.dtype)
                products = right @ right.mT
            weighted = products[:, None] * left if t == 1 else products[:, None] @ left
            found[samples] = (weighted.flatten(2) @ left.flatten(2).mT).double()
        return found

    @torch.no_grad()
    def block(self, samples: slice, rows: slice) -> Tensor:
        """Return batched products, or rows of an embedding in a table of zeros."""
        left, right = self.left(samples), self.right[samples]
        if self.looks_up:
            return _table(left, right, range(self.rows)[rows])
        whole = (right.shape[-1] if self.turned else self.outs) != self.rows
        if self.turned:
            right = right if whole else right[..., rows]
            g = right.to(self.dtype).mT[:, None] @ left
        else:
            g = (left if whole else left[..., rows]).mT @ right.to(self.dtype)[:, None]
        return g.reshape(*g.shape[:2], self.rows, self.width)[:, :, rows] if whole else g

    @override
    @torch.no_grad()
    def take(self, index: Tensor) -> Factors:
        lefts = [None if left is None else left[index] for left in self.lefts]
        return Factors(lefts, self.right[index], self.shape, self.turned)


@dataclass
class Flat(Stack):
    """The gradients themselves, [n, *shape] for each class."""

    values: list[Tensor | None]
    shape: torch.Size

    def __post_init__(self) -> None:
        some = next(value for value in self.values if value is not None)
        self.samples, self.classes, self.device, self.dtype = len(some), len(self.values), some.device, torch.float64

    @property
    @override
    def numbers(self) -> int:
        return sum(value.numel() for value in self.values if value is not None)

    @override
    @torch.no_grad()
    def block(self, samples: slice, rows: slice) -> Tensor:
        some = next(value for value in self.values if value is not None)
        parts = [torch.zeros_like(some[samples]) if value is None else value[samples] for value in self.values]
        stacked = torch.stack([part.reshape(len(part), self.rows, self.width)[:, rows] for part in parts], 1)
        return stacked.to(self.dtype)

    @override
    @torch.no_grad()
    def take(self, index: Tensor) -> Flat:
        return Flat([None if value is None else value[index] for value in self.values], self.shape)


@dataclass
class Several(Stack):
    """The sum over the uses of a parameter, each with a stack of its own kind."""

    parts: list[Stack]

    def __post_init__(self) -> None:
        first = self.parts[0]
        self.samples, self.classes, self.shape, self.device = first.samples, first.classes, first.shape, first.device
        self.dtype = first.dtype

    @property
    @override
    def numbers(self) -> int:
        return sum(part.numbers for part in self.parts)

    @torch.no_grad()
    def inner(self) -> Tensor:
        """Use both factors for an embedding that is also the last layer's weight; else write gradients out."""
        kinds = [part for part in self.parts if isinstance(part, Factors) and not part.turned]
        product = [part for part in kinds if not part.looks_up and part.outs == part.rows]
        table = [part for part in kinds if part.looks_up]
        if not (len(product) == len(table) == 1 and len(self.parts) == 2):
            return super().inner()
        mixed = _product_with_rows(product[0], table[0])
        return product[0].inner() + table[0].inner() + mixed + mixed.mT

    @override
    @torch.no_grad()
    def block(self, samples: slice, rows: slice) -> Tensor:
        first, *others = (part.block(samples, rows) for part in self.parts)
        return sum((other.to(first.dtype) for other in others), first)

    @override
    @torch.no_grad()
    def take(self, index: Tensor) -> Several:
        return Several([part.take(index) for part in self.parts])


@dataclass
class Forms(Stack):
    """Forms of any kind, one for each class, None for zero: gradients are written out when needed."""

    forms: list[Form | None]
    shape: torch.Size

    def __post_init__(self) -> None:
        some = next(form for form in self.forms if form is not None)
        self.samples, self.classes, self.device = some.samples, len(self.forms), some.device
        self.dtype = promoted(_dtype_of(some))

    @property
    @override
    def numbers(self) -> int:
        return self.samples * self.classes * self.shape.numel()

    @torch.no_grad()
    def block(self, samples: slice, rows: slice) -> Tensor:
        """Write out one class after the other."""
        n = range(self.samples)[samples]
        found = torch.zeros(
            len(n), self.classes, len(range(self.rows)[rows]), self.width, dtype=self.dtype, device=self.device
        )
        for c, form in enumerate(self.forms):
            if form is not None and len(n):
                part = _only_rows(form, rows)
                g = (part or form).gradients(n.start, n.stop, self.dtype)
                found[:, c] = (
                    g.reshape(found[:, c].shape) if part else g.reshape(len(n), self.rows, self.width)[:, rows]
                )
        return found

    @torch.no_grad()
    def take(self, index: Tensor) -> Flat:
        """Return the gradients of some samples, written out: those that follow each other together."""
        runs = torch.tensor_split(index, (index.diff() != 1).nonzero().flatten().cpu() + 1)
        pieces = [slice(int(run[0]), int(run[-1]) + 1) if len(run) else slice(0, 0) for run in runs]
        written = torch.cat([self.block(piece, slice(None)) for piece in pieces])
        return Flat([written[:, c].reshape(-1, *self.shape) for c in range(self.classes)], self.shape)


def stack(forms: Sequence[Form | None]) -> Stack:
    """Return the stack of one parameter from its forms for each class, None where a class does not depend on it."""
    some = [form for form in forms if form is not None]
    kinds, shape = {type(form) for form in some}, some[0].shape
    if kinds == {Product} and all(form.left.ndim == 3 for form in some if isinstance(form, Product)):
        products = [form if isinstance(form, Product) else None for form in forms]
        lefts, rights = ([None if p is None else getattr(p, side) for p in products] for side in ("left", "right"))
        if (shared := _shared(rights)) is not None:
            return Factors(lefts, shared, shape)
        if (shared := _shared(lefts)) is not None:
            return Factors(rights, shared, shape, turned=True)
    elif kinds == {Rows}:
        tables = [form if isinstance(form, Rows) else None for form in forms]
        if (shared := _shared([None if table is None else table.ids for table in tables])) is not None:
            return Factors([None if table is None else table.values for table in tables], shared, shape)
    elif kinds == {Dense}:
        return Flat([form.values if isinstance(form, Dense) else None for form in forms], shape)
    elif all(isinstance(form, Sum) for form in some) and len(some) == len(forms):
        parts = [form.parts for form in forms if isinstance(form, Sum)]
        if len({tuple(map(type, part)) for part in parts}) == 1:
            return Several([stack(list(column)) for column in zip(*parts, strict=True)])
    return Forms(list(forms), shape)


@torch.no_grad()
def gram(stacks: Sequence[Stack], limit: int = 2**24) -> Tensor:
    """Return ⟨g_nc, g_md⟩ between all samples of several stacks of one parameter, [Σn·c, Σn·c] in float64."""
    total = sum(one.samples * one.classes for one in stacks)
    factors = [one for one in stacks if isinstance(one, Factors)]
    alike = len(factors) == len(stacks) and len({one.turned for one in factors}) == 1
    if alike and all(one.positions == 1 and not one.looks_up for one in factors):
        left = torch.cat([one.left(slice(None))[:, :, 0].flatten(0, 1) for one in factors])  # [nc, o]
        right = torch.cat([one.right[:, 0].to(one.dtype).repeat_interleave(one.classes, 0) for one in factors])
        return ((left @ left.T) * (right @ right.T)).double()
    if alike and all(one.looks_up for one in factors):
        stacks = _renumbered(factors)
    found = torch.zeros(total, total, dtype=torch.float64, device=stacks[0].device)
    step = max(1, limit // max(1, total * stacks[0].width))
    for rows in _slices(stacks[0].rows, step):
        g = torch.cat([one.block(slice(None), rows).flatten(2).flatten(0, 1) for one in stacks])
        found += (g @ g.T).double()
    return found


def _product_with_rows(product: Factors, table: Factors) -> Tensor:
    """Return ⟨g_nc, g_nd⟩ of c's product with d's rows: Σ_ts left_c[t, id_s] (right_t·values_ds), [n, c, d]."""
    found = torch.empty(product.samples, product.classes, table.classes, dtype=torch.float64, device=product.device)
    for n in range(product.samples):
        one = slice(n, n + 1)
        there = product.left(one)[0][..., table.right[n]]  # [c, t, s]
        along = product.right[n].to(product.dtype) @ table.left(one)[0].mT  # [d, t, s]
        found[n] = (there.flatten(1) @ along.flatten(1).T).double()
    return found


def _table(values: Tensor, ids: Tensor, rows: range) -> Tensor:
    """Return some rows of the tables into whose rows ids [n, t] the values [n, c, t, d] are added."""
    table = values.new_zeros(*values.shape[:2], len(rows), values.shape[-1])
    inside = (ids >= rows.start) & (ids < rows.stop)
    index = torch.where(inside, ids - rows.start, 0)[:, None, :, None].expand_as(values)
    return table.scatter_add_(2, index, values * inside[:, None, :, None]) if len(rows) else table


def _renumbered(tables: list[Factors]) -> list[Stack]:
    """Return the same embeddings with tables of only those rows that some sample looks up."""
    used = torch.unique(torch.cat([table.right.flatten() for table in tables]))
    shape = torch.Size((len(used), *tables[0].shape[1:]))
    return [Factors(table.lefts, torch.searchsorted(used, table.right), shape) for table in tables]


def _only_rows(form: Form, rows: slice) -> Form | None:
    """Return a form of some rows of the parameter alone, where that is less work: channels of a convolution."""
    if not isinstance(form, Convolution) or form.transposed or form.groups > 1:
        return None
    g = form.g[:, :, rows]
    return replace(form, g=g, shape=torch.Size((g.shape[2], *form.shape[1:])))


def _shared(sides: Sequence[Tensor | None]) -> Tensor | None:
    """Return the tensor that all classes share, if it is the same for all of them."""
    first, *others = (side for side in sides if side is not None)
    where = first.data_ptr(), first.shape, first.stride()
    same = ((one.data_ptr(), one.shape, one.stride()) == where or torch.equal(one, first) for one in others)
    return first if all(same) else None


def _dtype_of(form: Form) -> torch.dtype:
    """Return the widest dtype of the tensors that a form is made of."""
    parts = [value for value in vars(form).values() if isinstance(value, Tensor) and value.is_floating_point()]
    inside = [_dtype_of(part) for part in getattr(form, "parts", ())]
    return max([part.dtype for part in parts] + inside, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
