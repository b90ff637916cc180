"""The one loop over data that every result of a network comes from.

for batch in data:
    logits = model(batch)                                   one forward pass, shared by all probes
    core = likelihood(logits at the positions that count)
    for u in estimator.cotangents(core, labels, generator):
        gradients = pullback(logits, u)                     one backward pass
        sums.add(gradients)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from neuromanifold.core import Core
from neuromanifold.core.checks import message
from neuromanifold.estimators import Estimator, Exact, SquaredBatchGradient
from neuromanifold.pullback.batch import BatchPullback, involves_half
from neuromanifold.pullback.sums import GradientSums
from neuromanifold.run.batches import Outputs, model_device, read_batch, read_outputs
from neuromanifold.run.progress import tracked
from neuromanifold.run.unchanged import unchanged
from neuromanifold.run.validation import LateValidation

Granularity = Literal["auto", "batch", "sample"]


class SlowPathWarning(UserWarning):
    """The answer is right, but a faster way to it does not exist yet."""


@dataclass(frozen=True)
class Settings:
    """Everything about a run but the model and the data."""

    estimator: Estimator
    likelihood: Callable[[Tensor], Core]
    granularity: Literal["batch", "sample"] = "batch"
    seed: int = 0
    class_dim: int = -1
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


def run(
    model: nn.Module,
    data: Iterable[object],
    parameters: dict[str, nn.Parameter],
    settings: Settings,
    sums: GradientSums,
    enough: Callable[[Counts], str] | None = None,
) -> Counts:
    """Go through the data once; `enough` may end it early by giving a reason."""
    _check_data(data)
    device, counts = model_device(model), Counts()
    pullback = BatchPullback(list(parameters.values()), involves_half(model.parameters(), device))
    generator, validation = torch.Generator(device).manual_seed(settings.seed), LateValidation(settings.likelihood)
    samples: int | Tensor = 0
    positions: int | Tensor = 0
    with unchanged(model):
        for item in tracked(data, settings.progress, "Fisher information"):
            batch = read_batch(item, counts.batches).to(device)
            output = model(*batch.args, **batch.kwargs)
            outputs = read_outputs(output, batch, settings.class_dim, settings.ignore_index)
            _check(outputs, settings.estimator, counts.batches)
            for cotangent, last in _with_last(_cotangents(outputs, settings, generator, validation, counts.batches)):
                sums.add(*pullback(outputs.logits, cotangent, keep_graph=not last))
                counts.passes += 1
            sums.end_batch()
            samples = samples + outputs.samples
            positions = positions + outputs.positions
            counts.batches += 1
            counts.dtype = str(outputs.logits.dtype).removeprefix("torch.")
            counts.stopped = enough(counts) if enough else ""
            if counts.stopped:
                break
    validation.finish()
    counts.samples, counts.positions = int(samples), int(positions)
    if not counts.samples:
        advice = "A generator can be used up only once; pass a list or a DataLoader. Ignored samples do not count."
        raise ValueError(message("data", "an iterable with at least one sample", f"{counts.batches} batches", advice))
    return counts


def choose_granularity(estimator: Estimator, granularity: str) -> Literal["batch", "sample"]:
    """Square whole batches where that is right; else one sample at a time, with a warning that this is slow."""
    if not isinstance(estimator, Estimator):
        advice = "Make one, such as nm.Hutchinson()."
        raise TypeError(message("estimator", "an estimator", repr(estimator), advice))
    if granularity not in ("auto", "batch", "sample"):
        raise ValueError(message("granularity", "'auto', 'batch' or 'sample'", repr(granularity)))
    squares_batches = estimator.centred or isinstance(estimator, SquaredBatchGradient)
    if granularity == "batch" and not squares_batches:
        advice = (
            "The gradients of different samples do not cancel on average, so the square of their sum is not a Fisher "
        )
        advice += "information. Use granularity='sample', or nm.SquaredBatchGradient() if that is the number you want."
        raise ValueError(message("granularity", f"'auto' or 'sample' for {estimator}", "'batch'", advice))
    if granularity == "sample" and isinstance(estimator, SquaredBatchGradient):
        raise ValueError(message("granularity", "'auto' or 'batch' for SquaredBatchGradient", "'sample'"))
    if squares_batches and granularity != "sample":
        return "batch"
    text = (
        f"{estimator} squares each sample on its own, by one backward pass for each sample and column: right, but slow."
    )
    warnings.warn(text + " nm.Hutchinson() is unbiased at one pass for each batch.", SlowPathWarning, stacklevel=4)
    return "sample"


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


def _check_data(data: object) -> None:
    """What is easily handed in instead of an iterable of batches."""
    one_batch = isinstance(data, Tensor) or (isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data))
    if one_batch or isinstance(data, Mapping):
        raise TypeError(message("data", "an iterable of batches", "a single batch", "Put it into a list: [batch]."))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        advice = "Wrap it: DataLoader(dataset, batch_size=64)."
        raise TypeError(message("data", "an iterable of batches", "a Dataset of single samples", advice))
    if not isinstance(data, Iterable):
        raise TypeError(message("data", "an iterable of batches", type(data).__name__))


def _cotangents(
    outputs: Outputs, settings: Settings, generator: torch.Generator, validation: LateValidation, number: int
) -> Iterator[Tensor]:
    """One cotangent of the logits' shape for each backward pass."""
    estimator, shape = settings.estimator, outputs.logits.shape
    logits, labels, valid = outputs.logits.detach(), outputs.labels if estimator.needs_labels else None, outputs.valid
    if valid is None or logits.ndim == 2:  # every row; those that do not count get a zero, without waiting for a GPU
        rows = logits.reshape(-1, shape[-1])
        rows = rows if valid is None else torch.where(valid[:, None], rows, 0.0)
        labels = None if labels is None else labels.reshape(len(rows), *labels.shape[len(shape) - 1 :])
    else:  # only the positions that count: padding may be most of them
        rows, labels = logits[valid], None if labels is None else labels[valid]
    core = validation.core(rows, number)
    try:
        for columns in estimator.cotangents(core, labels, generator):
            cotangent = _spread(columns, shape, valid)
            by_sample = settings.granularity == "sample"
            yield from _one_by_one(cotangent, valid, estimator) if by_sample else [cotangent]
    except (TypeError, ValueError) as error:
        raise ValueError(f"Batch {number} of `data`: {error}") from error


