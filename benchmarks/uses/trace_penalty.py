"""The trace penalty against weight decay and against nothing: digits, few images to train on.

    PYTHONPATH=src:benchmarks python -m uses.trace_penalty

A perceptron is trained with Adam for the same number of steps.  Each penalty has four strengths, of which the one
with the least validation loss, averaged over the seeds, is scored on the test images.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import table
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from uses.trained import IMAGES, Split, digits, perceptron, plus_minus, scores, seeded, shuffled, write

COMMAND = "PYTHONPATH=src:benchmarks python -m uses.trace_penalty"
STEPS = 250
STRENGTHS = {
    "none": [0.0],
    "weight decay": [0.01, 0.1, 1.0, 3.0],  # AdamW's, which the learning rate multiplies
    "trace penalty": [1e-4, 1e-3, 1e-2, 1e-1],
    "trace penalty, detached": [1e-4, 1e-3, 1e-2, 1e-1],
}


def run(kind: str, strength: float, seed: int) -> dict[str, float]:
    """Train one network; its scores, the trace that it ends with, and the processor time of a step in milliseconds."""
    training, validation, test = digits(seed, 200, 300)
    model = seeded(perceptron, seed)
    decay = strength if kind == "weight decay" else 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=decay)
    generator, start = torch.Generator().manual_seed(seed), time.process_time()
    for _, (x, y) in zip(range(STEPS), shuffled(training, seed, 10**6, 32), strict=False):
        logits = model(x)
        loss = cross_entropy(logits, y)
        if kind.startswith("trace"):
            detach = kind.endswith("detached")
            loss = loss + strength * nm.trace_penalty(model, logits, detach=detach, generator=generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        probs = {name: model(part.x).softmax(-1) for name, part in (("validation", validation), ("test", test))}
    scored = scores(probs["test"], test.y)
    trace = float(nm.fisher_trace(model, Split(training.x, training.y).batches()))
    chosen_by = scores(probs["validation"], validation.y).nll
    return {"validation": chosen_by, **scored._asdict(), "trace": trace, "milliseconds": 1000 * seconds / STEPS}


def figure(found: dict[str, dict[float, list[dict[str, float]]]]) -> None:
    """Write docs/images/uses-trace-penalty.png: test NLL against the trace of the trained network."""
    import matplotlib.pyplot as plt

    drawing, axis = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for kind, by in found.items():
        points = [[torch.tensor([one[key] for one in runs]) for runs in by.values()] for key in ("trace", "nll")]
        means = [[float(values.mean()) for values in side] for side in points]
        errors = [float(values.std() / len(values) ** 0.5) for values in points[1]]
        axis.errorbar(*means, yerr=errors, fmt="o-", markersize=4, linewidth=1, label=kind)
    axis.set_xscale("log")
    axis.set_xlabel("tr F per training image, at the end")
    axis.set_ylabel("test NLL")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    drawing.savefig(IMAGES / "uses-trace-penalty.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    found, rows = {}, []
    for kind, strengths in STRENGTHS.items():
        found[kind] = {s: [run(kind, s, seed) for seed in range(seeds)] for s in strengths}
        best = min(strengths, key=lambda s: statistics.fmean(one["validation"] for one in found[kind][s]))
        runs = found[kind][best]
        row = [kind, f"{best:g}"] + [plus_minus([one[key] for one in runs]) for key in ("nll",)]
        row += [plus_minus([one[key] for one in runs], 1, 100) for key in ("ece", "accuracy")]
        row += [plus_minus([one["trace"] for one in runs], 2), f"{min(one['milliseconds'] for one in runs):.1f}"]
        rows.append(row)
        print(row, flush=True)
    text = f"200 images to train on, 300 to validate, 1297 to test; {seeds} seeds, mean ± standard error; "
    text += f"{STEPS} steps.\n\n"
    header = ["penalty", "strength", "test NLL", "ECE %", "accuracy %", "tr F of training images", "ms a step"]
    write("uses-trace-penalty", "The trace penalty", COMMAND, text + table(header, rows), found)
    figure(found)


if __name__ == "__main__":
    main()
