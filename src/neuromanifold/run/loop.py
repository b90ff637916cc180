"""The one loop over data that every result of a network comes from.

for batch in data:
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
from neuromanifold.pullback.sums import GradientSums
from neuromanifold.run.batches import model_device, read_batch
from neuromanifold.run.progress import tracked
from neuromanifold.run.replay import Replay
from neuromanifold.run.step import Settings, Step
from neuromanifold.run.unchanged import unchanged


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


def run(
    model: nn.Module,
    data: Iterable[object],
    parameters: dict[str, nn.Parameter],
    settings: Settings,
    sums: GradientSums,
    enough: Callable[[Counts], str] | None = None,
) -> Counts:
    """Go through the data once; `enough` may end it early by giving a reason."""
    check_data(data)
    _check_model(model)
    device, counts = model_device(model), Counts()
    step = Step(model, parameters, settings, sums, device)
    replay = Replay(step, sums) if settings.replay else None
    samples: int | Tensor = 0
    positions: int | Tensor = 0
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, unchanged(model), step.squares.attached():
        for item in tracked(data, settings.progress, "Fisher information"):
            batch = read_batch(item, counts.batches).to(device)
            outputs = (replay or step)(batch, counts.batches)
            sums.settle()
            samples = samples + outputs.samples
            positions = positions + outputs.positions
            counts.batches += 1
            counts.dtype = str(outputs.logits.dtype).removeprefix("torch.")
            del outputs  # and with it all activations, before the next batch
            counts.stopped = enough(counts) if enough else ""
            if counts.stopped:
                break
        if replay is not None:
            replay.finish()
    step.validation.finish()
    counts.samples, counts.positions = int(samples), int(positions)
    counts.passes, counts.ways = step.squares.passes, step.squares.ways()
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        raise ValueError(message("data", "an iterable with at least one sample", f"{counts.batches} batches", advice))
    return counts


def _check_model(model: nn.Module) -> None:
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
