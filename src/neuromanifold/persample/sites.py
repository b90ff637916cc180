"""Where parameters outside of modules with a rule are used: sites at which they are broadcast over the batch.

Position tables, class tokens, scales, the projections of nn.MultiheadAttention: autograd gives the gradient of such a
tensor s summed over the samples.  One step earlier it is not: where s is broadcast over the batch, the gradient g of
the result still has a row for each sample.  So the graph is searched for these broadcast sites:

    x + s, expand(s)    ∂/∂s of a sample = its part of g, summed over what s is broadcast over
    x∘s                 the same with g∘x
    x @ s (+ b)         Σ over its rows of x ⊗ g, and of g for b
    layer_norm(x, s, b) the same as for x̂∘s + b, x̂ the normalised x
    embedding(ids, s)   Σ over its rows of g, in the row of s that was looked up

Between a site and s there may be reshapes, slices, casts, and functions of each entry alone: x∘(1 + s), exp(s).
Any other use is not supported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.persample.experts import CASTS, ExpertSite, expert_site, picks_matrices
from neuromanifold.persample.gradients import Dense, Form, Product, Rows
from neuromanifold.persample.graph import Graph, GraphSite, Node, shape_of
from neuromanifold.persample.places import Layout, stacked

_BROADCASTS = ("AddBackward0", "MulBackward0", "ExpandBackward0", "RepeatBackward0")
_PRODUCTS = {"AddmmBackward0": ("bias", "_saved_mat1", "matrix"), "MmBackward0": ("_saved_self", "matrix")}
_LAYER_NORM, _LOOKUP = "NativeLayerNormBackward0", "EmbeddingBackward0"
_PICKS = frozenset({"IndexBackward0", "SelectBackward0", "GroupedMmBackward0"})  # one of several matrices (experts.py)
_STRUCTURAL = (
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0"),
    *("SqueezeBackward1", "SliceBackward0", "SelectBackward0", "PermuteBackward0", "TransposeBackward0", "TBackward0"),
    *CASTS,
)
_POINTWISE = (  # of one tensor, and of constants of the same shape
    *("AddBackward0", "SubBackward0", "RsubBackward0", "RsubBackward1", "MulBackward0", "DivBackward0", "NegBackward0"),
    *("ExpBackward0", "LogBackward0", "SigmoidBackward0", "TanhBackward0", "SoftplusBackward0", "PowBackward0"),
    *("PowBackward1", "PowBackward2", "ReciprocalBackward0", "SqrtBackward0", "RsqrtBackward0", "AbsBackward0"),
    *("ReluBackward0", "ClampBackward1"),
)


class Step(NamedTuple):
    """An operation between a tensor and where it is broadcast over the batch."""

    node: Node
    derivative: Tensor | None = None  # of each entry, where the operation is a function of it alone

    def gradients(self, g: Tensor) -> Tensor:
        """Return the per-sample gradients of the operation's input, from those of its result."""
        return torch.vmap(self.node)(g) if self.derivative is None else g * self.derivative


