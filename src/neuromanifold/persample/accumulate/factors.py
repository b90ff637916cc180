"""Accumulator for Kronecker factors: with g_n = Σ_t l_nt ⊗ r_nt, the sums L = Σ l lᵀ and R = Σ r rᵀ.

weight, bias ─► held until both are there ─► one block, the bias as a further input that is always 1
Product, Convolution ─► L and R, in pieces            one side holds gradients (each pass), one inputs (once a batch)
Rows, Tied ─► R, and the diagonal of L                one row for each word
all others ─► RemainderSums
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from neuromanifold.core.checks import message, promoted
from neuromanifold.persample.accumulate.base import Pass
from neuromanifold.persample.accumulate.diagonal import DiagonalSums
from neuromanifold.persample.accumulate.remainder import RemainderSums
from neuromanifold.persample.gradients import Form, Product, Rows
from neuromanifold.persample.gradients.totals import Tied

WeightSharing = Literal["expand", "reduce"]
_LEAST_HALVED = 256  # features of a factor whose blocks on both sides of the diagonal are not both computed
_TOLERANCE = 1e-3  # to which a bias's gradient has to be the sum of a weight's output gradients


@dataclass(frozen=True)
class FactorShape:
    """How the gradients of a weight, perhaps with its bias, are read as matrices [G, L, R]."""

    weight: int
    bias: int | None
    groups: int
    left: int
    right: int
    turned: bool  # inputs are on the left
    tables: int = 0  # 1: rows of a table; 2: these and a product, of a weight that is an output layer, too

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrices, without groups where there are none."""
        groups = [] if self.groups == 1 else [self.groups]
        return torch.Size([*groups, self.left, self.right])


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


class PairedForms:
    """Brings the forms of a weight and of its bias together, which come one after the other in a pass."""

    def __init__(self, pairs: dict[int, int]) -> None:
        """`pairs`: the numbers of weights, each with that of the bias that may belong to it."""
        self._bias_of = dict(pairs)
        self._weight_of = {bias: weight for weight, bias in pairs.items()}
        self._held: dict[int, tuple[Form, Pass]] = {}

    def separate(self, weight: int) -> None:
        """From now on, give the weight and the bias each on its own."""
        self._weight_of.pop(self._bias_of.pop(weight))

    def given(self, i: int, form: Form, made_by: Pass) -> Iterator[tuple[int, Form, Form | None, Pass]]:
        """Yield (weight, its form, its bias's form, pass) once both are there; at once what has no partner."""
        partner = self._bias_of.get(i, self._weight_of.get(i))
        if partner is None:
            yield i, form, None, made_by
        elif partner in self._held:
            other = self._held.pop(partner)[0]
            yield (i, form, other, made_by) if i in self._bias_of else (partner, other, form, made_by)
        else:
            self._held[i] = form, made_by

    def left(self) -> Iterator[tuple[int, Form, None, Pass]]:
        """Yield what has come without its partner in this pass."""
        held, self._held = self._held, {}
        for i, (form, made_by) in held.items():
            yield i, form, None, made_by


