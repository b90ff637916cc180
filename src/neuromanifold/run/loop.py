"""The one loop over data that diagonals, traces, factors and matrices come from.

for window of batches:                                      those of this process and shard (dealing.py)
    for batch in window:                                    a single one, but with adaptive passes (windows.py)
        outputs = forward(batch)                            one forward pass, shared by all probes (methods.py)
        core = likelihood(logits at the positions that count)
        for u in estimator.cotangents(core, labels, generator):
            sums.add(gradients of u)                        one backward pass, squared per sample or per batch
    write a checkpoint, if it is due (checkpoint.py); stop, if `rtol` is reached (stopping.py)

A run is shared by the processes of torch.distributed, of which there may be one: at the end, all have the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from neuromanifold.core.checks import message
from neuromanifold.estimators import Adaptive
from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.run.checkpoint import CheckpointedRun
from neuromanifold.run.counts import Counts, Reporter
from neuromanifold.run.dealing import Dealing, DealtWindows, Window, deal
from neuromanifold.run.graphs import CapturedSteps
from neuromanifold.run.methods import Method, make_method
from neuromanifold.run.processes import together
from neuromanifold.run.settings import CudaGraphs, LoopOptions, Settings
from neuromanifold.run.stopping import Accuracy, Interrupts, Stopping
from neuromanifold.run.windows import AdaptiveSteps

_NO_TOLERANCE = Accuracy(None, lambda *_: None)


def run(
    problem: Problem,
    settings: Settings,
    sums: GradientSums,
    options: LoopOptions | None = None,
    *,
    accuracy: Accuracy = _NO_TOLERANCE,
    method: Method | None = None,
) -> Counts:
    """Go through the data once, or until the sums are accurate enough; return what was seen.

    `method`: that of an earlier run of the same problem, whose verified plans are used again; its passes and verified
    batches are counted with those of this run.
    With several processes, counts and sums are those of all of them at the end.
    """
    options = options or LoopOptions()
    method = method.again(settings) if method else make_method(problem, settings, tokens=sums.takes_tokens)
    interrupts = Interrupts(options.checkpoint is not None or options.on_interrupt == "return")
    counts = Counts()
    with together(options.distributed is not False) as processes, problem.session():
        bar = options.progress is True and processes.rank == 0
        items = problem.items(progress=bar, description=options.description)
        items, dealing = deal(items, processes, method, sums, options)
        steps = Steps(method, sums, counts, dealing, options.cuda_graphs)
        saved = CheckpointedRun(options.checkpoint, method, sums, counts) if options.checkpoint else None
        if saved is not None:
            saved.resume(processes, options.shard, dealing.own_data)
        windows = DealtWindows(items, dealing, processes, saved)
        stopping = Stopping(accuracy, counts, sums, processes, dealing, saved.begins_at if saved else 0)
        reporter = Reporter(options.progress if processes.rank == 0 else False)
        with method.attached(), interrupts.watched():
            try:
                _go_through(windows, steps, saved, stopping, reporter, interrupts)
            except BaseException as error:
                if interrupts.in_batch or not interrupts.wanted:
                    raise  # sums may hold a part of the batch: the checkpoint that was written before it remains
                steps.synchronize()
                if saved is not None:
                    saved.write()
                has_result = counts.batches or processes.several
                if not (isinstance(error, KeyboardInterrupt) and options.on_interrupt == "return" and has_result):
                    raise
                stopping.interrupt()
        windows.compare(ended=not stopping.reason)
        counts = Counts.total(processes.gather("counts", counts.shared(stopping.reason, windows.first)))
        processes.reduce(sums)
        processes.barrier(problem.device)
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        shard, shards = options.shard
        got = f"{counts.batches} batches" + (f" in shard {shard} of {shards}" if shards > 1 else "")
        raise ValueError(message("data", "an iterable with at least one sample", got, advice))
    return counts


def _go_through(
    windows: DealtWindows,
    steps: Steps,
    saved: CheckpointedRun | None,
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
                if saved is not None and saved.is_due:
                    steps.synchronize()
                    saved.write()
            stopping.after(window)
        # after a reason to stop, batches that the checkpoint has are still read: they must be those that it was made of
        if stopping.reason and (saved is None or window.end >= saved.ends_at):
            break
    stopping.after_the_data()
    with interrupts.held_back():
        steps.synchronize()
        if saved is not None:
            saved.check_length(windows.end)
            saved.write()


class Steps:
    """Passes of a window: batch by batch, eagerly or as CUDA graphs; or all of its batches together, adaptively.

    `_do_passes` takes an iterator over batches and returns one over (batch, outputs).  The passes run while that is
    iterated over: without adaptive passes, each batch is examined and counted before the next one runs.
    """

    def __init__(
        self, method: Method, sums: GradientSums, counts: Counts, dealing: Dealing, cuda_graphs: CudaGraphs
    ) -> None:
        self._method, self._sums, self._counts, self._dealing = method, sums, counts, dealing
        captures = cuda_graphs is True or (cuda_graphs == "auto" and method.problem.device.type == "cuda")
        self._captured = CapturedSteps(method, sums, cuda_graphs) if captures else None
        adaptive = isinstance(method.settings.estimator, Adaptive)
        self._do_passes = AdaptiveSteps(method, sums, counts) if adaptive else self._one_by_one
        # The method of an earlier run, which has made passes, has given its warnings already.
        self._inspected, self._left_to_autograd = method.passes > 0, method.left_to_autograd

    def __call__(self, window: Window) -> None:
        """Do the passes of all batches of a window, and count them."""
        batches = (self._method.problem.read(item, number) for number, item in window.items)
        for batch, outputs in self._do_passes(batches):
            self._examine(batch, outputs)
            self._counts.add(outputs)
            self._counts.end_batch(window.end)
        self._counts.note(self._method)

    def synchronize(self) -> None:
        """Finish pending checks of CUDA graphs and outputs, and read counts back, so that they can be reported."""
        if self._captured is not None:
            self._captured.synchronize()
        self._method.validation.flush()
        self._counts.note(self._method)
        self._counts.synchronize()

    def _one_by_one(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Outputs]]:
        return ((batch, self._one(batch)) for batch in batches)

    def _one(self, batch: Batch) -> Outputs:
        """Do the passes of a single batch, and return its outputs without the autograd graph."""
        self._sums.begin_batch(self._dealing.index(batch.number), self._method.problem.samples_of(batch))
        outputs = self._captured(batch) if self._captured else self._method(batch, self._sums)
        self._sums.synchronize()
        return outputs.detached()

    def _examine(self, batch: Batch, outputs: Outputs) -> None:
        """Warn of what looks wrong, in the first batch and when more parameters are left to autograd.

        Besides, in batches 0, 1, 2, 4, ..., sample how much of the error bars is noise, and how uneven the samples are.
        """
        problem, left, done = self._method.problem, self._method.left_to_autograd, self._counts.batches
        due = not self._inspected and done & (done - 1) == 0  # after 0, 1, 2, 4, ... batches
        if due or left > self._left_to_autograd:
            self._inspected = problem.inspect(batch, outputs)
        self._left_to_autograd = left
        index = self._dealing.index(batch.number)
        if index & (index - 1) == 0:
            core = problem.distributions(outputs, labels=False).core
            self._counts.add_noise_shares(self._method.settings.estimator.noise_shares(core))
            self._sums.note_traces(outputs.per_sample(core.trace()))
