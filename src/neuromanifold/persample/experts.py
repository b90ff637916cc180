"""Where rows are multiplied by one of several matrices that a parameter holds, as tokens by weights of experts.

    x[rows] @ W[e]            in a loop over experts
    bmm(x, W[ids])            a matrix for each row
    grouped_mm(x, W, offs)    rows that are sorted by experts
    b[e], b[ids]              their biases

W is [E, i, o], or [E, o, i] and transposed.  The gradient g of the result has a row for each row of x, which belongs to
the sample that `follow.py` has found: Σ over its rows of x ⊗ g, in the matrix that the row went through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neuromanifold.persample.gradients import Form, Routed
from neuromanifold.persample.graph import GraphSite, Node, shape_of, signed
from neuromanifold.persample.places import ROWS, Layout

CASTS = ("ToCopyBackward0", "CloneBackward0", "AliasBackward0")


@dataclass(eq=False)
class ExpertSite(GraphSite):
    """An operation whose rows went through matrices of one parameter, and which ones."""

    shape: torch.Size  # of the parameter
    experts: Tensor  # [r] or, if all rows went through one, []
    partner: Tensor | None  # [r, i]; None for a bias
    turned: bool  # the parameter is [E, i, o]
    is_left: bool = False  # the parameter is the left factor of a product
    layouts: tuple[Layout, ...] = (ROWS,)

    def __len__(self) -> int:
        """How many rows there are."""
        return self.result[0]

    def form(self, g: Tensor, samples: int, owners: Tensor) -> Form:
        """Return the per-sample gradients of the parameter, from the gradient g of the result."""
        experts = self.experts.to(g.device).expand(len(owners))
        owners, x = owners.to(g.device), g.new_ones(len(g), 1) if self.partner is None else self.partner
        if x.ndim == 3:  # [r, t, i], of which t have the same owner
            g = g.mT if self.is_left else g
            owners, experts = (one.repeat_interleave(x.shape[1]) for one in (owners, experts))
            g, x = g.flatten(0, 1), x.flatten(0, 1)
        sides = (x, g) if self.turned else (g, x)
        return Routed(*sides, owners, experts, samples, self.shape, self.turned)


def expert_site(node: Node, i: int, path: Sequence[Node], shape: torch.Size) -> ExpertSite | None:
    """Return the use of a parameter that arrives as input i of an operation, if that is one of those above.

    `path`: the operations between the operation and the parameter.
    """
    name, steps = node.name(), [step for step in path if step.name() not in CASTS]
    if node._input_metadata[0].dtype.is_complex:
        return None
    if not path and picks_matrices(node):
        picked = _chosen(node)
        return ExpertSite(node, shape, picked, None, False) if len(shape) == 2 and picked is not None else None
    turns = [_swaps_last(step) for step in steps]
    experts: Tensor | None = None
    if steps and not turns[-1]:
        experts, turns = _chosen(steps[-1]), turns[:-1]
    if not all(turns):
        return None
    odd = len(turns) % 2 == 1
    if name == "GroupedMmBackward0" and i == 1 and len(steps) == len(turns) and len(shape) == 3:
        x, ends = node._saved_self, node._saved_offs
        if x.ndim != 2 or ends is None:
            return None
        rows = torch.arange(len(x), device=x.device)
        experts = torch.searchsorted(ends.long(), rows, right=True).clamp_(max=shape[0] - 1)
        return ExpertSite(node, shape, experts, x.detach(), turned=not odd)
    if experts is None:
        return None
    if name == "BmmBackward0" and experts.ndim and len(shape) == 3:
        x = (node._saved_self if i else node._saved_mat2.mT).detach()
        return ExpertSite(node, shape, experts, x, turned=odd != bool(i), is_left=not i)
    if experts.ndim or (name == "AddmmBackward0" and (node._saved_alpha, node._saved_beta) != (1, 1)):
        return None
    matrix = {"MmBackward0": (1, "_saved_self"), "AddmmBackward0": (2, "_saved_mat1")}.get(name)
    if matrix is not None and i == matrix[0] and len(shape) == 3:
        return ExpertSite(node, shape, experts, getattr(node, matrix[1]).detach(), turned=not odd)
    added = (name == "AddmmBackward0" and i == 0) or (
        name == "AddBackward0" and len(shape_of(node)) == 2 and (i == 0 or node._saved_alpha == 1)
    )
    same = shape_of(node)[-1:] == shape[1:]
    return ExpertSite(node, shape, experts, None, False) if added and same and len(shape) == 2 else None


def picks_matrices(node: Node) -> bool:
    """Return whether an operation is W[ids], with one matrix for each row."""
    if node.name() != "IndexBackward0":
        return False
    first, *others = node._saved_indices
    return (
        first is not None and first.ndim == 1 and first.dtype == torch.int64 and not any(x is not None for x in others)
    )


def _chosen(node: Node) -> Tensor | None:
    """Return which matrices of a parameter an operation takes; None if it does something else."""
    below = node.next_functions[0][0]
    if picks_matrices(node) and below is not None:
        index: Tensor = node._saved_indices[0]
        return index.remainder(shape_of(below)[0])  # negative ones count from the last
    if node.name() != "SelectBackward0" or signed(node._saved_dim) != 0 or below is None:
        return None
    return torch.tensor(signed(node._saved_index) % shape_of(below)[0])


def _swaps_last(node: Node) -> bool:
    """Return whether an operation transposes matrices."""
    dims = len(shape_of(node))
    if node.name() == "TBackward0":
        return dims == 2
    if node.name() == "PermuteBackward0":
        return [signed(d) % dims for d in node._saved_dims] == [*range(dims - 2), dims - 1, dims - 2]
    if node.name() != "TransposeBackward0":
        return False
    return {signed(d) % dims for d in (node._saved_dim0, node._saved_dim1)} == {dims - 2, dims - 1}
