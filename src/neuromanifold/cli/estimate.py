"""`neuromanifold estimate`: from a model and data to a Fisher file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from neuromanifold.cli.display import length, live
from neuromanifold.cli.estimators import parse_estimator, parse_granularity, parse_likelihood
from neuromanifold.cli.options import Setup, check_output, with_setup
from neuromanifold.cli.output import output_console, print_line
from neuromanifold.cli.show import print_result
from neuromanifold.cli.sizes import sized_data
from neuromanifold.core.checks import message
from neuromanifold.hf import LoadedModel
from neuromanifold.problem.parameters import select_parameters
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.files import check_destination
from neuromanifold.run.checkpoint import Checkpoint
from neuromanifold.run.fisher import fisher_diagonal


@with_setup
def estimate(
    setup: Setup,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", rich_help_panel="Run",
            help="The file to write, in safetensors format; one that is there is replaced.",
        ),
    ],
    estimator: Annotated[
        str,
        typer.Option(
            "--estimator", "-e", rich_help_panel="Estimate", metavar="NAME",
            help="Hutchinson (unbiased, one backward pass a batch), Exact (classes - 1 passes), MonteCarlo, Empirical, "
            "SquaredBatchGradient; with settings as in 'Hutchinson(probes=4)'.",
        ),
    ] = "Hutchinson()",
    granularity: Annotated[
        str,
        typer.Option(
            "--granularity", rich_help_panel="Estimate",
            help="auto: each sample squared by itself wherever a layer allows it; sample: always; batch: whole "
            "batches, with more noise.",
        ),
    ] = "auto",
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", rich_help_panel="Estimate", help="Stop once the relative standard error is this small, e.g. 0.05."
        ),
    ] = None,
    noise_seed: Annotated[
        int | None,
        typer.Option(
            "--noise-seed", min=0, metavar="N", rich_help_panel="Run",
            help="Of the estimator's noise alone; by default --seed.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="FILE", rich_help_panel="Run",
            help="Keep the state of the run in this file; the same command then goes on where it was stopped, to the "
            "same numbers. It is removed once the result is written.",
        ),
    ] = None,
    checkpoint_every: Annotated[
        float | None,
        typer.Option(
            "--checkpoint-every", min=0, metavar="SECONDS", rich_help_panel="Run",
            help="How often; by default 30 seconds, or as rarely as writing takes a twentieth of the time.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", rich_help_panel="Run",
            help="Only batches I, I+N, I+2N, ... (I from 0 to N-1); `neuromanifold combine` adds the parts.",
        ),
    ] = None,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="Do not show how far it is.", rich_help_panel="Run")
    ] = False,
) -> None:  # fmt: skip
    """Estimate the diagonal of a network's Fisher information, with standard errors, and write it to a file.

    Ctrl-C ends the run early and writes what was done.  Examples:

        neuromanifold estimate -m ./model -d reviews.csv -o fim.safetensors

        neuromanifold estimate -m distilbert-base-uncased-finetuned-sst-2-english -d glue --subset sst2 \
-o fim.safetensors --rtol 0.05

        neuromanifold estimate -m my.module:model -d my.module:batches -o fim.safetensors -e Exact
    """
    check_output(output, checkpoint, setup.data)
    chosen, part = parse_estimator(estimator), parse_shard(shard)
    if setup.size is None and (checkpoint is not None or part is not None):
        advice = "neuromanifold forecast -b auto finds one."
        raise ValueError(message("batch-size", "a number with --checkpoint or --shard", "auto", advice))
    model = setup.load_model()
    _check_space(output, model, setup.parameters or None)
    options: dict[str, Any] = {
        "estimator": chosen,
        "likelihood": parse_likelihood(setup.likelihood, model.likelihood),
        "parameters": setup.parameters or None,
        "granularity": parse_granularity(granularity),
    }
    data = sized_data(setup, model, chosen.needs_labels, **options)
    with live(length(data), not no_progress) as observer:
        result = fisher_diagonal(
            model.module,
            data,
            seed=setup.seed if noise_seed is None else noise_seed,
            rtol=rtol,
            progress=observer or False,
            checkpoint=None if checkpoint is None else Checkpoint(checkpoint, checkpoint_every),
            shard=part,
            on_interrupt="return",
            **options,
        )
    result = named(result, model, data.about)
    result.save(output)
    interrupted = result.provenance.stopped.startswith("interrupted")
    if checkpoint is not None and not interrupted:
        checkpoint.unlink(missing_ok=True)
    _report(result, output, checkpoint if interrupted else None)
    if interrupted:
        raise typer.Exit(130)


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`0/4` is the first of four."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(message("shard", "I/N with I from 0 to N-1, such as 0/4 and 3/4", repr(text)))
    return int(found[1]), int(found[2])


def named(result: DiagonalFisher, model: LoadedModel, data: str) -> DiagonalFisher:
    """With the names that model and data go by."""
    p = result.provenance
    return dataclasses.replace(result, provenance=dataclasses.replace(p, model=f"{model.about} ({p.model})", data=data))


def _check_space(output: Path, model: LoadedModel, parameters: list[str] | None) -> None:
    """Said before the run, and not after hours: the result takes eight bytes for each parameter."""
    entries = sum(parameter.numel() for parameter in select_parameters(model.module, parameters).values())
    check_destination(output, 8 * entries)


def _report(result: DiagonalFisher, output: Path, checkpoint: Path | None) -> None:
    console = output_console()
    print_result(console, result, only=("trace", "estimator", "samples", "ended"))
    print_line(console, "written", output)
    if checkpoint is not None:
        print_line(console, "to go on", f"run the same command again ({checkpoint})")
