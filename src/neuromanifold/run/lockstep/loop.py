"""The loop over data for a model whose parameters are divided among processes: all of them go in step.

while any process has a window of batches:
    write a checkpoint, if it is due on any of them
    passes of this window, as of a whole model              by `Steps` of the other loop
        outputs = forward(batch)                            all processes together (method.py)
        while any process has a cotangent:
            sums.add(gradients of u)                        a layer at a time, added up over processes
    passes of other processes' windows                      with a batch that this one has had before, and no cotangent

A pass of a model in FSDP2 gathers parameters from all processes, and one of a tensor-parallel model adds up what they
have computed, so each must come to as many passes as the others.  In tensor parallelism all do the same batches.
What depends on a process's batch alone (whether to verify, how many passes) is decided by all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

from neuromanifold.core.checks import message
from neuromanifold.estimators import Adaptive
from neuromanifold.persample.accumulate import TraceSums
from neuromanifold.persample.accumulate.sharded import ShardedSums
from neuromanifold.persample.shards import Shards, shards_of
from neuromanifold.problem.fingerprint import OF_A_BATCH, fingerprint
from neuromanifold.problem.problem import Problem
from neuromanifold.run.counts import Counts, Reporter
from neuromanifold.run.dealing import Chain, Dealing, Window, deal
from neuromanifold.run.lockstep.checkpoint import ShardedCheckpoint
from neuromanifold.run.lockstep.method import Lockstep
from neuromanifold.run.loop import Steps
from neuromanifold.run.processes import ProcessError, Processes, together
from neuromanifold.run.settings import LoopOptions, Settings
from neuromanifold.run.stopping import Accuracy, Interrupts, is_due


@contextmanager
def sharded(problem: Problem, settings: Settings, options: LoopOptions) -> Iterator[Shards]:
    """Yield the parts of a model's parameters that this process has, with all processes together and in a session."""
    if options.distributed is False:
        raise ValueError(message("distributed", "left out for a model that several processes share", "False"))
    if problem.tensor_parallel and isinstance(settings.estimator, Adaptive):
        advice = "Outputs that differ by rounding could give processes different samples: use nm.Hutchinson(probes=m)."
        raise ValueError(message("passes", "left out for a tensor-parallel model", f"{settings.estimator}", advice))
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
    method = Lockstep(problem, settings, shards, sums)
    items = problem.items(progress=options.progress is True and shows, description=options.description)
    items, dealing = deal(items, processes, method, sums, options, one_replica=shards.one_replica)
    saved = ShardedCheckpoint(options.checkpoint, method, sums, counts, shards)
    saved.resume(options.shard, dealing.own_data)
    mine, reporter = _OwnWindows(items, dealing, saved), Reporter(options.progress if shows else False)
    steps = Steps(method, sums, counts, dealing, cuda_graphs=False)
    size, interrupts, stopped = dealing.window, Interrupts(wanted=True), ""
    rounds = saved.done.bit_count() // (size * dealing.at_once)
    if rounds and accuracy.rtol is not None and is_due(rounds * size):
        stopped = _reason_to_stop(shards, counts, sums, accuracy)
    with method.taking_part(lambda: problem.read(*mine.spare())), interrupts.noted(), processes.losses_named():
        while not stopped:
            window = mine.following()
            flags = [window is not None, saved.is_due, interrupts.asked, mine.chain.value]
            there, due, asked, chains = zip(*in_step.gather("round", flags), strict=True)
            if shards.one_replica and len({*chains}) > 1:  # batches of other sizes cannot meet in a layer
                mine.chain.compare(processes, ended=True)
            if any(due) or any(asked) or not any(there):
                saved.write(*mine.chain.end)
            if any(asked):
                stopped = _interrupted(asked, processes, counts, options)
            if stopped or not any(there):
                break
            if window:
                steps(window)
            method.finish()
            method.validation.flush()
            if window:
                for number, _ in window.items:
                    saved.done |= 1 << number
                reporter.batch_done(lambda: counts.progress(None))
            rounds += 1
            counts.note(method)
            if accuracy.rtol is not None and is_due(rounds * size):
                stopped = _reason_to_stop(shards, counts, sums, accuracy)
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


def _reason_to_stop(shards: Shards, counts: Counts, sums: ShardedSums | TraceSums, accuracy: Accuracy) -> str:
    """Return why the run ends if `rtol` is reached, else nothing; all processes find the same."""
    processes = shards.processes.all
    total = Counts.total(shards.of_replicas(processes.gather("counts so far", counts.shared())))
    whole = processes.sum_of(sums) if isinstance(sums, TraceSums) else sums
    return accuracy.reached(total, whole)


class _OwnWindows:
    """The windows of this process, and a batch of any number that it can run again for the others' sake."""

    def __init__(self, items: Iterator[object], dealing: Dealing, saved: ShardedCheckpoint) -> None:
        self._items, self._dealing, self._saved, self._place = items, dealing, saved, 0
        self.read = 0
        """The number of the batch after the last one that was read."""
        self.first = ""
        """The fingerprint of batch 0."""
        self.chain = Chain(2 * dealing.window * dealing.at_once)
        self._spare: tuple[object, int] | None = None

    def following(self) -> Window | None:
        """Return the next window; None at the end."""
        size, dealing, saved = self._dealing.window, self._dealing, self._saved
        while items := list(islice(self._items, size)):
            place, self._place = self._place, self._place + 1
            self.first = self.first or fingerprint(("batch", items[0]), most=OF_A_BATCH)
            window = list(enumerate(items, dealing.number(place) * size))
            self.read = window[-1][0] + 1
            self._spare = self._spare or (items[0], window[0][0])
            if not dealing.in_shard(place):
                continue
            if dealing.compares or saved.is_kept:
                for number, item in window:
                    saved.compare(number, self.chain.extend(number, item))
            window = [one for one in window if not saved.was_done(one[0])]
            if dealing.is_mine(place) and window:
                self._spare = window[0][1], window[0][0]
                return Window(place, self.read, window)
        return None

    def spare(self) -> tuple[object, int]:
        """Return a batch again."""
        if self._spare is None:
            raise ValueError(
                message("data", "at least one batch on each process", "none", "FSDP2 needs all to go along.")
            )
        return self._spare
