"""Elastic weight consolidation on split and permuted digits, against no protection and other importances.

    PYTHONPATH=src:benchmarks python -m uses.consolidation

Five tasks one after the other, one network with one head.  Split: two digits each (0/1, 2/3, ...), which of the two.
Permuted: all ten digits, the pixels in another order for each task.  Each method's strength is the best of the same
six on three seeds (mean validation accuracy of all tasks at the end); accuracies are those of test images, on eight
other seeds.
"""

from __future__ import annotations

import argparse
import copy

import torch
from common import table
from torch import Tensor, nn

import neuromanifold as nm
from uses.study import accuracy, batches, cell, digits, figure, mean_error, mlp, progress, report, train

TASKS, EPOCHS, LR = 5, 15, 1e-3
STRENGTHS = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
TUNING, TESTING = range(100, 103), range(8)
Split = tuple[Tensor, Tensor]


def tasks_of(kind: str, seed: int) -> list[list[Split]]:
    """For each task its training, validation and test data."""
    parts = digits(seed, 1000 if kind == "split" else 600)
    if kind == "split":
        return [[(x[y // 2 == t], y[y // 2 == t] % 2) for x, y in parts] for t in range(TASKS)]
    generator = torch.Generator().manual_seed(seed + 1000)
    orders = [torch.randperm(64, generator=generator) for _ in range(TASKS)]
    return [[(x[:, order], y) for x, y in parts] for order in orders]


def uniform(fim: nm.DiagonalFisher) -> nm.DiagonalFisher:
    """The same importance for all: an L2 penalty around the old parameters."""
    for values in fim.sums.values():
        values.fill_(float(fim.count))
    return 1e-3 * fim


ESTIMATORS = {
    "Fisher": nm.Hutchinson(),
    "Fisher, exact": nm.Exact(),
    "empirical Fisher": nm.Empirical(),
    "squared batch gradient": nm.SquaredBatchGradient(),
}


def importances(method: str, model: nn.Module, data: Split, seed: int) -> nm.DiagonalFisher:
    if method == "L2":
        return uniform(nm.fisher_diagonal(model, batches(*data), seed=seed))
    return nm.fisher_diagonal(model, batches(*data), ESTIMATORS[method], seed=seed)


def run(kind: str, method: str, strength: float, seed: int) -> tuple[float, list[float]]:
    """Validation accuracy at the end, and test accuracy of the tasks so far after each task."""
    tasks = tasks_of(kind, seed)
    model, penalty, curve = mlp(seed, 2 if kind == "split" else 10), None, []
    for t, (training, _, _) in enumerate(tasks):
        if method == "all data at once":
            seen = [task[0] for task in tasks[: t + 1]]
            training = (torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen]))
        train(model, *training, EPOCHS, seed + t, LR, penalty)
        if strength:
            one = nm.Consolidation(copy.deepcopy(model), importances(method, model, training, seed), strength)
            penalty = one if penalty is None else penalty + one
        curve.append(sum(accuracy(model, *task[2]) for task in tasks[: t + 1]) / (t + 1))
    return sum(accuracy(model, *task[1]) for task in tasks) / TASKS, curve


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    numbers: dict[str, dict[str, dict[str, object]]] = {}
    text = "# Consolidation: digits, five tasks in a row\n"
    for kind in ("split", "permuted"):
        numbers[kind] = {}
        rows = []
        for method in progress(kind, ["none", "L2", "squared batch gradient", "empirical Fisher", "Fisher",
                                      "Fisher, exact", "all data at once"]):  # fmt: skip
            tuned = [0.0]
            if method in (*ESTIMATORS, "L2"):
                tuned = sorted(STRENGTHS, key=lambda s: -sum(run(kind, method, s, seed)[0] for seed in TUNING))
            curves = [run(kind, method, tuned[0], seed)[1] for seed in TESTING]
            numbers[kind][method] = {"strength": tuned[0], "curves": curves}
            chosen = f"{tuned[0]:g}" if tuned[0] else "–"
            rows.append([method, chosen, cell([100 * c[-1] for c in curves], digits=1)])
        text += f"\n## {kind} digits\n\nAccuracy after the last task, mean over the five tasks, in %; "
        text += (
            f"{len(TESTING)} seeds, ± standard error.\n\n" + table(["importances", "strength", "accuracy"], rows) + "\n"
        )
    report("consolidation", text, numbers)

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        for axis, (kind, methods) in zip(axes, numbers.items(), strict=True):
            for method, found in methods.items():
                if method == "Fisher, exact":
                    continue
                points = [mean_error([100 * c[t] for c in found["curves"]]) for t in range(TASKS)]  # type: ignore[attr-defined]
                means, errors = zip(*points, strict=True)
                axis.errorbar(range(1, TASKS + 1), means, errors, marker="o", ms=3, label=method)
            axis.set(title=f"{kind} digits", xlabel="tasks learned", ylabel="accuracy on them, %", xticks=range(1, 6))
        axes[0].legend(fontsize=7)

    figure("consolidation", 2, draw)


if __name__ == "__main__":
    main()
