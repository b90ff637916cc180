"""`neuromanifold check`: every estimator against the exact value, on one's own model."""

from __future__ import annotations

from typing import Annotated

import typer

from neuromanifold.cli.estimators import parse_estimator, parse_likelihood
from neuromanifold.cli.options import Setup, with_setup
from neuromanifold.cli.output import output_console
from neuromanifold.diagnostics.check import check as run_check


@with_setup
def check(
    setup: Setup,
    estimator: Annotated[
        list[str] | None,
        typer.Option("--estimator", "-e", help="Compare only this one; may be given several times.", metavar="NAME"),
    ] = None,
    labels: Annotated[
        bool | None,
        typer.Option("--labels/--no-labels", help="Whether to use labels, for empirical estimates; if there are some."),
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show how far it is, on standard error.")] = True,
) -> None:
    """Compare the estimators with the exact diagonal on a few batches, and say in words which one to use.

    Uses 4 batches unless --batches says otherwise.  Example:

        neuromanifold check -m ./model -d reviews.csv -b 16
    """
    size, model = setup.number, setup.load_model()
    result = run_check(
        model.module,
        setup.load_data(model, labels, size),
        likelihood=parse_likelihood(setup.likelihood, model.likelihood),
        parameters=setup.parameters or None,
        batches=setup.batches or 4,
        seed=setup.seed,
        estimators=[parse_estimator(text) for text in estimator] if estimator else None,
        progress=progress,
    )
    output_console().print(str(result), markup=False, highlight=False, soft_wrap=True)
