"""`fisher_diagonal` and `fisher_trace`: the main job."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from neuromanifold._version import __version__
from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.estimators import Estimator, Hutchinson
from neuromanifold.pullback.sums import DiagonalSums
from neuromanifold.pullback.trace_sums import TraceSums
from neuromanifold.results import DiagonalFisher, Provenance, TraceEstimate
from neuromanifold.results.trace import check_reduction, trace_from_passes
from neuromanifold.run.batches import model_device
from neuromanifold.run.granularity import Granularity, choose_granularity
from neuromanifold.run.loop import Counts, run
from neuromanifold.run.parameters import Selection, select_parameters
from neuromanifold.run.step import Settings

Likelihood = Callable[[Tensor], Core]


@torch.inference_mode(mode=False)
def fisher_diagonal(
    model: nn.Module,
    data: Iterable[object],
    estimator: Estimator | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    granularity: Granularity = "auto",
    seed: int = 0,
    rtol: float | None = None,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    replay: bool = False,
) -> DiagonalFisher:
    """The diagonal of the network's Fisher information, F_ii = Σ_x E_y[(∂ log p(y|x)/∂θ_i)²], with standard errors.

    Args:
        model: any module whose output is, holds or begins with logits.  Nothing of it is changed.
        data: an iterable of batches: a tensor, (inputs, labels), or a dict with the labels under "labels".  A label
            belongs to the logits at its own position: labels of causal language models have to be shifted first.
        estimator: how; the default `nm.Hutchinson(deflate=1)` is unbiased in one backward pass for each batch.
        likelihood: what the outputs mean: `nm.Categorical`, `nm.Bernoulli`, `nm.Gaussian`, or a function of them.
        parameters: a name pattern, several, or a function of name and parameter; frozen ones are left out.
        reduction: "mean" (per sample) or "sum" (over samples): only a view, changed by `.mean` and `.sum`.
        granularity: "sample" squares each sample's gradient, "batch" that of whole batches.  "auto": samples through
            every module with a rule, in the same backward pass; the rest by batches where that is unbiased.
        seed: of the probes' noise.  Same seed, same device, same batches: same result.
        rtol: stop once the relative standard error (Σ stderr / Σ F) is that small.
        progress: show a progress bar on standard error.
        class_dim: which dimension of the logits holds the classes.
        batch_dim: which dimension of inputs, of what flows between modules, and of logits holds the samples; of
            tensors with fewer than three dimensions it is the first.
        ignore_index: positions with this label do not count, nor samples without any other.
        replay: on a GPU, record the work on a batch and replay it for others of the same shapes (CUDA graphs), where
            the model allows that: for small models, whose operations are done faster than they are launched.

    """
    estimator = Hutchinson(deflate=1) if estimator is None else estimator
    chosen = select_parameters(model, parameters)
    settings = _settings(estimator, likelihood, granularity, seed, class_dim, batch_dim, ignore_index, progress)
    if not isinstance(replay, bool):
        raise TypeError(message("replay", "True or False", repr(replay)))
    settings = dataclasses.replace(settings, replay=replay)
    view = check_reduction(reduction)
    sums = DiagonalSums(list(chosen.values()), fourth_powers=estimator.noise_factor > 0)
    counts = run(model, data, chosen, settings, sums, _stop_at(rtol, sums, estimator))
    return DiagonalFisher(
        dict(zip(chosen, sums.squares, strict=True)),
        dict(zip(chosen, sums.noise(), strict=True)),
        counts.samples,
        counts.positions,
        _provenance(model, data, chosen, settings, counts),
        view,
    )


@torch.inference_mode(mode=False)
def fisher_trace(
    model: nn.Module,
    data: Iterable[object],
    estimator: Estimator | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    granularity: Granularity = "auto",
    seed: int = 0,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
) -> TraceEstimate:
    """The trace of the network's Fisher information, Σ_x E_y‖∂ log p(y|x)/∂θ‖², with its standard error.

    Arguments as in `fisher_diagonal`.  Keeps one number for each pass, and nothing of the parameters' size.
    """
    estimator = Hutchinson(deflate=1) if estimator is None else estimator
    chosen = select_parameters(model, parameters)
    settings = _settings(estimator, likelihood, granularity, seed, class_dim, batch_dim, ignore_index, progress)
    view, sums = check_reduction(reduction), TraceSums()
    counts = run(model, data, chosen, settings, sums)
    provenance = _provenance(model, data, chosen, settings, counts)
    return trace_from_passes(
        sums.batches, estimator.noise_factor, sums.samples, sums.samples_variance, counts.samples, provenance, view
    )


def _settings(
    estimator: Estimator,
    likelihood: Likelihood,
    granularity: Granularity,
    seed: int,
    class_dim: int,
    batch_dim: int,
    ignore_index: int,
    progress: bool,
) -> Settings:
    """Check what can be checked before the run."""
    if not callable(likelihood):
        expected = "nm.Categorical, nm.Bernoulli, nm.Gaussian, or a function from outputs to one of them"
        raise TypeError(message("likelihood", expected, repr(likelihood)))
    seed = integer_in_range(seed, "seed", 0, 2**63 - 1, "a seed")
    batch_dim = integer_in_range(batch_dim, "batch_dim", 0, 63, "a dimension of the logits, counted from the front")
    level = choose_granularity(estimator, granularity)
    estimator = estimator.for_batches() if level == "batch" else estimator
    return Settings(estimator, likelihood, level, seed, class_dim, batch_dim, ignore_index, progress)


def _stop_at(rtol: float | None, sums: DiagonalSums, estimator: Estimator) -> Callable[[Counts], str] | None:
    """End the run once Σ stderr <= rtol Σ F; looked at less and less often, since looking costs."""
    if rtol is None:
        return None
    if not estimator.noise_factor:
        advice = "It has no noise that more data would lower; leave out rtol."
        raise ValueError(message("rtol", f"None for {estimator}", repr(rtol), advice))
    if isinstance(rtol, bool) or not isinstance(rtol, (int, float)) or not 0 < rtol < math.inf:
        raise ValueError(message("rtol", "a positive number such as 0.05", repr(rtol)))

    def enough(counts: Counts) -> str:
        if counts.batches % max(1, counts.batches // 8):
            return ""
        total = sum(float(square.double().sum()) for square in sums.squares)
        noise = sum(float(value.double().sum()) for value in sums.noise())
        if not total or noise > rtol * total:
            return ""
        return f"stopped after {counts.batches} batches: relative standard error {noise / total:.3g} <= rtol {rtol:g}"

    return enough


def _provenance(
    model: nn.Module, data: object, chosen: dict[str, nn.Parameter], settings: Settings, counts: Counts
) -> Provenance:
    size = sum(parameter.numel() for parameter in model.parameters())
    return Provenance(
        estimator=repr(settings.estimator),
        target=settings.estimator.target,
        likelihood=getattr(settings.likelihood, "__name__", repr(settings.likelihood)),
        granularity=dict(zip(chosen, counts.ways, strict=True)),
        seeds=[settings.seed] if settings.estimator.noise_factor else [],
        batches=counts.batches,
        passes=counts.passes,
        model=f"{type(model).__name__} with {size:,} parameters",
        data=type(getattr(data, "dataset", data)).__name__,
        dtype=counts.dtype,
        device=str(model_device(model)),
        stopped=counts.stopped,
        versions={"neuromanifold": __version__, "torch": str(torch.__version__)},
    )
