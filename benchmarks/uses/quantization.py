"""Mixed precision chosen by Fisher information, against the same bits for every weight.

    PYTHONPATH=src:benchmarks python -m uses.quantization                          digits, eight seeds
    PYTHONPATH=src:benchmarks python -m uses.quantization text --model DIR/pairs   a folder with model/ and data.csv

The budget is what a uniform format takes, with its scales (groups of 32).  Plans choose among 2 to 8 bits for each
weight; one of them by the rounding errors alone (F = 1 everywhere).  Measured: the KL divergence from the outputs
before to those after, on test images, and the accuracy.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from common import table
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.uses.quantization import QuantizationPlan
from uses.study import accuracy, batches, cell, digits, figure, mean_error, progress, report, train

FORMATS = [f"int{bits}" for bits in (2, 3, 4, 5, 6, 8)]
UNIFORM = ("int2", "int3", "int4", "int5")
SEEDS = range(8)


def network(seed: int) -> nn.Module:
    """Three convolutions and two linear layers."""
    torch.manual_seed(seed)
    first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *more, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def equal(fim: nm.DiagonalFisher) -> nm.DiagonalFisher:
    """F = 1 for every entry."""
    return replace(fim, sums={name: torch.full_like(value, float(fim.count)) for name, value in fim.sums.items()})


@torch.no_grad()
def divergence(before: Tensor, after: Tensor) -> float:
    """KL(p before, p after), mean over samples, from logits."""
    p, q = (logits.double().log_softmax(-1) for logits in (before, after))
    return float((p.exp() * (p - q)).sum(-1).mean())


def compared(
    model: nn.Module, fim: nm.DiagonalFisher, outputs: Callable[[nn.Module], Tensor]
) -> list[tuple[str, str, QuantizationPlan, Tensor]]:
    """Budget, who chooses, the plan and the outputs after it."""
    found = nm.quantization_sensitivity(model, fim, FORMATS)
    by_error = nm.quantization_sensitivity(model, equal(fim), FORMATS)
    made = []
    for budget in UNIFORM:
        uniform = found.uniform(budget)
        chosen = by_error.plan(uniform.bits + 1e-9).formats
        plans = {"uniform": uniform, "rounding errors": found._made(dict(chosen), 0.0)}
        plans["Fisher"] = found.plan(uniform.bits + 1e-9)
        for name, plan in plans.items():
            made.append((budget, name, plan, outputs(plan.apply(copy.deepcopy(model)))))
    return made


def study_digits() -> None:
    values: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    full = []
    for seed in progress("seed", SEEDS):
        training, _, (inputs, labels) = digits(seed)
        model = train(network(seed), *training, epochs=8, seed=seed)
        fim = nm.fisher_diagonal(model, batches(*training))
        full.append(accuracy(model, inputs, labels))
        with torch.no_grad():
            before = model(inputs)
        for budget, name, plan, after in compared(model, fim, lambda m: m(inputs).detach()):  # noqa: B023
            right = float((after.argmax(1) == labels).double().mean())
            row = (plan.bits, plan.loss_increase, divergence(before, after), right)
            values.setdefault((budget, name), []).append(row)
    text = "# Mixed precision: digits\n\nMean of 8 seeds ± standard error; accuracy before "
    text += f"{cell([100 * v for v in full], digits=1)} %.\n\n"
    header = ["budget", "formats chosen by", "bits", "predicted KL", "measured KL", "accuracy, %"]
    rows = []
    for (budget, name), found in values.items():
        bits, predicted, measured, right = zip(*found, strict=True)
        cells = [cell(predicted, digits=4), cell(measured, digits=4), cell([100 * v for v in right], digits=1)]
        rows.append([f"uniform {budget}", name, f"{sum(bits) / len(bits):.2f}", *cells])
    report("quantization", text + table(header, rows), {" / ".join(key): found for key, found in values.items()})

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        for axis, column, title in zip(axes, (2, 3), ("KL divergence", "accuracy, %"), strict=True):
            for name in ("uniform", "rounding errors", "Fisher"):
                chosen = [values[budget, name] for budget in UNIFORM]
                factor = 100 if column == 3 else 1
                means, errors = zip(*(mean_error([factor * r[column] for r in one]) for one in chosen), strict=True)
                axis.errorbar([one[0][0] for one in chosen], means, errors, marker="o", ms=3, label=name)
            axis.set(xlabel="bits per weight, scales included", ylabel=title)
        axes[0].set_yscale("log")
        axes[0].legend(fontsize=7, title="formats chosen by", title_fontsize=7)

    figure("quantization", 2, draw)


def study_text(folder: Path, samples: int) -> None:
    loaded = nm.load_model(str(folder / "model"))
    model = loaded.module
    data = nm.load_data(str(folder / "data.csv"), loaded, batch_size=32, batches=2 * samples // 32, max_length=48)
    every = list(data)
    fim = nm.fisher_diagonal(model, every[: len(every) // 2], likelihood=loaded.likelihood)
    tests = every[len(every) // 2 :]

    @torch.no_grad()
    def outputs(one: nn.Module) -> Tensor:
        return torch.cat([one(**{k: v for k, v in b.items() if k != "labels"}).logits for b in tests])

    before = outputs(model)
    rows = []
    for budget, name, plan, after in compared(model, fim, outputs):
        same = 100 * float((after.argmax(1) == before.argmax(1)).double().mean())
        cells = [f"{plan.loss_increase:.2g}", f"{divergence(before, after):.2g}", f"{same:.1f}"]
        rows.append([f"uniform {budget}", name, f"{plan.bits:.2f}", *cells])
    text = f"# Mixed precision: {folder.name}\n\nFisher information of {fim.count} rows, measured on "
    text += f"{len(before)} others; one run.\n\n"
    header = ["budget", "formats chosen by", "bits", "predicted KL", "measured KL", "same prediction, %"]
    report(f"quantization-{folder.name}", text + table(header, rows), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="digits", choices=["digits", "text"])
    parser.add_argument("--model", type=Path, help="a folder with model/ and data.csv")
    parser.add_argument("--samples", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    study_digits() if options.what == "digits" else study_text(options.model, options.samples)


if __name__ == "__main__":
    main()
