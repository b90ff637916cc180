"""Discover the uses of parameters in a forward pass, and decide how each is read: an immutable plan.

captures + graph ─► discover ─► uses, each with candidate layouts ─► verify (verify.py) ─► Plan

A parameter is done per sample if all of its uses are supported and their layouts pass the verification; else it is
excluded, and left to autograd for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.persample.experts import ExpertSite, expert_site
from neuromanifold.persample.follow import follow
from neuromanifold.persample.gradients import Form, of_samples
from neuromanifold.persample.graph import Graph, shape_of
from neuromanifold.persample.hooks import Capture, CaptureGradient
from neuromanifold.persample.places import ROWS, SHARED, UNKNOWN, Layout, Place, owners, stacked
from neuromanifold.persample.rules import Call, NotApplicableError
from neuromanifold.persample.shards import is_distributed
from neuromanifold.persample.sites import BroadcastSite, Site, broadcast_sites

Key = tuple[object, ...]
_KEY = attrgetter("key")
_BY_ROW = -3  # in place of a number: each row has an owner
_COMBINATIONS = 16  # of layouts that are tried for uses that share parameters
_IDENTITIES = frozenset({f"{CaptureGradient.__name__}Backward", "RegisterPostBackwardFunctionBackward"})  # FSDP2's


@dataclass(eq=False)
class Use:
    """One use of some parameters: a captured call of a module, or a broadcast site of one parameter.

    The output of a call may be shared by all samples (position embeddings).  Then its gradients are taken where it is
    broadcast over the batch, at `sites`.
    """

    key: Key  # the same in all graphs of one signature
    parameters: dict[str, int]
    layouts: tuple[Layout, ...]  # candidates
    capture: Capture | None = None
    sites: tuple[Site, ...] = ()
    owners: Tensor | None = None  # of the rows, where the data decide

    def forms(
        self, g: Tensor, samples: int, layout: Layout, validating: bool = False, tokens: bool = False
    ) -> dict[int, Form]:
        """Return the per-sample gradients of the use's parameters, by number, from the gradient g captured there.

        For a shared call, g is already [n, *output].  `validating`: the rule may find that it does not apply.
        `tokens`: each position of each sample is taken for a sample.
        """
        if self.capture is None:
            (i,), (site,) = self.parameters.values(), self.sites
            if isinstance(site, ExpertSite):
                assert self.owners is not None
                return {i: site.form(g, samples, self.owners)}
            return {i: site.form(g, samples, layout)}
        capture, x = self.capture, self.capture.x
        if layout.shared:
            x = x.expand(samples, *x.shape)
        else:
            x, g = layout.samples_first(x, samples), layout.samples_first(g, samples)
        if tokens:
            x, g = x.flatten(0, 1), g.flatten(0, 1)
        module, wanted = capture.owner.module, frozenset(self.parameters)
        forms = capture.owner.rule.function(Call(module, x, capture.others, capture.options, g, wanted, validating))
        if missing := wanted - forms.keys():
            text = (
                f"The rule of {type(module).__name__} gives nothing for {min(missing)!r}, which it is registered for."
            )
            raise NotApplicableError(text)
        if layout == ROWS:  # each of which was taken for a sample
            assert self.owners is not None
            rows = self.owners.to(g.device)
            return {i: of_samples(forms[name], rows, samples) for name, i in self.parameters.items()}
        return {i: forms[name] for name, i in self.parameters.items()}


class Following:
    """Where the tensors of a graph have their samples, or the positions of the logits; found when first asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._found = graph, dict[tuple[int, int], dict[Any, Place]]()
        self.by_values = graph.by_values
        """Whether the data decide: then places are part of what kind of graph it is."""

    def places(self, size: int, before: int) -> dict[Any, Place]:
        """Return the place of each node, by `follow`."""
        if (size, before) not in self._found:
            self._found[size, before] = follow(self._graph.users_first(), size, _IDENTITIES, before)
        return self._found[size, before]

    def kind(self, logits: Tensor) -> tuple[int, ...]:
        """Return all places that are decided by values in this batch, as numbers."""
        if not self.by_values:
            return ()
        axes = [(logits.shape[0], 1), *([(logits.shape[1], logits.shape[0])] if logits.ndim == 3 else [])]
        found = [self.places(*axis) for axis in axes if axis[0] > 1]
        return tuple(place if isinstance(place, int) else _BY_ROW for places in found for place in places.values())

    def owners(self, node: Any, samples: int, data_alone: bool = True) -> Tensor | None:
        """Return which sample owns each row of a tensor; None if unknown, or (`data_alone`) if shapes decide it."""
        if data_alone and not self.by_values:
            return None
        if samples == 1:
            rows = shape_of(node)[:1].numel()  # without any, shapes say nothing
            return None if data_alone and rows else torch.zeros(rows, dtype=torch.long)
        place, shape = self.places(samples, 1).get(node, UNKNOWN), shape_of(node)
        if data_alone and not isinstance(place, Tensor):
            return None
        try:
            found = owners(place, shape, samples)
        except ValueError:
            return None
        return None if found is None else found.clamp(min=0)


