"""Optimizers at equal cost on digits: SGD, Adam, AdaHessian, FisherSGD and FisherAdam.

    PYTHONPATH=src:benchmarks python -m uses.optimizers

cost = processor time of a step over that of a step of SGD, of optimizers that take turns; wall-clock time beside it
each optimizer gets STEPS/cost steps; its learning rate is the one of five with the least validation loss for
TUNING seeds, on a cosine schedule; then other seeds are scored
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from common import table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from uses.trained import IMAGES, Split, accuracy, digits, mean_loss, plus_minus, seeded, shuffled, write

COMMAND = "PYTHONPATH=src:benchmarks python -m uses.optimizers"
STEPS, TUNING, POINTS = 150, 2, 10


class AdaHessian:
    """Adam with the square of a Hutchinson estimate of the Hessian's diagonal (Yao et al. 2021), every k steps."""

    def __init__(self, parameters: Any, lr: float, every: int = 1) -> None:
        self.parameters, self.every, self.eps = list(parameters), every, 1e-4
        self.param_groups = [{"lr": lr}]
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.steps = self.updates = 0

    def minimise(self, loss: Tensor) -> None:
        """Take a step down the loss."""
        fresh = self.steps % self.every == 0
        gradients = torch.autograd.grad(loss, self.parameters, create_graph=fresh)
        if fresh:
            signs = [torch.randint_like(g, 2) * 2 - 1 for g in gradients]
            products = torch.autograd.grad(gradients, self.parameters, signs)
            for v, z, h in zip(self.v, signs, products, strict=True):
                v.mul_(0.999).addcmul_(z * h, z * h, value=0.001)
            self.updates += 1
        self.steps += 1
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
                m.mul_(0.9).add_(g.detach(), alpha=0.1)
                size = (v / (1 - 0.999**self.updates)).sqrt() + self.eps
                p.addcdiv_(m, size, value=-self.param_groups[0]["lr"] / (1 - 0.9**self.steps))


class Method(NamedTuple):
    """An optimizer, how often it updates its curvature, and its learning rates."""

    make: Callable[..., Any]
    every: int
    rates: list[float]


def grid(centre: float) -> list[float]:
    return [centre * 10 ** (k / 2) for k in range(-2, 3)]


METHODS = {
    "SGD, momentum": Method(lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), 0, grid(0.05)),
    "Adam": Method(torch.optim.Adam, 0, grid(1e-2)),
    "AdaHessian, every step": Method(AdaHessian, 1, grid(0.03)),
    "AdaHessian, every 10": Method(lambda p, lr: AdaHessian(p, lr, 10), 10, grid(0.03)),
    "FisherAdam, every step": Method(nm.optim.FisherAdam, 1, grid(1e-2)),
    "FisherAdam, every 10": Method(nm.optim.FisherAdam, 10, grid(1e-2)),
    "FisherSGD, every step": Method(nm.optim.FisherSGD, 1, grid(3e-3)),
    "FisherSGD, every 10": Method(nm.optim.FisherSGD, 10, grid(3e-3)),
}


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


NETWORKS = {"A perceptron with two hidden layers of 64": wide}


def train(
    network: Callable[[], nn.Module], method: Method, rate: float, part: Split, steps: int, seed: int
) -> Iterator[tuple[int, nn.Module]]:
    """Train for so many steps, with a cosine schedule; yields the model before each of POINTS steps and at the end."""
    model = seeded(network, seed)
    optimizer = method.make(model.parameters(), lr=rate)
    stops = {round(steps * k / POINTS) for k in range(POINTS)}
    for number, (x, y) in zip(range(steps), shuffled(part, seed, 10**6), strict=False):
        if number in stops:
            yield number, model
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * number / steps)) / 2
        logits = model(x)
        if isinstance(optimizer, AdaHessian):
            optimizer.minimise(cross_entropy(logits, y))
            continue
        if method.every and number % method.every == 0:
            optimizer.update_fisher(logits)
        optimizer.zero_grad()
        cross_entropy(logits, y).backward()
        optimizer.step()
    yield steps, model


CLOCKS = {"cost": time.process_time, "wall-clock": time.perf_counter}


