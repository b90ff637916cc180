"""The one loop over data that diagonals, traces, factors and matrices come from.

for batch in problem.batches():                             those of the shard, but for what was done before
    outputs = forward(batch)                                one forward pass, shared by all probes
    core = likelihood(logits at the positions that count)
    for u in estimator.cotangents(core, labels, generator):
        sums.add(gradients of u)                            one backward pass, squared per sample or per batch

With adaptive passes, a window of batches takes the place of a batch (windows.py).  Several processes deal the windows
among themselves (dealing.py), and add up their sums at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Literal

from neuromanifold.core.checks import message
from neuromanifold.estimators import Adaptive
from neuromanifold.persample.accumulate import DiagonalSums, GradientSums, SharedSums, StatefulSums
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.fingerprint import OF_A_BATCH, fingerprint
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.progress import Observer, Reporter, RunProgress
from neuromanifold.run.checkpoint import Checkpoint, CheckpointedRun, identity_of
from neuromanifold.run.counts import Counts, coarsest
from neuromanifold.run.dealing import Chain, Dealing, Distributed, agree
from neuromanifold.run.graphs import CapturedSteps
from neuromanifold.run.interrupts import Interrupts, OnInterrupt
from neuromanifold.run.methods import Method
from neuromanifold.run.processes import Processes, together
from neuromanifold.run.step import Settings, Step
from neuromanifold.run.windows import AdaptiveSteps

_COMPARED = 1024  # numbers of each parameter that processes compare
CudaGraphs = bool | Literal["auto"]
Enough = Callable[[Counts, GradientSums], str]


@dataclass(frozen=True)
class LoopOptions:
    """How the loop is run, apart from what it computes."""

    progress: bool | Observer = False
    shard: tuple[int, int] = (0, 1)  # of every so many batches, the one with this number
    checkpoint: Checkpoint | None = None
    on_interrupt: OnInterrupt = "raise"
    cuda_graphs: CudaGraphs = False
    description: str = "Fisher information"
    distributed: Distributed = False


def run(
    problem: Problem,
    settings: Settings,
    sums: GradientSums,
    options: LoopOptions | None = None,
    *,
    enough: Enough | None = None,
    relative_error: Callable[[Counts], float | None] = lambda _: None,
    method: Method | None = None,
) -> Counts:
    """Go through the data once; `enough` may end it early by giving a reason.

    `method`: that of an earlier run of the same problem, so that what was found out there, and verified, is not again;
    its passes and verified batches are counted with those of this run.
    With several processes, counts and sums are those of all of them at the end.
    """
    options = options or LoopOptions()
    with together(options.distributed is not False) as processes:
        return _run(problem, settings, sums, options, processes, enough, relative_error, method)


def _run(
    problem: Problem,
    settings: Settings,
    sums: GradientSums,
    options: LoopOptions,
    processes: Processes,
    enough: Enough | None,
    relative_error: Callable[[Counts], float | None],
    method: Method | None,
) -> Counts:
    counts, last = Counts(), -1
    step = Step(problem, settings, sums, method)
    inspected, left = step.method.passes > 0, step.method.left_to_autograd
    captures = options.cuda_graphs is True or (options.cuda_graphs == "auto" and problem.device.type == "cuda")
    one_by_one = CapturedSteps(step, sums, options.cuda_graphs) if captures else step
    dealing = Dealing(options.shard, settings.window, processes.rank, processes.world)

    def one(batch: Batch) -> Outputs:
        if isinstance(sums, DiagonalSums):
            sums.begin_batch(dealing.index(batch.number), problem.samples_of(batch))
        outputs = one_by_one(batch).detached()  # without its activations
        sums.synchronize()
        return outputs

    process = AdaptiveSteps(step, counts) if isinstance(settings.estimator, Adaptive) else partial(map, one)
    interrupts = Interrupts(options.checkpoint is not None or options.on_interrupt == "return")
    shows = processes.rank == 0
    reporter = Reporter(options.progress) if shows and callable(options.progress) else None

    def synchronize() -> None:
        """Wait for what is still open, so that counts and sums are right."""
        one_by_one.synchronize()
        step.validation.flush()
        counts.synchronize()

    def progress() -> RunProgress:
        return counts.progress(None if processes.several else relative_error(counts))

    def examine(batch: Batch, outputs: Outputs) -> None:
        """Count a batch, and warn of what looks wrong: in the first one, and when parameters turn out to be slow."""
        nonlocal left, inspected
        some = counts.batches & (counts.batches - 1) == 0  # 0, 1, 2, 4, ...: these are enough
        if (some and not inspected) or step.method.left_to_autograd > left:
            inspected = problem.inspect(batch, outputs)
        left = step.method.left_to_autograd
        index = dealing.index(batch.number)
        if index & (index - 1) == 0:
            core = problem.distributions(outputs, labels=False).core
            counts.add_noise_shares(settings.estimator.noise_shares(core))
            if isinstance(sums, DiagonalSums):
                sums.note_traces(outputs.per_sample(core.trace()))
        counts.add(outputs)

    def windows_to_do() -> Iterator[tuple[int, list[tuple[int, object]]]]:
        """Go through the data: this process's windows, without the batches that were done before."""
        nonlocal last
        for place, items in windows:
            if not place:
                counts.first = fingerprint(("batch", items[0]), most=OF_A_BATCH)
            numbered = list(enumerate(items, dealing.number(place) * settings.window))
            last = numbered[-1][0]
            if not dealing.in_shard(place):
                continue
            for number, item in numbered if before else ():
                assert before is not None
                begins, after = not before.value, before.extend(number, item)
                if saved:
                    saved.compare(number, after, begins)
            if dealing.is_mine(place):
                yield place, [(n, item) for n, item in numbered if not (saved and saved.was_done(n))]

    with problem.session(), step.method.attached(), interrupts.watched():
        items = problem.items(progress=options.progress is True and shows, description=options.description)
        windows: Iterator[tuple[int, list[object]]] = enumerate(_windows(items, settings.window))
        if processes.several:
            windows, own_data = _agreed(processes, problem, settings, sums, options, windows)
            dealing = replace(dealing, own_data=own_data)
        saved = _resumed(step, counts, options, processes, dealing)
        compares = processes.several and not dealing.own_data
        before = Chain(2 * settings.window * processes.world) if saved or compares else None
        looks = _Looks(enough, processes, dealing, saved.begins_at if saved else 0)
        try:
            if counts.batches and not processes.several:
                counts.stopped = looks.at_once(counts, sums)
            for place, fresh in windows_to_do():
                if fresh and counts.stopped:
                    break
                with interrupts.held_back():
                    batches = [problem.read(item, number) for number, item in fresh]
                    for batch, outputs in zip(batches, process(batches) if batches else (), strict=True):
                        examine(batch, outputs)
                    if fresh:
                        counts.next, counts.methods = max(counts.next, last + 1), step.method.methods()
                        if reporter:
                            reporter.batch_done(progress)
                        counts.stopped = looks.at_once(counts, sums) if not processes.several else ""
                    if fresh and saved and before:
                        saved.note_done([number for number, _ in fresh], before.value)
                        if saved.is_due:
                            synchronize()
                            saved.write()
                processes.check()
                if processes.several:
                    counts.stopped = looks.after(place, counts, sums, synchronize) or processes.stopped
                if fresh and counts.stopped:
                    break
            if processes.several and not counts.stopped:
                counts.stopped = looks.until_all_end(counts, sums, synchronize)
            with interrupts.held_back():
                synchronize()
                if saved:
                    saved.check_length(last + 1)
                    saved.write()
        except BaseException as error:
            if interrupts.spoiled or (saved is None and options.on_interrupt == "raise"):
                raise  # where some of a batch has been added, what was written before is still there
            synchronize()
            if saved:
                saved.write()
            some = counts.batches or processes.several
            if not (isinstance(error, KeyboardInterrupt) and options.on_interrupt == "return" and some):
                raise
            counts.stopped = f"interrupted after {counts.batches} batches"
            processes.stop(counts.stopped)
        counts.passes, counts.verified, counts.methods = step.method.passes, step.method.verified, step.method.methods()
        if processes.several:
            if compares and before:
                before.compare(processes, not counts.stopped)
            counts = of_all_processes(processes, counts, dealing)
            assert isinstance(sums, SharedSums)
            sums.reduce(processes)
            processes.meet(problem.device)
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        shard, shards = options.shard
        got = f"{counts.batches} batches" + (f" in shard {shard} of {shards}" if shards > 1 else "")
        raise ValueError(message("data", "an iterable with at least one sample", got, advice))
    return counts


