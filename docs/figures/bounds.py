"""How tight the bounds of section 3 are along a training: the data of the plot first, then the plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from neuromanifold.bounds.run import fisher_bounds
from neuromanifold.core.checks import message
from neuromanifold.problem.unchanged import unchanged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from neuromanifold.bounds import NetworkBounds


class Moment(NamedTuple):
    """One moment of a training."""

    step: float  # epochs, or whatever the caller counts in
    confidence: float  # the mean of the largest probability
    bounds: NetworkBounds

    def row(self, statement: str) -> tuple[float, float, float]:
        """lower, actual, upper of a statement, relative to tr F; nan where there is none."""
        trace = self.bounds.rows[0].actual
        found = next((row for row in self.bounds.rows if row.statement.startswith(statement)), None)
        if found is None:
            names = ", ".join(repr(row.statement) for row in self.bounds.rows)
            raise ValueError(message("statement", f"the beginning of one of {names}", repr(statement)))
        assert trace is not None
        values = (float("nan") if value is None else value / trace for value in found[2:5])
        lower, actual, upper = values
        return lower, actual, upper


def along_training(
    make: Callable[[int], nn.Module], steps: Sequence[int], data: Iterable[object], rank: int = 1
) -> list[Moment]:
    """The bounds at several moments: `make(step)` gives the network after so many steps; data as (inputs, labels)."""
    batches = list(data)
    moments = []
    for step in steps:
        model = make(step)
        with unchanged(model), torch.no_grad():
            largest = [model(batch[0]).softmax(-1).amax(-1) for batch in batches]  # type: ignore[index]
        found = fisher_bounds(model, batches, rank=rank, diagonals=False)
        moments.append(Moment(step, float(torch.cat(largest).mean()), found))
    return moments


def draw_traces(axes: Axes, moments: Sequence[Moment]) -> None:
    """Prop. 5 and Cor. 6: every bound of the trace over the trace itself."""
    x = [moment.step for moment in moments]
    rank = moments[0].bounds.rank
    lines = {
        "tr F^DG (Prop. 5)": ("C0", "-", [m.row("Prop. 5")[2] for m in moments]),
        f"tr F^LR({rank}) (Prop. 5)": ("C1", "-", [m.row("Prop. 5")[0] for m in moments]),
        "Σ λ_i σ² (Cor. 6)": ("C2", "-", [m.row("Cor. 6, second")[0] for m in moments]),
        "the same, centred": ("C2", "--", [m.row("  second, centred")[0] for m in moments]),
        "λ_C σ_1² (Cor. 6)": ("C3", "-", [m.row("Cor. 6, first")[0] for m in moments]),
    }
    axes.axhline(1.0, color="0.6", linewidth=1)
    for label, (colour, style, y) in lines.items():
        axes.plot(x, y, style, color=colour, marker=".", label=label)
    _style_axes(axes, "bound over tr F")


def draw_errors(axes: Axes, moments: Sequence[Moment]) -> None:
    """Props. 7 to 9: actual errors of the three deterministic approximations, and the paper's bounds of them."""
    x = [moment.step for moment in moments]
    statements = {
        "F^DG, ‖·‖_F (Prop. 7)": ("C0", "Prop. 7"),
        f"F^LR({moments[0].bounds.rank}), ‖·‖_F (Prop. 8)": ("C1", "Prop. 8"),
        "empirical, ‖·‖_σ (Prop. 9)": ("C4", "Prop. 9"),
    }
    for label, (colour, statement) in statements.items():
        rows = [moment.row(statement) for moment in moments]
        axes.plot(x, [row[1] for row in rows], "-", color=colour, marker=".", label=label)
        axes.plot(x, [row[2] for row in rows], ":", color=colour)
    axes.plot([], [], ":", color="0.3", label="the paper's bound of it")
    _style_axes(axes, "error over tr F")


def _style_axes(axes: Axes, label: str) -> None:
    axes.set_yscale("log")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel("epochs")
    axes.set_ylabel(label)
    axes.legend(fontsize=7.5, frameon=False)