def costs(
    network: Callable[[], nn.Module], part: Split, turns: int = 15, steps: int = 20
) -> dict[str, dict[str, float]]:
    """Processor and wall-clock time of a step over those of SGD's: medians over turns."""
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in METHODS} for clock in CLOCKS}
    for turn in range(turns + 1):
        for name, method in METHODS.items():
            start = {clock: now() for clock, now in CLOCKS.items()}
            list(train(network, method, 1e-4, part, steps, 0))
            if turn:  # the first one warms up
                for clock, now in CLOCKS.items():
                    seconds[clock][name].append(now() - start[clock])
    medians = {clock: {n: statistics.median(v) for n, v in found.items()} for clock, found in seconds.items()}
    return {clock: {n: v / found["SGD, momentum"] for n, v in found.items()} for clock, found in medians.items()}


def final(network: Callable[[], nn.Module], method: Method, rate: float, part: Split, steps: int, seed: int) -> Any:
    *_, (_, model) = train(network, method, rate, part, steps, seed)
    return model


def study(network: Callable[[], nn.Module], seeds: int) -> dict[str, dict[str, Any]]:
    """Cost, steps, learning rate, and scores over seeds of each optimizer."""
    ratios = costs(network, digits(0, 1000, 300)[0])
    cost = ratios["cost"]
    found: dict[str, dict[str, Any]] = {}
    for name, method in METHODS.items():
        steps = round(STEPS / cost[name])

        def validation_loss(rate: float, method: Method = method, steps: int = steps) -> float:
            total = 0.0
            for seed in range(100, 100 + TUNING):
                training, validation, _ = digits(seed, 1000, 300)
                loss = mean_loss(final(network, method, rate, training, steps, seed), validation)
                total += loss if math.isfinite(loss) else math.inf
            return total

        rate = min(method.rates, key=validation_loss)
        curves, scored = [], []
        for seed in range(seeds):
            training, _, test = digits(seed, 1000, 300)
            curve = []
            for _, model in train(network, method, rate, training, steps, seed):
                curve.append(mean_loss(model, training))
            curves.append(curve)
            scored.append((curve[-1], mean_loss(model, test), accuracy(model, test)))
        paid = {clock: of[name] for clock, of in ratios.items()}
        found[name] = {**paid, "steps": steps, "rate": rate, "curves": curves, "scores": scored}
        edge = " (at the edge of its grid)" if rate in (method.rates[0], method.rates[-1]) else ""
        print(name, f"rate {rate:.3g}{edge}, training loss {statistics.fmean(s[0] for s in scored):.5f}", flush=True)
    return found


def figure(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write docs/images/uses-optimizers.png: training loss against cost."""
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(1, len(found), figsize=(6.5, 3.8), layout="constrained", squeeze=False)
    for axis, (network, by) in zip(axes[0], found.items(), strict=True):
        for number, (name, one) in enumerate(by.items()):
            mean = torch.tensor(one["curves"]).mean(0)
            at = torch.linspace(0, STEPS, len(mean))
            style = {"S": "-", "A": "-", "F": "--"}[name[0]]
            axis.plot(at, mean, style, color=f"C{number}", label=name, linewidth=1.3)
        axis.set_yscale("log")
        axis.set_title(network, fontsize=9)
        axis.set_xlabel("cost, in steps of SGD")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("training loss")
    axes[0][-1].legend(fontsize=7)
    drawing.savefig(IMAGES / "uses-optimizers.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    found, text = {}, f"1000 digits to train on in batches of 64, 300 to validate, 497 to test; {seeds} seeds, mean ± "
    text += f"standard error. Every optimizer has the cost of {STEPS} steps of SGD.\n\n"
    for name, network in NETWORKS.items():
        found[name] = study(network, seeds)
        rows = []
        for method, one in found[name].items():
            losses, tests, right = zip(*one["scores"], strict=True)
            row = [
                method,
                f"{one['cost']:.2f}",
                f"{one['wall-clock']:.2f}",
                str(one["steps"]),
                f"{one['rate']:.2g}",
                plus_minus(losses, 4),
            ]
            rows.append([*row, plus_minus(tests), plus_minus(right, 1, 100)])
        header = [
            "optimizer",
            "cost of a step",
            "wall-clock",
            "steps",
            "learning rate",
            "training loss",
            "test loss",
            "accuracy %",
        ]
        text += f"## {name}\n\n{table(header, rows)}\n\n"
    write("uses-optimizers", "Optimizers at equal cost", COMMAND, text.rstrip(), found)
    figure(found)


if __name__ == "__main__":
    main()
