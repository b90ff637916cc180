"""The one loop over data that diagonals, traces, factors and matrices come from.

for window of batches:                                      of this process and shard, without what was done before
    for batch in window:                                    a single one, but with adaptive passes (windows.py)
        outputs = forward(batch)                            one forward pass, shared by all probes
        core = likelihood(logits at the positions that count)
        for u in estimator.cotangents(core, labels, generator):
            sums.add(gradients of u)                        one backward pass, squared per sample or per batch
    write a checkpoint, if it is due; stop, if `rtol` is reached

A run is shared by the processes of torch.distributed, of which there may be one: at the end, all have the whole.
"""

from __future__ import annotations

from neuromanifold.core.checks import message
from neuromanifold.persample.accumulate import DiagonalSums, GradientSums
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.progress import Reporter
from neuromanifold.run.checkpoint import CheckpointedRun
from neuromanifold.run.counts import Counts
from neuromanifold.run.dealing import DealtWindows, deal
from neuromanifold.run.methods import Method, make_method
from neuromanifold.run.processes import together
from neuromanifold.run.settings import LoopOptions, Settings
from neuromanifold.run.steps import Steps
from neuromanifold.run.stopping import Accuracy, Interrupts, Stopping

_NONE = Accuracy(None, lambda *_: None)


def run(
    problem: Problem,
    settings: Settings,
    sums: GradientSums,
    options: LoopOptions | None = None,
    *,
    accuracy: Accuracy = _NONE,
    method: Method | None = None,
) -> Counts:
    """Go through the data once, or until they are accurate enough; return what was seen.

    `method`: that of an earlier run of the same problem, so that what was found out there, and verified, is not again;
    its passes and verified batches are counted with those of this run.
    With several processes, counts and sums are those of all of them at the end.
    """
    options = options or LoopOptions()
    tokens = isinstance(sums, DiagonalSums)  # others keep one gradient for each sample
    method = method.again(settings) if method else make_method(problem, settings, tokens=tokens)
    interrupts = Interrupts(options.checkpoint is not None or options.on_interrupt == "return")
    counts = Counts()
    with together(options.distributed is not False) as processes, problem.session():
        bar = options.progress is True and processes.rank == 0
        items = problem.items(progress=bar, description=options.description)
        items, dealing = deal(items, processes, method, sums, options)
        steps = Steps(method, sums, counts, dealing, options.cuda_graphs)
        saved = CheckpointedRun(options.checkpoint, method, sums, counts)
        saved.resume(processes, options.shard, dealing.own_data)
        windows = DealtWindows(items, dealing, processes, saved, counts)
        stopping = Stopping(accuracy, counts, sums, processes, dealing, saved.begins_at)
        reporter = Reporter(options.progress if processes.rank == 0 else False)
        with method.attached(), interrupts.watched():
            try:
                _go_through(windows, steps, saved, stopping, reporter, interrupts)
            except BaseException as error:
                if interrupts.spoiled or not interrupts.wanted:
                    raise  # where some of a batch has been added, what was written before is still there
                steps.synchronize()
                saved.write()
                some = counts.batches or processes.several
                if not (isinstance(error, KeyboardInterrupt) and options.on_interrupt == "return" and some):
                    raise
                stopping.interrupt()
        counts.stopped = stopping.reason
        windows.compare(ended=not stopping.reason)
        counts = Counts.total(processes.gather("counts", counts.shared()))
        processes.reduce(sums)
        processes.meet(problem.device)
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        shard, shards = options.shard
        got = f"{counts.batches} batches" + (f" in shard {shard} of {shards}" if shards > 1 else "")
        raise ValueError(message("data", "an iterable with at least one sample", got, advice))
    return counts


def _go_through(
    windows: DealtWindows,
    steps: Steps,
    saved: CheckpointedRun,
    stopping: Stopping,
    reporter: Reporter,
    interrupts: Interrupts,
) -> None:
    """Do the windows of this process that were not done before, until the data end or a reason to stop is found."""
    for window in windows:
        with interrupts.held_back():
            if window.items and not stopping.reason:
                steps(window)
                windows.note_done(window)
                reporter.batch_done(stopping.progress)
                if saved.is_due:
                    steps.synchronize()
                    saved.write()
            stopping.after(window)
        if stopping.reason and window.end >= saved.ends_at:
            break
    stopping.after_the_data()
    with interrupts.held_back():
        steps.synchronize()
        saved.check_length(windows.end)
        saved.write()
