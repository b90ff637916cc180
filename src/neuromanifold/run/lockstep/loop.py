"""The loop over data for a model whose parameters are divided among processes: all of them go in step.

while any process has a batch:
    batch = the next one of this process, or one again whose cotangents are zero
    write a checkpoint, if it is due on any of them
    outputs = forward(batch)                                all processes together
    while any process has a cotangent:
        sums.add(gradients of u)                            a layer at a time, added up over processes

A pass of a model in FSDP2 gathers parameters from all processes, and one of a tensor-parallel model adds up what they
have computed, so each must come to as many passes as the others.  In tensor parallelism all do the same batches.
What depends on a process's batch alone (whether to verify, how many passes) is decided by all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from neuromanifold.core.checks import message
from neuromanifold.estimators import Adaptive
from neuromanifold.persample.accumulate import TraceSums
from neuromanifold.persample.accumulate.sharded import ShardedSums
from neuromanifold.persample.shards import Shards, shards_of
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.fingerprint import OF_A_BATCH, fingerprint
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.run.counts import Counts, Reporter
from neuromanifold.run.dealing import Chain, Dealing, deal
from neuromanifold.run.lockstep.checkpoint import ShardedCheckpoint
from neuromanifold.run.lockstep.method import Lockstep
from neuromanifold.run.processes import ProcessError, Processes, together
from neuromanifold.run.settings import LoopOptions, Settings
from neuromanifold.run.stopping import Accuracy, Interrupts, is_due


@contextmanager
def sharded(problem: Problem, settings: Settings, options: LoopOptions) -> Iterator[Shards]:
    """Yield the parts of a model's parameters that this process has, with all processes together and in a session."""
    _check(settings, options)
    with together(True) as processes, problem.session(), ExitStack() as stack:
        processes.join(True, problem.device)
        in_step = stack.enter_context(processes.in_step())
        shards = shards_of(problem.model, problem.parameters, in_step)
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
    accuracy: Accuracy,
) -> Counts:
    """Go through the data once, or until the sums are accurate enough, as `loop.run` does; inside of `sharded`."""
    in_step, processes, counts = shards.processes, shards.processes.all, Counts()
    shows = processes.rank == 0
    method = Lockstep(problem, settings, shards, tokens=sums.takes_tokens)
    items = problem.items(progress=options.progress is True and shows, description=options.description)
    items, dealing = deal(items, processes, method, sums, options, one_replica=shards.one_replica)
    saved = ShardedCheckpoint(options.checkpoint, method, sums, counts, shards)
    saved.resume(options.shard, dealing.own_data)
    mine, reporter = _Mine(items, dealing, saved), Reporter(options.progress if shows else False)
    rounds, interrupts, stopped = saved.done.bit_count() // dealing.at_once, Interrupts(wanted=True), ""
    if rounds and accuracy.rtol is not None and is_due(rounds):
        stopped = _looked(shards, counts, sums, accuracy)
    with method.attached(), interrupts.noted(), processes.losses_named():
        while not stopped:
            entry = mine.following()
            flags = [entry is not None, method.engine.came_late, saved.is_due, interrupts.asked, mine.chain.value]
            there, late, due, asked, chains = zip(*in_step.gather("round", flags), strict=True)
            if shards.one_replica and len({*chains}) > 1:  # batches of other sizes cannot meet in a layer
                mine.chain.compare(processes, ended=True)
            if any(due) or any(asked) or not any(there):
                saved.write(*mine.chain.end)
            if any(asked):
                stopped = _interrupted(asked, processes, counts, options)
            if stopped or not any(there):
                break
            batch = problem.read(*(entry or mine.spare()))
            outputs = method.forward(batch, verify=any(late))
            if entry:
                method.seed(batch.number)
                method.backward(outputs, sums)
                saved.done |= 1 << batch.number
            else:
                method.go_along(outputs, sums)
            method.release()
            method.validation.flush()
            outputs = outputs.detached()
            if entry:
                _count(method, counts, batch, outputs, dealing.index(batch.number))
                reporter.batch_done(lambda: counts.progress(None))
            rounds += 1
            counts.note(method)
            if accuracy.rtol is not None and is_due(rounds):
                stopped = _looked(shards, counts, sums, accuracy)
        if stopped:
            saved.write(*mine.chain.end)
        else:
            saved.check_length(mine.read)
    if dealing.compares:
        mine.chain.compare(processes, not stopped)
    counts.note(method)
    counts = Counts.total(shards.of_replicas(processes.gather("counts", counts.shared(stopped, mine.first))))
    counts.processes = processes.world
    if isinstance(sums, TraceSums):
        processes.reduce(sums)
    if not counts.samples:
        raise ValueError(message("data", "an iterable with at least one sample", f"{counts.batches} batches"))
    return counts


