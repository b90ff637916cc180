"""Pruning curves on digits: by Fisher information, by the empirical one, and by magnitude.

    PYTHONPATH=src:benchmarks python -m uses.pruning

A network of two hidden layers is trained, pruned at once to each sparsity, and its test accuracy measured, before and
after two epochs of further training with the masks in force.  Eight seeds.
"""

from __future__ import annotations

import copy

import torch
from common import table

import neuromanifold as nm
from uses.study import accuracy, batches, cell, digits, figure, loss_of, mean_error, mlp, progress, report, train

SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
SEEDS = range(8)
METHODS: dict[str, dict[str, str]] = {
    "magnitude, global": {"score": "magnitude"},
    "magnitude, per layer": {"score": "magnitude", "scope": "layer"},
    "empirical Fisher, global": {},
    "Fisher, per layer": {"scope": "layer"},
    "Fisher, global": {},
}


def main() -> None:
    torch.set_num_threads(1)
    before: dict[str, dict[float, list[float]]] = {name: {s: [] for s in SPARSITIES} for name in METHODS}
    after = copy.deepcopy(before)
    rows_of: dict[float, list[tuple[float, float]]] = {s: [] for s in SPARSITIES}
    unpruned, patterned = [], {"magnitude": [], "fisher": []}  # type: ignore[var-annotated]
    for seed in progress("seed", SEEDS):
        training, _, test = digits(seed)
        model = train(mlp(seed), *training, epochs=25, seed=seed)
        data = batches(*training)
        fims = {name: nm.fisher_diagonal(model, data, nm.Empirical() if "emp" in name else nm.Hutchinson())
                for name in ("Fisher", "empirical Fisher")}  # fmt: skip
        unpruned.append(accuracy(model, *test))
        start = loss_of(model, *training)
        for score in patterned:
            plan = nm.plan_pruning(model, fims["Fisher"], structure="2:4", score=score)
            patterned[score].append(accuracy(plan.apply(copy.deepcopy(model)), *test))
        for sparsity in SPARSITIES:
            for name, settings in METHODS.items():
                fim = fims["empirical Fisher" if name.startswith("empirical") else "Fisher"]
                plan = nm.plan_pruning(model, fim, sparsity, **settings)  # type: ignore[arg-type]
                pruned = plan.apply(copy.deepcopy(model))
                before[name][sparsity].append(accuracy(pruned, *test))
                if name == "Fisher, global":
                    rows_of[sparsity].append((plan.loss_increase, loss_of(pruned, *training) - start))
                after[name][sparsity].append(accuracy(train(pruned, *training, epochs=2, seed=seed), *test))
    header = ["", *(f"{100 * s:g} %" for s in SPARSITIES)]
    text = "# Pruning: digits\n\nTest accuracy in %, mean of 8 seeds ± standard error; "
    text += f"unpruned {cell([100 * v for v in unpruned], digits=1)}.\n"
    for title, found in (("without further training", before), ("after two epochs of training", after)):
        rows = [[n, *(cell([100 * v for v in one[s]], digits=1) for s in SPARSITIES)] for n, one in found.items()]
        text += f"\n## Single entries, {title}\n\n" + table(header, rows) + "\n"
    text += "\n## 2:4, without further training\n\n"
    text += table(["score", "accuracy"], [[k, cell([100 * x for x in v], digits=1)] for k, v in patterned.items()])
    text += "\n\n## Predicted and measured increase of the training loss, Fisher, global\n\n"
    rows = [[f"{100 * s:g} %", *(cell([pair[i] for pair in found], digits=4) for i in (0, 1))]
            for s, found in rows_of.items()]  # fmt: skip
    text += table(["sparsity", "predicted", "measured"], rows)
    report("pruning", text, {"before": before, "after": after, "unpruned": unpruned, "losses": rows_of})

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        for axis, title, found in zip(axes, ("no further training", "two epochs more"), (before, after), strict=True):
            for name, one in found.items():
                means, errors = zip(*(mean_error([100 * v for v in one[s]]) for s in SPARSITIES), strict=True)
                axis.errorbar([100 * s for s in SPARSITIES], means, errors, marker="o", ms=3, label=name)
            axis.set(title=title, xlabel="pruned, %", ylabel="test accuracy, %")
        axes[0].legend(fontsize=7)

    figure("pruning", 2, draw)


if __name__ == "__main__":
    main()
