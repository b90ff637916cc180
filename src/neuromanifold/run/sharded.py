"""The loop over data for a model in FSDP2, whose parameters are divided among processes: all of them go in step.

while any process has a batch:
    batch = the next one of this process, or one again whose cotangents are zero
    outputs = forward(batch)                                all processes together
    while any process has a cotangent:
        sums.add(gradients of u)                            a layer at a time, added up over processes

A forward or backward pass gathers parameters from all processes, so each must come to as many passes as the others.  What
depends on a process's batch alone (whether to verify, how many passes) is decided by all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.estimators import Adaptive, Exact
from neuromanifold.persample.accumulate import Pass, TraceSums
from neuromanifold.persample.accumulate.sharded import ShardedSums
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.engine import PerSampleGradients
from neuromanifold.persample.gradients import Form
from neuromanifold.persample.shards import Shards
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.cotangents import Cotangent, batch_seed, by_position, by_sample, cotangents
from neuromanifold.problem.fingerprint import OF_A_BATCH, fingerprint
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.progress import Reporter
from neuromanifold.run.checkpoint import identity_of
from neuromanifold.run.counts import Counts
from neuromanifold.run.dealing import Chain, Dealing, agree
from neuromanifold.run.loop import Enough, LoopOptions, is_due, of_all_processes
from neuromanifold.run.methods import captured_forward, independent_tokens, pass_of
from neuromanifold.run.processes import Processes, together
from neuromanifold.run.step import Settings

T = TypeVar("T")


class _Nothing:
    """Takes gradients of a batch that this process runs only for the others."""

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Drop them."""

    def add(self, gradients: list[Tensor | None], made_by: Pass) -> None:
        """Drop them."""

    def end_pass(self) -> None:
        """Do nothing."""


class Lockstep:
    """Per-sample gradients of a model in FSDP2, by as many passes as the process with most of them needs."""

    def __init__(self, problem: Problem, settings: Settings, sums: ShardedSums | TraceSums, shards: Shards) -> None:
        self._problem, self._estimator, self._sums, self._shards = problem, settings.estimator, sums, shards
        squares = isinstance(sums, ShardedSums) and settings.granularity == "auto"
        tokens = squares and independent_tokens(settings.estimator)
        parameters = problem.parameters
        self.engine = PerSampleGradients(problem.model, parameters, problem.batch_dim, tokens=tokens, shards=shards)
        if settings.granularity == "batch":
            self.engine.exclude_all()
        self._mixes = settings.estimator.centred and settings.granularity != "sample"
        self._mixes = self._mixes or settings.granularity == "batch"  # nm.SquaredBatchGradient
        self.passes = 0

    def forward(self, batch: Batch) -> tuple[Outputs, PerSampleBackward]:
        """Run the model on a batch, as often as any process needs; it must have a sample."""
        outputs, backward = captured_forward(self._problem, batch, self.engine, self._estimator)
        if not len(outputs.logits):
            text = message("batch", "of at least one sample", "an empty one")
            raise ValueError(f"Batch {batch.number} of `data`: {text}")
        return outputs, backward

    def methods(self) -> list[str]:
        """Return how each parameter was done."""
        return self.engine.methods("batch" if self._mixes else "sample, one by one")

    def backward(self, outputs: Outputs, backward: PerSampleBackward, drawn: Iterator[Cotangent]) -> None:
        """Send all cotangents of the batch back; none for a process that only goes along."""
        logits, processes = outputs.logits, self._shards.processes
        alone = any(processes.gather("alone", bool(backward.uses.remaining and not self._mixes)))
        apart = isinstance(self._estimator, Exact) and not all(processes.gather("tokens", backward.all_by_token))
        zeros = torch.zeros_like(logits)
        for cotangent in self._in_step("cotangent", drawn):
            whole = zeros if cotangent is None else cotangent.values
            made_by = Pass() if cotangent is None else pass_of(cotangent, self._estimator)
            pieces = by_position(whole, outputs.valid) if apart else iter([whole])
            for piece in self._in_step("position", iter([]) if cotangent is None else pieces):
                self._send(logits, piece, zeros, made_by, backward)
                if alone:
                    single = made_by._replace(noise=made_by.sample_noise)
                    for one in self._in_step("sample", iter([]) if piece is None else by_sample(piece)):
                        self._send_alone(logits, one, zeros, single, backward)

    def _send(
        self, logits: Tensor, piece: Tensor | None, zeros: Tensor, made_by: Pass, backward: PerSampleBackward
    ) -> None:
        """One backward pass, whose gradients come a layer at a time."""
        sink = self._sink(piece)
        remaining = backward.uses.remaining
        with self._shards.streamed(remaining, partial(self._take, sink if self._mixes else _Nothing(), made_by)):
            backward(logits, zeros if piece is None else piece, sink, made_by, keep_graph=True)
        sink.end_pass()
        self.passes += piece is not None

    def _send_alone(
        self, logits: Tensor, one: Tensor | None, zeros: Tensor, made_by: Pass, backward: PerSampleBackward
    ) -> None:
        """A backward pass of one sample, for parameters without a rule."""
        sink = self._sink(one)
        with self._shards.streamed(backward.uses.remaining, partial(self._take, sink, made_by)):
            backward.remaining_gradients(logits, zeros if one is None else one, backward.uses.remaining)
        sink.end_pass()
        self.passes += one is not None

    def _sink(self, piece: Tensor | None) -> Any:
        return self._sums if piece is not None or isinstance(self._sums, ShardedSums) else _Nothing()

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


