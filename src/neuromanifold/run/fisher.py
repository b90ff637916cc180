"""`fisher_diagonal` and `fisher_trace`: the main job."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from neuromanifold._version import __version__
from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.estimators import Estimator, Hutchinson
from neuromanifold.persample.sums import DiagonalSums
from neuromanifold.persample.trace_sums import TraceSums
from neuromanifold.problem.batches import model_device
from neuromanifold.problem.fingerprint import fingerprint
from neuromanifold.problem.parameters import Selection, plain_name, select_parameters, tied_names
from neuromanifold.problem.progress import Lookout, Observer
from neuromanifold.results import DiagonalFisher, Provenance, TraceEstimate
from neuromanifold.results.trace import check_reduction, trace_from_passes
from neuromanifold.run.checkpoint import Checkpoint
from neuromanifold.run.granularity import Granularity, choose_granularity
from neuromanifold.run.interrupts import OnInterrupt, check_on_interrupt
from neuromanifold.run.loop import Counts, Keeping, run
from neuromanifold.run.step import Settings

Likelihood = Callable[[Tensor], Core]
_LOOKED_AT = 1024  # numbers of each parameter, for a fingerprint


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
    progress: bool | Observer = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    replay: bool = False,
    checkpoint: str | Path | Checkpoint | None = None,
    shard: tuple[int, int] | None = None,
    on_interrupt: OnInterrupt = "raise",
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
        progress: show a progress bar on standard error; or a function that is told how far the run is, now and then.
        class_dim: which dimension of the logits holds the classes.
        batch_dim: which dimension of inputs, of what flows between modules, and of logits holds the samples; of
            tensors with fewer than three dimensions it is the first.
        ignore_index: positions with this label do not count, nor samples without any other.
        replay: on a GPU, record the work on a batch and replay it for others of the same shapes (CUDA graphs), where
            the model allows that: for small models, whose operations are done faster than they are launched.
        checkpoint: a file to keep the state of the run in, as `nm.Checkpoint` says.  A rerun with the same arguments
            goes on from there and gives the same numbers, bit for bit (with `replay`, but for rounding).
        shard: (i, n) for batches i, i + n, i + 2n, ... of the data alone.  The results of all n shards, with the same
            seed, add up to that of one run.
        on_interrupt: what Ctrl-C does once the batch is done and the checkpoint is written: "raise" KeyboardInterrupt,
            or "return" the result so far, whose `provenance.stopped` says so.

    """
    estimator = Hutchinson(deflate=1) if estimator is None else estimator
    chosen = select_parameters(model, parameters)
    bar, observer = (progress, None) if isinstance(progress, bool) else (False, progress)
    settings = make_settings(estimator, likelihood, granularity, seed, class_dim, batch_dim, ignore_index, bar)
    if not isinstance(replay, bool):
        raise TypeError(message("replay", "True or False", repr(replay)))
    settings = dataclasses.replace(settings, replay=replay, shard=_shard(shard))
    keeping, view = _keeping(checkpoint, on_interrupt), check_reduction(reduction)
    sums = DiagonalSums(list(chosen.values()), fourth_powers=estimator.noise_factor > 0)
    enough = _observed(observer, sums, estimator, _stop_at(rtol, sums, estimator))
    counts = run(model, data, chosen, settings, sums, enough, keeping)
    return DiagonalFisher(
        dict(zip(chosen, sums.squares, strict=True)),
        dict(zip(chosen, sums.noise(last=True), strict=True)),
        counts.samples,
        counts.positions,
        make_provenance(model, data, chosen, settings, counts),
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
    checkpoint: str | Path | Checkpoint | None = None,
    shard: tuple[int, int] | None = None,
    on_interrupt: OnInterrupt = "raise",
) -> TraceEstimate:
    """The trace of the network's Fisher information, Σ_x E_y‖∂ log p(y|x)/∂θ‖², with its standard error.

    Arguments as in `fisher_diagonal`.  Keeps one number for each pass, and nothing of the parameters' size.
    """
    estimator = Hutchinson(deflate=1) if estimator is None else estimator
    chosen = select_parameters(model, parameters)
    settings = make_settings(estimator, likelihood, granularity, seed, class_dim, batch_dim, ignore_index, progress)
    settings = dataclasses.replace(settings, shard=_shard(shard))
    view, sums = check_reduction(reduction), TraceSums()
    counts = run(model, data, chosen, settings, sums, keeping=_keeping(checkpoint, on_interrupt))
    provenance = make_provenance(model, data, chosen, settings, counts)
    return trace_from_passes(
        sums.batches, estimator.noise_factor, sums.samples, sums.samples_variance, counts.samples, provenance, view
    )


