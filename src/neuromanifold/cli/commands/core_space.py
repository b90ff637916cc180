"""`neuromanifold core-space`: the geometry of the core space, as a table and a plot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from neuromanifold.cli.console import print_facts, print_table
from neuromanifold.cli.parsing import check_creatable
from neuromanifold.core import Categorical
from neuromanifold.experiments.core_space import core_path, plot_core_path, tightness
from neuromanifold.report.plots import save_figure
from neuromanifold.results.drawing import needs_matplotlib

_CASES = ((2, 3.0), (3, 3.0), (14, 0.3), (14, 3.0), (100, 0.3), (100, 3.0), (1000, 0.3), (1000, 3.0))
_TITLE = "Theorem 1's bounds of the largest eigenvalue λ of the core metric diag(p) - ppᵀ"
_HEADER = ("classes", "scale", "lower/λ", "smallest", "upper/λ", "largest", "top 2")
_NOTES = """
Each row: 2000 random p = softmax(scale·N(0, 1)).  lower/λ, upper/λ: medians.
The bounds need no eigenvalue solver and enclose λ within a factor of two; the
secular equation gives λ to rounding (top 2: time per sample for two eigenpairs)."""


def core_space_command(
    out: Annotated[Path, typer.Option(help="Folder for the plot; created if missing.")] = Path("demo"),
    classes: Annotated[int, typer.Option(min=4, help="Number of classes in the plot.")] = 10,
) -> None:
    """Show the metric of the core space: how tight the paper's bounds are, and how fast its exact spectrum is."""
    file = out / "core-space.png"
    check_creatable(file)
    print_table(_TITLE, _HEADER, [_tightness_row(*case) for case in _CASES], _NOTES, left=0)
    with needs_matplotlib():
        print_facts({"plot": save_figure(plot_core_path(core_path(classes)), file)})


def _tightness_row(classes: int, scale: float) -> tuple[str, ...]:
    ratios = (f"{value:.3f}" for value in tightness(classes, scale))
    return (str(classes), f"{scale:g}", *ratios, f"{1e6 * _seconds_per_sample(classes, scale):.1f} µs")


def _seconds_per_sample(classes: int, scale: float) -> float:
    generator = torch.Generator().manual_seed(0)
    core = Categorical(scale * torch.randn(256, classes, generator=generator, dtype=torch.float64))
    core.spectrum(2)
    start = time.perf_counter()
    core.spectrum(2)
    return (time.perf_counter() - start) / 256