@contextmanager
def sharded(problem: Problem, settings: Settings, options: LoopOptions) -> Iterator[Shards]:
    """Yield the parts of a model's parameters that this process has, with all processes together and in a session."""
    _check(settings, options)
    with together(True) as processes, problem.session(), ExitStack() as stack:
        processes.join(True, problem.device)
        in_step = stack.enter_context(processes.in_step())
        shards = Shards(problem.model, problem.parameters, in_step)
        try:
            yield shards
        finally:
            shards.reshard()


def run_sharded(
    problem: Problem,
    settings: Settings,
    sums: ShardedSums | TraceSums,
    options: LoopOptions,
    shards: Shards,
    *,
    enough: Enough | None = None,
) -> Counts:
    """Go through the data once, as `loop.run` does, inside of `sharded`."""
    counts = _run(problem, settings, sums, options, shards, enough)
    if isinstance(sums, TraceSums):
        sums.reduce(shards.processes.all)
    if not counts.samples:
        raise ValueError(message("data", "an iterable with at least one sample", f"{counts.batches} batches"))
    return counts


def _check(settings: Settings, options: LoopOptions) -> None:
    """Refuse what is not there for models in FSDP2."""
    refused = {
        "passes": isinstance(settings.estimator, Adaptive),
        "checkpoint": options.checkpoint is not None,
        "on_interrupt": options.on_interrupt == "return",
        "distributed": options.distributed is False,
    }
    for argument, given in refused.items():
        if given:
            raise ValueError(message(argument, "left out for a model in FSDP2 (fully_shard)", "one that is set"))


