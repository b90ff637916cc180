"""`neuromanifold forecast`: time and memory of a run, in advance."""

from __future__ import annotations

from typing import Annotated

import typer

from neuromanifold.cli.options import EstimatorName, GranularityName, Setup, run_option, with_setup
from neuromanifold.cli.parsing import parse_estimator, parse_granularity
from neuromanifold.diagnostics.forecast import forecast


@with_setup
def forecast_command(
    setup: Setup,
    estimator: EstimatorName = "Hutchinson()",
    granularity: GranularityName = "auto",
    tries: Annotated[int, run_option("Number of batches to run.", min=1)] = 3,
    processes: Annotated[
        int, run_option("Processes (of torchrun) that would share the run, each with a device of its own.", min=1)
    ] = 1,
) -> None:
    """Predict what `estimate` with the same options takes: time, memory, size of the file.

    Runs a few batches.  Example:

        neuromanifold forecast -m ./model -d reviews.csv -b auto
    """
    chosen, squared = parse_estimator(estimator), parse_granularity(granularity)
    model = setup.load_model()
    run = {"estimator": chosen, "granularity": squared, **setup.selection(model)}
    data = setup.load_data(model, chosen.needs_labels, **run)
    typer.echo(str(forecast(model.module, data, batches=tries, processes=processes, **run)))
