"""Kronecker-preconditioned gradients beside SGD with momentum and Adam, by steps and by processor time, on digits.

    PYTHONPATH=src:benchmarks python -m uses.preconditioner

A perceptron on 1,000 digits in batches of 64.  The learning rate of each method is the best of five for the loss on
validation images after all steps; scores are those of the test images.  The first methods have as many steps each, the
last two as much processor time as the preconditioned run took, by more steps.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import torch
from common import table
from torch import Tensor
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from uses.trained import Split, accuracy, digits, mean_loss, perceptron, plus_minus, seeded, shuffled, write

COMMAND = "PYTHONPATH=src:benchmarks python -m uses.preconditioner"
STEPS, EVERY = 150, 10
RATES = {
    "SGD": (0.01, 0.03, 0.1, 0.3, 1.0),
    "Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "Kronecker": (0.003, 0.01, 0.03, 0.1, 0.3),
}


class Run(NamedTuple):
    """Mean losses and accuracy after a run, and its processor time in seconds."""

    training: float
    validation: float
    test: float
    accuracy: float
    seconds: float


def batches(part: Split, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(shuffled(part, seed, 10**6))


def run(method: str, rate: float, steps: int, seed: int, parts: tuple[Split, Split, Split]) -> Run:
    """Train from the seed's initial weights."""
    model = seeded(perceptron, seed)
    kronecker = method == "Kronecker"
    sgd = torch.optim.SGD(model.parameters(), rate, momentum=0.0 if kronecker else 0.9)
    optimiser = torch.optim.Adam(model.parameters(), rate) if method == "Adam" else sgd
    preconditioner = nm.KroneckerPreconditioner(model, damping=1e-2, every=EVERY) if kronecker else None
    begin = time.process_time()
    for x, y in islice(batches(parts[0], seed), steps):
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        if preconditioner is not None:
            preconditioner.step((x, y))
        optimiser.step()
    seconds = time.process_time() - begin
    return Run(*(mean_loss(model, part) for part in parts), accuracy(model, parts[2]), seconds)


def best(method: str, steps: int, seed: int, parts: tuple[Split, Split, Split]) -> Run:
    """The run of the learning rate with the least validation loss."""
    runs = []
    for rate in RATES[method]:
        with suppress(ValueError):  # logits are no numbers any more
            runs.append(run(method, rate, steps, seed, parts))
    return min((one for one in runs if math.isfinite(one.validation)), key=lambda one: one.validation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[Run]] = {}
    more = 0
    for seed in range(given.seeds):
        parts = digits(seed, 1000, 300)
        runs = {method: best(method, STEPS, seed, parts) for method in RATES}
        more = more or round(STEPS * runs["Kronecker"].seconds / runs["SGD"].seconds)  # the same for all seeds
        for method, one in runs.items():
            found.setdefault(f"{method}, {STEPS} steps", []).append(one)
        for method in ("SGD", "Adam"):
            found.setdefault(f"{method}, {more} steps", []).append(best(method, more, seed, parts))
        print(seed, {name: round(some[-1].test, 3) for name, some in found.items()}, flush=True)
    header = ["method", "training loss", "test loss", "test accuracy %", "seconds"]
    rows = [
        [
            *(name, plus_minus([one.training for one in some], 4), plus_minus([one.test for one in some])),
            *(plus_minus([one.accuracy for one in some], 1, 100), plus_minus([one.seconds for one in some], 2)),
        ]
        for name, some in found.items()
    ]
    text = (
        f"A perceptron on 1,000 digits, batches of 64; {given.seeds} seeds, mean ± standard error. SGD has a momentum "
    )
    text += (
        f"of 0.9, preconditioned gradients have none. F anew every {EVERY} steps, damping 0.01. Learning rates: the "
    )
    text += "best of five on 300 validation images. Seconds: processor time of one run.\n\n"
    numbers = {name: [one._asdict() for one in some] for name, some in found.items()}
    write("uses-preconditioner", "Preconditioned gradients", COMMAND, text + table(header, rows), numbers)


if __name__ == "__main__":
    main()