def _run(
    problem: Problem,
    settings: Settings,
    sums: ShardedSums | TraceSums,
    options: LoopOptions,
    shards: Shards,
    enough: Enough | None,
) -> Counts:
    in_step, processes = shards.processes, shards.processes.all
    counts, generator, validation = Counts(), torch.Generator(problem.device), problem.validation()
    shows = processes.rank == 0
    reporter = Reporter(options.progress) if shows and callable(options.progress) else None
    items = problem.items(progress=options.progress is True and shows, description=options.description)
    dealing, items = _agreed(problem, settings, options, shards, sums, items)
    mine = _Mine(items, dealing, compares=processes.several and not dealing.own_data)
    method, rounds = Lockstep(problem, settings, sums, shards), 0
    with method.engine.attached():
        while not counts.stopped:
            entry = mine.following()
            found = in_step.gather("round", [entry is not None, method.engine.came_late])
            if not any(there for there, _ in found):
                break
            if any(late for _, late in found):
                method.engine.require_reference()
            batch = problem.read(*reversed(entry or mine.spare()))
            outputs, backward = method.forward(batch)
            generator.manual_seed(batch_seed(settings.seed, batch.number))
            drawn = cotangents(outputs, settings.estimator, generator, validation)
            method.backward(outputs, backward, drawn if entry else iter([]))
            method.engine.end_batch()
            del backward
            validation.flush()
            if entry:
                sums.end_batch()
                _count(problem, settings, counts, batch, outputs.detached())
                if reporter:
                    reporter.batch_done(lambda: counts.progress(None))
            rounds += 1
            counts.methods = method.methods()
            if enough and is_due(rounds):
                counts.stopped = _looked(processes, counts, sums, enough)
    counts.first, counts.passes, counts.verified = mine.first, method.passes, method.engine.verified
    counts.synchronize()
    if mine.chain is not None:
        mine.chain.compare(processes, not counts.stopped)
    return of_all_processes(processes, counts, dealing) if processes.several else counts


def _count(problem: Problem, settings: Settings, counts: Counts, batch: Batch, outputs: Outputs) -> None:
    """Count a batch, and look at some of them: at their noise, and at the first one's outputs."""
    if counts.batches & (counts.batches - 1) == 0:
        core = problem.distributions(outputs, labels=False).core
        counts.add_noise_shares(settings.estimator.noise_shares(core))
        if not counts.batches:
            problem.inspect(batch, outputs)
    counts.add(outputs)
    counts.next = batch.number + 1


def _looked(processes: Processes, counts: Counts, sums: ShardedSums | TraceSums, enough: Enough) -> str:
    """Return why it is enough, or nothing: all processes find the same."""
    counts.synchronize()
    total, whole = Counts(methods=counts.methods), sums
    for one in processes.gather("counts so far", counts.state()):
        total.merge(one)
    if isinstance(whole, TraceSums):
        whole = whole.copy()
        whole.reduce(processes)
    return enough(total, whole)


def _agreed(
    problem: Problem,
    settings: Settings,
    options: LoopOptions,
    shards: Shards,
    sums: ShardedSums | TraceSums,
    items: Iterator[tuple[int, object]],
) -> tuple[Dealing, Iterator[tuple[int, object]]]:
    """Return who does which batch, after comparing what the processes are about to do."""
    processes = shards.processes.all
    dealing, head = Dealing(options.shard, 1, processes.rank, processes.world), next(items, None)
    items = chain([] if head is None else [head], items)
    if not processes.several:
        return dealing, items
    first = "" if head is None else fingerprint(("batch", head[1]), most=OF_A_BATCH)
    identity = identity_of(problem, settings, sums, options.shard)
    identity["weights of the model"] = shards.fingerprint
    own = agree(processes, options.distributed, problem.data, first, identity, problem.device)
    return Dealing(options.shard, 1, processes.rank, processes.world, own), items


class _Mine:
    """The batches of this process, and one of any number that it can run again for the others' sake."""

    def __init__(self, items: Iterator[tuple[int, object]], dealing: Dealing, compares: bool) -> None:
        self._items, self._dealing = items, dealing
        self.first = ""
        """The fingerprint of batch 0."""
        self.chain = Chain(2 * dealing.world) if compares else None
        self._spare: tuple[int, object] | None = None

    def following(self) -> tuple[int, object] | None:
        """Return number and item of the next batch; None at the end."""
        for place, item in self._items:
            self.first = self.first or fingerprint(("batch", item), most=OF_A_BATCH)
            number = self._dealing.number(place)
            self._spare = self._spare or (number, item)
            if self._dealing.in_shard(place):
                if self.chain is not None:
                    self.chain.extend(number, item)
                if self._dealing.is_mine(place):
                    self._spare = number, item
                    return number, item
        return None

    def spare(self) -> tuple[int, object]:
        """Return a batch again."""
        if self._spare is None:
            raise ValueError(message("data", "at least one batch on each process", "none", "FSDP2 needs all to go along."))
        return self._spare
