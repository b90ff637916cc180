"""The application object, with every command registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import neuromanifold
from neuromanifold.cli.bounds import bounds
from neuromanifold.cli.check import check
from neuromanifold.cli.combine import combine
from neuromanifold.cli.compare import compare
from neuromanifold.cli.core_space import core_space
from neuromanifold.cli.demo import demo
from neuromanifold.cli.env import env
from neuromanifold.cli.errors import FriendlyGroup
from neuromanifold.cli.estimate import estimate
from neuromanifold.cli.forecast import forecast
from neuromanifold.cli.report import report
from neuromanifold.cli.reproduce import reproduce
from neuromanifold.cli.show import show

app = typer.Typer(
    name="neuromanifold",
    cls=FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "From a model and data": (estimate, forecast, check, bounds),
    "Results": (show, compare, combine, report),
    "To look at": (demo, reproduce, core_space, env),
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neuromanifold {neuromanifold.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The Fisher information of neural networks, with known accuracy."""
