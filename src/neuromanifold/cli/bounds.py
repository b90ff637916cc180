"""`neuromanifold bounds`: the paper's bounds beside the actual values, on one's own model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.bounds.run import fisher_bounds
from neuromanifold.cli.estimators import parse_likelihood
from neuromanifold.cli.options import Setup, check_output, with_setup
from neuromanifold.cli.output import output_console

BATCHES = 8  # unless told otherwise: every class takes backward passes


@with_setup
def bounds(
    setup: Setup,
    rank: Annotated[
        int, typer.Option("--rank", "-k", min=1, help="Eigenvectors of the lower bound.", rich_help_panel="Bounds")
    ] = 1,
    diagonals: Annotated[
        bool, typer.Option(help="Also the traces of the bounds' diagonals, in more passes.", rich_help_panel="Bounds")
    ] = True,
    labels: Annotated[
        bool | None,
        typer.Option(
            "--labels/--no-labels", help="Whether to use labels (Prop. 9); if there are some.", rich_help_panel="Data"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write them to this file, in safetensors format.",
            rich_help_panel="Run",
        ),
    ] = None,
    progress: Annotated[
        bool, typer.Option(help="Show how far it is, on standard error.", rich_help_panel="Run")
    ] = True,
) -> None:
    """Show how tight the deterministic bounds of the paper are for a network: Props. 5 to 10, with the actual values.

    Uses 8 batches unless --batches says otherwise.  Example:

        neuromanifold bounds -m ./model -d reviews.csv -b 8 --rank 1
    """
    if output is not None:
        check_output(output, setup.data)
    size, model = setup.number, setup.load_model()
    data = dataclasses.replace(setup, batches=setup.batches or BATCHES).load_data(model, labels, size)
    result = fisher_bounds(
        model.module,
        data,
        rank=rank,
        likelihood=parse_likelihood(setup.likelihood, model.likelihood),
        parameters=setup.parameters or None,
        diagonals=diagonals,
        seed=setup.seed,
        progress=progress,
    )
    console = output_console()
    console.print(str(result), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        result.save(output)
        console.print(f"written: {output}", markup=False, highlight=False, soft_wrap=True)