@dataclass(eq=False)
class Uses:
    """All uses of the parameters in one forward pass."""

    samples: int
    supported: list[Use] = field(default_factory=list)
    """Those that are done per sample."""
    remaining: list[int] = field(default_factory=list)
    """Parameters whose gradients autograd gives."""
    unsupported: frozenset[int] = frozenset()
    """Parameters with a use that cannot be done per sample: they have to be excluded."""
    signature: int = 0
    following: Following = field(default_factory=lambda: Following(Graph({})))
    by_capture: dict[Capture, Use] = field(default_factory=dict)
    """The uses that are captured calls."""

    @cached_property
    def counts(self) -> dict[int, int]:
        """How often each parameter is used, where it is done per sample."""
        counts: dict[int, int] = {}
        for use in self.supported:
            for i in use.parameters.values():
                counts[i] = counts.get(i, 0) + 1
        return counts

    def parameters_of(self, keys: Set[Key]) -> frozenset[int]:
        """Return the parameters of some of the uses that are done per sample."""
        return frozenset(i for use in self.supported if use.key in keys for i in use.parameters.values())

    def places(self) -> dict[Key, Place]:
        """Return for each use where the graph has the samples, as far as they can be followed (`follow.py`)."""
        return {} if self.samples == 1 else self._of_uses(self.samples, 1)

    def places_of_positions(self, positions: int) -> dict[Key, Place]:
        """Return for each use where the graph has the positions of logits [n, T, C]: nowhere below attention."""
        return {} if positions == 1 else self._of_uses(positions, self.samples)

    def _of_uses(self, size: int, before: int) -> dict[Key, Place]:
        places = self.following.places(size, before)
        nodes = {use.key: use.sites[0].node if use.capture is None else use.capture.node for use in self.supported}
        return {key: places[node] for key, node in nodes.items()}


@dataclass(frozen=True)
class Plan:
    """How the uses in graphs of one signature are read; nothing is left to decide when it is executed."""

    layouts: Mapping[Key, Layout]
    followed: bool = False  # whether the signature alone decides which row belongs to which sample
    unverified: frozenset[Key] = frozenset()  # uses at which only zeros were seen
    tokens: frozenset[Key] | None = None  # whose gradients are given for each position (`tokens.py`); None: not tried


def discover(
    captures: list[Capture],
    logits: Tensor,
    parameters: list[nn.Parameter],
    numbers: Mapping[int, int],
    excluded: frozenset[int],
    batch_dim: int,
    plans: Mapping[int, Plan],
) -> Uses:
    """Find all uses of the parameters in the graph of a forward pass.

    `numbers`: the index of each parameter, by its id.  `plans`, by signature: where one is known, a call has the layout
    that was verified, and no other is looked for.
    """
    samples = logits.shape[0]
    if logits.grad_fn is None:  # the logits are a parameter
        own = [numbers[id(logits)]] if id(logits) in numbers else []
        return Uses(samples, remaining=own)
    graph = Graph.of(logits.grad_fn, samples)
    reaching = [capture for capture in captures if capture.node in graph.users]
    leaves = [(node, i) for node in graph.leaves if (i := numbers.get(id(node.variable))) is not None]
    # Two heads that take turns have the same graph, and other parameters.
    used = (2 * i + (i in excluded) for _, i in leaves)
    following = Following(graph)
    signature = hash((graph.signature, *map(_KEY, reaching), *used, *following.kind(logits)))
    plan = plans.get(signature)
    verified = plan.layouts if plan is not None and plan.followed else {}
    supported, unsupported, by_capture = list[Use](), set[int](), dict[Capture, Use]()
    for capture in reaching:
        key = ("call", *capture.key)
        known, sites = verified.get(key), tuple[BroadcastSite, ...]()
        layouts: tuple[Layout, ...] = () if known is None else (known,)
        rows = following.owners(capture.node, samples)
        if rows is not None:
            layouts = (ROWS,) if capture.owner.rule.extra_dims and len(capture.x) == len(rows) else ()
        elif known is None or known.shared:
            layouts, sites = _layouts(capture, samples, batch_dim, graph)
        if layouts and not capture.overwritten:
            by_capture[capture] = use = Use(key, capture.parameters, layouts, capture, sites, rows)
            supported.append(use)
        else:
            unsupported |= set(capture.parameters.values())
    remaining = []
    for node, i in leaves:
        shape = parameters[i].shape
        direct = None
        if i not in excluded and i not in unsupported and not is_distributed(parameters[i]):
            direct = _sites(node, shape, samples, graph, following)
        if direct is None:
            remaining.append(i)
            continue
        for k, (site, rows) in enumerate(direct):
            supported.append(Use(("site", i, k), {"": i}, site.layouts, None, (site,), rows))
    if remaining:
        unsupported |= {i for use in by_capture.values() for i in use.parameters.values()}.intersection(remaining)
    return Uses(samples, supported, sorted(remaining), frozenset(unsupported), signature, following, by_capture)


