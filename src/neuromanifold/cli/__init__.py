"""The command line: `neuromanifold`, also `python -m neuromanifold`.  One file for each command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say how to install it."""
    try:
        from neuromanifold.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit("The command line needs typer and rich: pip install 'neuromanifold[cli,plots]'.")
    app()