def make_settings(
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


def _shard(shard: tuple[int, int] | None) -> tuple[int, int]:
    """(i, n) with 0 <= i < n."""
    if shard is None:
        return 0, 1
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise TypeError(message("shard", "a pair (i, n), such as (0, 4) for the first of four", repr(shard)))
    shards = integer_in_range(shard[1], "shard[1]", 1, 2**31, "how many shards there are")
    return integer_in_range(shard[0], "shard[0]", 0, shards - 1, "which of the shards, counted from 0"), shards


def _keeping(checkpoint: str | Path | Checkpoint | None, on_interrupt: str) -> Keeping:
    """A path is a checkpoint, too."""
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    return Keeping(checkpoint, check_on_interrupt(on_interrupt))


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
        error = _relative_error(sums)
        if error is None or error > rtol:
            return ""
        return f"stopped after {counts.batches} batches: relative standard error {error:.3g} <= rtol {rtol:g}"

    return enough


def _relative_error(sums: DiagonalSums) -> float | None:
    """Σ stderr / Σ F so far; None while F is zero."""
    total = sum(float(square.double().sum()) for square in sums.squares)
    return sum(float(value.double().sum()) for value in sums.noise()) / total if total else None


def _observed(
    observer: Observer | None, sums: DiagonalSums, estimator: Estimator, enough: Callable[[Counts], str] | None
) -> Callable[[Counts], str] | None:
    """After each batch: perhaps tell the observer, then ask whether it is enough."""
    if observer is None:
        return enough
    if not callable(observer):
        raise TypeError(message("progress", "True, False, or a function of a Seen", repr(observer)))
    lookout = Lookout(observer)

    def told(counts: Counts) -> str:
        random = estimator.noise_factor > 0
        lookout.batch_done(lambda: counts.seen(_relative_error(sums) if random else None))
        return enough(counts) if enough else ""

    return told


def make_provenance(
    model: nn.Module, data: object, chosen: dict[str, nn.Parameter], settings: Settings, counts: Counts
) -> Provenance:
    """Where a result comes from."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return Provenance(
        estimator=repr(settings.estimator),
        target=settings.estimator.target,
        likelihood=getattr(settings.likelihood, "__name__", repr(settings.likelihood)),
        granularity=dict(zip(chosen, counts.ways, strict=True)),
        seeds=[settings.seed] if settings.estimator.noise_factor else [],
        noise_factor=settings.estimator.noise_factor,
        draws=[[settings.seed, settings.shard[0], counts.next, settings.shard[1]]],
        data_fingerprints=[counts.first] if counts.first else [],
        batches=counts.batches,
        passes=counts.passes,
        model=f"{type(model).__name__} with {size:,} parameters",
        data=type(getattr(data, "dataset", data)).__name__,
        dtype=counts.dtype,
        device=str(model_device(model)),
        stopped=counts.stopped,
        versions={"neuromanifold": __version__, "torch": str(torch.__version__)},
        weights=fingerprint(*chosen.items(), most=_LOOKED_AT),
        frozen=[plain_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad],
        tied=tied_names(model),
    )
