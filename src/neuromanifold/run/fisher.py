"""`fisher_diagonal` and `fisher_trace`: check the arguments, run the loop over the data, make the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuromanifold._version import __version__
from neuromanifold.core import Categorical
from neuromanifold.core.checks import Reduction, check_reduction, finite_number, message, warn
from neuromanifold.estimators import Adaptive, Estimator, Hutchinson
from neuromanifold.persample.accumulate import DiagonalSums, TraceOfParts, TraceSums
from neuromanifold.persample.accumulate.sharded import ShardedSums
from neuromanifold.persample.shards import Shards
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.fingerprint import fingerprint
from neuromanifold.problem.model import Selection, ShiftLabels, plain_name, tied_names
from neuromanifold.problem.offloaded import loading_offloaded
from neuromanifold.problem.problem import Problem
from neuromanifold.results import DiagonalFisher, Provenance, TraceEstimate
from neuromanifold.results.diagonal import ShardedFisher
from neuromanifold.results.error_bars import ErrorBars
from neuromanifold.run.counts import Counts
from neuromanifold.run.lockstep.loop import run_sharded, sharded
from neuromanifold.run.loop import run
from neuromanifold.run.settings import (
    Checkpoint,
    CudaGraphs,
    Distributed,
    Granularity,
    LoopOptions,
    Observer,
    OnInterrupt,
    Settings,
    choose_error_bars,
)
from neuromanifold.run.stopping import Accuracy

_FINGERPRINTED = 1024  # numbers of each parameter that the fingerprint of the weights reads, at most


class ToleranceNotReachedWarning(UserWarning):
    """The data ended before the relative standard error was as small as `rtol` asks for.

    The result is what all the data gave; its `provenance.stopped` says how far it got.  Use more data, more probes, or
    a larger `rtol`.
    """


@torch.inference_mode(mode=False)
def fisher_diagonal(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    estimator: Estimator | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    granularity: Granularity = "auto",
    seed: int = 0,
    passes: float | None = None,
    rtol: float | None = None,
    progress: bool | Observer = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
    cuda_graphs: CudaGraphs = "auto",
    checkpoint: str | Path | Checkpoint | None = None,
    shard: tuple[int, int] | None = None,
    on_interrupt: OnInterrupt = "raise",
    distributed: Distributed = "auto",
    error_bars: ErrorBars | Literal["auto"] = "auto",
) -> DiagonalFisher:
    """Return the diagonal of the Fisher information, F_ii = Σ_x E_y[(∂ log p(y|x)/∂θ_i)²], with standard errors.

    Cost with the default estimator: one forward and one backward pass for each batch; besides, two numbers for each
    parameter (its sum and its standard error).

    Args:
        model: any module whose output is, holds or begins with logits; or a `function(parameters, *inputs)`, given
            its `parameters` as a dict of tensors.  It is not changed.
        data: an iterable of batches: a tensor, (inputs, labels), or a dict with the labels under `label_key`.
        estimator: how; the default `nm.Hutchinson()` is unbiased in one backward pass for each batch.
        likelihood: what the outputs mean: `nm.Categorical`, `nm.Bernoulli`, `nm.Gaussian`, or a function of them.
        parameters: a name pattern, several, or a function of name and parameter; frozen ones are left out.
        reduction: "mean" (per sample, which for [B, T, C] outputs is a sequence), "token" (per position that counts) or
            "sum" (over samples): only a view, changed by `.mean`, `.per_token` and `.sum`.
        granularity: "sample" squares each sample's gradient, "batch" that of whole batches.  "auto": per sample
            wherever per-sample gradients pass their verification, in the same backward pass, and per token in layers
            of sequence models after the last mixing of positions; the rest per batch where that is unbiased.
        seed: random seed of the probes.  Same seed, same device, same batches: same result.
        passes: the cost, in forward + backward passes over the data (0.7, 1, 1.5, ...), of an unbiased estimate that
            gives most of them to the samples with most noise: `nm.Adaptive(passes)` in place of an `estimator`.
        rtol: stop once the relative standard error (Σ stderr / Σ F) is that small; warns if the data end before.
        progress: show a progress bar on standard error; or a function that is called with a `RunProgress` now and then.
        class_dim: which dimension of the logits holds the classes.
        batch_dim: which dimension of inputs, of what flows between modules, and of logits holds the samples; of
            tensors with fewer than three dimensions it is the first.
        ignore_index: positions with this label do not count, nor samples without any other.
        label_key: where a batch that is a dict has its labels.
        shift_labels: whether the logits at position t predict token t + 1, so that label t + 1 belongs to them, and
            only positions with a next token count, whether there are labels or not.  "auto": for causal language models
            of transformers, which shift labels themselves.  False: a label belongs to the logits at its own position.
        cuda_graphs: on a GPU, capture the work on a batch as CUDA graphs and replay it for batches of the same shapes:
            for models whose kernels finish faster than Python launches them.  "auto": where measured times of the run
            show that, and the model allows it, without a warning where it does not.
        checkpoint: a file for the state of the run, or an `nm.Checkpoint`.  A rerun with the same arguments continues
            from there and gives the same numbers, bit for bit (with CUDA graphs, but for rounding).
        shard: (i, n) for batches i, i + n, i + 2n, ... of the data alone.  The results of all n shards, with the same
            seed, add up to that of one run.
        on_interrupt: what Ctrl-C does once the batch is done and the checkpoint is written: "raise" KeyboardInterrupt,
            or "return" the result so far, whose `provenance.stopped` says so.
        distributed: what happens where `torch.distributed` is initialised.  "auto": all processes, which must make the
            same call, share the batches of the same data, and each of them returns the whole result; or each has data
            of its own, if a DistributedSampler divides them.  "own data": each has data that no other has, however
            they were divided.  False: this process runs alone.  The processes of a tensor-parallel model do all batches
            together.
        error_bars: what gets standard errors.  True: each entry, which takes as much memory as the values.  "rows": the
            sum of each row of a weight (`fim.rows`), which takes a fraction of a percent.  False: nothing.  "auto":
            rows for more than 2**28 entries, which `fim.error_bars` says, else each entry.

    Returns:
        A `DiagonalFisher`: a mapping from parameter name to a tensor of the parameter's shape.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected; the message says what is.
        VerificationError: per-sample gradients that were verified turned out wrong on a later batch.

    Example:
        >>> fim = nm.fisher_diagonal(model, data)
        >>> fim["2.weight"].shape
        torch.Size([3, 8])
        >>> print(f"{fim['2.bias'][0]:.3f} ± {fim.stderr['2.bias'][0]:.3f}")
        0.258 ± 0.043
    """
    estimator = _estimator(estimator, passes)
    settings, view = Settings.of(estimator, granularity, seed), check_reduction(reduction, tokens=True)
    options = LoopOptions.of(progress, shard, checkpoint, on_interrupt, distributed, cuda_graphs)
    arguments = model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    with loading_offloaded(model, parameters):
        return diagonal_of(Problem.of(*arguments, shards=True), settings, options, view, rtol, error_bars)


def diagonal_of(
    problem: Problem,
    settings: Settings,
    options: LoopOptions,
    view: Reduction = "mean",
    rtol: float | None = None,
    error_bars: ErrorBars | Literal["auto"] = "auto",
) -> DiagonalFisher:
    """Return the diagonal of a problem whose arguments have been checked."""
    random, similar = settings.estimator.noise_factor > 0, not isinstance(settings.estimator, Adaptive)
    parameters = list(problem.parameters.values())
    if problem.tensor_parallel and error_bars == "rows":
        advice = "Rows of weights are divided among processes."
        raise ValueError(message("error_bars", "'auto', True or False for a tensor-parallel model", "'rows'", advice))
    # "auto" never chooses rows for a tensor-parallel model, however large it is
    entries = 0 if problem.tensor_parallel else sum(map(Tensor.numel, parameters))
    kind = choose_error_bars(error_bars, entries, rtol)
    if problem.sharded:
        return _sharded_diagonal(problem, settings, options, view, rtol, kind)
    sums = DiagonalSums(parameters, fourth_powers=kind if random else False, similar_batches=similar)
    counts = _run(problem, settings, sums, options, rtol)
    errors = sums.standard_errors(in_place=True) if kind or not random else []
    noiseless = sums.noiseless
    provenance = make_provenance(problem, settings, counts, options.shard)
    return DiagonalFisher(
        dict(zip(problem.parameters, sums.squares, strict=True)),
        dict(zip(problem.parameters, errors, strict=bool(errors))),
        counts.samples,
        counts.positions,
        replace(provenance, error_bars=kind if random else True),
        view,
        dict(zip(problem.parameters, noiseless, strict=bool(noiseless))),
    )


def _sharded_diagonal(
    problem: Problem,
    settings: Settings,
    options: LoopOptions,
    view: Reduction,
    rtol: float | None,
    kind: ErrorBars,
) -> ShardedFisher:
    """Return the diagonal for a model in FSDP2 or tensor parallelism: each process has its part of each tensor."""
    random = settings.estimator.noise_factor > 0
    with sharded(problem, settings, options) as shards:
        sums = ShardedSums(shards, fourth_powers=kind if random else False)
        counts = _run(problem, settings, sums, options, rtol, shards)
        names, provenance = list(problem.parameters), make_provenance(problem, settings, counts, options.shard)
        errors = sums.standard_errors() if kind or not random else []
        parts = (dict(zip(names, each, strict=bool(each))) for each in (sums.squares, errors, sums.noiseless))
        squares, noise, noiseless = parts
    provenance = replace(provenance, weights=shards.fingerprint, error_bars=kind if random else True)
    return ShardedFisher(squares, noise, counts.samples, counts.positions, provenance, view, noiseless)


@torch.inference_mode(mode=False)
def fisher_trace(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    estimator: Estimator | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    granularity: Granularity = "auto",
    seed: int = 0,
    passes: float | None = None,
    rtol: float | None = None,
    progress: bool | Observer = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
    checkpoint: str | Path | Checkpoint | None = None,
    shard: tuple[int, int] | None = None,
    on_interrupt: OnInterrupt = "raise",
    distributed: Distributed = "auto",
) -> TraceEstimate:
    """Return the trace of the Fisher information, tr F = Σ_x E_y‖∂ log p(y|x)/∂θ‖², with its standard error.

    All arguments are those of `fisher_diagonal`.  Cost: one backward pass for each batch and probe; kept is one number
    for each pass, and nothing of the parameters' size.

    Returns:
        A `TraceEstimate`: `.value`, `.stderr`, and a float where one is expected.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected; the message says what is.

    Example:
        >>> trace = nm.fisher_trace(model, data)
        >>> print(f"{trace.value:.2f} ± {trace.stderr:.2f}")
        2.39 ± 0.38
    """
    estimator = _estimator(estimator, passes)
    settings, view = Settings.of(estimator, granularity, seed), check_reduction(reduction, tokens=True)
    options = LoopOptions.of(progress, shard, checkpoint, on_interrupt, distributed)
    arguments = model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    sums = TraceSums(estimator.noise_factor)
    with loading_offloaded(model, parameters):
        problem = Problem.of(*arguments, shards=True)
        with sharded(problem, settings, options) if problem.sharded else nullcontext() as shards:
            if shards and shards.one_replica:
                sums = TraceOfParts(estimator.noise_factor, shards)
            counts = _run(problem, settings, sums, options, rtol, shards)
        provenance = make_provenance(problem, settings, counts, options.shard)
    provenance = replace(provenance, weights=shards.fingerprint) if shards else provenance
    return TraceEstimate(*sums.total_and_standard_error(), counts.samples, provenance, view, counts.positions)


def _estimator(estimator: Estimator | None, passes: float | None) -> Estimator:
    """Return the estimator that was given, `nm.Adaptive(passes)`, or the default."""
    if passes is None:
        return Hutchinson() if estimator is None else estimator
    if estimator is not None:
        raise ValueError(message("passes", f"None if there is an estimator ({estimator})", repr(passes)))
    return Adaptive(passes)


def _run(
    problem: Problem,
    settings: Settings,
    sums: DiagonalSums | ShardedSums | TraceSums,
    options: LoopOptions,
    rtol: float | None,
    shards: Shards | None = None,
) -> Counts:
    """Run the loop until the data end or Σ stderr <= rtol Σ F; warn if `rtol` was not reached.

    `shards`: those of a model that is divided among processes, which run every batch in step (`lockstep/loop.py`).
    """
    random = settings.estimator.noise_factor > 0
    if rtol is not None:
        _check_rtol(rtol, settings.estimator)

    def relative_error(counts: Counts, sums: Any) -> float | None:
        error = sums.relative_error() if random else None
        return error if error is None or isinstance(sums, TraceSums) else counts.noise_ratio * error

    accuracy = Accuracy(rtol, relative_error)
    if shards is None:
        assert not isinstance(sums, ShardedSums)
        counts = run(problem, settings, sums, options, accuracy=accuracy)
    else:
        assert not isinstance(sums, DiagonalSums)
        counts = run_sharded(problem, settings, sums, options, shards, accuracy)
    if rtol is not None and not counts.stopped:
        error = relative_error(counts, sums)
        if error is not None and error > rtol:
            found = f"relative standard error {error:.3g} after {counts.batches} batches"
            counts = replace(counts, stopped=f"rtol {rtol:g} not reached: {found}")
            text = f"`rtol={rtol:g}` was not reached: {found}, when the data ended. Use more data, more probes "
            text += "(nm.Hutchinson(probes=4)), or a larger rtol."
            warn(text, ToleranceNotReachedWarning)
    return counts


def _check_rtol(rtol: float, estimator: Estimator) -> None:
    if not estimator.noise_factor:
        advice = "It has no noise that more data would lower; leave out rtol."
        raise ValueError(message("rtol", f"None for {estimator}", repr(rtol), advice))
    finite_number(rtol, "rtol", positive=True, advice="0.05 asks for 5 %.")


def make_provenance(
    problem: Problem, settings: Settings, counts: Counts, shard: tuple[int, int] = (0, 1)
) -> Provenance:
    """Return the provenance of a result: model, data, estimator, seeds, how parameters were done, versions."""
    model, estimator = problem.model, settings.estimator
    size = sum(parameter.numel() for parameter in model.parameters())
    return Provenance(
        estimator=repr(estimator),
        target=estimator.target,
        likelihood=getattr(problem.likelihood, "__name__", repr(problem.likelihood)),
        unit=counts.unit,
        granularity=dict(zip(problem.parameters, counts.methods, strict=True)),
        seeds=[settings.seed] if estimator.noise_factor else [],
        noise_factor=estimator.noise_factor,
        noise_ratio=counts.noise_ratio,
        # the windows that were drawn: seed, first, end, step; `counts.next` batches are so many windows, rounded up
        draws=[[settings.seed, shard[0], -(-counts.next // estimator.window), shard[1]]],
        data_fingerprints=[counts.first] if counts.first else [],
        batches=counts.batches,
        passes=counts.passes,
        left_out=counts.left_out,
        processes=counts.processes,
        verified=counts.verified,
        model=f"{type(model).__name__} with {size:,} parameters",
        data=type(getattr(problem.data, "dataset", problem.data)).__name__,
        dtype=counts.dtype,
        device=str(problem.device),
        stopped=counts.stopped,
        shift_labels=problem.predicts_next,
        versions={"neuromanifold": __version__, "torch": str(torch.__version__)},
        weights=fingerprint(*problem.parameters.items(), most=_FINGERPRINTED),
        frozen=[plain_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad],
        tied=tied_names(model),
    )
