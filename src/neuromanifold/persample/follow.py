"""Follow the samples from the logits down autograd's graph: which dimension of each tensor holds them.

The logits have the samples in their first dimension.  Each operation says where its inputs then have them, so that by
one walk from the logits down it is known for every tensor, from shapes and arguments alone, never from values:

    logits [n, C] ── Mm ── [n, t·d] ── View ── [n, t, d] ── Transpose ── [t, n, d] ── Add ── ...

Where samples and positions share a dimension, [n·t, d] or [t·n, d], the place of the samples is still one number: the
product `before` of all sizes (and factors of a size) that are counted before them.  Reshaping does not change it.

Rows that the data send elsewhere, as tokens to experts, are followed by the values of the indices: a tensor then has
the number of the sample that owns each of its rows.  This is done anew for each batch (`plan.py`).  Operations that mix
rows by what the data say (products with a matrix of the data) are not followed.  What lies below them is verified with
every batch (`verify.py`), since the next one may differ.
"""

# ruff: noqa: SIM905 (names of operations, as text)

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.persample.graph import (
    Node,
    leaves_in_place,
    operation,
    shape_of,
    shifted_dims,
    signed,
    takes_own_rows,
)
from neuromanifold.persample.places import SHARED, UNKNOWN, Place, combined, locate, owners, regular, reshaped

_ELEMENTWISE = frozenset(
    """
    Abs Acos Acosh Add Addcdiv Addcmul Alias Asin Asinh Atan Atan2 Atanh Celu Ceil Clamp ClampMax ClampMin Clone Cos
    Cosh Detach Div Elu Erf Erfc Exp Exp2 Expand Expm1 Floor Fmod Gelu Hardshrink Hardsigmoid Hardswish Hardtanh
    Hypot LeakyRelu Lerp Log Log10 Log1P Log2 Logaddexp Logit LogSigmoid MaskedFill Maximum Minimum Mish Mul
    NanToNum NativeDropout Neg Polar Pow Prelu Reciprocal Relu Remainder Repeat Round Rsqrt Rsub Selu Sgn Sigmoid Silu
    Sin Sinc Sinh Softplus Softshrink Sqrt Square Sub Tan Tanh Threshold ToCopy Trunc Where Xlogy
    """.split()
)
_RESHAPES = frozenset("View UnsafeView ReshapeAlias Unsqueeze Squeeze Reshape ViewAsReal ViewAsComplex".split())
_REDUCES = frozenset("Sum Mean Amax Amin Logsumexp Norm LinalgVectorNorm Std Var Prod Median Max Min All Any".split())
_ALONG = frozenset("Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp Topk Sort".split())
_POOLS = tuple("AvgPool MaxPool AdaptiveAvgPool AdaptiveMaxPool Upsample MkldnnAdaptiveAvgPool ReflectionPad".split())


def follow(order: Sequence[Node], samples: int, identities: frozenset[str], before: int = 1) -> dict[Node, Place]:
    """Return for each node where its (first) output has the samples.

    `before` is their place in the logits, which have them first; the T positions of logits [n, T, C] are followed in
    the same way, as T samples with the place n.

    `order` lists the graph's nodes so that users come before what they use, the logits first; `identities` names
    operations that leave tensors as they are.  A tensor whose users disagree is UNKNOWN.
    """
    places: dict[Node, Place] = {order[0]: before}
    for node in order:
        place = places.get(node, UNKNOWN)
        if isinstance(place, Tensor):
            place = places[node] = regular(place, samples)
        inputs = [(below, output) for below, output in node.next_functions]
        found: list[Place]
        if isinstance(place, int) and place < 0:
            found = [place] * len(inputs)
        else:
            try:
                found = _inputs(node, place, samples, identities)
            except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
                found = [UNKNOWN] * len(inputs)
        for (below, output), its in zip(inputs, found, strict=True):
            if below is not None:
                known = places.get(below)
                places[below] = its if known is None else combined(known, its, shape_of(below, output), samples)
    return places


def _inputs(node: Node, place: Place, samples: int, identities: frozenset[str]) -> list[Place]:
    """Return where each input of an operation has the samples, given where its output has them."""
    name, inputs, out = operation(node), node.next_functions, shape_of(node)
    shapes = [None if below is None else shape_of(below, output) for below, output in inputs]
    if node.name() in identities or (name in _RESHAPES and isinstance(place, int)):
        return [place] * len(inputs)
    if isinstance(place, Tensor):
        if name in _RESHAPES:
            return [SHARED if shape is None else reshaped(place, shape) for shape in shapes]
        if len(place) != out[0]:
            raise ValueError("Rows of another tensor.")
        followed = _Followed(node, shapes, out, 0, 1, place, samples)
    else:
        followed = _Followed(node, shapes, out, *locate(out, place, samples), None, samples)
    if name in _ELEMENTWISE:
        return [followed.broadcast(shape) for shape in shapes]
    rule = _RULES.get(name) or (_leading if name.startswith(_POOLS) else None)
    return [UNKNOWN] * len(shapes) if rule is None else rule(followed)


