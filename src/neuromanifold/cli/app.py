"""The application object, with every command registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import neuromanifold
from neuromanifold.cli.commands.bounds import bounds
from neuromanifold.cli.commands.check import check
from neuromanifold.cli.commands.combine import combine
from neuromanifold.cli.commands.compare import compare
from neuromanifold.cli.commands.core_space import core_space
from neuromanifold.cli.commands.demo import demo
from neuromanifold.cli.commands.env import env
from neuromanifold.cli.commands.estimate import estimate
from neuromanifold.cli.commands.forecast import forecast
from neuromanifold.cli.commands.report import report
from neuromanifold.cli.commands.reproduce import reproduce
from neuromanifold.cli.commands.show import show
from neuromanifold.cli.errors import FriendlyGroup

app = typer.Typer(
    name="neuromanifold",
    cls=FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Model and data": (estimate, forecast, check, bounds),
    "Results": (show, compare, combine, report),
    "Experiments and environment": (demo, reproduce, core_space, env),
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
