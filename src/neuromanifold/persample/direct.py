"""Parameters that are used outside of modules with a rule, and outputs of modules that all samples share.

Position tables, class tokens, scales, the projections of nn.MultiheadAttention: autograd gives their gradient summed
over the samples.  One step earlier it is not: where the tensor s meets the samples, the gradient g of the result still
has a row for each of them.  So the graph is searched for these meetings, and the gradient is picked up there:

    x + s, expand(s)    ∂/∂s of a sample = its part of g, summed over what s is broadcast over
    x∘s                 the same with g∘x
    x @ s (+ b)         Σ over its rows of x ⊗ g, and of g for b

Between there and s there may be reshapes, slices and casts.  Anything else is not recognised, and left to others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from neuromanifold.persample.gradients import Dense, Form, Product

Node = Any
Edge = tuple[Node, int]  # a node, and which of its inputs
Order = Literal["samples", "positions"]
"""What comes first where samples and positions share a dimension: [n·t, ...] or [t·n, ...]."""

_BROADCASTS = ("AddBackward0", "MulBackward0", "ExpandBackward0")
_PRODUCTS = {"AddmmBackward0": ("bias", "_saved_mat1", "matrix"), "MmBackward0": ("_saved_self", "matrix")}
_CASTS = ("ToCopyBackward0", "CloneBackward0", "AliasBackward0")
_ROUTING = (
    "Index",
    "Gather",
    "Scatter",
    "MaskedSelect",
    "MaskedScatter",
    "Take",
    "Sort",
    "Topk",
    "PackPadded",
    "Unique",
)
_STRUCTURAL = (
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0"),
    *("SqueezeBackward1", "SliceBackward0", "SelectBackward0", "PermuteBackward0", "TransposeBackward0", "TBackward0"),
    *_CASTS,
)


@dataclass(eq=False)
class Meeting:
    """Where a tensor meets the samples: a node, which of its inputs, and the way from there to the tensor."""

    node: Node
    input: int
    path: tuple[Node, ...]
    shape: torch.Size  # of the tensor
    partner: Tensor | None = None  # what the tensor is multiplied by

    @property
    def edge(self) -> GradientEdge:
        """Where the gradient of the result is."""
        return GradientEdge(self.node, 0)

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices, in which samples and positions may share a dimension."""
        return self.node.name() in _PRODUCTS

    def orders(self, samples: int) -> list[Order]:
        """In which orders the result can have the samples, going by its shape; none if it cannot."""
        result, arriving = self.node._input_metadata[0].shape, self._arriving
        if not len(result) or not samples:
            return []
        if self.is_product:
            role = _PRODUCTS[self.node.name()][self.input]
            turns = [_transposes(node) for node in self.path if node.name() not in _CASTS]
            straight = turns in ([], [True]) if role == "matrix" else role == "bias" and not turns
            factors = (getattr(self.node, "_saved_alpha", 1), getattr(self.node, "_saved_beta", 1))
            if factors != (1, 1) or not straight or result[0] % samples or (role == "bias" and len(arriving) != 1):
                return []
            return ["samples"] if result[0] == samples else ["samples", "positions"]
        shared = len(arriving) < len(result) or (len(arriving) == len(result) and arriving[0] == 1)
        found: list[Order] = ["samples"] if result[0] == samples and shared else []
        if len(result) > 2 and result[1] == samples and len(arriving) <= len(result) - 2:
            found.append("positions")
        return found

    def form(self, g: Tensor, samples: int, order: Order) -> Form:
        """Gradients of single samples with respect to the tensor, from the gradient of the result."""
        if not self.is_product:
            return Dense(self.gradients(g, order))
        g = samples_first(g, samples, order)  # [n, t, o]
        if self.partner is None:
            return Dense(g.sum(1))
        x = samples_first(self.partner, samples, order)  # [n, t, i]
        turned = any(_transposes(node) for node in self.path)
        return Product(g, x) if turned else Product(x, g)

    def rows(self, g: Tensor, samples: int, order: Order) -> Tensor:
        """The gradient of the result with samples first."""
        if self.is_product:
            return samples_first(g, samples, order)
        return g if order == "samples" else g.movedim(1, 0)

    def gradients(self, g: Tensor, order: Order = "samples") -> Tensor:
        """Those of single samples as a tensor [n, *shape]; not for products."""
        if self.partner is not None:
            g = g * self.partner
        elif self.node.name() == "AddBackward0" and self.input == 1 and self.node._saved_alpha != 1:
            g = g * self.node._saved_alpha
        g = g if order == "samples" else g.movedim(1, 0)
        shape = self._arriving
        padded = (1,) * (g.ndim - len(shape)) + tuple(shape)
        over = tuple(d for d in range(1, g.ndim) if padded[d] == 1 and g.shape[d] != 1)
        g = (g.sum(over, keepdim=True) if over else g).reshape(g.shape[0], *shape)
        for node in self.path:
            g = torch.vmap(node)(g)
        return g.reshape(g.shape[0], *self.shape)

    @property
    def _arriving(self) -> torch.Size:
        """The shape in which the tensor arrives at the meeting."""
        return torch.Size(self.path[0]._input_metadata[0].shape) if self.path else self.shape


