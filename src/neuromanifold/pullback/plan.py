"""Who does which parameter: found out from the graph of a forward pass, not assumed.

Parameters with a rule at every use are done by samples, the others by autograd.  A use is recognised if it is

* a call of a module with a rule, whose rows are the samples, perhaps several rows for each;
* such a call whose output all samples share (position ids of shape [1, T]), or a parameter outside of modules with a
  rule, where it meets the samples in a way that `direct` knows.

Whether rows are samples is tried out: a backward pass from some of the samples only must leave the rows of all others
at exactly zero, and one from the others must leave those of the first at zero.  This also tells in which order samples
and positions are where they share a dimension; as long as both orders are possible, it is done again with each batch.
So it is where the graph has other operations than before, or sends rows where the data say (mixtures of experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from neuromanifold.pullback.direct import Meeting, Order, consumers, meetings, samples_first, sends_rows_by_data
from neuromanifold.pullback.forms import Form
from neuromanifold.pullback.rules import Call, NotApplicableError
from neuromanifold.pullback.taps import Record, Taps

Backward = Callable[[Tensor, Tensor, Callable[[Record, Tensor], None]], dict[int, Tensor | None]]
"""Sends a cotangent back; tells the taps' gradients, and gives those at the plan's edges."""


_ORDERS: tuple[Order, Order] = ("samples", "positions")


class Plan:
    """Decisions about one model, made again for each batch's graph; what is left to autograd once stays with it."""

    def __init__(self, taps: Taps, parameters: list[nn.Parameter], batch_dim: int) -> None:
        self.taps, self.batch_dim = taps, batch_dim
        self.samples = 0
        self.by_autograd: set[int] = set()
        self.direct: dict[int, list[Meeting]] = {}  # parameters used outside of modules with a rule
        self._numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._orders: dict[int, Order] = {}  # of parameters
        self._excluded: set[tuple[tuple[int, int], int]] = set()  # calls, and dimensions known not to hold the samples
        self._tried: set[object] = set()  # uses whose rows have been tried out, in which kind of graph
        self._graph: int | None = None  # the kind of the last graph; None if it may differ each time

    @property
    def records(self) -> list[Record]:
        """The calls of modules with a rule."""
        return self.taps.records

    def release(self) -> None:
        """Let go of the last graph: records and its nodes hold each other."""
        for record in self.records:
            record.node, record.meetings = None, []
        self.taps.records, self.direct = [], {}

    def settled(self, logits: Tensor, backward: Backward) -> bool:
        """Look at a new graph; False if rules took a parameter that they cannot do: then forward has to be repeated."""
        self.samples = logits.shape[0]
        used_by = consumers(logits.grad_fn)
        self._graph = None if sends_rows_by_data(used_by, self.samples) else hash(tuple(n.name() for n in used_by))
        self.taps.records = [record for record in self.records if record.node in used_by]
        direct = self._direct_uses(used_by)
        covered = {i for record in self.records for i in record.parameters.values()}
        refused = {
            i for record in self.records if not self._usable(record, used_by) for i in record.parameters.values()
        }
        refused |= {i for i, found in direct.items() if found is None and i in covered}
        if not refused:
            self.direct = {i: found for i, found in direct.items() if found}
            self.by_autograd |= {i for i, found in direct.items() if found is None}
            return self._rows_are_samples(logits, backward)
        self.taps.plain |= refused
        return False

    def uses(self) -> dict[int, int]:
        """How often each parameter that rules do is used."""
        counts = {i: len(found) for i, found in self.direct.items()}
        for record in self.records:
            for i in record.parameters.values():
                counts[i] = counts.get(i, 0) + 1
        return counts

    def edges(self) -> Iterator[tuple[Record | int, Meeting]]:
        """All meetings, of calls and of parameters."""
        for record in self.records:
            yield from ((record, meeting) for meeting in record.meetings)
        for i, found in self.direct.items():
            yield from ((i, meeting) for meeting in found)

    def gradient_edges(self) -> list[GradientEdge]:
        """Where their gradients are, in the same order."""
        return [meeting.edge for _, meeting in self.edges()]

    def form(self, i: int, meeting: Meeting, g: Tensor) -> Form:
        """Gradients of single samples at a parameter's own meeting."""
        return meeting.form(g, self.samples, self._orders.get(i, "samples"))

    def call(self, record: Record, g: Tensor) -> Call:
        """What a rule gets: samples first, in the input and in the gradient."""
        x = record.x
        if record.meetings:  # one input for all samples
            x = x.expand(g.shape[0], *x.shape)
        else:
            layout = self._layout(record)
            assert layout is not None
            dim, rows = layout
            x, g = x.movedim(dim, 0), g.movedim(dim, 0)
            if rows > 1:
                order = self._orders.get(next(iter(record.parameters.values())), "samples")
                x, g = (samples_first(t, self.samples, order) for t in (x, g))
        return Call(record.site.module, x, record.others, record.options, g, frozenset(record.parameters))

    def _direct_uses(self, used_by: dict[Any, Any]) -> dict[int, list[Meeting] | None]:
        """Parameters that the graph reaches outside of modules with a rule, and where they meet the samples."""
        found: dict[int, list[Meeting] | None] = {}
        for node in used_by:
            variable = getattr(node, "variable", None)
            i = self._numbers.get(id(variable)) if variable is not None else None
            if variable is None or i is None:
                continue
            known = i not in self.taps.plain and i not in self.by_autograd
            found[i] = meetings(node, variable.shape, self.samples, used_by) if known else None
        return found

    def _usable(self, record: Record, used_by: dict[Any, Any]) -> bool:
        """Whether a call's input is still there, and its rows are samples or meet the samples later."""
        if record.changed:
            return False
        if self._layout(record) is not None:
            return True
        found = meetings(record.node, record.shape, self.samples, used_by) if record.site.rule.extra_dims else None
        if not found or any(m.is_product or "samples" not in m.orders(self.samples) for m in found):
            return False
        record.meetings = found
        if self.samples > 1:  # in another batch there may be as many rows as samples, by chance
            self._excluded |= {(record.key, 0), (record.key, 1)}
        return True

    def _layout(self, record: Record) -> tuple[int, int] | None:
        """Which dimension holds the samples, and how many rows each of them has there; None if there is none."""
        shape, x = record.shape, record.x
        dim = self.batch_dim if len(shape) > 2 else 0
        samples, flexible = self.samples, record.site.rule.extra_dims
        for d in (dim, 1) if flexible and len(shape) > 2 else (dim,):
            fits = d < min(len(shape), x.ndim) and shape[d] == x.shape[d] == samples
            if fits and (record.key, d) not in self._excluded:
                return d, 1
        stacked = samples and len(shape) and shape[0] == x.shape[0] and shape[0] > samples and not shape[0] % samples
        if flexible and stacked and (record.key, 0) not in self._excluded:
            return 0, shape[0] // samples
        return None

    def _rows_are_samples(self, logits: Tensor, backward: Backward) -> bool:
        """Try out where rows belong to samples; False if something has been given up for which that is not so."""
        uses = self._kinds_of_uses()
        if self._graph is not None and uses <= self._tried:
            return True
        trials: list[_Trial] = []
        for mask, cotangent in _from_some_samples(logits):

            def touches_others(rows: Tensor, mask: Tensor = mask) -> Tensor:
                return ((rows.flatten(1) != 0).any(1) & ~mask).any()

            def look(record: Record, g: Tensor, touches: Callable[[Tensor], Tensor] = touches_others) -> None:
                if not record.meetings:
                    trials.extend(self._trials_of_call(record, g, touches))

            found = backward(logits, cotangent, look)
            for k, (what, meeting) in enumerate(self.edges()):
                g = found[k]
                if g is not None:
                    trials.extend(self._trials_at_edge(what, meeting, g, touches_others))
        return self._judge(trials, uses)

    def _kinds_of_uses(self) -> set[object]:
        """What has to be tried out once, and with more than one sample: every use, in each of its layouts."""
        many = self.samples > 1
        calls: set[object] = set()
        for record in self.records:
            layout = self._layout(record)
            calls.add((self._graph, record.key, None if layout is None else (layout[0], layout[1] > 1), many))
        for i, found in self.direct.items():
            orders = (tuple(meeting.orders(self.samples)) for meeting in found)
            calls.update((self._graph, i, k, order, many) for k, order in enumerate(orders))
        return calls

    def _trials_of_call(self, record: Record, g: Tensor, touches: Callable[[Tensor], Tensor]) -> Iterator[_Trial]:
        numbers, layout = tuple(record.parameters.values()), self._layout(record)
        try:
            record.site.rule.function(self.call(record, g))
        except NotApplicableError:
            yield _Trial(numbers, None, None, torch.ones((), dtype=torch.bool))
        assert layout is not None
        dim, rows = layout
        g = g.movedim(dim, 0)
        if rows == 1:
            yield _Trial(numbers, record, None, touches(g), dim)
        else:
            for order in _ORDERS:
                yield _Trial(numbers, record, order, touches(samples_first(g, self.samples, order)))

    def _trials_at_edge(
        self, what: Record | int, meeting: Meeting, g: Tensor, touches: Callable[[Tensor], Tensor]
    ) -> Iterator[_Trial]:
        if isinstance(what, Record):
            one = meeting.gradients(g)
            try:
                what.site.rule.function(self.call(what, one))
            except NotApplicableError:
                yield _Trial(tuple(what.parameters.values()), None, None, torch.ones((), dtype=torch.bool))
            yield _Trial(tuple(what.parameters.values()), None, None, touches(g))
            return
        possible = meeting.orders(self.samples)
        for order in _ORDERS:
            touched = touches(meeting.rows(g, self.samples, order)) if order in possible else torch.ones(())
            yield _Trial((what,), None, order, touched)

    def _judge(self, trials: list[_Trial], uses: set[object]) -> bool:
        """Keep orders in which no row of others was touched; give up, or look further on, where there is none."""
        failed: dict[int, set[Order | None]] = {}
        undecided, given_up, excluded = False, set(), set()
        for trial in trials:
            for i in trial.parameters:
                orders = failed.setdefault(i, set())
                if bool(trial.touched):
                    orders.add(trial.order)
                    if trial.record is not None and trial.order is None:
                        excluded.add((trial.record.key, trial.dim))
        ordered = {i for trial in trials for i in trial.parameters if trial.order is not None}
        for i, orders in failed.items():
            right = [order for order in _ORDERS if order not in orders]
            if None in orders or (i in ordered and not right):
                given_up.add(i)
            elif i in ordered:
                undecided |= len(right) > 1
                self._orders[i] = self._orders[i] if self._orders.get(i) in right else right[0]
        if excluded:  # the samples are another dimension, or none, although there are as many rows
            self._excluded |= excluded
            return False
        self.taps.plain |= given_up
        if not given_up and not undecided:
            self._tried |= uses
        return not given_up


class _Trial(NamedTuple):
    """Whether rows of other samples were touched, at one use of some parameters, if it has this order."""

    parameters: tuple[int, ...]
    record: Record | None  # of a call whose rows are the samples, going by its shape
    order: Order | None  # None: there is only one
    touched: Tensor
    dim: int = 0  # of the record's output


def _from_some_samples(logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some samples, then the others: which, and a cotangent that is zero for the rest."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(logits.shape[0], generator=generator) < 0.5
    if len(mask) > 1:
        mask[0], mask[-1] = True, False
    noise = torch.randn(logits.shape, generator=generator)
    for some in (mask, ~mask) if len(mask) > 1 else (torch.ones_like(mask),):
        yield some.to(logits.device), (noise * some.view(-1, *[1] * (logits.ndim - 1))).to(logits)
