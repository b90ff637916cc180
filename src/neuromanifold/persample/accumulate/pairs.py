"""How gradients of a weight, perhaps with its bias, are read as matrices with two Kronecker factors.

Both come one after the other in a pass, so that the first is held until the second is there (`PairedForms`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import message, promoted
from neuromanifold.persample.accumulate.base import Pass, SharedSums
from neuromanifold.persample.accumulate.diagonal import DiagonalSums
from neuromanifold.persample.accumulate.remainder import RemainderSums
from neuromanifold.persample.gradients import Form, Rows
from neuromanifold.persample.gradients.totals import Tied

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


class PairedForms:
    """Brings the forms of a weight and of its bias together, which come one after the other in a pass."""

    def __init__(self, pairs: dict[int, int]) -> None:
        """`pairs`: the numbers of weights, each with that of the bias that may belong to it."""
        self._bias_of = dict(pairs)
        self._weight_of = {bias: weight for weight, bias in pairs.items()}
        self._held: dict[int, tuple[Form, Pass]] = {}

    def separate(self, weight: int) -> None:
        """From now on, give the weight and the bias each on its own."""
        self._weight_of.pop(self._bias_of.pop(weight, -1), None)

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


class KroneckerSums(SharedSums):
    """What accumulators for layers with Kronecker factors share: pairs of weight and bias, and all other parameters."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        pairs: dict[int, int],
        shapes: dict[int, FactorShape],
        max_block: int,
        diagonal: DiagonalSums,
    ) -> None:
        """`diagonal`: has squares of all that gets neither factors nor a block of at most `max_block` rows."""
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._pairs, self.shapes = PairedForms(pairs), shapes
        self.diagonal, self.fourth_powers = diagonal, diagonal.fourth_powers
        self.remainder = RemainderSums(self._parameters, max_block, diagonal)

    @override
    def begin_batch(self, index: int, samples: int) -> None:
        self.diagonal.begin_batch(index, samples)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Take the gradients of parameters without a rule, summed over a batch or of one sample; none of a layer."""
        layers = {n for shape in self.shapes.values() for n in (shape.weight, shape.bias)}
        if late := [i for i, g in enumerate(gradients) if g is not None and i in layers]:
            raise changed(self._names[late[0]], "a gradient that autograd has summed over the batch")
        self.remainder.add(gradients, made_by)

    @override
    @torch.no_grad()
    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        if form.samples:
            for pair in self._pairs.given(i, form, made_by):
                self._add(*pair)

    @override
    @torch.no_grad()
    def end_pass(self) -> None:
        for pair in self._pairs.left():
            self._add_alone(*pair)
        self.diagonal.end_pass()

    @override
    def end_batch(self) -> None:
        self.diagonal.end_batch()

    @override
    def synchronize(self) -> None:
        self.diagonal.synchronize()

    @override
    def note_traces(self, traces: Tensor) -> None:
        self.diagonal.note_traces(traces)

    @abstractmethod
    def _add(self, i: int, form: Form, bias: Form | None, made_by: Pass) -> None:
        """Add the gradients of a weight, with those of its bias if they belong together, or of any other parameter."""

    @abstractmethod
    def _add_alone(self, i: int, form: Form, bias: None, made_by: Pass) -> None:
        """Add gradients of a weight whose bias got none in this pass, or the other way round."""


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
    if (
        bias is not None
        and j is not None
        and bool(is_sum_of(bias.gradients(0, stop, promoted(outputs.dtype)), outputs))
    ):
        return FactorShape(i, j, groups, left + product.turned, right + (not product.turned), product.turned)
    return FactorShape(i, None, groups, left, right, product.turned)


def is_sum_of(bias: Tensor, outputs: Tensor) -> Tensor:
    """Whether a bias's gradients [n, o] are the sums over positions of output gradients [n, t, o] or [n, G, t, o]."""
    sums = outputs.to(bias.dtype).sum(-2).flatten(1)
    if bias.ndim != 2 or bias.shape != sums.shape:
        return torch.zeros((), dtype=torch.bool, device=bias.device)
    size = torch.linalg.vector_norm(outputs.to(bias.dtype).abs().sum(-2))
    found: Tensor = torch.linalg.vector_norm(bias - sums) <= _TOLERANCE * size
    return found


def changed(name: str, got: str) -> ValueError:
    """Return the error for gradients of a parameter that are not of the kind of those before."""
    advice = "The model treats batches differently. Leave the parameter out with `parameters`."
    return ValueError(message(f"gradients of {name}", "of the same kind in all batches", got, advice))
