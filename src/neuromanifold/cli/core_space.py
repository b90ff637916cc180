"""`neuromanifold core-space`: the geometry of the core space, as a table and a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from neuromanifold.core import Categorical
from neuromanifold.experiments.core_space import core_path, plot_core_path, tightness
from neuromanifold.report.plots import save_figure

CASES = ((2, 3.0), (3, 3.0), (14, 0.3), (14, 3.0), (100, 0.3), (100, 3.0), (1000, 0.3), (1000, 3.0))


def core_space(
    out: Annotated[Path, typer.Option(help="Folder for the picture; made if missing.")] = Path("demo"),
    classes: Annotated[int, typer.Option(min=4, help="Number of classes in the picture.")] = 10,
) -> None:
    """Show the metric of the core space: how tight the paper's bounds are, and how exact and fast its spectrum is."""
    console = Console()
    console.print(_table())
    console.print(
        "2000 random p = softmax(scale·N(0, 1)) a row; the metric is diag(p) - ppᵀ.\n"
        "The bounds cost no eigenvalue solver and hold λ within a factor of two;\n"
        "the secular equation gives λ itself to rounding (time for each sample).\n"
    )
    try:
        picture = save_figure(plot_core_path(core_path(classes)), out / "core-space.png")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        console.print("No picture: matplotlib is missing (pip install 'neuromanifold[plots]').", markup=False)
        raise typer.Exit(1) from None
    console.print(f"Picture: {picture}", markup=False, soft_wrap=True)


def _table() -> Table:
    table = Table(title="The largest eigenvalue λ of a core metric, and Theorem 1's bounds of it")
    for name in ("classes", "scale", "lower/λ\nmedian", "\nworst", "upper/λ\nmedian", "\nworst", "time for\ntop 2"):
        table.add_column(name, justify="right")
    for classes, scale in CASES:
        t = tightness(classes, scale)
        bounds = (t.lower_median, t.lower_worst, t.upper_median, t.upper_worst)
        microseconds = 1e6 * _seconds_per_sample(classes, scale)
        table.add_row(str(classes), f"{scale:g}", *(f"{value:.3f}" for value in bounds), f"{microseconds:.1f} µs")
    return table


def _seconds_per_sample(classes: int, scale: float, samples: int = 256) -> float:
    generator = torch.Generator().manual_seed(0)
    core = Categorical(scale * torch.randn(samples, classes, generator=generator, dtype=torch.float64))
    core.spectrum(2)
    start = time.perf_counter()
    core.spectrum(2)
    return (time.perf_counter() - start) / samples
