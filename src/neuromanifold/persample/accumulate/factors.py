"""Accumulator for Kronecker factors: with g_n = Σ_t l_nt ⊗ r_nt, the sums L = Σ l lᵀ and R = Σ r rᵀ.

weight, bias ─► held until both are there ─► one block, the bias as a further input that is always 1
Product, Convolution ─► L and R, in pieces            one side holds gradients (each pass), one inputs (once a batch)
Rows, Tied ─► R, and the diagonal of L                one row for each word
all others ─► RemainderSums
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import message, promoted
from neuromanifold.persample.accumulate.base import Pass, Reducer, named
from neuromanifold.persample.accumulate.diagonal import DiagonalSums
from neuromanifold.persample.accumulate.pairs import FactorShape, KroneckerSums, changed, is_sum_of, shape_of_factors
from neuromanifold.persample.gradients import Form, Product, Rows
from neuromanifold.persample.gradients.totals import Tied

WeightSharing = Literal["expand", "reduce"]
_LEAST_HALVED = 256  # features of a factor whose blocks on both sides of the diagonal are not both computed


def add_gram(to: Tensor, rows: Tensor) -> None:
    """Add Σ_n v_n v_nᵀ of rows [n, d] to the lower triangle of a matrix [d, d], and some numbers to its upper one.

    Halves of large matrices have three products of blocks, not four, on a CPU; a GPU is faster with a single one.
    """
    size = rows.shape[1]
    if size < _LEAST_HALVED or rows.device.type != "cpu":
        to.addmm_(rows.mT, rows)
        return
    half = size // 2
    add_gram(to[:half, :half], rows[:, :half])
    add_gram(to[half:, half:], rows[:, half:])
    to[half:, :half].addmm_(rows[:, half:].mT, rows[:, :half])


class FactorSums(KroneckerSums):
    """Sums of the factors of all layers, and blocks or diagonals of the other parameters.

    With weight sharing "expand", each position counts as a sample of its own: F ≈ L ⊗ R/Σ_n T_n.  With "reduce" its
    gradients are summed and its inputs averaged over positions: F ≈ L ⊗ R/N (Eschenhagen et al. 2023).  A table of
    embeddings is always expanded: its inputs are one-hot, so that their factor is diagonal.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        pairs: dict[int, int],
        sharing: WeightSharing,
        max_block: int,
        max_side: int,
    ) -> None:
        """`max_side`: a side with more features than that has a diagonal factor."""
        super().__init__(parameters, pairs, {}, max_block, DiagonalSums(list(parameters.values()), fourth_powers=False))
        self._sharing, self._max_side = sharing, max_side
        self._arguments = parameters, pairs, sharing, max_block, max_side
        self._candidates = pairs
        self._factors: dict[str, Tensor] = {}  # [G, d, d], lower triangles, or [G, d]; f"{weight}.left", ".right", ...
        self.terms: dict[str, float | Tensor] = {}  # what the product of two factors is divided by
        self._inputs: dict[int, Tensor] = {}  # of the first pass of a batch
        self._first: dict[int, bool] = {}
        self._shared: dict[tuple[Any, ...], tuple[list[str], Tensor, Tensor | None]] = {}
        """Inputs of the batch by their place in memory, with the factors that they belong to."""
        self._wrong: dict[int, Tensor] = {}  # whether a bias's gradient was not that of the weight's outputs
        self._batches = 0

    def factor(self, name: str) -> Tensor:
        """Return a factor [G, d, d] in its lower triangle, or [G, d] of a diagonal one, by f"{weight}.left", ".right".

        Layers with the same inputs, such as queries, keys and values, have one in common.
        """
        return self._factors[name]

    def verify(self) -> None:
        """Raise if a bias turned out not to belong to its weight; waits for a GPU."""
        for i, wrong in self._wrong.items():
            if bool(wrong):
                raise changed(self._names[i], "a bias whose gradient is not that of the weight's outputs")

    @override
    @torch.no_grad()
    def end_batch(self) -> None:
        self._add_shared()
        self._inputs, self._first = {}, {}  # the next pass has other inputs
        self._batches += 1
        super().end_batch()

    @override
    def empty(self) -> FactorSums:
        return FactorSums(*self._arguments)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all factors, blocks and squares, and how they were decided."""
        tensors, values = self.remainder.state()
        tensors |= named(
            {name: value.clone() for name, value in self._factors.items()}, "factor"
        )  # some have one in common
        tensors |= named({n: torch.as_tensor(v, dtype=torch.float64) for n, v in self.terms.items()}, "terms")
        return tensors, {**values, "shapes": [asdict(shape) for shape in self.shapes.values()]}

    @override
    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self._factors, self.terms, self.shapes = {}, {}, {}
        self.remainder.set_state(tensors, values)
        self._take(tensors, values["shapes"])

    @override
    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.remainder.merge(tensors, values)
        self._take(tensors, values["shapes"])

    def reduce(self, processes: Reducer) -> None:
        """Add up the sums of all processes; factors that layers have in common everywhere once."""
        place = {id(factor): name for name, factor in reversed(self._factors.items())}
        mine = {name: [place[id(factor)], list(factor.shape)] for name, factor in self._factors.items()}
        terms = {name: float(value) for name, value in self.terms.items()}
        wrong = [i for i, value in self._wrong.items() if bool(value)]
        shapes = [asdict(shape) for shape in self.shapes.values()]
        of_all = processes.gather("factors", {"held": mine, "terms": terms, "wrong": wrong, "shapes": shapes})
        for one in of_all:
            self._take_shapes(one["shapes"])
            self._wrong |= dict.fromkeys(one["wrong"], torch.ones(()))
        names = sorted({name for one in of_all for name in one["terms"]})
        self.terms = {name: sum(one["terms"].get(name, 0.0) for one in of_all) for name in names}
        alike: dict[tuple[str | None, ...], list[str]] = {}
        for name in sorted({name for one in of_all for name in one["held"]}):
            alike.setdefault(tuple(one["held"].get(name, [None])[0] for one in of_all), []).append(name)
        before, self._factors = self._factors, {}
        for members in alike.values():
            sizes = next(one["held"][members[0]][1] for one in of_all if members[0] in one["held"])
            held = before.get(members[0])
            parameter = self._parameters[int(members[0].split(".")[0])]
            zeros = torch.zeros(sizes, dtype=promoted(parameter.dtype), device=parameter.device)
            total = zeros if held is None else held.clone()
            processes.add(total)
            self._factors.update(dict.fromkeys(members, total))
        self.remainder.reduce(processes)

    def _take(self, tensors: dict[str, Tensor], shapes: list[dict[str, Any]]) -> None:
        """Add factors and terms of other batches, and what has been decided about them."""
        device = self._parameters[0].device
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "factor":
                self._factors[rest] = self._factors.get(rest, 0.0) + value.to(device)
            elif kind == "terms":
                self.terms[rest] = self.terms.get(rest, 0.0) + value.to(device)
        self._take_shapes(shapes)
        for weight in set(self._candidates) & self.remainder.numbers:
            self._pairs.separate(weight)

    def _take_shapes(self, shapes: list[dict[str, Any]]) -> None:
        for one in (FactorShape(**shape) for shape in shapes):
            if self.shapes.setdefault(one.weight, one) != one:
                got = "other factors in another process, or in another part of the data"
                raise changed(self._names[one.weight], got)
            if one.bias is None and one.weight in self._candidates:
                self._pairs.separate(one.weight)

    # ------------------------------------------------------------------------------------------------ inside

    @override
    def _add_alone(self, i: int, form: Form, bias: None, made_by: Pass) -> None:
        if any(shape.bias is not None and i in (shape.weight, shape.bias) for shape in self.shapes.values()):
            raise changed(self._names[i], "a weight without its bias, or the other way round")
        self._add(i, form, bias, made_by)

    @override
    def _add(self, i: int, form: Form, bias: Form | None, made_by: Pass) -> None:
        if i not in self.shapes and i not in self.remainder.numbers:
            self._decide(i, form, bias)
        if i not in self.shapes:
            self.remainder.add_samples(i, form, made_by)
            bias_number = self._candidates.get(i)
            if bias is not None and bias_number is not None:
                self._add(bias_number, bias, None, made_by)
            return
        shape = self.shapes[i]
        if bias is not None and shape.bias is None:
            self._add(self._candidates[i], bias, None, made_by)
            bias = None
        if isinstance(form, Rows):
            self._add_rows(i, form, made_by)
        elif isinstance(form, Tied):
            self._add_product(shape, form.product, None, made_by, key=f"{i}.product")
            self._add_rows(i, form.rows, made_by)
        else:
            self._add_product(shape, form, bias, made_by, key=str(i))
        self._first[i] = False

    def _decide(self, i: int, form: Form, bias: Form | None) -> None:
        """Decide how a parameter is done when its first gradients come, and whether its bias belongs to it."""
        found = shape_of_factors(i, self._candidates.get(i), form, bias)
        if bias is not None and (found is None or found.bias is None):
            self._pairs.separate(i)
        if found is not None:
            self.shapes[i] = found
        else:
            self.remainder.numbers.add(i)

    def _add_product(self, shape: FactorShape, form: Form, bias: Form | None, made_by: Pass, key: str) -> None:
        first = self._first.get(shape.weight, True)
        dtype = promoted(self._parameters[shape.weight].dtype)
        looks = bias is not None and self._batches & (self._batches - 1) == 0  # 0, 1, 2, 4, ...
        for start, stop in form.product_pieces():
            product = form.product_of(start, stop)
            if product is None:
                raise changed(self._names[shape.weight], f"gradients as a {type(form).__name__}")
            sides = (product.right, product.left) if product.turned else (product.left, product.right)
            outputs, inputs = (side.to(dtype) for side in sides)
            if bias is not None and looks:
                wrong = ~is_sum_of(bias.gradients(start, stop, dtype), outputs)
                self._wrong[shape.weight] = self._wrong.get(shape.weight, torch.zeros_like(wrong)) | wrong
            names = ("right", "left") if product.turned else ("left", "right")
            if self._sharing == "reduce":
                outputs = outputs.sum(-2, keepdim=True)
            outputs = outputs if made_by.scale == 1.0 else outputs / made_by.scale
            self._accumulate([f"{key}.{names[0]}"], outputs, None, diagonal=shape.tables > 0)
            if first:
                weights = None if made_by.weights is None else made_by.weights[start:stop].to(inputs)
                inputs = inputs.mean(-2, keepdim=True) if self._sharing == "reduce" else inputs
                self._count(key, len(inputs) if weights is None else weights.sum(), inputs.shape[-2])
                name, with_ones = f"{key}.{names[1]}", shape.bias is not None
                if isinstance(form, Product) and self._sharing == "expand":
                    place = inputs.data_ptr(), inputs.shape, inputs.stride(), with_ones
                    self._shared.setdefault(place, ([], inputs, weights))[0].append(name)
                else:
                    self._accumulate([name], inputs, weights, with_ones=with_ones)
        if isinstance(form, Product):
            self._check_inputs(shape.weight, form)

    def _add_rows(self, i: int, rows: Rows, made_by: Pass) -> None:
        key, dtype = f"{i}.table", promoted(self._parameters[i].dtype)
        self._accumulate([f"{key}.right"], rows.values.to(dtype) / made_by.scale, None)
        if self._first.get(i, True):
            weights = torch.ones(rows.samples, dtype=dtype, device=rows.device)
            weights = weights if made_by.weights is None else made_by.weights.to(dtype)
            counts = torch.zeros(1, rows.rows, dtype=dtype, device=rows.device)
            counts[0].index_add_(0, rows.ids.flatten(), weights[:, None].expand(rows.ids.shape).flatten())
            self._factors[f"{key}.left"] = self._factors.get(f"{key}.left", 0.0) + counts
            self._count(key, weights.sum(), rows.ids.shape[1])

    def _add_shared(self) -> None:
        """Add the inputs of the batch, once for all layers that have had the same inputs in every batch so far."""
        for (*_, with_ones), (names, inputs, weights) in self._shared.items():
            alike: dict[int, list[str]] = {}
            for name in names:
                alike.setdefault(id(self._factors.get(name)), []).append(name)
            for members in alike.values():
                held = self._factors.get(members[0])
                if held is not None and sum(factor is held for factor in self._factors.values()) > len(members):
                    self._factors.update(dict.fromkeys(members, held.clone()))  # others have other inputs from now on
                self._accumulate(members, inputs, weights, with_ones=with_ones)
        self._shared = {}

    def _accumulate(
        self,
        names: list[str],
        values: Tensor,
        weights: Tensor | None,
        *,
        diagonal: bool = False,
        with_ones: bool = False,
    ) -> None:
        """Add Σ_n w_n Σ_t v_nt v_ntᵀ of values [n, t, d] or [n, G, t, d] to one factor of all names, or its diagonal.

        `with_ones`: each v has a further entry that is always 1, which is the input that a bias is the weight of.
        """
        if weights is not None:
            values = values * weights.sqrt().view(-1, *[1] * (values.ndim - 1))
        rows = values.flatten(0, 1)[None] if values.ndim == 3 else values.movedim(0, 1).flatten(1, 2)  # [G, n·t, d]
        groups, count, size = rows.shape
        held = self._factors.get(names[0])
        if held is None:
            full = size + with_ones
            shape = (groups, full) if diagonal or full > self._max_side else (groups, full, full)
            held = rows.new_zeros(shape)
            self._factors.update(dict.fromkeys(names, held))
        if held.ndim == 2:
            held[:, :size] += rows.square().sum(1)
        elif groups == 1:
            add_gram(held[0, :size, :size], rows[0])
        else:
            held[:, :size, :size].baddbmm_(rows.mT, rows)
        if with_ones:
            positions = values.shape[-2]
            held.view(groups, -1)[:, -1] += count if weights is None else weights.sum() * positions
            if held.ndim == 3:
                ones = rows.new_ones(count) if weights is None else weights.sqrt().repeat_interleave(positions)
                held[:, -1, :size] += (rows.mT @ ones).view(groups, size)

    def _count(self, key: str, samples: int | Tensor, positions: int) -> None:
        count = samples if isinstance(samples, int) else samples.double()
        self.terms[key] = self.terms.get(key, 0.0) + count * positions

    def _check_inputs(self, i: int, product: Product) -> None:
        """Raise if the inputs differ between the passes of a batch: then the sides have been taken for each other."""
        now = product.left if product.turned else product.right
        before = self._inputs.setdefault(i, now)
        if before.data_ptr() != now.data_ptr() and not torch.equal(before, now):
            advice = "Its rule should give Product(gradients, inputs), or Product(inputs, gradients, turned=True)."
            expected = "the same in each pass of a batch"
            raise ValueError(message(f"inputs of {self._names[i]}", expected, "others", advice))
