"""`neuromanifold check`: every estimator against the exact diagonal."""

from __future__ import annotations

from typing import Annotated

import typer

from neuromanifold.cli.options import Labels, NoProgress, Setup, option, with_setup
from neuromanifold.cli.parsing import parse_estimator
from neuromanifold.diagnostics.check import check


@with_setup
def check_command(
    setup: Setup,
    estimator: Annotated[
        list[str] | None,
        option("Estimate", "Compare only this estimator. Repeatable.", "--estimator", "-e", metavar="NAME"),
    ] = None,
    labels: Labels = None,
    no_progress: NoProgress = False,
) -> None:
    """Compare the estimators with the exact diagonal on a few batches, and recommend one.

    Uses 4 batches by default.  Example:

        neuromanifold check -m ./model -d reviews.csv -b 16
    """
    chosen = [parse_estimator(text) for text in estimator] if estimator else None
    model = setup.load_model(fixed_size="check")
    result = check(
        model.module,
        setup.load_data(model, labels),
        batches=setup.batches or 4,
        seed=setup.seed,
        estimators=chosen,
        progress=not no_progress,
        **setup.selection(model),
    )
    typer.echo(str(result))