def _transposes(node: Node) -> bool:
    """Whether a node is the transposition of a matrix."""
    matrix = len(node._input_metadata[0].shape) == 2
    if node.name() == "PermuteBackward0":
        return matrix and node._saved_dims[0] % 2 == 1
    return matrix and node.name() in ("TBackward0", "TransposeBackward0")


def samples_first(rows: Tensor, samples: int, order: Order) -> Tensor:
    """[n·t, ...] or [t·n, ...] as [n, t, ...]."""
    if order == "samples":
        return rows.reshape(samples, -1, *rows.shape[1:])
    return rows.reshape(-1, samples, *rows.shape[1:]).transpose(0, 1)


def consumers(root: Node) -> dict[Node, list[Edge]]:
    """For each node of a graph, where its result goes."""
    found: dict[Node, list[Edge]] = {root: []}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for i, (below, _) in enumerate(node.next_functions):
            if below is None:
                continue
            if below in found:
                found[below].append((node, i))
            else:
                found[below] = [(node, i)]
                waiting.append(below)
    return found


def sends_rows_by_data(nodes: Iterable[Node], samples: int) -> bool:
    """Whether a graph has operations that pick or place rows by what the data say, so that each batch differs."""
    return any(node.name().startswith(_ROUTING) and not _keeps_rows(node, samples) for node in nodes)


def _keeps_rows(node: Node, samples: int) -> bool:
    """Whether such an operation leaves the first dimension alone: it works on another, or takes row n for sample n."""
    dim = getattr(node, "_saved_dim", None)
    if dim is not None:
        signed = dim - 2**64 if dim >= 2**63 else dim
        return bool(signed % max(1, len(node._input_metadata[0].shape)) != 0)
    first = (getattr(node, "_saved_indices", None) or (torch.zeros(0),))[0]
    if first is None:
        return True
    first = first.flatten()
    return len(first) == samples and bool((first == torch.arange(samples, device=first.device)).all())


def meetings(node: Node, shape: torch.Size, samples: int, used_by: dict[Node, list[Edge]]) -> list[Meeting] | None:
    """Where what a node makes meets the samples; None if one of its uses is not recognised."""
    found: list[Meeting] = []
    waiting: list[tuple[Node, tuple[Node, ...]]] = [(node, ())]
    while waiting:
        below, path = waiting.pop()
        users = used_by.get(below, [])
        if not users:
            return None  # the output itself
        for user, i in users:
            name, meeting = user.name(), Meeting(user, i, path, shape)
            if (name in _BROADCASTS or name in _PRODUCTS) and meeting.orders(samples):
                meeting.partner = _partner(meeting)
                found.append(meeting)
            elif name in _STRUCTURAL:
                waiting.append((user, (user, *path)))
            else:
                return None
    return found


def _partner(meeting: Meeting) -> Tensor | None:
    """What autograd has saved for the gradient: it lets go of it during the last backward pass, so it is kept."""
    node, name = meeting.node, meeting.node.name()
    if name == "MulBackward0":
        saved: Tensor = node._saved_other if meeting.input == 0 else node._saved_self
        return saved.detach()
    if name in _PRODUCTS and _PRODUCTS[name][meeting.input] == "matrix":
        factor: Tensor = getattr(node, next(saved for saved in _PRODUCTS[name] if saved.startswith("_saved")))
        return factor.detach()
    return None
