"""K(x) = J Jᵀ, [C, C] for each sample, with J = ∂z/∂θ never written out.

for group of layers:                                        as many as fit into the budget
    for c in classes:                                       one backward pass, that stops at the group
        forms[c] = rules(gradients at the group's modules)
    K += Σ over the group's parameters of inner products between forms[c] and forms[d]

All gradients of C passes would be C times what an ordinary backward pass holds one after the other.  So a run takes
fewer samples at a time where a batch can be split (run/splitting.py); where it cannot, the layers are done in groups,
each with C passes of its own, as small as fit into what an ordinary backward pass takes: one layer at least, C times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from neuromanifold.persample.direct import Meeting
from neuromanifold.persample.gradients import Form
from neuromanifold.persample.gradients.stacks import Flat, Stack, stack
from neuromanifold.persample.samples import _AT_ONCE, SamplePullback
from neuromanifold.persample.sums import GradientSums, Pass
from neuromanifold.persample.taps import Record

_LEAST = 2**24  # bytes that may be held in any case


class ClassForms:
    """Keeps the forms of the passes of all classes, until all are there."""

    waits = False

    def __init__(self) -> None:
        self.forms: dict[int, dict[int, Form]] = {}  # parameter: class: gradients of all samples
        self.current = 0  # class

    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Nothing: those of whole batches are of no use."""

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Keep it."""
        del made_by
        self.forms.setdefault(i, {})[self.current] = form

    def end_pass(self) -> None:
        """Nothing to do."""

    def end_batch(self) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Nothing to do."""


