"""Autograd's graph from the logits down: its nodes, what they have saved, and whether two graphs are of one kind."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Node = Any

_ARGUMENTS = (  # of any operation that has them: they decide where rows go
    *("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1", "_saved_split_sizes", "_saved_start", "_saved_step"),
    *("_saved_shifts", "_saved_training", "_saved_normalized_shape"),
)


@dataclass(eq=False)
class GraphSite:
    """An operation at which a parameter meets rows of the batch."""

    node: Node

    @property
    def edge(self) -> GradientEdge:
        """The edge of autograd's graph at which the gradient of the result arrives."""
        return GradientEdge(self.node, 0)

    @property
    def result(self) -> torch.Size:
        """The shape of the result."""
        return shape_of(self.node)


@dataclass(frozen=True)
class Graph:
    """Autograd's graph from logits down, read in one walk."""

    users: dict[Node, list[tuple[Node, int]]]
    """For each node who uses its result, and as which input."""
    signature: int = 0
    """Equal for graphs in which the same rows belong to each sample.

    It holds the operations, how they are connected, the arguments that decide where rows go, and all sizes: not as
    numbers, since sequences of other lengths need no other treatment, but by which of them are equal to each other, to
    1, and to (a multiple of) the number of samples.
    """
    leaves: tuple[Node, ...] = ()
    """Where the graph ends in a parameter, or another tensor with a gradient."""
    by_values: bool = False
    """Whether the values of indices decide which sample owns some rows (`follow.py`)."""

    @classmethod
    def of(cls, root: Node, samples: int) -> Graph:
        """Read the graph below a node."""
        users: dict[Node, list[tuple[Node, int]]] = {root: []}
        numbers, waiting, parts, leaves, by_values = {root: 0}, [root], list[tuple[Any, ...]](), list[Node](), False
        while waiting:
            node = waiting.pop()
            name, metadata = node.name(), node._input_metadata
            part: list[object] = [name, tuple(metadata[0].shape) if metadata else (), numbers[node]]
            if arguments := _arguments_of(type(node)):  # type: ignore[arg-type]
                part += [getattr(node, argument) for argument in arguments]
            if name == "torch::autograd::AccumulateGrad":
                leaves.append(node)
            elif name in MOVES_ROWS:
                by_values = by_values or reads_values(node)
                if name == "IndexBackward0":
                    part += [takes_own_rows(node), tuple(index is None for index in node._saved_indices)]
            elif name == "ConstantPadNdBackward0":
                part.append(shifted_dims(node))
            elif name.startswith("AsStridedBackward"):
                part.append(leaves_in_place(node))
            for i, (below, output) in enumerate(node.next_functions):
                if below is None:
                    part.append(None)
                    continue
                if below not in users:
                    users[below], numbers[below] = [], len(numbers)
                    waiting.append(below)
                users[below].append((node, i))
                part += (numbers[below], output)
            parts.append(tuple(part))
        return cls(users, _canonical(samples, tuple(parts)), tuple(leaves), by_values)

    def users_first(self) -> list[Node]:
        """Return the nodes in an order in which each comes after all of its users."""
        left = {node: len(users) for node, users in self.users.items()}
        order = [node for node, count in left.items() if not count]
        for node in order:
            for below, _ in node.next_functions:
                if below is not None:
                    left[below] -= 1
                    if not left[below]:
                        order.append(below)
        return order


@functools.cache
def _arguments_of(kind: type) -> tuple[str, ...]:
    """Return the names of an operation's arguments that are part of a signature."""
    return tuple(name for name in _ARGUMENTS if hasattr(kind, name))


@functools.lru_cache(maxsize=256)
def _canonical(samples: int, parts: tuple[tuple[Any, ...], ...]) -> int:
    """Return a hash of a graph in which sizes are named in the order in which they come."""
    names: dict[int, tuple[int, bool, bool]] = {}
    for _, shape, *_ in parts:
        for size in shape:
            if size > 1 and size not in names:
                names[size] = (len(names), size == samples, bool(samples) and size % samples == 0)
    return hash(tuple((name, *(names.get(size, size) for size in shape), *rest) for name, shape, *rest in parts))


def operation(node: Node) -> str:
    """Return the name of a node's operation, without "Backward0" and the like.

    Functions of a user's own, which have no number at the end, keep theirs: one that is called Add may do anything.
    """
    name: str = node.name()
    return name.partition("Backward")[0] if name[-1:].isdigit() else name


def signed(number: int) -> int:
    """Return a number that a node has saved: negative ones come as unsigned ones of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


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


def shifted_dims(node: Node) -> tuple[int, ...]:
    """Return the dimensions, counted from the last, that padding shifts: as much is added in front as is cut behind."""
    before, after = ([signed(amount) for amount in node._saved_pad[k::2]] for k in (0, 1))
    return tuple(d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a and a == -b)


MOVES_ROWS = frozenset({"IndexBackward0", "IndexSelectBackward0", "IndexAddBackward0"})
"""Operations of which an index says where rows come from."""


def reads_values(node: Node) -> bool:
    """Return whether the values of such an index decide which sample owns the rows of the operation's input."""
    if node.name() == "IndexBackward0":
        first = node._saved_indices[0]
        picked = first is not None and first.ndim == 1 and not takes_own_rows(node)
    else:
        picked = signed(node._saved_dim) in (0, -len(shape_of(node)))
    rows = 1 if node.name() == "IndexAddBackward0" else 0  # the input that has them
    below = node.next_functions[rows][0] if picked else None
    return below is not None and not hasattr(below, "variable")


def leaves_in_place(node: Node) -> bool:
    """Return whether an `as_strided` sees all entries of a new mean where they are, with other strides of single ones.

    So does pooling to one pixel with channels last, [n, c, h, w] ─ mean ─► [n, c, 1, 1] ─ as_strided ─► [n, c, 1, 1].
    """
    shape, ((below, output), *_) = shape_of(node), node.next_functions
    if below is None or operation(below) != "Mean" or shape_of(below, output) != shape or node._saved_storage_offset:
        return False
    strides = zip(shape, node._saved_stride, torch.empty(shape, device="meta").stride(), strict=True)
    return all(size == 1 or own == dense for size, own, dense in strides)
