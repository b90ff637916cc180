"""`fisher_matrix`: F itself, dense or in blocks, for small models and single layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import integer_in_range, message, one_of
from neuromanifold.estimators import Estimator, Exact
from neuromanifold.operators.factors import GIB
from neuromanifold.operators.layout import ParameterLayout
from neuromanifold.operators.matrix_result import FisherMatrix
from neuromanifold.persample.accumulate import GradientRows
from neuromanifold.problem.parameters import Selection
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.validation import Likelihood
from neuromanifold.results.trace import check_reduction
from neuromanifold.run.fisher import make_provenance
from neuromanifold.run.loop import LoopOptions, run
from neuromanifold.run.step import Settings


@torch.inference_mode(mode=False)
def fisher_matrix(
    model: nn.Module,
    data: Iterable[object],
    estimator: Estimator | None = None,
    blocks: Literal["layer"] | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    max_bytes: int = 4 * GIB,
    seed: int = 0,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
) -> FisherMatrix:
    """F = Σ_x Jᵀ M(x) J as a dense matrix [P, P], or as dense blocks, one for the parameters of each layer.

    The gradients of the samples of a batch are held at a time, [B, P].

    Args:
        model: any module whose output is, holds or begins with logits.  Nothing of it is changed.
        data: an iterable of batches.
        estimator: `nm.Exact()` unless given; any other works sample by sample, too.
        blocks: None for all of F, "layer" for the diagonal blocks of modules.
        likelihood: what the outputs mean.
        parameters: which; all that are trainable unless given.
        reduction: "mean" (per sample) or "sum" (over samples): only a view.
        dtype: float32 or float64; that of the parameters unless given.
        max_bytes: refuse if the matrix takes more than that.
        seed: random seed of probes, if the estimator has any.
        progress: show a progress bar on standard error.
        class_dim: which dimension of the logits holds the classes.
        batch_dim: which dimension of inputs and of logits holds the samples.
        ignore_index: positions with this label do not count, nor samples without any other.
        label_key: where a batch that is a dict has its labels.

    """
    estimator = Exact() if estimator is None else estimator
    if blocks not in (None, "layer"):
        raise ValueError(message("blocks", "None (all of F) or 'layer'", repr(blocks)))
    problem = Problem.of(model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key)
    settings, view = Settings.of(estimator, "sample", seed), check_reduction(reduction)
    chosen, layout = problem.parameters, ParameterLayout.of(problem.parameters)
    exact = any(parameter.dtype == torch.float64 for parameter in chosen.values())
    dtype = (torch.float64 if exact else torch.float32) if dtype is None else dtype
    one_of(dtype, "dtype", torch.float32, torch.float64)
    places = _places(layout, blocks)
    _check_size(places, dtype, blocks, integer_in_range(max_bytes, "max_bytes", 1, 2**63, "memory for the matrix"))
    sizes = {name: place.stop - place.start for name, place in places.items()}
    sums = {name: torch.zeros(n, n, dtype=dtype, device=problem.device) for name, n in sizes.items()}

    def take(rows: Tensor) -> None:
        for name, place in places.items():
            sums[name].addmm_(rows[:, place].mT, rows[:, place])

    def reserve(count: int) -> None:
        if (needed := count * layout.size * dtype.itemsize) > max_bytes:
            got = f"{needed / GIB:.3g} GiB for the gradients of a batch of {count} samples"
            raise ValueError(message("max_bytes", "enough for F", got, "Use smaller batches, or fewer `parameters`."))

    rows = GradientRows(list(chosen.values()), dtype, take, reserve)
    counts = run(problem, settings, rows, LoopOptions(progress))
    return FisherMatrix(sums, layout, counts.samples, make_provenance(problem, settings, counts), view)


def _places(layout: ParameterLayout, blocks: str | None) -> dict[str, slice]:
    """Return the range of indices of each block in the vector of all parameters."""
    if blocks is None:
        return {"": slice(0, layout.size)}
    slices = {name: [layout.slices[one] for one in names] for name, names in layout.layers().items()}
    return {name: slice(one[0].start, one[-1].stop) for name, one in slices.items()}


def _check_size(places: dict[str, slice], dtype: torch.dtype, blocks: str | None, limit: int) -> None:
    """Raise if the matrix would take more bytes than `limit`, and say how many."""
    sizes = {name: (place.stop - place.start) ** 2 * dtype.itemsize for name, place in places.items()}
    if sum(sizes.values()) <= limit:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    count = places[largest].stop - places[largest].start
    whose = (
        f", most of it for the {count:,} parameters of {largest!r}" if blocks else f" ({count:,} parameters squared)"
    )
    advice = "Choose fewer `parameters`" + ("" if blocks else ", or blocks='layer'")
    advice += "; nm.fisher_operator and nm.fisher_factors need no matrix."
    raise ValueError(message("max_bytes", "enough for F", f"{sum(sizes.values()) / GIB:.3g} GiB{whose}", advice))
