"""`neuromanifold forecast`: time and memory before the run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from neuromanifold.cli.estimators import parse_estimator, parse_granularity, parse_likelihood
from neuromanifold.cli.options import Setup, with_setup
from neuromanifold.cli.output import output_console
from neuromanifold.cli.sizes import sized_data
from neuromanifold.diagnostics.forecast import forecast as run_forecast


@with_setup
def forecast(
    setup: Setup,
    estimator: Annotated[
        str, typer.Option("--estimator", "-e", metavar="NAME", help="As for estimate.", rich_help_panel="Estimate")
    ] = "Hutchinson()",
    granularity: Annotated[
        str, typer.Option("--granularity", help="As for estimate: auto, sample, batch.", rich_help_panel="Estimate")
    ] = "auto",
    tries: Annotated[int, typer.Option("--tries", min=1, help="How many batches to try.", rich_help_panel="Run")] = 3,
) -> None:
    """Say what `estimate` with the same options will take: time, memory, size of the file.  Runs a few batches.

    Example:
        neuromanifold forecast -m ./model -d reviews.csv -b auto
    """
    chosen = parse_estimator(estimator)
    model = setup.load_model()
    options: dict[str, Any] = {
        "estimator": chosen,
        "likelihood": parse_likelihood(setup.likelihood, model.likelihood),
        "parameters": setup.parameters or None,
        "granularity": parse_granularity(granularity),
    }
    data = sized_data(setup, model, chosen.needs_labels, **options)
    output_console().print(
        str(run_forecast(model.module, data, batches=tries, **options)), markup=False, highlight=False, soft_wrap=True
    )