class _Looks:
    """Asks whether it is enough: less and less often, and with several processes at the end of the same rounds."""

    def __init__(self, enough: Enough | None, processes: Processes, dealing: Dealing, begins_at: int) -> None:
        self._enough, self._processes, self._dealing = enough, processes, dealing
        self._first = 0 if dealing.own_data else dealing.turn(begins_at // dealing.window)[0]
        self._next = 0  # the round that comes next here

    def at_once(self, counts: Counts, sums: GradientSums) -> str:
        """Return why it is enough, or nothing; for a process that is alone."""
        return self._enough(counts, sums) if self._enough and is_due(counts.batches) else ""

    def after(self, place: int, counts: Counts, sums: GradientSums, synchronize: Callable[[], None]) -> str:
        """Return why it is enough after a window of this process, in which all processes agree."""
        self._next = self._dealing.turn(place)[0] + 1
        return self._together(self._next, counts, sums, synchronize, ended=False)[0]

    def until_all_end(self, counts: Counts, sums: GradientSums, synchronize: Callable[[], None]) -> str:
        """Take part in what the others ask about, after the last window of this process."""
        while self._enough:
            self._next += 1
            reason, ended = self._together(self._next, counts, sums, synchronize, ended=True)
            if reason or ended:
                return reason
        return ""

    def _together(
        self, rounds: int, counts: Counts, sums: GradientSums, synchronize: Callable[[], None], ended: bool
    ) -> tuple[str, bool]:
        """Return the reason to stop, and whether all processes are at the end of their data."""
        if self._enough is None or rounds <= self._first or not is_due(rounds):
            return "", False
        synchronize()
        state = {**counts.state(), "methods": counts.methods}
        found = self._processes.gather_unless_stopped(f"round {rounds}", [state, ended])
        if found is None:
            return self._processes.stopped, False
        assert isinstance(sums, SharedSums)
        total, whole = Counts(), sums.copy()
        for one, _ in found:
            total.merge(one)
        total.methods = coarsest(one["methods"] for one, _ in found)
        whole.reduce(self._processes)
        reason = self._enough(total, whole) if total.batches else ""
        return self._processes.gather("reason", reason)[0], all(one[1] for one in found)


def is_due(number: int) -> bool:
    """Whether accuracy is looked at after so many batches or rounds, since it costs: 1, ..., 16, 18, 20, ..."""
    return number % max(1, number // 8) == 0


def _windows(items: Iterator[tuple[int, object]], size: int) -> Iterator[list[object]]:
    """Yield lists of so many items, the last one perhaps shorter."""
    while window := [item for _, item in islice(items, size)]:
        yield window


def _agreed(
    processes: Processes,
    problem: Problem,
    settings: Settings,
    sums: GradientSums,
    options: LoopOptions,
    windows: Iterator[tuple[int, list[object]]],
) -> tuple[Iterator[tuple[int, list[object]]], bool]:
    """Return the windows, and whether each process has data of its own, which their first batches show."""
    head = next(windows, None)
    first = "" if head is None else fingerprint(("batch", head[1][0]), most=OF_A_BATCH)
    identity = identity_of(problem, settings, sums, options.shard, most=_COMPARED)
    identity |= {"checkpoint": options.checkpoint is not None, "on_interrupt": options.on_interrupt}
    own_data = agree(processes, options.distributed, problem.data, first, identity, problem.device)
    return chain([] if head is None else [head], windows), own_data


def of_all_processes(processes: Processes, counts: Counts, dealing: Dealing) -> Counts:
    """Return the counts of all processes together."""
    own = {name: getattr(counts, name) for name in ("passes", "verified", "methods", "stopped", "first")}
    of_all, total = processes.gather("counts", {**counts.state(), **own}), Counts()
    for one in of_all:
        total.merge(one)
    total.passes, total.verified = (sum(one[name] for one in of_all) for name in ("passes", "verified"))
    total.methods = coarsest(one["methods"] for one in of_all)
    total.stopped = next(filter(None, (one["stopped"] for one in of_all)), "")
    if total.stopped.startswith("interrupted"):
        total.stopped = f"interrupted after {total.batches} batches"
    firsts = [one["first"] for one in of_all]
    total.first = fingerprint(("", firsts)) if dealing.own_data else next(filter(None, firsts), "")
    total.processes = processes.world
    total.synchronize()
    return total


def _resumed(
    step: Step, counts: Counts, options: LoopOptions, processes: Processes, dealing: Dealing
) -> CheckpointedRun | None:
    """The state of an earlier run of the same kind, if it is written to a file."""
    if options.checkpoint is None:
        return None
    assert isinstance(step.sums, StatefulSums)
    identity = identity_of(step.problem, step.settings, step.sums, options.shard)
    identity["processes with data of their own"] = processes.world if dealing.own_data else None
    saved = CheckpointedRun(options.checkpoint, identity, step.method, step.sums, counts)
    saved.resume(processes, dealing.own_data)
    return saved