@dataclass(eq=False)
class BroadcastSite(GraphSite):
    """Where a tensor is broadcast over the batch: a node, which of its inputs, and the path to the tensor."""

    input: int
    path: tuple[Step, ...]
    shape: torch.Size  # of the tensor
    layouts: tuple[Layout, ...] = ()  # that the result can have, going by its shape
    partner: Tensor | None = None  # what the tensor is multiplied by, once normalised; or which rows are looked up
    statistics: tuple[Tensor, Tensor] | None = None  # mean and 1/σ, by which the partner is

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices, in which samples and positions may share a dimension."""
        return self.node.name() in _PRODUCTS

    @property
    def is_lookup(self) -> bool:
        """Whether rows of the tensor are looked up."""
        name: str = self.node.name()
        return name == _LOOKUP

    @property
    def is_tiled(self) -> bool:
        """Whether several entries are repeated together: [h, ...] to [n·h, ...], as DeBERTa does with its heads."""
        result, arriving = self.result, self._arriving
        repeated = self.node.name() == "RepeatBackward0" and len(result) == len(arriving) > 0 and arriving[0] > 1
        return repeated and result[1:] == arriving[1:]

    def candidates(self, samples: int) -> list[Layout]:
        """Return the layouts that the result can have, going by its shape; none if the use is not supported."""
        result, arriving = self.result, self._arriving
        if not len(result) or not samples:
            return []
        if self.is_lookup:
            if self.path or self.node._saved_scale_grad_by_freq:
                return []
            apart = [Layout(d) for d in range(min(2, len(result) - 1)) if result[d] == samples]
            return apart or stacked(0, result[0], samples)
        if self.is_product:
            role = _PRODUCTS[self.node.name()][self.input]
            turns = [_transposes(step.node) for step in self.path if step.node.name() not in CASTS]
            straight = turns in ([], [True]) if role == "matrix" else role == "bias" and not turns
            factors = (getattr(self.node, "_saved_alpha", 1), getattr(self.node, "_saved_beta", 1))
            straight &= not self.node._input_metadata[0].dtype.is_complex  # conjugates, of which the real part counts
            if factors != (1, 1) or not straight or (role == "bias" and len(arriving) != 1):
                return []
            return stacked(0, result[0], samples)
        if self.is_tiled and result[0] == samples * arriving[0]:
            return [Layout(0)]
        offset = len(result) - len(arriving)
        if any(size not in (1, result[d]) for d, size in enumerate(arriving, offset)):
            return []  # repeated several times in a row
        return [
            Layout(d)
            for d in range(min(2, len(result)))
            if result[d] == samples and (d < offset or arriving[d - offset] == 1)
        ]

    def form(self, g: Tensor, samples: int, layout: Layout) -> Form:
        """Return the per-sample gradients of the tensor, from the gradient g of the result."""
        if self.is_lookup:
            return self._rows(g, samples, layout)
        if not self.is_product:
            return Dense(self.gradients(g, layout))
        g = layout.samples_first(g, samples)
        g = g if g.ndim > 2 else g[:, None]  # [n, t, o]
        if self.partner is None:
            return Dense(g.sum(1))
        x = layout.samples_first(self.partner, samples)
        x = x if x.ndim > 2 else x[:, None]  # [n, t, i]
        turned = any(_transposes(step.node) for step in self.path)
        return Product(g, x) if turned else Product(x, g, turned=True)

    def gradients(self, g: Tensor, layout: Layout) -> Tensor:
        """Return the per-sample gradients as one tensor [n, *shape]; not for products of matrices."""
        if self.partner is not None:
            x = self.partner
            if self.statistics is not None:
                mean, reciprocal = self.statistics
                x = ((x - mean) * reciprocal).to(x.dtype)
            g = g * x
        elif self.node.name() == "AddBackward0" and self.input == 1 and self.node._saved_alpha != 1:
            g = g * self.node._saved_alpha
        shape = self._arriving
        if self.is_tiled:
            g = g.reshape(-1, *shape)  # [n, h, ...]
        padded = [1] * (g.ndim - len(shape)) + list(shape)
        padded.insert(0, padded.pop(layout.dim))
        g = g.movedim(layout.dim, 0)
        over = tuple(d for d in range(1, g.ndim) if padded[d] == 1 and g.shape[d] != 1)
        g = (g.sum(over, keepdim=True) if over else g).reshape(g.shape[0], *shape)
        for step in self.path:
            g = step.gradients(g)
        return g.reshape(g.shape[0], *self.shape)

    def _rows(self, g: Tensor, samples: int, layout: Layout) -> Rows:
        """Return the per-sample gradients of a tensor whose rows are looked up, but for the padding row."""
        assert self.partner is not None
        ids = layout.samples_first(self.partner, samples).reshape(samples, -1)
        g = layout.samples_first(g, samples).reshape(*ids.shape, -1)
        padding = self.node._saved_padding_idx
        if padding < self.shape[0]:  # as an unsigned number: there is none
            g = torch.where((ids == padding)[..., None], 0.0, g)
        return Rows(g, ids.long(), self.shape[0])

    @property
    def _arriving(self) -> torch.Size:
        """The shape in which the tensor arrives at the site."""
        return shape_of(self.path[0].node) if self.path else self.shape


def _transposes(node: Node) -> bool:
    matrix = len(shape_of(node)) == 2
    if node.name() == "PermuteBackward0":
        return matrix and node._saved_dims[0] % 2 == 1
    return matrix and node.name() in ("TBackward0", "TransposeBackward0")


Site = BroadcastSite | ExpertSite


def broadcast_sites(node: Node, shape: torch.Size, samples: int, graph: Graph) -> list[Site] | None:
    """Return where a node's result is broadcast over the batch; None if one of its uses is not supported."""
    found: list[Site] = []
    waiting: list[tuple[Node, tuple[Step, ...]]] = [(node, ())]
    while waiting:
        below, path = waiting.pop()
        users = graph.users.get(below, [])
        if not users:
            return None  # the logits themselves
        for user, i in users:
            site = _site(user, i, path, shape, samples)
            if site is not None:
                found.append(site)
                continue
            arriving = shape_of(path[0].node) if path else shape
            structural = user.name() in _STRUCTURAL or (len(arriving) == 3 and picks_matrices(user))
            step = Step(user) if structural else _pointwise(user, i, arriving)
            if step is None:
                return None
            waiting.append((user, (step, *path)))
    return found