def _interrupted(asked: Sequence[bool], processes: Processes, counts: Counts, options: LoopOptions) -> str:
    """Return why the run ends on all processes, or raise what ends the call."""
    some = any(processes.gather("some", counts.batches))
    if options.on_interrupt == "return" and some:
        return f"interrupted after {counts.batches} batches"
    if asked[processes.rank]:
        raise KeyboardInterrupt
    text = f"Rank {asked.index(True)} of {processes.world} was interrupted, which ends the run on all processes; with "
    raise ProcessError(text + "a checkpoint, the same call resumes it.")


def _check(settings: Settings, options: LoopOptions) -> None:
    """Refuse what is not there for models in FSDP2 or tensor parallelism."""
    refused = {
        "passes": isinstance(settings.estimator, Adaptive),
        "distributed": options.distributed is False,
    }
    for argument, given in refused.items():
        if given:
            raise ValueError(
                message(
                    argument, "left out for a model whose parameters are divided among processes", "one that is set"
                )
            )


def _count(method: Lockstep, counts: Counts, batch: Batch, outputs: Outputs, index: int) -> None:
    """Count a batch, and look at some of them: at their noise, and at the first one's outputs."""
    problem = method.problem
    if index & (index - 1) == 0:
        core = problem.distributions(outputs, labels=False).core
        counts.add_noise_shares(method.settings.estimator.noise_shares(core))
    if not counts.batches:
        problem.inspect(batch, outputs)
    counts.add(outputs)
    counts.end_batch(batch.number + 1)


def _looked(shards: Shards, counts: Counts, sums: ShardedSums | TraceSums, accuracy: Accuracy) -> str:
    """Return why it is enough, or nothing: all processes find the same."""
    processes = shards.processes.all
    total = Counts.total(shards.of_replicas(processes.gather("counts so far", counts.shared())))
    whole = processes.sum_of(sums) if isinstance(sums, TraceSums) else sums
    return accuracy.reached(total, whole)


class _Mine:
    """The batches of this process, and one of any number that it can run again for the others' sake."""

    def __init__(self, items: Iterator[object], dealing: Dealing, saved: ShardedCheckpoint) -> None:
        self._items, self._dealing, self._saved = enumerate(items), dealing, saved
        self.read = 0
        """The number of the batch after the last one that was read."""
        self.first = ""
        """The fingerprint of batch 0."""
        self.chain = Chain(2 * dealing.at_once)
        self._spare: tuple[object, int] | None = None

    def following(self) -> tuple[object, int] | None:
        """Return item and number of the next batch; None at the end."""
        for place, item in self._items:
            self.first = self.first or fingerprint(("batch", item), most=OF_A_BATCH)
            number = self._dealing.number(place)
            self.read = number + 1
            self._spare = self._spare or (item, number)
            if self._dealing.in_shard(place):
                if self._dealing.compares or self._saved.is_kept:
                    self._saved.compare(number, self.chain.extend(number, item))
                if self._dealing.is_mine(place) and not self._saved.was_done(number):
                    self._spare = item, number
                    return item, number
        return None

    def spare(self) -> tuple[object, int]:
        """Return a batch again."""
        if self._spare is None:
            raise ValueError(
                message("data", "at least one batch on each process", "none", "FSDP2 needs all to go along.")
            )
        return self._spare
