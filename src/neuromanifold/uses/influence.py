"""Influence of training samples on test samples: dot products of gradients through the inverse of a metric.

test samples   g_q = ∇ log p(y_q | x_q)  ─►  H⁻¹ g_q, once, for H = F + damping I            [P, Q]
training data  g_n, one batch after the other                                     [B, P] at a time
scores         g_nᵀ H⁻¹ g_q/N                                                                 [Q, N]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import finite_number, message
from neuromanifold.estimators import Empirical
from neuromanifold.operators.metric import Metric, StoredMetric
from neuromanifold.persample.accumulate import GradientRows
from neuromanifold.problem.problem import Problem
from neuromanifold.run.loop import run
from neuromanifold.run.settings import LoopOptions, Settings
from neuromanifold.uses.matching import check_weights


@torch.inference_mode(mode=False)
def influence(
    model: nn.Module,
    train: Iterable[object],
    test: Iterable[object],
    fisher: Metric,
    damping: float,
    progress: bool = False,
    **options: Any,
) -> Tensor:
    """Return how much the loss of each test sample would rise without each training sample, [Q, N], to first order.

    With the loss -log p(y|x), summed over N training samples, and H = F + damping I per sample in place of its Hessian,
    leaving out sample n moves the optimum by H⁻¹ ∇loss_n/N, so that the loss of test sample q rises by g_qᵀ H⁻¹ g_n/N
    (Koh and Liang 2017).  Large positive scores are helpful samples, negative ones harmful.  Cost: one per-sample
    backward pass over both data sets and a solution for each test sample; held are the gradients of the test samples,
    [Q, P], and those of one batch of training samples.

    Args:
        model: trained; a classifier with labels, or another `likelihood` with its targets.  It is not changed.
        train: batches (inputs, labels) of training samples, in the order of the columns.
        test: batches of test samples, in the order of the rows.
        fisher: `nm.fisher_kronecker(model, train)`, or another metric; its parameters are those that count.
        damping: of the mean over samples, such as the weight decay that the model was trained with.
        progress: show a progress bar over the training samples.
        options: `likelihood`, `class_dim`, `ignore_index`, ... as in `fisher_diagonal`.

    Returns:
        A tensor [Q, N].

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected, such as data without labels.

    Example:
        >>> F = nm.fisher_kronecker(model, data)
        >>> nm.influence(model, data, data[:1], F, damping=1e-2).shape
        torch.Size([8, 32])
    """
    if not isinstance(fisher, Metric):
        advice = "Make one with nm.fisher_kronecker(model, train)."
        raise TypeError(message("fisher", "a metric such as nm.KroneckerFisher", type(fisher).__name__, advice))
    if isinstance(fisher, StoredMetric):
        check_weights(fisher.provenance, model, "fisher")
    damping, metric = finite_number(damping, "damping"), fisher.mean
    queries: list[Tensor] = []
    _take_gradients(model, test, metric, queries.append, LoopOptions(), options)
    solved = metric.solve(torch.cat(queries).mT.contiguous(), damping).x  # [P, Q]
    scores: list[Tensor] = []
    shown = LoopOptions(progress, description="Influence")
    _take_gradients(model, train, metric, lambda rows: scores.append(rows @ solved), shown, options)
    found = torch.cat(scores)  # [N, Q]
    return found.mT / len(found)


def _take_gradients(
    model: nn.Module,
    data: Iterable[object],
    metric: Metric,
    take: Callable[[Tensor], None],
    shown: LoopOptions,
    options: dict[str, Any],
) -> None:
    """Pass the gradients of log p(y|x) of all samples on, a block of rows [n, P] for each batch."""
    names = metric.layout.shapes
    problem = Problem.of(model, data, parameters=lambda name, _: name in names, **options)
    found = {name: parameter.shape for name, parameter in problem.parameters.items()}
    if found != names or list(found) != list(names):
        got = next((name for name in names if found.get(name) != names[name]), "their order")
        raise ValueError(message("fisher", "a metric of this model's parameters", f"one that differs in {got}"))
    rows = GradientRows(list(problem.parameters.values()), metric.precision, take, lambda _: None)
    run(problem, Settings.of(Empirical(), "sample", 0), rows, shown)