def _sites(
    node: Any, shape: torch.Size, samples: int, graph: Graph, following: Following
) -> list[tuple[Site, Tensor | None]] | None:
    """Return where a parameter is used outside of modules with a rule, and who owns the rows there if data decide."""
    found = broadcast_sites(node, shape, samples, graph)
    sites: list[tuple[Site, Tensor | None]] = []
    for site in found or ():
        rows, used = following.owners(site.node, samples), site
        if rows is not None and isinstance(site, BroadcastSite):  # as many rows as samples
            own = expert_site(site.node, site.input, [step.node for step in site.path], shape)
            if own is None:
                return None
            used = own
        if isinstance(used, ExpertSite):
            rows = following.owners(used.node, samples, data_alone=False)
            if rows is None or len(rows) != len(used):
                return None
        sites.append((used, rows))
    return None if found is None else sites


def _layouts(
    capture: Capture, samples: int, batch_dim: int, graph: Graph
) -> tuple[tuple[Layout, ...], tuple[BroadcastSite, ...]]:
    """The layouts that a call's input and output may have, going by their shapes."""
    shape, x, flexible = capture.shape, capture.x, capture.owner.rule.extra_dims
    found: list[Layout] = []
    if len(shape) > 1:
        dim = batch_dim if len(shape) > 2 else 0
        dims = dict.fromkeys((dim, 0, 1) if flexible and len(shape) > 2 else (dim,))
        found = [Layout(d) for d in dims if d < min(len(shape), x.ndim) and shape[d] == x.shape[d] == samples]
        if flexible and shape[0] == x.shape[0] > samples:
            found += stacked(0, shape[0], samples)
    sites = (broadcast_sites(capture.node, shape, samples, graph) if flexible else None) or []
    broadcasts = [site for site in sites if isinstance(site, BroadcastSite) and not site.is_product]
    if sites and len(broadcasts) == len(sites):
        dims_of_sites = [{layout.dim for layout in site.layouts} for site in sites]
        found += [Layout(d, shared=True) for d in sorted(set.intersection(*dims_of_sites))]
        return tuple(found), tuple(broadcasts)
    return tuple(found), ()


def preferred(uses: Uses) -> tuple[dict[Key, tuple[Layout, ...]], dict[Key, Layout]]:
    """Return each use's candidates, those first that the graph points to; and the ones followed to the logits."""
    candidates, expected = {}, {}
    places = uses.places()
    for use in uses.supported:
        place = places.get(use.key)
        fitting = [layout for layout in use.layouts if place is not None and _fits(use, layout, place, uses.samples)]
        candidates[use.key] = tuple(dict.fromkeys((*fitting, *use.layouts)))
        if fitting:
            expected[use.key] = fitting[0]
    return candidates, expected


def _fits(use: Use, layout: Layout, place: Place, samples: int) -> bool:
    if layout == ROWS or isinstance(place, Tensor):
        return layout == ROWS and use.owners is not None
    if use.capture is None:
        return layout.before(use.sites[0].result, samples) == place
    return place == SHARED if layout.shared else layout.before(use.capture.shape, samples) == place


def combinations(
    uses: Uses, candidates: Mapping[Key, tuple[Layout, ...]]
) -> dict[frozenset[int], Iterator[dict[Key, Layout]]]:
    """Return the layouts that may be tried for the uses of each group of parameters, the likeliest first."""

    def choices(members: list[Use]) -> Iterator[dict[Key, Layout]]:
        keys = [use.key for use in members]
        every = product(*(candidates[key] for key in keys))
        return (dict(zip(keys, layouts, strict=True)) for layouts in islice(every, _COMBINATIONS))

    return {frozenset(parameters): choices(members) for parameters, members in connected(uses.supported)}


def connected(uses: Sequence[Use]) -> list[tuple[set[int], list[Use]]]:
    """Return the uses in groups that have no parameter in common, each with its parameters."""
    groups: list[tuple[set[int], list[Use]]] = []
    for use in uses:
        own, apart = (set(use.parameters.values()), [use]), []
        for parameters, members in groups:
            if parameters.isdisjoint(own[0]):
                apart.append((parameters, members))
            else:
                own = (own[0] | parameters, [*members, *own[1]])
        groups = [*apart, own]
    return groups
