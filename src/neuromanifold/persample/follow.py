"""Follow the samples from the logits down autograd's graph: which dimension of each tensor holds them.

The logits have the samples in their first dimension.  Each operation says where its inputs then have them, so that by
one walk from the logits down it is known for every tensor, from shapes and arguments alone, never from values:

    logits [n, C] ── Mm ── [n, t·d] ── View ── [n, t, d] ── Transpose ── [t, n, d] ── Add ── ...

Where samples and positions share a dimension, [n·t, d] or [t·n, d], the place of the samples is still one number: the
product `before` of all sizes (and factors of a size) that are counted before them.  Reshaping does not change it.

Operations that pick or mix rows by what the data say (indexing, sorting, products with a matrix of the data) are not
followed.  What lies below them is verified with every batch (`verify.py`), since the next one may differ.
"""

# ruff: noqa: SIM905 (names of operations, as text)

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

Node = Any
SHARED: Final = -1
"""The tensor has no dimension for the samples: all of them share it."""

UNKNOWN: Final = -2
"""The samples cannot be followed to this tensor."""

_ELEMENTWISE = frozenset(
    """
    Abs Acos Acosh Add Addcdiv Addcmul Alias Asin Asinh Atan Atan2 Atanh Celu Ceil Clamp ClampMax ClampMin Clone Cos
    Cosh Detach Div Elu Erf Erfc Exp Exp2 Expand Expm1 Floor Fmod Gelu Hardshrink Hardsigmoid Hardswish Hardtanh
    Hypot LeakyRelu Lerp Log Log10 Log1P Log2 Logaddexp Logit LogSigmoid MaskedFill Maximum Minimum Mish Mul
    NanToNum NativeDropout Neg Polar Pow Prelu Reciprocal Relu Remainder Round Rsqrt Rsub Selu Sgn Sigmoid Silu Sin
    Sinc Sinh Softplus Softshrink Sqrt Square Sub Tan Tanh Threshold ToCopy Trunc Where Xlogy
    """.split()
)
_RESHAPES = frozenset("View UnsafeView ReshapeAlias Unsqueeze Squeeze Reshape ViewAsReal ViewAsComplex".split())
_REDUCES = frozenset("Sum Mean Amax Amin Logsumexp Norm LinalgVectorNorm Std Var Prod Median Max Min All Any".split())
_ALONG = frozenset("Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp".split())
_POOLS = tuple("AvgPool MaxPool AdaptiveAvgPool AdaptiveMaxPool Upsample MkldnnAdaptiveAvgPool ReflectionPad".split())


def operation(node: Node) -> str:
    """Return the name of a node's operation, without "Backward0" and the like."""
    name: str = node.name()
    return name.partition("Backward")[0]


def shape_of(node: Node, output: int = 0) -> torch.Size:
    """Return the shape of what a node's operation computed."""
    return torch.Size(node._input_metadata[output].shape)


def takes_own_rows(node: Node) -> bool:
    """Return whether an indexing is x[arange(n), ids]: then it takes from each sample its own.

    The values of the first index decide, so that it is part of a graph's signature.  They cannot be read while a CUDA
    graph is captured, which only happens after it has been verified.
    """
    indices = node._saved_indices
    given = [index for index in indices if index is not None]
    if len(given) < 2 or indices[0] is None or indices[0].ndim != 1 or indices[0].dtype == torch.bool:
        return False
    rows: Tensor = indices[0]
    if rows.is_cuda and torch._C._cuda_isCurrentStreamCapturing():
        return True
    return torch.equal(rows, torch.arange(len(rows), device=rows.device, dtype=rows.dtype))


def follow(order: Sequence[Node], samples: int, identities: frozenset[str]) -> dict[Node, int]:
    """Return for each node where its (first) output has the samples: `before`, SHARED or UNKNOWN.

    `order` lists the graph's nodes so that users come before what they use, the logits first; `identities` names
    operations that leave tensors as they are.  A tensor whose users disagree is UNKNOWN.
    """
    places: dict[Node, int] = {order[0]: 1}
    for node in order:
        place = places.get(node, UNKNOWN)
        inputs = [(below, output) for below, output in node.next_functions]
        if place < 0:
            found = [place] * len(inputs)
        else:
            try:
                found = _inputs(node, place, samples, identities)
            except (AttributeError, IndexError, TypeError, ValueError):
                found = [UNKNOWN] * len(inputs)
        for (below, _), its in zip(inputs, found, strict=True):
            if below is not None:
                places[below] = its if places.get(below, its) == its else UNKNOWN
    return places


