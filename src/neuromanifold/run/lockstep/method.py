"""Per-sample gradients of a model in parts: as many passes on each process as the one with most of them needs.

What a process does next depends on its own batches.  Before it runs the model it tells the others, and what comes first
in the order below, if any of them asks for it, is done by all of them: by some for the others' sake.

    outputs     a forward pass without a graph
    backward    all backward passes through the last forward pass; none, if it is not needed after all
    forward     a forward pass with a graph, and its verification
    nothing     the batches are done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import message
from neuromanifold.estimators import Estimator
from neuromanifold.persample.accumulate import GradientSums, Pass, TraceSums
from neuromanifold.persample.accumulate.sharded import ShardedSums
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.gradients import Form
from neuromanifold.persample.shards import Shards
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.cotangents import Cotangent, by_position, by_sample
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.run.methods import PerSample
from neuromanifold.run.settings import Settings

T = TypeVar("T")
_ORDER = ("outputs", "backward", "forward", "nothing")


class _Nothing:
    """Drops the gradients of a pass that this process runs only for the others; takes part in adding up theirs."""

    def __init__(self, sums: ShardedSums | None = None) -> None:
        self._sums = sums

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Drop the gradients, and only come to the parameter's layer, as the other processes do."""
        del made_by
        if self._sums is not None and form.samples:
            self._sums.pass_over(i)

    def add(self, gradients: list[Tensor | None], made_by: Pass) -> None:
        """Drop the gradients, and only come to the layers of those that there are."""
        del made_by
        for i, g in enumerate(gradients):
            if self._sums is not None and g is not None:
                self._sums.pass_over(i)

    def end_pass(self) -> None:
        """End the pass, in which the last layer is added up over processes."""
        if self._sums is not None:
            self._sums.end_pass()


@dataclass(frozen=True, eq=False)
class _InTurn(Problem):
    """A problem whose outputs are computed by all processes together."""

    together: Callable[[], AbstractContextManager[None]] = nullcontext

    @override
    def outputs(self, batch: Batch, estimator: Estimator | None = None) -> Outputs:
        with self.together():
            return super().outputs(batch, estimator)