def _site(node: Node, i: int, path: tuple[Step, ...], shape: torch.Size, samples: int) -> Site | None:
    """Return where a node uses a parameter for the rows of a batch, if it does so."""
    site = BroadcastSite(node, i, path, shape)
    if node.name() in (*_BROADCASTS, *_PRODUCTS, _LAYER_NORM, _LOOKUP):
        site.layouts = tuple(site.candidates(samples))
    if not site.layouts:
        steps = [step.node for step in path]
        picks = samples and not _PICKS.isdisjoint(one.name() for one in (node, *steps))
        return expert_site(node, i, steps, shape) if picks else None
    site.partner = _partner(site)
    if node.name() == _LAYER_NORM:
        site.statistics = node._saved_result1, node._saved_result2
    return site


@torch.no_grad()
def _pointwise(node: Node, i: int, arriving: torch.Size) -> Step | None:
    """Return a node that is a function of each entry of its one input with a graph; None if it is not."""
    others = (below for k, (below, _) in enumerate(node.next_functions) if k != i)
    if node.name() not in _POINTWISE or shape_of(node) != arriving or any(other is not None for other in others):
        return None
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    if any(isinstance(one, Tensor) and one.numel() and not one.untyped_storage().nbytes() for one in saved):
        return None  # a whole parameter that FSDP2 has freed until its backward
    metadata = node._input_metadata[0]
    derivative = node(torch.ones(arriving, dtype=metadata.dtype, device=metadata.device))
    return Step(node, derivative if isinstance(derivative, Tensor) else derivative[i])


def _partner(site: BroadcastSite) -> Tensor | None:
    """Return the tensor that autograd has saved for the gradient, which it frees during the last backward pass."""
    node, name = site.node, site.node.name()
    if name == "MulBackward0":
        saved: Tensor = node._saved_other if site.input == 0 else node._saved_self
        return saved.detach()
    if name == _LOOKUP:
        ids: Tensor = node._saved_indices
        return ids
    if name == _LAYER_NORM and site.input == 1:
        x: Tensor = node._saved_input
        return x.detach()
    if name in _PRODUCTS and _PRODUCTS[name][site.input] == "matrix":
        factor: Tensor = getattr(node, next(saved for saved in _PRODUCTS[name] if saved.startswith("_saved")))
        return factor.detach()
    return None
