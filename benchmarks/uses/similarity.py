"""Distances between tasks, against how well a network of one task does on the other.

    PYTHONPATH=src:benchmarks python -m uses.similarity            the distances
    PYTHONPATH=src:benchmarks python -m uses.similarity errors     how wide the bound on the probes' noise is

Ten tasks: the digits turned by 0, 10, ..., 90 degrees.  A reference network, trained on all of them, has a result for
each task, and each of the 45 pairs a distance.  Truth: a network is trained on each task alone; the loss of transfer is
1 - accuracy on the other task, mean of both directions.  What is compared is Spearman's correlation of the two.
"""

from __future__ import annotations

import argparse
import math
import statistics
from itertools import combinations

import torch
from common import table
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

import neuromanifold as nm
from neuromanifold.uses.similarity import TaskDistance
from uses.study import accuracy, batches, cell, digits, figure, mlp, progress, report, train

ANGLES = range(0, 100, 10)
SEEDS = range(6)
REPEATS, REPEATED = 30, range(3)
METRICS = ("cosine", "frechet", "task2vec")


def turned(images: Tensor, angle: float) -> Tensor:
    a = math.radians(angle)
    matrix = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
    grid = affine_grid(matrix.expand(len(images), 2, 3), [len(images), 1, 8, 8], align_corners=False)
    return grid_sample(images.view(-1, 1, 8, 8), grid, align_corners=False).flatten(1)


def study_errors() -> None:
    """Compare the spread of a distance over runs that differ in their probes alone with its standard errors."""
    ratios: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for seed in progress("seed", REPEATED):
        (x, y), _, _ = digits(seed)
        every = [turned(x, angle) for angle in ANGLES]
        reference = train(mlp(seed), torch.cat(every), y.repeat(len(ANGLES)), epochs=3, seed=seed)
        found: dict[str, list[TaskDistance]] = {metric: [] for metric in METRICS}
        for k in range(REPEATS):
            one, other = (nm.fisher_diagonal(reference, batches(every[i], y), seed=10 * k + i) for i in (0, 4))
            for metric in METRICS:
                found[metric].append(nm.task_distance(one, other, metric))
        for metric, many in found.items():
            spread = statistics.stdev(distance.value for distance in many)
            ratios[metric].append(statistics.fmean(distance.stderr for distance in many) / spread)
    text = (
        "# Task similarity: the bound on the probes' noise\n\nStandard error over the spread of the distance of 0 and "
    )
    text += f"40 degrees in {REPEATS} runs that differ in their probes, {len(REPEATED)} networks.\n\n"
    rows = [[metric, *(f"{ratio:.1f}" for ratio in found)] for metric, found in ratios.items()]
    report("similarity-errors", text + table(["distance", *(f"seed {k}" for k in REPEATED)], rows), ratios)


def spearman(a: list[float], b: list[float]) -> float:
    ranks = torch.stack([torch.tensor(one).argsort().argsort().double() for one in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="distances", choices=["distances", "errors"])
    torch.set_num_threads(1)
    if parser.parse_args().what == "errors":
        study_errors()
        return
    pairs = list(combinations(range(len(ANGLES)), 2))
    correlations: dict[str, list[float]] = {name: [] for name in (*METRICS, "mean features", "empirical, cosine")}
    shown, errors = [], []
    for seed in progress("seed", SEEDS):
        (x, y), _, (tests, labels) = digits(seed)
        every = [turned(x, angle) for angle in ANGLES]
        reference = train(mlp(seed), torch.cat(every), y.repeat(len(ANGLES)), epochs=3, seed=seed)
        alone = [train(mlp(seed), images, y, epochs=15, seed=seed) for images in every]
        right = [[accuracy(model, turned(tests, angle), labels) for angle in ANGLES] for model in alone]
        truth = [1 - (right[i][j] + right[j][i]) / 2 for i, j in pairs]
        fims = [nm.fisher_diagonal(reference, batches(images, y), seed=i) for i, images in enumerate(every)]
        labelled = [nm.fisher_diagonal(reference, batches(images, y), nm.Empirical()) for images in every]
        with torch.no_grad():
            features = [reference[:-1](images).mean(0) for images in every]
        for metric in METRICS:
            found = [nm.task_distance(fims[i], fims[j], metric) for i, j in pairs]
            correlations[metric].append(spearman([one.value for one in found], truth))
            if seed == 0 and metric == "cosine":
                shown = [
                    (float(ANGLES[j] - ANGLES[i]), one.value, t)
                    for (i, j), one, t in zip(pairs, found, truth, strict=True)
                ]
        found = [nm.task_distance(labelled[i], labelled[j]) for i, j in pairs]
        correlations["empirical, cosine"].append(spearman([one.value for one in found], truth))
        by_features = [1 - float(torch.cosine_similarity(features[i], features[j], 0)) for i, j in pairs]
        correlations["mean features"].append(spearman(by_features, truth))
        parts = [[nm.fisher_diagonal(reference, batches(a, b), seed=5 * i + k) for k, (a, b) in
                  enumerate(zip(every[i].chunk(5), y.chunk(5), strict=True))] for i in (0, 4)]  # fmt: skip
        both = nm.task_distance(fims[0], fims[4]), nm.task_distance(*parts)
        errors.append([str(seed), *(f"{one.value:.4f} ± {one.stderr:.4f}" for one in both)])
    rows = [[name, cell(values)] for name, values in correlations.items()]
    text = "# Task similarity: turned digits\n\nSpearman's correlation of distance and loss of transfer over "
    text += f"{len(pairs)} pairs of tasks, mean of {len(SEEDS)} seeds ± standard error.\n\n"
    text += table(["distance", "correlation"], rows)
    text += "\n\n## Cosine distance of 0 and 40 degrees\n\n"
    header = ["seed", "± probes' noise, at most", "in five parts: ± data and probes"]
    report("similarity", text + table(header, errors), {"correlations": correlations, "pairs": shown})

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        angles, distances, losses = zip(*shown, strict=True)
        axes[0].scatter(angles, distances, s=9)
        axes[0].set(xlabel="angle between tasks, degrees", ylabel="cosine distance")
        axes[1].scatter(distances, [100 * one for one in losses], s=9)
        axes[1].set(xlabel="cosine distance", ylabel="loss of transfer, %")

    figure("similarity", 2, draw)


if __name__ == "__main__":
    main()