class Lockstep(PerSample):
    """Passes through parameters that are gathered from all processes: each takes part in those of the others."""

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        shards: Shards,
        sums: ShardedSums | TraceSums,
    ) -> None:
        given = {one.name: getattr(problem, one.name) for one in fields(problem)}
        super().__init__(_InTurn(**given, together=self._outputs), settings, tokens=sums.takes_tokens, shards=shards)
        self._shards, self._sums = shards, sums
        self._spare: Callable[[], Batch] | None = None
        self._open: Outputs | None = None  # of a forward pass whose backward passes are to come
        self._verify = False
        self._failed: Exception | None = None
        if settings.granularity == "batch":
            self.engine.exclude_all()
            self._remaining_per_batch = True

    @contextmanager
    def taking_part(self, spare: Callable[[], Batch]) -> Iterator[None]:
        """Capture forward passes inside; `spare` returns a batch that this process can run for the others' sake."""
        self._spare = spare
        with self.attached():
            yield

    @override
    def forward(self, batch: Batch, *, verify: bool = False) -> Outputs:
        self._take_part("forward")
        return self._forward(batch, verify)

    @override
    def _add(self, outputs: Outputs, drawn: Iterator[Cotangent], sums: GradientSums) -> None:
        self._take_part("backward")
        self._backward(outputs, drawn, sums)

    @override
    def release(self) -> None:
        if self._open is not None:
            self._add(self._open, iter([]), self._sums)
        super().release()

    def finish(self) -> None:
        """Take part in what the others do until all of them are done with their batches."""
        self._take_part("nothing")

    @contextmanager
    def _outputs(self) -> Iterator[None]:
        """Compute outputs inside; an error is one of the run even if it is caught, since the others wait."""
        try:
            self._take_part("outputs")
            yield
        except Exception as error:
            self._failed = error
            raise

    def _take_part(self, wanted: str) -> None:
        """Return when all processes come to what this one wants; until then, do what others want."""
        if self._failed is not None:
            raise self._failed
        assert self._spare is not None
        while True:
            asked = self._shards.processes.gather("next", [_ORDER.index(wanted), self.engine.came_late])
            first, self._verify = _ORDER[min(one for one, _ in asked)], any(late for _, late in asked)
            if first == wanted:
                return
            if first == "outputs":
                Problem.outputs(self.problem, self._spare())
            elif first == "forward":
                self._forward(self._spare())
            else:
                assert self._open is not None
                self._backward(self._open, iter([]), self._sums)
                super().release()

    def _forward(self, batch: Batch, verify: bool = False) -> Outputs:
        outputs = self._open = super().forward(batch, verify=verify or self._verify)
        if not len(outputs.logits):
            text = message("batch", "of at least one sample", "an empty one")
            raise ValueError(f"Batch {batch.number} of `data`: {text}")
        self._shards.agree_on(outputs.logits)
        return outputs

    def _backward(self, outputs: Outputs, drawn: Iterator[Cotangent], sums: GradientSums) -> None:
        """Run backward passes until no process has a cotangent left; one that has none sends zeros back."""
        self._open = None
        logits, backward, processes = outputs.logits, self.captured, self._shards.processes
        assert backward is not None
        alone = any(processes.gather("alone", bool(backward.uses.remaining and not self._remaining_per_batch)))
        apart = any(processes.gather("apart", self._pass_per_position(backward)))
        zeros = torch.zeros_like(logits)
        for cotangent in self._in_step("cotangent", drawn):
            whole = zeros if cotangent is None else self._shards.agreed(cotangent.values)
            made_by = Pass() if cotangent is None else self._pass(cotangent, 1.0)
            pieces: Iterator[Tensor | None] = iter([None if cotangent is None else whole])
            if apart:
                own = iter([]) if cotangent is None else by_position(whole, outputs.valid)
                pieces = self._in_step("position", own)
            for piece in pieces:
                self._send(logits, piece, zeros, made_by, backward, sums)
                if alone:
                    singles = self._in_step("sample", iter([]) if piece is None else by_sample(piece))
                    for one in singles:
                        self._send_alone(logits, one, zeros, made_by.of_one_sample, backward, sums)

    @override
    def verify_late(self, batch: Batch) -> None:
        """Do nothing: all processes verify the next batch instead."""

    def _send(
        self,
        logits: Tensor,
        piece: Tensor | None,
        zeros: Tensor,
        made_by: Pass,
        backward: PerSampleBackward,
        sums: GradientSums,
    ) -> None:
        """One backward pass, whose gradients come a layer at a time."""
        sink = self._sink(sums, piece)
        remaining = backward.uses.remaining
        with self._shards.streamed(
            remaining, partial(self._take, sink if self._remaining_per_batch else _Nothing(), made_by)
        ):
            backward(logits, zeros if piece is None else piece, sink, made_by, keep_graph=True)
        sink.end_pass()
        self.passes += piece is not None

    def _send_alone(
        self,
        logits: Tensor,
        one: Tensor | None,
        zeros: Tensor,
        made_by: Pass,
        backward: PerSampleBackward,
        sums: GradientSums,
    ) -> None:
        """A backward pass of one sample, for parameters without a rule."""
        sink = self._sink(sums, one)
        with self._shards.streamed(backward.uses.remaining, partial(self._take, sink, made_by)):
            backward.remaining_gradients(logits, zeros if one is None else one, backward.uses.remaining)
        sink.end_pass()
        self.passes += one is not None

    def _sink(self, sums: GradientSums, piece: Tensor | None) -> Any:
        return sums if piece is not None else _Nothing(sums if isinstance(sums, ShardedSums) else None)

    def _take(self, sink: Any, made_by: Pass, i: int, g: Tensor) -> None:
        gradients: list[Tensor | None] = [None] * len(self.engine.parameters)
        gradients[i] = g
        sink.add(gradients, made_by)

    def _in_step(self, what: str, items: Iterator[T]) -> Iterator[T | None]:
        """Yield items as long as any process has some; None where this one has no more."""
        while True:
            item = next(items, None)
            if not any(self._shards.processes.gather(what, item is not None)):
                return
            yield item
