"""`neuromanifold merge`: several models into one, weighted by their Fisher information."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.console import note
from neuromanifold.cli.options import NoProgress, option
from neuromanifold.results.files import FileError, load_tensors
from neuromanifold.uses.merging.merge import METHODS, merge


def merge_command(
    models: Annotated[
        list[Path], typer.Argument(help="Folders of models (config.json, *.safetensors), or files.", metavar="MODEL...")
    ],
    output: Annotated[Path, option("Options", "Folder to write.", "--output", "-o", metavar="DIR")],
    fisher: Annotated[
        list[Path] | None,
        option(
            "Options",
            "A result for each model, in their order; further ones may follow, or repeat it.",
            "--fisher",
            "-f",
            metavar="FILE...",
        ),
    ] = None,
    method: Annotated[str, option("Options", f"{', '.join(METHODS)}.")] = "fisher",
    weight: Annotated[
        list[float] | None, option("Options", "Weight of each model, in their order. Repeatable.", "--weight", "-w")
    ] = None,
    base: Annotated[
        Path | None, option("Options", "The model that all were fine-tuned from: for task-arithmetic and ties.")
    ] = None,
    density: Annotated[float, option("Options", "Share of each task vector's entries that ties keeps.")] = 0.2,
    scale: Annotated[float, option("Options", "By which changes from the base are multiplied.")] = 1.0,
    differing: Annotated[
        str, option("Options", "error, or first: take tensors that are not the same in all from the first model.")
    ] = "error",
    shard_size: Annotated[str, option("Options", "Largest file of weights; memory holds up to two of them.")] = "5GB",
    no_progress: NoProgress = False,
) -> None:
    """Merge models of one architecture: each parameter weighted by its Fisher information; or by other methods.

    Tensors are read, merged and written one by one, so models may be larger than memory.
    """
    folders = [path for path in models if not _is_result(path)]
    fishers = [*(fisher or ()), *(path for path in models if _is_result(path))]  # --fisher a b
    merged = merge(
        [str(path) for path in folders],
        fishers,
        method=method,
        weights=weight or None,
        base=None if base is None else str(base),
        density=density,
        scale=scale,
        differing=differing,
    )
    typer.echo(str(merged))
    merged.save(output, shard_size, progress=not no_progress and sys.stderr.isatty())
    note(f"Written: {output}")


def _is_result(path: Path) -> bool:
    """Whether a file was written by this library."""
    try:
        return path.is_file() and bool(load_tensors(path, only=())[1])
    except FileError:
        return False
