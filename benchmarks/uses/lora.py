"""Ranks of LoRA in proportion to Fisher information, against the same rank everywhere, on a small vision transformer.

    PYTHONPATH=src:benchmarks python -m uses.lora

A network with three layers is trained on digits and then tuned with LoRA alone (peft) on 100 labelled images of a task
that differs in its inputs (turned by 90 degrees) or in its outputs (labels in another order).  All choices of ranks
have at most the parameters of rank 2 in all matrices of the layers; "random" gives them out by chance.  Every choice
may take the best of three learning rates by validation accuracy.  Test accuracy, four seeds.
"""

from __future__ import annotations

import argparse
import copy
import random
from dataclasses import replace

import torch
from common import table
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.uses.tuning import LoraPlan
from uses.study import accuracy, batches, cell, digits, figure, mean_error, progress, report, train, transformer
from uses.tuning import shifted

SEEDS, RATES, RANK = range(4), (1e-3, 3e-3, 1e-2), 2
MATRICES = ["*.layers.*.weight"]
Parts = list[tuple[Tensor, Tensor]]


def scattered(plan: LoraPlan, seed: int) -> LoraPlan:
    """Ranks given out by chance, at least one each, within the size of the same rank everywhere."""
    generator, ranks = random.Random(seed), dict.fromkeys(plan.ranks, 1)
    left = (RANK - 1) * sum(plan.costs.values())
    while open_ := [name for name, cost in plan.costs.items() if cost <= left]:
        one = generator.choice(open_)
        ranks[one] += 1
        left -= plan.costs[one]
    return replace(plan, ranks=ranks)


def tuned(model: nn.Module, plan: LoraPlan, parts: Parts, seed: int) -> float:
    """Test accuracy at the learning rate with the best validation accuracy."""
    import peft

    found = []
    for rate in RATES:
        torch.manual_seed(seed)
        one = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**plan.config()))
        train(one, *parts[0], epochs=20, seed=seed, lr=rate, batch=20)
        found.append((accuracy(one, *parts[1]), accuracy(one, *parts[2])))
    return max(found, key=lambda pair: pair[0])[1]


def plans_of(model: nn.Module, data: Parts, seed: int) -> dict[str, LoraPlan]:
    """The choices of ranks by name."""
    fims = {
        "Fisher": nm.fisher_diagonal(model, data),
        "empirical Fisher": nm.fisher_diagonal(model, data, nm.Empirical()),
    }
    plans = {name: nm.plan_lora(model, fim, RANK, MATRICES) for name, fim in fims.items()}
    any_plan = plans["Fisher"]
    equal = replace(any_plan, ranks=dict.fromkeys(any_plan.ranks, RANK))
    return {"equal": equal, "random": scattered(any_plan, seed), **plans}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    kinds = ("inputs turned", "labels permuted")
    values: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    shares: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    for seed in progress("seed", SEEDS):
        training, validation, test = digits(seed)
        model = train(transformer(seed), *training, epochs=30, seed=seed, lr=3e-3, batch=100)
        for kind in kinds:
            parts = [shifted(kind, *one) for one in (tuple(t[:100] for t in training), validation, test)]  # type: ignore[misc]
            values[kind].setdefault("not tuned", []).append(accuracy(model, *parts[2]))
            for name, plan in plans_of(model, batches(*parts[0], size=20), seed).items():
                values[kind].setdefault(name, []).append(tuned(model, plan, parts, seed))
                first = sum(rank * plan.costs[n] for n, rank in plan.ranks.items() if ".layers.0." in n)
                shares[kind].setdefault(name, []).append(first / plan.entries)
    text = "# Ranks of LoRA: digits\n\nTest accuracy in %, mean of 4 seeds ± standard error; the difference to equal "
    text += "ranks is that on the same seeds.\n"
    for kind in kinds:
        rows = []
        for name, found in values[kind].items():
            apart = [100 * (a - b) for a, b in zip(found, values[kind]["equal"], strict=True)]
            share = (
                cell([100 * s for s in shares[kind][name]], digits=0).split(" ±")[0] if name in shares[kind] else "–"
            )
            difference = "–" if name in ("equal", "not tuned") else cell(apart, digits=1)
            rows.append([name, share, cell([100 * v for v in found], digits=1), difference])
        header = ["ranks", "in the first layer, %", "accuracy", "minus equal"]
        text += f"\n## {kind}\n\n" + table(header, rows) + "\n"
    report("lora", text, {"accuracy": values, "in the first layer": shares})

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        for axis, (kind, found) in zip(axes, values.items(), strict=True):
            tuned_ones = {name: one for name, one in found.items() if name != "not tuned"}
            means, errors = zip(*(mean_error([100 * v for v in one]) for one in tuned_ones.values()), strict=True)
            axis.errorbar(means, range(len(means)), xerr=errors, fmt="o")
            axis.set_yticks(range(len(means)), list(tuned_ones))
            axis.set(title=kind, xlabel="test accuracy, %")

    figure("lora", 2, draw)


if __name__ == "__main__":
    main()
