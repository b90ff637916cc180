"""Who does which parameter: found out from the graph of a forward pass, not assumed.

Parameters with a rule at every use are done by samples, the others by autograd.  A use is recognised if it is

* a call of a module with a rule, whose rows are the samples, perhaps several rows for each;
* such a call whose output all samples share (position ids of shape [1, T]), or a parameter outside of modules with a
  rule, where it meets the samples in a way that `direct` knows.

Whether rows are samples is tried out (`trial.py`).  This also tells in which order samples and positions are where they
share a dimension; as long as both orders are possible it is done again with each batch.  So it is where the graph has
other operations than before, or sends rows where the data say (mixtures of experts).  Where nothing but zeros was seen
(behind a matrix that is zero, as in a fresh adapter) it is done again once something else comes by (`Watch`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from neuromanifold.persample.direct import Meeting, Order, consumers, meetings, samples_first, sends_rows_by_data
from neuromanifold.persample.gradients import Form
from neuromanifold.persample.rules import Call, NotApplicableError
from neuromanifold.persample.taps import Record, Taps
from neuromanifold.persample.trial import Sketch, Sketches, Trial
from neuromanifold.persample.watch import Watch

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
        self.reached: list[int] = []  # by autograd, all that it still connects to the outputs
        self._numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._orders: dict[int, Order] = {}  # of parameters
        self._excluded: set[tuple[tuple[int, int], int]] = set()  # calls, and dimensions known not to hold the samples
        self._tried: set[object] = set()  # uses whose rows have been tried out, in which kind of graph
        self._graph: int | None = None  # the kind of the last graph; None if it may differ each time
        self.watch = Watch()

    @property
    def records(self) -> list[Record]:
        """The calls of modules with a rule."""
        return self.taps.records

    def state(self) -> dict[str, Any]:
        """What has been decided so far."""
        given_up = {"plain": list(self.taps.plain), "by_autograd": list(self.by_autograd)}
        seen = {"excluded": list(self._excluded), "tried": list(self._tried), "orders": list(self._orders.items())}
        return given_up | seen | {"late": list(self.watch.late())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.taps.plain, self.by_autograd = set(state["plain"]), set(state["by_autograd"])
        self._excluded, self._tried = (set(_tuples(state[name])) for name in ("excluded", "tried"))
        self._orders = dict(_tuples(state["orders"]))
        self.watch.set_late(set(_tuples(state["late"])))

    def release(self) -> None:
        """Let go of the last graph: records and its nodes hold each other."""
        for record in self.records:
            record.node, record.meetings = None, []
        self.taps.records, self.direct, self.watch.here = [], {}, {}

    def settled(self, logits: Tensor, backward: Backward) -> bool:
        """Look at a new graph; False if rules took a parameter that they cannot do: then forward has to be repeated."""
        self.samples = logits.shape[0]
        if logits.grad_fn is None:  # a parameter itself
            self.reached = [self._numbers[id(logits)]] if id(logits) in self._numbers else []
            self.by_autograd |= set(self.reached)
            return True
        used_by = consumers(logits.grad_fn)
        self._graph = None if sends_rows_by_data(used_by, self.samples) else _kind(used_by)
        for record in self.records:
            record.node = record.node if record.node in used_by else None  # its output is not used
        self.taps.records = [record for record in self.records if record.node is not None]
        direct = self._direct_uses(used_by)
        self.reached = sorted(direct)
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

    def call(self, record: Record, g: Tensor, trial: bool = False) -> Call:
        """What a rule gets: samples first, in the input and in the gradient."""
        x = record.x
        if record.meetings:  # one input for all samples
            x = x.expand(g.shape[0], *x.shape)
        else:
            assert record.layout is not None
            dim, rows = record.layout
            if dim:
                x, g = x.movedim(dim, 0), g.movedim(dim, 0)
            if rows > 1:
                order = self._orders.get(next(iter(record.parameters.values())), "samples")
                x, g = (samples_first(t, self.samples, order) for t in (x, g))
        return Call(record.site.module, x, record.others, record.options, g, frozenset(record.parameters), trial)

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
        record.layout = self.layout(record)
        if record.layout is not None:
            return True
        found = meetings(record.node, record.shape, self.samples, used_by) if record.site.rule.extra_dims else None
        if not found or any(m.is_product or "samples" not in m.orders(self.samples) for m in found):
            return False
        record.meetings = found
        if self.samples > 1:  # in another batch there may be as many rows as samples, by chance
            self._excluded |= {(record.key, 0), (record.key, 1)}
        return True

    def layout(self, record: Record) -> tuple[int, int] | None:
        """Which dimension holds the samples, and how many rows each of them has there; None if there is none."""
        shape, x = record.shape, record.x
        if len(shape) < 2:
            return None
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
        pending = self._kinds_of_uses() - self._tried
        if self._graph is not None and not (pending and self.watch.calls_for_a_trial(pending)):
            self._watch_what_is_quiet()
            return True
        trial, looks = Trial(logits), _Looks(self)
        for cotangent in trial.cotangents():
            found = backward(logits, cotangent, looks.at_tap)
            for k, (what, meeting) in enumerate(self.edges()):
                g = found[k]
                if g is not None:
                    looks.at_edge(what, meeting, g)
        right = self._decide(looks, trial)
        self._watch_what_is_quiet()
        return right

    def _watch_what_is_quiet(self) -> None:
        """Note by which records of this graph the uses are to be recognised."""
        found = ((record, self.kind_of(record)) for record in self.records) if self.watch.quiet else ()
        self.watch.here = {record: use for record, use in found if use in self.watch.quiet}

    def _kinds_of_uses(self) -> set[object]:
        """What has to be tried out once, and with more than one sample: every use, in each of its layouts."""
        uses: set[object] = {self.kind_of(record) for record in self.records}
        for i, found in self.direct.items():
            uses.update(self.kind_of(i, meeting) for meeting in found)
        return uses

    def kind_of(self, what: Record | int, meeting: Meeting | None = None) -> object:
        """One use, in one layout."""
        many = self.samples > 1
        if isinstance(what, Record):
            shape = None if what.layout is None else (what.layout[0], what.layout[1] > 1)
            return self._graph, what.key, shape, len(what.shape), many
        assert meeting is not None
        return self._graph, what, self.direct[what].index(meeting), tuple(meeting.orders(self.samples)), many

    def _decide(self, looks: _Looks, trial: Trial) -> bool:
        """Keep the orders in which rows are samples; give up, or look further on, where there is none."""
        wrong: dict[int, set[Order | None]] = {}
        ordered: set[int] = set()
        tried: set[object] = set()
        zero: set[object] = set()
        bad: set[object] = set()
        excluded: set[tuple[tuple[int, int], int]] = set()
        for look in looks.all():
            right, seen = trial.judge(*look.sketches) if len(look.sketches) == 2 else (look.possible, False)
            tried |= {look.use} if seen else set()
            zero |= {look.use} if not (seen or look.order) and self.samples > 1 else set()
            bad |= set() if right or look.order else {look.use}
            ordered |= set(look.parameters) if look.order else set()
            for i in look.parameters:
                wrong.setdefault(i, set())
                if not (right and look.possible):
                    wrong[i].add(look.order)
                    excluded |= {look.excludes} if look.excludes and look.possible else set()
        if bad & self.watch.late():
            text = "Batches differ in a way that rules cannot follow: gradients that were zero at first came to rows "
            text += "that are not the samples. Begin with a batch in which they are not zero, or, with random probes, "
            raise RuntimeError(text + "use granularity='batch'.")
        self.watch.tried(tried, zero - self._tried)
        if excluded:  # the samples are another dimension, or none, although there are as many rows
            self._excluded |= excluded
            return False
        given_up = looks.refused
        for i, orders in wrong.items():
            possible = [order for order in _ORDERS if order not in orders]
            if None in orders or (i in ordered and not possible):
                given_up.add(i)
            elif i in ordered:
                self._orders[i] = self._orders[i] if self._orders.get(i) in possible else possible[0]
                if len(possible) > 1:  # not decided: to be tried again
                    tried = {use for use in tried if use not in looks.uses_of(i)}
        self.taps.plain |= given_up
        self._tried |= tried if self.samples > 1 else self._kinds_of_uses()
        return not given_up


def _kind(graph: Iterable[Any]) -> int:
    """The same for graphs of the same operations, in another process too."""
    names = "\n".join(node.name() for node in graph)
    return int.from_bytes(hashlib.blake2b(names.encode(), digest_size=7).digest(), "big")


def _tuples(value: Any) -> Any:
    """Lists as tuples, however deep: JSON knows no tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