class GramPullback(SamplePullback):
    """A sample-wise pullback that also gives the gradients for all classes, a group of parameters at a time."""

    passes = 0
    """Backward passes so far; those that stop early count as well."""

    budget: int | None = None
    """How many bytes gradients of several classes may take together; None: half of what `ordinary` says."""

    @property
    def ordinary(self) -> int:
        """Bytes that an ordinary backward pass takes, about: modules' outputs, and a gradient for each parameter."""
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)
        return max(_LEAST, self.outputs + weights)

    @property
    def outputs(self) -> int:
        """Bytes of the gradients of all modules' outputs, for one class."""
        return sum(size for _, size in self._uses_and_sizes())

    def stacks(
        self, logits: Tensor, cotangent: Callable[[int], Tensor], scale: float = 1.0
    ) -> Iterator[tuple[int, Stack]]:
        """For each parameter with a rule, the gradients of all classes, `scale` times too large; the graph is kept.

        `cotangent(c)` is that of class c, of the logits' shape.
        """
        classes = logits.shape[-1]
        for group in self._groups(classes):
            kept = ClassForms()
            together = self._together(logits, classes)
            for start in range(0, classes, together):
                some = range(start, min(start + together, classes))
                self._send(logits, [cotangent(c) * scale for c in some], some.start, group, kept)
            for i in list(kept.forms):
                by_class = kept.forms.pop(i)
                yield i, stack([by_class.get(c) for c in range(classes)])

    def rest_stack(
        self, logits: Tensor, cotangent: Callable[[int], Tensor], n: int, numbers: list[int], scale: float = 1.0
    ) -> dict[int, Flat]:
        """The same of one sample for parameters that no rule does, by autograd alone."""
        found: dict[int, list[Tensor | None]] = {i: [] for i in numbers}
        for c in range(logits.shape[-1]):
            one = torch.zeros_like(logits)
            one[n] = cotangent(c)[n] * scale
            gradients = self.plain_gradients(logits, one, numbers)
            self.passes += 1
            for i in numbers:
                g = gradients[i]
                found[i].append(None if g is None else g[None])
        return {
            i: Flat(values, self.parameters[i].shape)
            for i, values in found.items()
            if any(value is not None for value in values)
        }

    @contextmanager
    def untapped(self) -> Iterator[None]:
        """The model as it is while inside: autograd does all parameters."""
        before, self.taps.plain = self.taps.plain, set(range(len(self.parameters)))
        try:
            yield
        finally:
            self.taps.plain = before

    @torch.no_grad()
    def flush(self, sums: GradientSums) -> None:
        """Add what several passes of other cotangents have left for the end; the graph is kept."""
        products, self._products = self._products, {}
        for (i, _), product in products.items():
            sums.add_samples(i, product, Pass(sample_noise=1.0))

    def _groups(self, classes: int) -> list[set[int]]:
        """Parameters whose gradients of all classes fit into the budget together; uses of one parameter stay together.

        Only half of what an ordinary backward pass takes, since the activations are held all the time.
        """
        budget = self.ordinary // 2 if self.budget is None else self.budget
        groups: list[set[int]] = []
        filled = 0
        for parameters, size in _connected(self._uses_and_sizes()):
            if not groups or filled + classes * size > budget:
                groups.append(set())
                filled = 0
            groups[-1] |= parameters
            filled += classes * size
        return groups

    def _uses_and_sizes(self) -> list[tuple[set[int], int]]:
        """The parameters of each use, and bytes of the gradient there, if it is single precision."""
        found = [
            (set(record.parameters.values()), sum(map(_size, record.meetings)) or 4 * record.shape.numel())
            for record in self.plan.records
        ]
        return found + [({i}, sum(map(_size, meetings))) for i, meetings in self.plan.direct.items()]

    def _together(self, logits: Tensor, classes: int) -> int:
        """How many classes to send back at once, where that works: as many as are small together."""
        if not self._several or logits.dtype.itemsize < 4 or any(True for _ in self.plan.edges()):
            return 1
        size = sum(record.shape.numel() for record in self.plan.records) + logits.numel()
        return max(1, min(classes, _AT_ONCE[logits.device.type == "cpu"] // max(1, size)))

    def _send(self, logits: Tensor, cotangents: list[Tensor], first: int, group: set[int], kept: ClassForms) -> None:
        """Passes for classes `first` and on, to the modules of a group."""
        records = [r for r in self.plan.records if not r.meetings and not group.isdisjoint(r.parameters.values())]
        edges = list(self.plan.edges())
        asked = [k for k, (what, _) in enumerate(edges) if not group.isdisjoint(_numbers(what))]
        targets = [GradientEdge(r.node, 0) for r in records] + [edges[k][1].edge for k in asked]
        self.passes += len(cotangents)
        if len(cotangents) == 1:
            gradients = [_gradients(logits, targets, cotangents[0], several=False)]
        else:
            try:
                found = _gradients(logits, targets, torch.stack(cotangents), several=True)
                gradients = [[None if g is None else g[k] for g in found] for k in range(len(cotangents))]
            except (RuntimeError, NotImplementedError):
                self._several = False  # an operation that cannot be vectorised
                gradients = [_gradients(logits, targets, one, several=False) for one in cotangents]
        self.taps.restore()  # activation checkpoints call modules again
        for k, found in enumerate(gradients):
            kept.current = first + k
            at_edges: list[Tensor | None] = [None] * len(edges)
            for place, g in zip(asked, found[len(records) :], strict=True):
                at_edges[place] = g
            self._pass = (kept, Pass(), False)
            try:
                with torch.no_grad():
                    for record, g in zip(records, found, strict=False):
                        if g is not None:
                            self._take_call(record, g)
                self._end_pass(at_edges)
            finally:
                self._pass, self._waiting = None, {}


def _gradients(logits: Tensor, targets: list[GradientEdge], cotangent: Tensor, several: bool) -> list[Tensor | None]:
    if not targets:
        return []
    return list(
        torch.autograd.grad(
            logits,
            targets,
            cotangent.to(logits.dtype),
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=several,
        )
    )


def _numbers(what: Record | int) -> Sequence[int]:
    return list(what.parameters.values()) if isinstance(what, Record) else [what]


def _size(meeting: Meeting) -> int:
    """Bytes of the gradient there, if it is single precision."""
    return 4 * int(torch.Size(meeting.node._input_metadata[0].shape).numel())


def _connected(uses: list[tuple[set[int], int]]) -> list[tuple[set[int], int]]:
    """Uses that share a parameter, put together."""
    found: list[tuple[set[int], int]] = []
    for parameters, size in uses:
        apart: list[tuple[set[int], int]] = []
        for others, there in found:
            if others.isdisjoint(parameters):
                apart.append((others, there))
            else:
                parameters, size = parameters | others, size + there
        found = [*apart, (parameters, size)]
    return found
