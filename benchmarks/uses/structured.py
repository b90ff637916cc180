"""Whole heads and neurons of a small vision transformer pruned by Fisher information, against magnitude and chance.

    PYTHONPATH=src:benchmarks python -m uses.structured

A network of three layers with four heads and 64 neurons each is trained on digits, pruned at once to each sparsity,
and its test accuracy measured before and after two epochs of further training with the masks in force.  Five seeds.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace

import torch
from common import table
from torch import nn

import neuromanifold as nm
from uses.study import accuracy, batches, cell, digits, figure, mean_error, progress, report, train, transformer

SPARSITIES, SEEDS = (0.25, 0.5, 0.75), range(5)
STRUCTURES = {"heads": {"structure": "heads"}, "neurons": {"structure": "rows", "parameters": ["*.mlp.fc1.weight"]}}
METHODS = ("chance", "magnitude", "empirical Fisher", "Fisher")
Found = dict[str, dict[float, list[float]]]


def by_chance(model: nn.Module, fim: nm.DiagonalFisher, seed: int) -> nm.DiagonalFisher:
    """A result whose F θ² are random numbers: one for each row, and one for each head of output projections."""
    generator, sums = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.weight"):
            numbers = torch.rand(4, generator=generator).repeat_interleave(parameter.shape[1] // 4)
        else:
            numbers = torch.rand(len(parameter), generator=generator).view(-1, *[1] * (parameter.ndim - 1))
        sums[name] = numbers / parameter.detach().square().clamp(min=1e-12)
    return replace(fim, sums=sums)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    before: dict[str, Found] = {kind: {name: {s: [] for s in SPARSITIES} for name in METHODS} for kind in STRUCTURES}
    after, unpruned = copy.deepcopy(before), []
    for seed in progress("seed", SEEDS):
        training, _, test = digits(seed)
        model = train(transformer(seed), *training, epochs=30, seed=seed, lr=3e-3, batch=100)
        unpruned.append(accuracy(model, *test))
        fim = nm.fisher_diagonal(model, batches(*training))
        fims = {"Fisher": fim, "magnitude": fim, "chance": by_chance(model, fim, seed),
                "empirical Fisher": nm.fisher_diagonal(model, batches(*training), nm.Empirical())}  # fmt: skip
        for kind, settings in STRUCTURES.items():
            for name in METHODS:
                for sparsity in SPARSITIES:
                    score = "magnitude" if name == "magnitude" else "fisher"
                    plan = nm.plan_pruning(model, fims[name], sparsity, score=score, **settings)  # type: ignore[arg-type]
                    pruned = plan.apply(copy.deepcopy(model))
                    before[kind][name][sparsity].append(accuracy(pruned, *test))
                    trained = train(pruned, *training, epochs=2, seed=seed, batch=100)
                    after[kind][name][sparsity].append(accuracy(trained, *test))
    text = "# Structured pruning: digits\n\nTest accuracy in %, mean of 5 seeds ± standard error; "
    text += f"unpruned {cell([100 * v for v in unpruned], digits=1)}.\n"
    for kind in STRUCTURES:
        for title, found in (("without further training", before), ("after two epochs of training", after)):
            rows = [
                [n, *(cell([100 * v for v in one[s]], digits=1) for s in SPARSITIES)] for n, one in found[kind].items()
            ]
            header = ["", *(f"{100 * s:g} %" for s in SPARSITIES)]
            text += f"\n## {kind}, {title}\n\n{table(header, rows)}\n"
    report("structured", text, {"before": before, "after": after, "unpruned": unpruned})

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        for axis, kind in zip(axes, STRUCTURES, strict=True):
            for name, one in before[kind].items():
                means, errors = zip(*(mean_error([100 * v for v in one[s]]) for s in SPARSITIES), strict=True)
                axis.errorbar([100 * s for s in SPARSITIES], means, errors, marker="o", ms=3, label=name)
            axis.set(title=f"{kind}, no further training", xlabel="pruned, %", ylabel="test accuracy, %")
        axes[0].legend(fontsize=7)

    figure("structured", 2, draw)


if __name__ == "__main__":
    main()