def _spread(columns: Tensor, shape: torch.Size, valid: Tensor | None) -> Tensor:
    """Put cotangents of the positions that count into a tensor of the logits' shape, zero elsewhere."""
    if valid is None:
        return columns.view(shape)
    if len(shape) == 2:
        return torch.where(valid[:, None], columns, 0.0)
    cotangent = columns.new_zeros(shape)
    cotangent[valid] = columns
    return cotangent


def _one_by_one(cotangent: Tensor, valid: Tensor | None, estimator: Estimator) -> Iterator[Tensor]:
    """The cotangent restricted to one sample, or to one position where columns of positions must not be added."""
    single = isinstance(estimator, Exact)
    flat = cotangent.flatten(0, -2) if single else cotangent
    counts = torch.ones_like(cotangent[..., 0], dtype=torch.bool) if valid is None else valid
    counts = counts.flatten() if single else counts.reshape(len(counts), -1).any(-1)
    for i in counts.nonzero()[:, 0].tolist():
        one = torch.zeros_like(flat)
        one[i] = flat[i]
        yield one.view(cotangent.shape)


def _with_last(items: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Each item, and whether it is the last: the graph is kept until then."""
    previous: Tensor | None = None
    for item in items:
        if previous is not None:
            yield previous, False
        previous = item
    if previous is not None:
        yield previous, True