def _inputs(node: Node, before: int, samples: int, identities: frozenset[str]) -> list[int]:
    """Return where each input of an operation has the samples, given where its output has them."""
    name = operation(node)
    shapes = [None if below is None else shape_of(below, output) for below, output in node.next_functions]
    out = shape_of(node)
    if name in _RESHAPES:
        return [before] * len(shapes)
    dim, major = _locate(out, before, samples)
    if name in _ELEMENTWISE or node.name() in identities:
        return [_broadcast(shape, out, dim, major) for shape in shapes]
    rule = _RULES.get(name) or (_leading if name.startswith(_POOLS) else None)
    if rule is None:
        return [UNKNOWN] * len(shapes)
    return rule(node, shapes, out, dim, major)


def _locate(shape: torch.Size, before: int, samples: int) -> tuple[int, int]:
    """Return the dimension that holds the samples, and how many positions are counted before them inside of it."""
    counted = 1
    for dim, size in enumerate(shape):
        if before < counted * size:
            major, rest = divmod(before, counted)
            if rest or size % (major * samples):
                break
            return dim, major
        counted *= size
    raise ValueError("The samples are spread over several dimensions.")


def _at(shape: torch.Size | None, dim: int, major: int) -> int:
    return SHARED if shape is None else prod(shape[:dim]) * major


def _broadcast(shape: torch.Size | None, out: torch.Size, dim: int, major: int) -> int:
    """Return the same dimension of an input, counted from the last; SHARED if it does not have it."""
    if shape is None:
        return SHARED
    own = dim - (len(out) - len(shape))
    return SHARED if own < 0 or shape[own] != out[dim] else _at(shape, own, major)


def _signed(dim: int, dims: int) -> int:
    return _negative(dim) % max(1, dims)


def _negative(number: int) -> int:
    """Return a number that a node has saved: negative ones come as unsigned ones of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


_Follows = Callable[[Node, list[torch.Size | None], torch.Size, int, int], list[int]]
_RULES: dict[str, _Follows] = {}
_READ: dict[str, tuple[str, ...]] = {  # attributes of nodes that decide where rows go; below, those that rules read
    **dict.fromkeys(("Split", "UnsafeSplit", "Unsqueeze"), ("_saved_dim",)),
    **dict.fromkeys(("SplitWithSizes", "UnsafeSplitWithSizes"), ("_saved_dim", "_saved_split_sizes")),
    "Slice": ("_saved_dim", "_saved_start", "_saved_step"),
    "Flip": ("_saved_dims",),
    "Roll": ("_saved_dims", "_saved_shifts"),
}


def _of(*names: str, reads: tuple[str, ...] = ()) -> Callable[[_Follows], _Follows]:
    """Enter a rule for some operations, and the attributes of a node, besides shapes, that it depends on."""

    def enter(rule: _Follows) -> _Follows:
        _RULES.update(dict.fromkeys(names, rule))
        if reads:
            _READ.update(dict.fromkeys(names, reads))
        return rule

    return enter


def arguments(node: Node, name: str) -> tuple[object, ...]:
    """Return all but shapes that decides where a node's rows go: two nodes with the same are followed alike."""
    if name == "IndexBackward0":
        return (takes_own_rows(node), *(index is None for index in node._saved_indices))
    if name == "ConstantPadNdBackward0":
        return tuple(_shifted(node))
    return tuple([getattr(node, attribute, None) for attribute in _attributes(name)])


@functools.cache
def _attributes(name: str) -> tuple[str, ...]:
    operation = name.partition("Backward")[0]
    return _READ.get(operation, ())