@dataclass
class _Look:
    """The gradients at one use of some parameters, read in one order."""

    use: object
    parameters: tuple[int, ...]
    order: Order | None = None  # None: there is only one
    excludes: tuple[tuple[int, int], int] | None = None  # a call and a dimension that is not the samples if this fails
    possible: bool = True  # going by the shape
    sketches: list[Sketch] = field(default_factory=list)


class _Looks:
    """All that is seen in a trial."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._sketches = plan, Sketches()
        self.refused: set[int] = set()  # parameters whose rule does not apply after all
        self._found: dict[tuple[object, Order | None], _Look] = {}

    def all(self) -> list[_Look]:
        """One for each use and order."""
        return list(self._found.values())

    def uses_of(self, i: int) -> set[object]:
        """The uses of a parameter."""
        return {look.use for look in self._found.values() if i in look.parameters}

    def at_tap(self, record: Record, g: Tensor) -> None:
        """A call of a module."""
        if record.meetings:
            return
        assert record.layout is not None
        dim, rows = record.layout
        self._try_rule(record, g)
        use, numbers = self.plan.kind_of(record), tuple(record.parameters.values())
        g = g.movedim(dim, 0)
        if rows == 1:
            self._add(_Look(use, numbers, excludes=(record.key, dim)), g)
            return
        for order in _ORDERS:
            self._add(_Look(use, numbers, order), samples_first(g, self.plan.samples, order))

    def at_edge(self, what: Record | int, meeting: Meeting, g: Tensor) -> None:
        """Where a shared tensor meets the samples."""
        if isinstance(what, Record):
            self._try_rule(what, meeting.gradients(g))
            self._add(_Look(self.plan.kind_of(what), tuple(what.parameters.values())), g)
            return
        use, possible = self.plan.kind_of(what, meeting), meeting.orders(self.plan.samples)
        for order in _ORDERS:
            look = _Look(use, (what,), order, possible=order in possible)
            self._add(look, meeting.rows(g, self.plan.samples, order) if look.possible else None)

    def _add(self, look: _Look, rows: Tensor | None) -> None:
        look = self._found.setdefault((look.use, look.order), look)
        if rows is not None:
            look.sketches.append(self._sketches.of(rows))

    def _try_rule(self, record: Record, g: Tensor) -> None:
        try:
            record.site.rule.function(self.plan.call(record, g, trial=True))
        except NotApplicableError:
            self.refused.update(record.parameters.values())
