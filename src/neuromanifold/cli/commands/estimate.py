"""`neuromanifold estimate`: from a model and data to a Fisher file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from neuromanifold.cli.console import print_result, progress_bar
from neuromanifold.cli.launched import Launched, process_group
from neuromanifold.cli.options import EstimatorName, GranularityName, NoProgress, Setup, option, run_option, with_setup
from neuromanifold.cli.parsing import check_output, parse_estimator, parse_granularity, parse_shard
from neuromanifold.core.checks import message, one_of
from neuromanifold.estimators import Adaptive
from neuromanifold.problem.model import is_tensor_parallel, select_parameters
from neuromanifold.results.diagonal import DiagonalFisher, ShardedFisher, load_diagonal
from neuromanifold.results.files import check_destination
from neuromanifold.run.fisher import fisher_diagonal
from neuromanifold.run.settings import Checkpoint, choose_error_bars

DEFAULT = "Hutchinson()"
ERROR_BARS: dict[str, Any] = {"auto": "auto", "entries": True, "rows": "rows", "none": False}
_PRINTED = ("trace", "estimator", "right for F", "samples", "left out", "labels", "batches", "ended")
_INTERRUPTED, _NOT_REACHED = 130, 3  # exit codes


@with_setup
def estimate_command(
    setup: Setup,
    output: Annotated[
        Path, run_option("File to write (safetensors); replaced if it exists.", "--output", "-o", metavar="FILE")
    ],
    estimator: EstimatorName = DEFAULT,
    granularity: GranularityName = "auto",
    passes: Annotated[
        float | None,
        option(
            "Estimate",
            "Cost in forward + backward passes over the data, e.g. 0.7 or 1.5, spent on the samples with most noise; "
            "in place of --estimator.",
        ),
    ] = None,
    rtol: Annotated[
        float | None, option("Estimate", "Stop once the relative standard error is this small, e.g. 0.05.")
    ] = None,
    strict: Annotated[
        bool, option("Estimate", "Exit with code 3 if --rtol is not reached; the result is written.", "--strict")
    ] = False,
    error_bars: Annotated[
        str,
        option(
            "Estimate",
            "What gets standard errors: each entry, which takes as much memory as the values, the sum of each row of a "
            "weight, or nothing. auto: entries, but rows of large models.",
            "--error-bars",
            metavar="|".join(ERROR_BARS),
        ),
    ] = "auto",
    noise_seed: Annotated[
        int | None, run_option("Random seed of the probes alone. Default: --seed.", metavar="N", min=0)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        run_option(
            "File for the state of the run: the same command resumes from it, to the same numbers. Removed once the "
            "result is written.",
            metavar="FILE",
        ),
    ] = None,
    checkpoint_every: Annotated[
        float | None,
        run_option(
            "Interval. Default: 30, or more where writing would take 5 % of the time.", metavar="SECONDS", min=0
        ),
    ] = None,
    shard: Annotated[
        str | None,
        run_option("Only batches I, I+N, I+2N, ... (0 <= I < N); `neuromanifold combine` adds them.", metavar="I/N"),
    ] = None,
    no_progress: NoProgress = False,
) -> None:
    """Estimate the diagonal of a network's Fisher information, with standard errors, and write it to a file.

    Ctrl-C ends the run early and writes the result so far.  Examples:

        neuromanifold estimate -m ./model -d reviews.csv -o fim.safetensors

        neuromanifold estimate -m distilbert-base-uncased-finetuned-sst-2-english -d glue --subset sst2 \
-o fim.safetensors --rtol 0.05

        neuromanifold estimate -m ./model -d reviews.csv -o fim.safetensors --passes 1

        neuromanifold estimate -m my.module:model -d my.module:batches -o fim.safetensors -e Exact

        torchrun --nproc-per-node 8 -m neuromanifold estimate -m ./model -d reviews.csv -o fim.safetensors
    """
    state = None if checkpoint is None else Checkpoint(checkpoint, checkpoint_every)
    with process_group(setup.device) as own:
        if own.rank == 0:
            check_output(output, checkpoint, setup.data)
            if checkpoint is not None:
                check_output(checkpoint, setup.data)
        if strict and rtol is None:
            raise ValueError(message("strict", "given together with --rtol", "no --rtol"))
        bars = ERROR_BARS[one_of(error_bars, "--error-bars", *ERROR_BARS)]
        if passes is not None and estimator != DEFAULT:
            raise ValueError(message("passes", "given without --estimator", f"--estimator {estimator!r} as well"))
        chosen = parse_estimator(estimator) if passes is None else Adaptive(passes)
        squared, part = parse_granularity(granularity), parse_shard(shard)
        fixed = "--checkpoint or --shard" if state is not None or part is not None else ""
        setup = replace(setup, device=own.device)
        model = setup.load_model(fixed_size="several processes" if own.several else fixed)
        run = {"estimator": chosen, "granularity": squared, **setup.selection(model)}
        entries = sum(parameter.numel() for parameter in select_parameters(model.module, run["parameters"]).values())
        if own.rank == 0:
            by_entry = choose_error_bars(bars, entries, rtol) is True or is_tensor_parallel(model.module)
            check_destination(output, (8 if by_entry or not chosen.noise_factor else 4) * entries)
        data = setup.load_data(model, chosen.needs_labels, **run)
        resumed, start = state is not None and bool(state.files()), time.monotonic()
        with progress_bar(data, own.rank == 0 and not no_progress) as progress:
            result = fisher_diagonal(
                model.module,
                data,
                seed=setup.seed if noise_seed is None else noise_seed,
                rtol=rtol,
                progress=progress,
                checkpoint=state,
                shard=part,
                on_interrupt="return",
                error_bars=bars,
                **run,
            )
        p, seconds = result.provenance, None if resumed else time.monotonic() - start
        named = replace(result, provenance=p.named(f"{model.about} ({p.model})", data.about))
        _write(named, output, own, state, seconds)
    if p.stopped.startswith("interrupted"):
        raise typer.Exit(_INTERRUPTED)
    if strict and "not reached" in p.stopped:
        raise typer.Exit(_NOT_REACHED)


def _write(
    result: DiagonalFisher, output: Path, own: Launched, checkpoint: Checkpoint | None, seconds: float | None
) -> None:
    """Write and print the result, and remove the checkpoint of a finished run; `seconds`: None if it was resumed."""
    p, divided = result.provenance, isinstance(result, ShardedFisher)
    interrupted = p.stopped.startswith("interrupted")
    if own.rank == 0 or divided:
        result.save(output)
    own.barrier()  # checkpoints may go
    if checkpoint is not None and not interrupted:
        checkpoint.file(own.rank).unlink(missing_ok=True)
        if own.rank == 0:
            checkpoint.remove()
    if own.rank:
        return
    done, unit = (result.positions, p.position) if p.unit == "sequence" else (result.count, p.unit)
    also: dict[str, object] = {"time": f"{seconds:.3g} s, {done / seconds:,.3g} {unit}s/s"} if seconds else {}
    also |= {"processes": own.world} if own.several else {}
    also["written"] = output
    if checkpoint is not None and interrupted:
        also["to resume"] = f"run the same command again ({checkpoint.path})"
    print_result(load_diagonal(output) if divided else result, only=_PRINTED, also=also)
