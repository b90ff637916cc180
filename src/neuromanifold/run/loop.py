"""The one loop over data that every result of a network comes from.

for batch in data:
    logits = model(batch)                                   one forward pass, shared by all probes
    core = likelihood(logits at the positions that count)
    for u in estimator.cotangents(core, labels, generator):
        squares.add(logits, u)                              one backward pass; samples or batches are squared and added
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from neuromanifold.core import Core
from neuromanifold.core.checks import message
from neuromanifold.estimators import Estimator
from neuromanifold.pullback.sums import GradientSums
from neuromanifold.run.batches import Batch, Outputs, model_device, read_batch, read_outputs
from neuromanifold.run.cotangents import cotangents
from neuromanifold.run.granularity import Granularity
from neuromanifold.run.progress import tracked
from neuromanifold.run.squares import make_squares
from neuromanifold.run.unchanged import unchanged
from neuromanifold.run.validation import LateValidation


@dataclass(frozen=True)
class Settings:
    """Everything about a run but the model and the data."""

    estimator: Estimator
    likelihood: Callable[[Tensor], Core]
    granularity: Granularity = "auto"
    seed: int = 0
    class_dim: int = -1
    batch_dim: int = 0
    ignore_index: int = -100
    progress: bool = False


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
    device, counts, estimator = model_device(model), Counts(), settings.estimator
    squares = make_squares(model, parameters, sums, estimator, settings.granularity, settings.batch_dim)
    generator, validation = torch.Generator(device).manual_seed(settings.seed), LateValidation(settings.likelihood)
    samples: int | Tensor = 0
    positions: int | Tensor = 0

    def evaluate(batch: Batch) -> Outputs:
        output = model(*batch.args, **batch.kwargs)
        outputs = read_outputs(output, batch, settings.class_dim, settings.ignore_index, settings.batch_dim)
        _check(outputs, estimator, counts.batches)
        return outputs

    with unchanged(model), squares.attached():
        for item in tracked(data, settings.progress, "Fisher information"):
            batch = read_batch(item, counts.batches).to(device)
            outputs = squares.forward(lambda batch=batch: evaluate(batch))  # type: ignore[misc]
            squares.add_all(outputs, cotangents(outputs, estimator, generator, validation, counts.batches))
            squares.end_batch()
            samples = samples + outputs.samples
            positions = positions + outputs.positions
            counts.batches += 1
            counts.dtype = str(outputs.logits.dtype).removeprefix("torch.")
            counts.stopped = enough(counts) if enough else ""
            if counts.stopped:
                break
    validation.finish()
    counts.samples, counts.positions = int(samples), int(positions)
    counts.passes, counts.ways = squares.passes, squares.ways()
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        raise ValueError(message("data", "an iterable with at least one sample", f"{counts.batches} batches", advice))
    return counts


def _check(outputs: Outputs, estimator: Estimator, number: int) -> None:
    """Errors that only a batch can show."""
    if not outputs.logits.requires_grad:
        advice = "Look for torch.no_grad(), .detach() or a non-differentiable step in its forward."
        raise ValueError(message("model", "differentiable", "logits that do not depend on any parameter", advice))
    if estimator.needs_labels and outputs.labels is None:
        advice = "Yield (inputs, labels) or a dict with 'labels', or choose an estimator without labels."
        where = f"Batch {number} of `data`: "
        raise ValueError(where + message("labels", f"given for {estimator}", "none", advice))
    if estimator.needs_labels and outputs.labels is not None and outputs.labels_fit is False:
        shapes = f"{list(outputs.logits.shape[:-1])} (class labels) or {list(outputs.logits.shape)} (targets)"
        got = f"shape {list(outputs.labels.shape)}"
        raise ValueError(f"Batch {number} of `data`: " + message("labels", f"of shape {shapes}", got))


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
