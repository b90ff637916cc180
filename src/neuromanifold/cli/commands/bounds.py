"""`neuromanifold bounds`: the paper's bounds beside the actual values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.bounds.run import fisher_bounds
from neuromanifold.cli.console import print_facts
from neuromanifold.cli.options import Labels, NoProgress, Setup, option, run_option, with_setup
from neuromanifold.cli.parsing import check_output

BATCHES = 8  # by default: each class takes backward passes of its own


@with_setup
def bounds_command(
    setup: Setup,
    rank: Annotated[int, option("Bounds", "Eigenvectors of the lower bound.", "--rank", "-k", min=1)] = 1,
    diagonals: Annotated[
        bool, option("Bounds", "Include the traces of the bounds' diagonals, which take more passes.")
    ] = True,
    labels: Labels = None,
    output: Annotated[
        Path | None, run_option("Write the bounds to this file (safetensors).", "--output", "-o", metavar="FILE")
    ] = None,
    no_progress: NoProgress = False,
) -> None:
    """Show how tight the paper's deterministic bounds are for a network: Props. 5 to 10, beside the actual values.

    Uses 8 batches by default.  Example:

        neuromanifold bounds -m ./model -d reviews.csv -b 8 --rank 1
    """
    if output is not None:
        check_output(output, setup.data)
    model = setup.load_model(fixed_size="bounds")
    result = fisher_bounds(
        model.module,
        replace(setup, batches=setup.batches or BATCHES).load_data(model, labels),
        rank=rank,
        diagonals=diagonals,
        seed=setup.seed,
        progress=not no_progress,
        **setup.selection(model),
    )
    typer.echo(str(result))
    if output is not None:
        result.save(output)
        print_facts({"written": output})