class _Followed(NamedTuple):
    """An operation whose output has the samples in a known place."""

    node: Node
    shapes: list[torch.Size | None]  # of its inputs; None: no gradient goes there
    out: torch.Size
    dim: int  # of the output, which holds the samples
    major: int  # positions that are counted before them inside of it
    rows: Tensor | None  # owners of the rows, where the data decide
    samples: int

    def at(self, shape: torch.Size | None, dim: int) -> Place:
        """Return the place of the samples in an input that has them in dimension `dim`."""
        if shape is None:
            return SHARED
        if self.rows is not None:
            return self.rows if dim == 0 and shape[0] == len(self.rows) else UNKNOWN
        return prod(shape[:dim]) * self.major

    def broadcast(self, shape: torch.Size | None) -> Place:
        """Return the place in the same dimension of an input, counted from the last; SHARED if it does not have it."""
        own = self.dim - (len(self.out) - len(shape or ()))
        return SHARED if shape is None or own < 0 or shape[own] != self.out[self.dim] else self.at(shape, own)

    def first_only(self, known: bool) -> list[Place]:
        """Return the same dimension of the first input, if it is known to have the samples; others are shared."""
        place = self.at(self.shapes[0], self.dim) if known else UNKNOWN
        return [place, *[SHARED] * (len(self.shapes) - 1)]

    @property
    def owners(self) -> Tensor:
        """The samples of the output's rows."""
        place = prod(self.out[: self.dim]) * self.major if self.rows is None else self.rows
        found = owners(place, self.out, self.samples)
        if found is None:
            raise ValueError("The first dimension does not hold the samples.")
        return found

    @property
    def keeps_size(self) -> bool:
        """Whether the first input has the same dimensions, and the samples' of the same size."""
        first = self.shapes[0]
        return first is not None and len(first) == len(self.out) and first[self.dim] == self.out[self.dim]

    def saved(self, dim: int, dims: int | None = None) -> int:
        """Return a dimension that the node has saved, counted from the first; of `dims`, or as many as the output's."""
        return signed(dim) % max(1, len(self.out) if dims is None else dims)


_Rule = Callable[[_Followed], list[Place]]
_RULES: dict[str, _Rule] = {}


