"""The one loop over data that diagonals, traces, factors and matrices come from.

for batch in problem.batches():                             those of the shard, but for what was done before
    outputs = forward(batch)                                one forward pass, shared by all probes
    core = likelihood(logits at the positions that count)
    for u in estimator.cotangents(core, labels, generator):
        sums.add(gradients of u)                            one backward pass, squared per sample or per batch

With adaptive passes, a window of batches takes the place of a batch (windows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

from neuromanifold.core.checks import message
from neuromanifold.estimators import Adaptive
from neuromanifold.persample.accumulate import DiagonalSums, GradientSums, StatefulSums
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.fingerprint import OF_A_BATCH, fingerprint
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.progress import Observer, Reporter
from neuromanifold.run.checkpoint import Checkpoint, CheckpointedRun, identity_of
from neuromanifold.run.counts import Counts
from neuromanifold.run.graphs import CapturedSteps
from neuromanifold.run.interrupts import Interrupts, OnInterrupt
from neuromanifold.run.step import Settings, Step
from neuromanifold.run.windows import AdaptiveSteps

CudaGraphs = bool | Literal["auto"]


@dataclass(frozen=True)
class LoopOptions:
    """How the loop is run, apart from what it computes."""

    progress: bool | Observer = False
    shard: tuple[int, int] = (0, 1)  # of every so many batches, the one with this number
    checkpoint: Checkpoint | None = None
    on_interrupt: OnInterrupt = "raise"
    cuda_graphs: CudaGraphs = False
    description: str = "Fisher information"


def run(
    problem: Problem,
    settings: Settings,
    sums: GradientSums,
    options: LoopOptions | None = None,
    *,
    enough: Callable[[Counts], str] | None = None,
    relative_error: Callable[[Counts], float | None] = lambda _: None,
) -> Counts:
    """Go through the data once; `enough` may end it early by giving a reason."""
    options = options or LoopOptions()
    counts, (shard, shards), number, left = Counts(), options.shard, -1, 0
    step, inspected = Step(problem, settings, sums), False
    captures = options.cuda_graphs is True or (options.cuda_graphs == "auto" and problem.device.type == "cuda")
    one_by_one = CapturedSteps(step, sums, options.cuda_graphs) if captures else step

    def one(batch: Batch) -> Outputs:
        outputs = one_by_one(batch).detached()  # without its activations
        sums.synchronize()
        return outputs

    process = AdaptiveSteps(step, counts) if isinstance(settings.estimator, Adaptive) else partial(map, one)
    saved = _resumed(step, counts, options)
    interrupts = Interrupts(saved is not None or options.on_interrupt == "return")
    reporter = Reporter(options.progress) if callable(options.progress) else None
    bar = options.progress is True

    def synchronize() -> None:
        """Wait for what is still open, so that counts and sums are right."""
        one_by_one.synchronize()
        step.validation.flush()
        counts.synchronize()

    def examine(batch: Batch, outputs: Outputs) -> None:
        """Count a batch, and warn of what looks wrong: in the first one, and when parameters turn out to be slow."""
        nonlocal left, inspected
        some = counts.batches & (counts.batches - 1) == 0  # 0, 1, 2, 4, ...: these are enough
        if (some and not inspected) or step.method.left_to_autograd > left:
            inspected = problem.inspect(batch, outputs)
        left = step.method.left_to_autograd
        if some:
            core = problem.distributions(outputs, labels=False).core
            counts.add_noise_shares(settings.estimator.noise_shares(core))
            if isinstance(sums, DiagonalSums):
                sums.note_traces(outputs.per_sample(core.trace()))
        counts.add(outputs)

    with problem.session(), step.method.attached(), interrupts.watched():
        try:
            if enough and counts.batches:
                counts.stopped = enough(counts)
            for window in windows(problem.items(progress=bar, description=options.description), settings.window):
                number = window[-1][0]
                if not window[0][0]:
                    counts.first = fingerprint(("batch", window[0][1]), most=OF_A_BATCH)
                if window[0][0] // settings.window % shards != shard:
                    continue
                window = [(n, item) for n, item in window if not (saved and saved.was_done(n, item))]
                if not window:
                    continue
                if counts.stopped:
                    break
                with interrupts.held_back():
                    batches = []
                    for n, item in window:
                        if saved:
                            saved.begin_batch(item)
                        batches.append(problem.read(item, n))
                    for batch, outputs in zip(batches, process(batches), strict=True):
                        examine(batch, outputs)
                    counts.next, counts.methods = number + 1, step.method.methods()
                    if reporter:
                        reporter.batch_done(lambda: counts.progress(relative_error(counts)))
                    counts.stopped = enough(counts) if enough else ""
                    if saved:
                        saved.end_batch()
                        if saved.is_due:
                            synchronize()
                            saved.write()
                if counts.stopped:
                    break
            with interrupts.held_back():
                synchronize()
                if saved:
                    saved.check_length(number + 1)
                    saved.write()
        except BaseException as error:
            if interrupts.spoiled or (saved is None and options.on_interrupt == "raise"):
                raise  # where some of a batch has been added, what was written before is still there
            synchronize()
            if saved:
                saved.write()
            if not (isinstance(error, KeyboardInterrupt) and options.on_interrupt == "return" and counts.batches):
                raise
            counts.stopped = f"interrupted after {counts.batches} batches"
    counts.passes, counts.verified, counts.methods = step.method.passes, step.method.verified, step.method.methods()
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        got = f"{counts.batches} batches" + (f" in shard {shard} of {shards}" if shards > 1 else "")
        raise ValueError(message("data", "an iterable with at least one sample", got, advice))
    return counts


def windows(items: Iterator[tuple[int, object]], size: int) -> Iterator[list[tuple[int, object]]]:
    """Lists of so many numbered items, the last one perhaps shorter."""
    while window := list(islice(items, size)):
        yield window


def _resumed(step: Step, counts: Counts, options: LoopOptions) -> CheckpointedRun | None:
    """The state of an earlier run of the same kind, if it is written to a file."""
    if options.checkpoint is None:
        return None
    assert isinstance(step.sums, StatefulSums)
    identity = identity_of(step.problem, step.settings, step.sums, options.shard)
    saved = CheckpointedRun(options.checkpoint, identity, step.method, step.sums, counts)
    saved.resume()
    return saved
