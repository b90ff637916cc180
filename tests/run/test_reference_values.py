"""Same seeds, same numbers: sums and error bars of every problem and estimator, as before the engine was rewritten.

`reference_values.json` has for each run the number of samples and positions, Σ v and Σ v cos k of all entries v of the
diagonal and of its standard errors, and how many parameters were done by which method.

Younger are: `Hutchinson(2) | auto` of CNN with BatchNorm, depthwise conv, tied embeddings and nested dict inputs, where
the leading eigenvector has one of two passes, the other independent signs along all axes, and error bars the predicted
noise of the first; and `auto` of sequences (GPT-2; time first, tokens), whose last layers are squared per token.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from tests.problems.architectures import ARCHITECTURES
from tests.problems.networks import PROBLEMS

VALUES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("reference_values.json").read_text())
ALL = {**PROBLEMS, **ARCHITECTURES}


def digest(tensors: dict[str, Tensor]) -> list[float]:
    values = torch.cat([t.double().flatten() for t in tensors.values()])
    return [float(values.sum()), float(values @ torch.cos(torch.arange(len(values), dtype=torch.float64)))]


NAMES = sorted({key.split(" | ")[0] for key in VALUES})


@pytest.mark.parametrize(
    ("name", "every"),
    [*((name, 4) for name in NAMES), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in NAMES)],
)
def test_the_same_seed_gives_the_same_numbers(name: str, every: int) -> None:
    """Each fourth run of a model, beginning with another one for each: all estimators, on a quarter of the models."""
    problem, first = ALL[name], NAMES.index(name) % every
    for key in [key for key in VALUES if key.split(" | ")[0] == name][first::every]:
        expected, (_, estimator, granularity) = VALUES[key], key.split(" | ")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nm.SlowPathWarning)
            found = nm.fisher_diagonal(
                problem.model,
                problem.data,
                eval(f"nm.{estimator}"),
                problem.likelihood,
                granularity=granularity,
                reduction="sum",
                seed=3,
                **problem.options,
            )
        methods = list(found.provenance.granularity.values())
        assert {method: methods.count(method) for method in methods} == expected["methods"], key
        assert (found.count, found.positions) == (expected["count"], expected["positions"]), key
        for tensors, kind in ((found.sums, "sums"), (found.noise, "noise")):
            size = abs(expected[kind][0])
            assert digest(tensors) == pytest.approx(expected[kind], rel=1e-6, abs=1e-6 * size + 1e-12), (key, kind)