@_of("Permute", reads=("_saved_dims",))
def _permuted(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    return [_at(shapes[0], _signed(node._saved_dims[dim], len(out)), major)]


@_of("Transpose", reads=("_saved_dim0", "_saved_dim1"))
def _transposed(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    a, b = _signed(node._saved_dim0, len(out)), _signed(node._saved_dim1, len(out))
    return [_at(shapes[0], {a: b, b: a}.get(dim, dim), major)]


@_of("T")
def _turned(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    del node
    return [_at(shapes[0], len(out) - 1 - dim, major)]


@_of("Slice", "Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "ConstantPadNd")
def _cut(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    """Taking some entries along another dimension leaves the samples where they are."""
    (first,) = shapes
    kept = first is not None and first[dim] == out[dim] and len(first) == len(out)
    if operation(node) == "ConstantPadNd":
        kept = kept and len(out) - 1 - dim not in _shifted(node)
    return [_at(first, dim, major) if kept else UNKNOWN]


def _shifted(node: Node) -> list[int]:
    """Return the dimensions, counted from the last, that padding shifts: as much is added in front as is cut behind."""
    before, after = ([_negative(amount) for amount in node._saved_pad[k::2]] for k in (0, 1))
    return [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a and a == -b]


@_of("Gather", "IndexSelect", reads=("_saved_dim",))
def _gathered(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    first = shapes[0]
    kept = first is not None and first[dim] == out[dim] and len(first) == len(out)
    kept = kept and _signed(node._saved_dim, len(out)) != dim
    return [_at(first, dim, major) if kept else UNKNOWN, *[SHARED] * (len(shapes) - 1)]


@_of("Select", "Unbind", reads=("_saved_dim",))
def _selected(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    removed = _signed(node._saved_dim, len(out) + 1)
    return [_at(shapes[0], dim if dim < removed else dim + 1, major)]


@_of("Stack", reads=("_saved_dim",))
def _stacked(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    new = _signed(node._saved_dim, len(out))
    return [UNKNOWN if new == dim else _at(shape, dim if dim < new else dim - 1, major) for shape in shapes]


@_of("Cat", reads=("_saved_dim",))
def _concatenated(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    """Parts may be joined along the samples only if each has all of them, positions first: [k·n] of k [n]."""
    if _signed(node._saved_dim, len(out)) != dim:
        return [_at(shape, dim, major) for shape in shapes]
    whole, rest = divmod(out[dim], major)
    if rest or any(shape is None or shape[dim] % whole for shape in shapes):
        return [UNKNOWN] * len(shapes)
    return [_at(shape, dim, shape[dim] // whole) for shape in shapes if shape is not None]


@_of(*_REDUCES, reads=("_saved_dim",))
def _reduced(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    (shape,) = shapes
    assert shape is not None
    if len(shape) != len(out):
        over = node._saved_dim
        gone = {_signed(d, len(shape)) for d in (over if isinstance(over, (tuple, list)) else (over,))}
        dim = [d for d in range(len(shape)) if d not in gone][dim]
    return [_at(shape, dim, major)]


@_of(*_ALONG, reads=("_saved_dim",))
def _along(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    mixes = _signed(node._saved_dim, len(out)) == dim
    return [UNKNOWN if mixes else _at(shapes[0], dim, major)]


@_of("NativeLayerNorm", "FusedRmsNorm", reads=("_saved_normalized_shape",))
def _normalised(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    outside = dim < len(out) - len(node._saved_normalized_shape)
    return [_at(shapes[0], dim, major) if outside else UNKNOWN, *[SHARED] * (len(shapes) - 1)]


@_of("Tril", "Triu")
def _triangle(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    del node
    return [_at(shapes[0], dim, major) if dim < len(out) - 2 else UNKNOWN]


@_of(
    *("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeGroupNorm", "Convolution", "MkldnnConvolution"),
    reads=("_saved_training",),
)
def _leading(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    """The first input has the samples where the output has them, in front; weights are shared."""
    del out
    mixes = dim > 0 or getattr(node, "_saved_training", False) or shapes[0] is None
    return [UNKNOWN if mixes else _at(shapes[0], 0, major), *[SHARED] * (len(shapes) - 1)]


@_of("Mm", "Addmm", "Bmm", "Baddbmm")
def _multiplied(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    """In [..., r, k] @ [..., k, c], rows belong to the left factor, columns to the right one, batches to both."""
    del node
    *added, left, right = shapes
    last = len(out) - 1
    sides = [_at(left, dim, major) if dim != last else SHARED, _at(right, dim, major) if dim != last - 1 else SHARED]
    return [*(_broadcast(shape, out, dim, major) for shape in added), *sides]


@_of(
    *("ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
)
def _attended(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    del node
    return [_broadcast(shape, out, dim, major) if dim < len(out) - 2 else UNKNOWN for shape in shapes]


@_of("Index")
def _indexed(node: Node, shapes: list[torch.Size | None], out: torch.Size, dim: int, major: int) -> list[int]:
    """Indexing is followed behind the samples' dimension, and for x[arange(n), ids]."""
    first = next(k for k, index in enumerate(node._saved_indices) if index is not None)
    shape = shapes[0]
    kept = shape is not None and (dim < first or (dim == 0 and shape[0] == out[0] and takes_own_rows(node)))
    return [_at(shape, dim, major) if kept else UNKNOWN, *[SHARED] * (len(shapes) - 1)]
