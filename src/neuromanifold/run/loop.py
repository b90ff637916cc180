"""The one loop over data that every result of a network comes from.

for batch in data:                                          those of the shard, but for what was done before
    logits = model(batch)                                   one forward pass, shared by all probes
    core = likelihood(logits at the positions that count)
    for u in estimator.cotangents(core, labels, generator):
        squares.add(logits, u)                              one backward pass; samples or batches are squared and added
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from neuromanifold.core.checks import message
from neuromanifold.persample.sums import GradientSums
from neuromanifold.problem.batches import model_device, read_batch
from neuromanifold.problem.fingerprint import fingerprint
from neuromanifold.problem.progress import Seen, tracked
from neuromanifold.problem.unchanged import unchanged
from neuromanifold.run.checkpoint import Checkpoint, KeepableSums, Kept, identity_of
from neuromanifold.run.graphs import Replay
from neuromanifold.run.interrupts import Interrupts, OnInterrupt
from neuromanifold.run.step import Settings, Step

_LOOKED_AT = 2**13  # numbers of each tensor of a batch, for its fingerprint


@dataclass
class Counts:
    """What a run has seen."""

    samples: int = 0
    positions: int = 0
    batches: int = 0
    passes: int = 0
    dtype: str = ""
    stopped: str = ""
    ways: list[str] = field(default_factory=list)  # how each parameter was done
    first: str = ""  # a fingerprint of batch 0 of the data, whichever shard this is
    next: int = 0  # the number, in the data, of the batch after the last one
    running: int | Tensor = 0  # samples, perhaps still on their way on a GPU

    def seen(self, relative_error: float | None) -> Seen:
        """How far the run has come; waits for a GPU."""
        return Seen(self.batches, int(self.running) or self.samples, self.next, relative_error)


@dataclass(frozen=True)
class Keeping:
    """What is kept of a run that may not come to its end."""

    checkpoint: Checkpoint | None = None
    on_interrupt: OnInterrupt = "raise"


def run(
    model: nn.Module,
    data: Iterable[object],
    parameters: dict[str, nn.Parameter],
    settings: Settings,
    sums: GradientSums,
    enough: Callable[[Counts], str] | None = None,
    keeping: Keeping | None = None,
) -> Counts:
    """Go through the data once; `enough` may end it early by giving a reason."""
    check_data(data)
    check_model(model)
    device, counts, keeping = model_device(model), Counts(), keeping or Keeping()
    step = Step(model, parameters, settings, sums, device)
    replay = Replay(step, sums) if settings.replay else None
    kept = _kept(model, parameters, settings, sums, step, counts, keeping.checkpoint)
    interrupts = Interrupts(kept is not None or keeping.on_interrupt == "return")
    samples: int | Tensor = counts.samples
    positions: int | Tensor = counts.positions
    (shard, shards), number = settings.shard, -1

    def settle() -> None:
        """Wait for what is still open, so that counts and sums are right."""
        if replay is not None:
            replay.finish()
        step.validation.finish()
        counts.samples, counts.positions = int(samples), int(positions)

    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, unchanged(model), step.squares.attached(), interrupts.watched():
        try:
            if enough and counts.batches:
                counts.stopped = enough(counts)
            for number, item in enumerate(tracked(data, settings.progress, "Fisher information")):
                if not number:
                    counts.first = fingerprint(("batch", item), most=_LOOKED_AT)
                if number % shards != shard or (kept and kept.passes_over(number, item)):
                    continue
                if counts.stopped:
                    break
                with interrupts.held_back():
                    if kept:
                        kept.batch_begins(item)
                    batch = read_batch(item, number).to(device)
                    outputs = (replay or step)(batch, number)
                    sums.settle()
                    samples = counts.running = samples + outputs.samples
                    positions = positions + outputs.positions
                    counts.batches, counts.next = counts.batches + 1, number + 1
                    counts.dtype = str(outputs.logits.dtype).removeprefix("torch.")
                    del outputs  # and with it all activations, before the next batch
                    counts.stopped = enough(counts) if enough else ""
                    if kept:
                        kept.batch_done()
                        if kept.is_due:
                            settle()
                            kept.write()
                if counts.stopped:
                    break
            with interrupts.held_back():
                settle()
                if kept:
                    kept.check_length(number + 1)
                    kept.write()
        except BaseException as error:
            if interrupts.spoiled or (kept is None and keeping.on_interrupt == "raise"):
                raise  # where some of a batch has been added, what was written before is still there
            settle()
            if kept:
                kept.write()
            if not (isinstance(error, KeyboardInterrupt) and keeping.on_interrupt == "return" and counts.batches):
                raise
            counts.stopped = f"interrupted after {counts.batches} batches"
    counts.passes, counts.ways = step.squares.passes, step.squares.ways()
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        got = f"{counts.batches} batches" + (f" in shard {shard} of {shards}" if shards > 1 else "")
        raise ValueError(message("data", "an iterable with at least one sample", got, advice))
    return counts


def _kept(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    settings: Settings,
    sums: GradientSums,
    step: Step,
    counts: Counts,
    checkpoint: Checkpoint | None,
) -> Kept | None:
    """The state of an earlier run of the same kind, if it is to be kept."""
    if checkpoint is None:
        return None
    assert isinstance(sums, KeepableSums)
    kept = Kept(checkpoint, identity_of(model, parameters, settings, sums), step, sums, counts)
    kept.resume()
    return kept


def check_model(model: nn.Module) -> None:
    """Options of embeddings that change weights in a forward pass, or gradients so that they are not derivatives."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            advice = "It overwrites weights in the forward pass. Apply it once to the weights, then set it to None."
            raise ValueError(message("model", "without max_norm", f"max_norm={module.max_norm} at {name!r}", advice))
        if module.scale_grad_by_freq:
            advice = "Such gradients are not derivatives. Set it to False; it has no effect on outputs."
            got = f"scale_grad_by_freq=True at {name!r}"
            raise ValueError(message("model", "without scale_grad_by_freq", got, advice))


def check_data(data: object) -> None:
    """What is easily handed in instead of an iterable of batches."""
    one_batch = isinstance(data, Tensor) or (isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data))
    if one_batch or isinstance(data, Mapping):
        raise TypeError(message("data", "an iterable of batches", "a single batch", "Put it into a list: [batch]."))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        advice = "Wrap it: DataLoader(dataset, batch_size=64)."
        raise TypeError(message("data", "an iterable of batches", "a Dataset of single samples", advice))
    if not isinstance(data, Iterable):
        raise TypeError(message("data", "an iterable of batches", type(data).__name__))