def _of(*names: str) -> Callable[[_Rule], _Rule]:
    """Enter a rule for some operations; whatever it reads of a node, besides shapes, is part of `Graph.signature`."""

    def enter(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


@_of("Permute")
def _permuted(op: _Followed) -> list[Place]:
    return [op.at(op.shapes[0], op.saved(op.node._saved_dims[op.dim]))]


@_of("Transpose")
def _transposed(op: _Followed) -> list[Place]:
    a, b = op.saved(op.node._saved_dim0), op.saved(op.node._saved_dim1)
    return [op.at(op.shapes[0], {a: b, b: a}.get(op.dim, op.dim))]


@_of("T")
def _turned(op: _Followed) -> list[Place]:
    return [op.at(op.shapes[0], len(op.out) - 1 - op.dim)]


@_of("Slice", "Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes")
def _cut(op: _Followed) -> list[Place]:
    """Taking some entries along another dimension leaves the samples where they are."""
    return op.first_only(op.keeps_size)


@_of("ConstantPadNd")
def _padded(op: _Followed) -> list[Place]:
    return op.first_only(op.keeps_size and len(op.out) - 1 - op.dim not in shifted_dims(op.node))


@_of("Gather", "IndexSelect")
def _gathered(op: _Followed) -> list[Place]:
    along = op.saved(op.node._saved_dim)
    if along == op.dim == 0 and operation(op.node) == "IndexSelect":
        return _picked(op, op.node._saved_index)
    return op.first_only(op.keeps_size and along != op.dim)


@_of("Select", "Unbind")
def _selected(op: _Followed) -> list[Place]:
    removed = op.saved(op.node._saved_dim, len(op.out) + 1)
    return [op.at(op.shapes[0], op.dim if op.dim < removed else op.dim + 1)]


@_of("Stack")
def _stacked(op: _Followed) -> list[Place]:
    new = op.saved(op.node._saved_dim)
    own = op.dim if op.dim < new else op.dim - 1
    return [UNKNOWN if new == op.dim else op.at(shape, own) for shape in op.shapes]


@_of("Cat")
def _concatenated(op: _Followed) -> list[Place]:
    """Parts may be joined along the samples only if each has all of them, positions first: [k·n] of k [n]."""
    if op.saved(op.node._saved_dim) != op.dim:
        return [op.at(shape, op.dim) for shape in op.shapes]
    if op.rows is not None:
        return [UNKNOWN] * len(op.shapes)
    whole, rest = divmod(op.out[op.dim], op.major)
    if rest or any(shape is None or shape[op.dim] % whole for shape in op.shapes):
        return [UNKNOWN] * len(op.shapes)
    return [prod(shape[: op.dim]) * (shape[op.dim] // whole) for shape in op.shapes if shape is not None]


@_of(*_REDUCES)
def _reduced(op: _Followed) -> list[Place]:
    (shape,) = op.shapes
    assert shape is not None
    if len(shape) == len(op.out):
        return [op.at(shape, op.dim)]
    over = op.node._saved_dim
    gone = {op.saved(d, len(shape)) for d in (over if isinstance(over, (tuple, list)) else (over,))}
    return [op.at(shape, [d for d in range(len(shape)) if d not in gone][op.dim])]


@_of(*_ALONG)
def _along(op: _Followed) -> list[Place]:
    return op.first_only(op.saved(op.node._saved_dim) != op.dim)


@_of("NativeLayerNorm", "FusedRmsNorm")
def _normalised(op: _Followed) -> list[Place]:
    return op.first_only(op.dim < len(op.out) - len(op.node._saved_normalized_shape))


@_of("AsStrided")
def _restrided(op: _Followed) -> list[Place]:
    return op.first_only(leaves_in_place(op.node))


@_of("Tril", "Triu")
def _triangle(op: _Followed) -> list[Place]:
    return op.first_only(op.dim < len(op.out) - 2)


@_of(
    *("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeGroupNorm", "Convolution", "MkldnnConvolution"),
)
def _leading(op: _Followed) -> list[Place]:
    """The first input has the samples where the output has them, in front; weights are shared."""
    mixes = op.dim > 0 or getattr(op.node, "_saved_training", False) or op.shapes[0] is None
    return op.first_only(not mixes)


@_of("Mm", "Addmm", "Bmm", "Baddbmm")
def _multiplied(op: _Followed) -> list[Place]:
    """In [..., r, k] @ [..., k, c], rows belong to the left factor, columns to the right one, batches to both."""
    *added, left, right = op.shapes
    from_last = len(op.out) - 1 - op.dim
    sides = [SHARED if from_last == 0 else op.at(left, op.dim), SHARED if from_last == 1 else op.at(right, op.dim)]
    return [*map(op.broadcast, added), *sides]


@_of(
    *("ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
)
def _attended(op: _Followed) -> list[Place]:
    """Queries [..., t, d] and masks [..., t, s] belong to the outputs [..., t, d], which share keys and values."""
    if op.dim == len(op.out) - 1:
        return [UNKNOWN] * len(op.shapes)
    shared = (1, 2) if op.dim == len(op.out) - 2 else ()
    return [SHARED if k in shared else op.broadcast(shape) for k, shape in enumerate(op.shapes)]


@_of("Index")
def _indexed(op: _Followed) -> list[Place]:
    """Indexing is followed behind the samples' dimension, for x[arange(n), ids], and for rows x[ids], x[ids, others].

    Indices that are apart, as in x[:, i, :, j], put their own dimension first.
    """
    shape, indexed = op.shapes[0], [k for k, index in enumerate(op.node._saved_indices) if index is not None]
    together = indexed[-1] - indexed[0] < len(indexed)
    own_rows = shape is not None and op.dim == 0 and shape[0] == op.out[0] and takes_own_rows(op.node)
    first = op.node._saved_indices[0]
    if op.dim == 0 and together and first is not None and first.ndim == 1 and not own_rows:
        return _picked(op, first.nonzero()[:, 0] if first.dtype == torch.bool else first)
    return op.first_only(shape is not None and ((together and op.dim < indexed[0]) or own_rows))


def _picked(op: _Followed, index: Tensor) -> list[Place]:
    """Return the owners of x's rows from those of x[index]; a row that goes to several samples has none."""
    (shape,), rows = op.shapes[:1], op.owners.to(index.device)
    if shape is None or len(index) != len(rows):
        return op.first_only(False)
    index = torch.where(index < 0, index + shape[0], index)
    found = rows.new_full(shape[:1], -1).scatter_reduce(0, index, rows, "amax")
    same = bool(((found[index] == rows) | (rows < 0)).all())
    return [found if same else UNKNOWN, *[SHARED] * (len(op.shapes) - 1)]


@_of("IndexAdd")
def _added_to_rows(op: _Followed) -> list[Place]:
    """Rows of the second input are added to those of the first that an index names."""
    into, rows = op.at(op.shapes[0], op.dim), op.shapes[1]
    if op.saved(op.node._saved_dim) != op.dim:
        return [into, op.at(rows, op.dim)]
    index = op.node._saved_index
    return [into, op.owners.to(index.device)[index]]


@_of("_ToTorchTensorBackward", "_FromTorchTensorBackward", "RedistributeBackward")
def _distributed(op: _Followed) -> list[Place]:
    """Between a DTensor and a part of it, which has all samples."""
    known = type(op.node)._forward_cls.__module__.startswith("torch.distributed.tensor.")
    return op.first_only(known and op.keeps_size)


@_of("GroupedMm")
def _multiplied_in_groups(op: _Followed) -> list[Place]:
    return op.first_only(op.dim == 0 and len(op.out) == 2)