class FactorSums:
    """Sums of the factors of all layers, and blocks or diagonals of the other parameters.

    With weight sharing "expand", each position counts as a sample of its own: F ≈ L ⊗ R/Σ_n T_n.  With "reduce" its
    gradients are summed and its inputs averaged over positions: F ≈ L ⊗ R/N (Eschenhagen et al. 2023).  A table of
    embeddings is always expanded: its inputs are one-hot, so that their factor is diagonal.
    """

    def __init__(
        self, parameters: Sequence[Tensor], pairs: dict[int, int], sharing: WeightSharing, max_block: int, max_side: int
    ) -> None:
        """`max_side`: a side with more features than that has a diagonal factor."""
        self._parameters, self._sharing, self._max_side = parameters, sharing, max_side
        self._pairs = PairedForms(pairs)
        self._candidates = pairs
        self.shapes: dict[int, FactorShape] = {}
        self._factors: dict[str, Tensor] = {}  # [G, d, d], lower triangles, or [G, d]; f"{weight}.left", ".right", ...
        self.terms: dict[str, float | Tensor] = {}  # what the product of two factors is divided by
        self.diagonal = DiagonalSums(parameters, fourth_powers=False)
        self.remainder = RemainderSums(parameters, max_block, self.diagonal)
        self._inputs: dict[int, Tensor] = {}  # of the first pass of a batch
        self._first: dict[int, bool] = {}
        self._wrong: dict[int, Tensor] = {}  # whether a bias's gradient was not that of the weight's outputs
        self._batches = 0

    def factor(self, name: str) -> Tensor:
        """Return a factor [G, d, d], or [G, d] of a diagonal one, by f"{weight}.left" and f"{weight}.right"."""
        factor = self._factors[name]
        return factor if factor.ndim == 2 else factor.tril() + factor.tril(-1).mT

    def verify(self) -> None:
        """Raise if a bias turned out not to belong to its weight; waits for a GPU."""
        for i, wrong in self._wrong.items():
            if bool(wrong):
                raise _changed(i, "a bias whose gradient is not that of the weight's outputs")

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Take the gradients of parameters without a rule, summed over a batch or of one sample."""
        refuse_late([i for i, g in enumerate(gradients) if g is not None], self.shapes)
        self.remainder.add(gradients, made_by)

    @torch.no_grad()
    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take the per-sample gradients of parameter number i."""
        if form.samples:
            for pair in self._pairs.given(i, form, made_by):
                self._add(*pair)

    @torch.no_grad()
    def end_pass(self) -> None:
        """Take what has come without a partner."""
        joint = {
            number for shape in self.shapes.values() if shape.bias is not None for number in (shape.weight, shape.bias)
        }
        for pair in self._pairs.left():
            if pair[0] in joint:
                raise _changed(pair[0], "a weight without its bias, or the other way round")
            self._add(*pair)
        self.diagonal.end_pass()

    def end_batch(self) -> None:
        """End a batch: the next pass has other inputs."""
        self._inputs, self._first = {}, {}
        self._batches += 1
        self.diagonal.end_batch()

    def synchronize(self) -> None:
        """Do what the sums of squares do between batches."""
        self.diagonal.synchronize()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all factors, blocks and squares, and how they were decided."""
        squares, values = self.diagonal.state()
        tensors = {f"factor.{name}": value for name, value in self._factors.items()}
        tensors |= {f"terms.{name}": torch.as_tensor(v, dtype=torch.float64) for name, v in self.terms.items()}
        tensors |= {f"block.{i}": value for i, value in self.remainder.blocks.items()}
        tensors |= {f"diagonal.{name}": value for name, value in squares.items()}
        shapes = [asdict(shape) for shape in self.shapes.values()]
        return tensors, {"diagonal": values, "shapes": shapes, "others": sorted(self.remainder.numbers)}

    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        device = self._parameters[0].device
        kinds: dict[str, dict[str, Tensor]] = {"factor": {}, "terms": {}, "block": {}, "diagonal": {}}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            kinds[kind][rest] = value.to(device, copy=True)
        self._factors, self.terms = kinds["factor"], dict(kinds["terms"])
        self.remainder.blocks = {int(i): block for i, block in kinds["block"].items()}
        self.remainder.numbers = set(values["others"])
        self.diagonal.set_state(kinds["diagonal"], values["diagonal"])
        self.shapes = {one["weight"]: FactorShape(**one) for one in values["shapes"]}
        for weight in [w for w in self._candidates if w in self.shapes and self.shapes[w].bias is None]:
            self._pairs.separate(weight)
        for weight in set(self._candidates) & self.remainder.numbers:
            self._pairs.separate(weight)

    # ------------------------------------------------------------------------------------------------ inside

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
                raise _changed(shape.weight, f"gradients as a {type(form).__name__}")
            sides = (product.right, product.left) if product.turned else (product.left, product.right)
            outputs, inputs = (side.to(dtype) for side in sides)
            if bias is not None and looks:
                wrong = ~_is_sum(bias.gradients(start, stop, dtype), outputs)
                self._wrong[shape.weight] = self._wrong.get(shape.weight, torch.zeros_like(wrong)) | wrong
            names = ("right", "left") if product.turned else ("left", "right")
            if self._sharing == "reduce":
                outputs = outputs.sum(-2, keepdim=True)
            outputs = outputs if made_by.scale == 1.0 else outputs / made_by.scale
            self._accumulate(f"{key}.{names[0]}", outputs, None, diagonal=shape.tables > 0)
            if first:
                weights = None if made_by.weights is None else made_by.weights[start:stop].to(inputs)
                inputs = inputs.mean(-2, keepdim=True) if self._sharing == "reduce" else inputs
                self._accumulate(f"{key}.{names[1]}", inputs, weights, with_ones=shape.bias is not None)
                self._count(key, len(inputs) if weights is None else weights.sum(), inputs.shape[-2])
        if isinstance(form, Product):
            self._check_inputs(shape.weight, form)

    def _add_rows(self, i: int, rows: Rows, made_by: Pass) -> None:
        key, dtype = f"{i}.table", promoted(self._parameters[i].dtype)
        self._accumulate(f"{key}.right", rows.values.to(dtype) / made_by.scale, None)
        if self._first.get(i, True):
            weights = torch.ones(rows.samples, dtype=dtype, device=rows.device)
            weights = weights if made_by.weights is None else made_by.weights.to(dtype)
            counts = torch.zeros(1, rows.rows, dtype=dtype, device=rows.device)
            counts[0].index_add_(0, rows.ids.flatten(), weights[:, None].expand(rows.ids.shape).flatten())
            self._factors[f"{key}.left"] = self._factors.get(f"{key}.left", 0.0) + counts
            self._count(key, weights.sum(), rows.ids.shape[1])

    def _accumulate(
        self, name: str, values: Tensor, weights: Tensor | None, *, diagonal: bool = False, with_ones: bool = False
    ) -> None:
        """Add Σ_n w_n Σ_t v_nt v_ntᵀ of values [n, t, d] or [n, G, t, d] to a factor, or only its diagonal.

        `with_ones`: each v has a further entry that is always 1, which is the input that a bias is the weight of.
        """
        if weights is not None:
            values = values * weights.sqrt().view(-1, *[1] * (values.ndim - 1))
        rows = values.flatten(0, 1)[None] if values.ndim == 3 else values.movedim(0, 1).flatten(1, 2)  # [G, n·t, d]
        groups, count, size = rows.shape
        held = self._factors.get(name)
        if held is None:
            full = size + with_ones
            shape = (groups, full) if diagonal or full > self._max_side else (groups, full, full)
            held = self._factors[name] = rows.new_zeros(shape)
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
            raise ValueError(message(f"inputs of parameter {i}", expected, "others", advice))


def shape_of_factors(i: int, j: int | None, form: Form, bias: Form | None) -> FactorShape | None:
    """Return how a weight's gradients are read as matrices, with the bias where it belongs to them; None: not at all.

    The bias belongs to the weight if its gradient is the sum over positions of the weight's output gradients.
    A convolution with a single channel in each group has dense blocks, which are exact, instead.
    """
    if isinstance(form, (Rows, Tied)):
        return FactorShape(i, None, 1, form.shape[0], form.shape[1], True, 2 if isinstance(form, Tied) else 1)
    stop = next((stop for _, stop in form.product_pieces()), 0)
    product = form.product_of(0, stop)
    if product is None:
        return None
    left, right = product.left.shape[-1], product.right.shape[-1]
    groups = product.left.shape[1] if product.left.ndim == 4 else 1
    if groups > 1 and min(left, right) == 1:
        return None
    outputs = product.right if product.turned else product.left
    if bias is not None and j is not None and bool(_is_sum(bias.gradients(0, stop, promoted(outputs.dtype)), outputs)):
        return FactorShape(i, j, groups, left + product.turned, right + (not product.turned), product.turned)
    return FactorShape(i, None, groups, left, right, product.turned)


def _is_sum(bias: Tensor, outputs: Tensor) -> Tensor:
    """Whether a bias's gradients [n, o] are the sums over positions of output gradients [n, t, o] or [n, G, t, o]."""
    sums = outputs.to(bias.dtype).sum(-2).flatten(1)
    if bias.ndim != 2 or bias.shape != sums.shape:
        return torch.zeros((), dtype=torch.bool, device=bias.device)
    size = torch.linalg.vector_norm(outputs.to(bias.dtype).abs().sum(-2))
    found: Tensor = torch.linalg.vector_norm(bias - sums) <= _TOLERANCE * size
    return found


def refuse_late(numbers: Sequence[int], shapes: dict[int, FactorShape]) -> None:
    """Raise if parameters that have factors are left to autograd in a later batch."""
    taken = {n for shape in shapes.values() for n in (shape.weight, shape.bias) if n is not None}
    if late := sorted(taken.intersection(numbers)):
        raise _changed(late[0], "a gradient that autograd has summed over the batch")


def _changed(i: int, got: str) -> ValueError:
    advice = "The model treats batches differently. Leave the parameter out with `parameters`."
    return ValueError(message(f"gradients of parameter {i}", "of the same kind in all batches", got, advice))
