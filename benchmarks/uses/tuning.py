"""Which single layer to tune: chosen by Fisher information, against each layer, the last one, and all.

    PYTHONPATH=src:benchmarks python -m uses.tuning

A network with four layers is trained on digits, then tuned on 100 labelled images of a task that differs in its inputs
(turned by 90 degrees) or in its outputs (labels in another order).  Every choice may take the best of three learning
rates by validation accuracy.  Test accuracy, eight seeds.
"""

from __future__ import annotations

import copy
from collections import Counter

import torch
from common import table
from torch import Tensor, nn

import neuromanifold as nm
from uses.study import accuracy, batches, cell, digits, figure, mean_error, progress, report, train

SEEDS, RATES = range(8), (1e-3, 3e-3, 1e-2)
LAYERS = ("0", "2", "4", "6")
BY = ("mean", "trace", "relative")


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for n in (64, 100, 100) for layer in (nn.Linear(n, 100), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(100, 10))


def shifted(kind: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "inputs turned":
        return torch.rot90(images.view(-1, 8, 8), 1, (1, 2)).flatten(1), labels
    return images, (labels + 3) % 10


def tuned(model: nn.Module, layers: tuple[str, ...], parts: list[tuple[Tensor, Tensor]], seed: int) -> float:
    """Test accuracy at the learning rate with the best validation accuracy."""
    found = []
    for rate in RATES:
        one = copy.deepcopy(model)
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in layers)
        train(one, *parts[0], epochs=40, seed=seed, lr=rate, batch=20)
        found.append((accuracy(one, *parts[1]), accuracy(one, *parts[2])))
    return max(found, key=lambda pair: pair[0])[1]


def main() -> None:
    torch.set_num_threads(1)
    numbers: dict[str, dict[str, list[float]]] = {}
    text = "# Which layer to tune: digits\n\nTest accuracy in %, mean of 8 seeds ± standard error.\n"
    for kind in ("inputs turned", "labels permuted"):
        values: dict[str, list[float]] = {}
        chosen: dict[str, list[str]] = {}
        for seed in progress(kind, SEEDS):
            training, validation, test = digits(seed)
            model = train(network(seed), *training, epochs=15, seed=seed)
            parts = [shifted(kind, *one) for one in (tuple(t[:100] for t in training), validation, test)]  # type: ignore[misc]
            each = {layer: tuned(model, (layer,), parts, seed) for layer in LAYERS}
            for layer in LAYERS:
                values.setdefault(f"layer {LAYERS.index(layer) + 1}", []).append(each[layer])
            values.setdefault("all layers", []).append(tuned(model, LAYERS, parts, seed))
            for label, estimator in (("Fisher", nm.Hutchinson()), ("empirical Fisher", nm.Empirical())):
                fim = nm.fisher_diagonal(model, batches(*parts[0], size=20), estimator)
                for by in BY:
                    (layer,) = nm.plan_tuning(model, fim, 1e-9, by).chosen
                    chosen.setdefault(f"{label}, {by}", []).append(f"layer {LAYERS.index(layer) + 1}")
                    values.setdefault(f"{label}, {by}", []).append(each[layer])
        numbers[kind] = values
        rows = []
        for name, found in values.items():
            layers = ", ".join(f"{k} ({n})" for k, n in sorted(Counter(chosen.get(name, [])).items()))
            rows.append([name, layers or "–", cell([100 * v for v in found], digits=1)])
        text += f"\n## {kind}\n\n" + table(["tuned", "chosen (seeds)", "accuracy"], rows) + "\n"
    report("tuning", text, numbers)

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        for axis, (kind, values) in zip(axes, numbers.items(), strict=True):
            means, errors = zip(*(mean_error([100 * v for v in one]) for one in values.values()), strict=True)
            axis.barh(list(values)[::-1], means[::-1], xerr=errors[::-1], height=0.6)
            axis.set(title=kind, xlabel="test accuracy, %")
            axis.tick_params(axis="y", labelsize=7)

    figure("tuning", 2, draw)


if __name__ == "__main__":
    main()
