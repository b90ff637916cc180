"""The bounds along a training on digits: the numbers of docs/concepts/bounds.md and of its figure."""

import sys
from pathlib import Path

import torch
from common import keep, setting, table

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs.figures.bounds import along_training

from neuromanifold.bounds.run import fisher_bounds
from neuromanifold.experiments.digits import train_digits


def main() -> None:
    """Print the bounds over tr F after some epochs, and write them to benchmarks/results/bounds-training.md."""
    data = train_digits(192, epochs=0).batches
    moments = along_training(lambda epochs: train_digits(192, epochs=epochs).model, [0, 1, 2, 4, 8, 16], data)
    rows, owner = [], ""
    for number, first in enumerate(moments[0].bounds.rows):
        owner = owner if first.statement.startswith(" ") else first.statement
        for moment in moments:
            row = moment.bounds.rows[number]
            values = ["-" if value is None else f"{value / moment.bounds.rows[0].actual:.4g}" for value in row[2:5]]
            rows.append(
                [owner if first.statement == owner else f"{owner},{first.statement}", str(moment.step), *values]
            )
    two = fisher_bounds(train_digits(192, epochs=16).model, data, rank=2, diagonals=False).rows[0]
    rows.append([two.statement, "16", *[f"{value / two.actual:.4g}" for value in two[2:5]]])
    text = f"""# Bounds along a training

{setting("python benchmarks/bounds_training.py", torch.device("cpu"))}

The library's network on 192 digits, after so many epochs; everything over tr F.

{table(["statement", "epochs", "lower", "actual", "upper"], rows)}
"""
    keep("bounds-training", text)


if __name__ == "__main__":
    main()
