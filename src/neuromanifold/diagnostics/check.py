"""`nm.check`: every estimator against the exact diagonal, on the user's own model.

first: the first batches; does a second pass over the data give the same?
examine: how each parameter is done and why; does the model repeat itself, do samples leave each other alone?
affordable: how many passes would the exact diagonal take?  too many: fewer batches, fewer samples, or a good estimate
for each round:                                             interleaved, so that a busy machine is busy for all
    reference = diagonal of Exact()
    seconds of forward + ordinary backward over the batches
    for each estimator: its diagonal with a fresh seed: seconds, errors, coverage
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.diagnostics.check_result import Check
from neuromanifold.diagnostics.check_run import run_check
from neuromanifold.diagnostics.examination import first
from neuromanifold.diagnostics.runs import Runs, short_name
from neuromanifold.estimators import Estimator
from neuromanifold.problem.parameters import Selection
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.validation import Likelihood
from neuromanifold.run.granularity import choose_granularity


@torch.inference_mode(mode=False)
def check(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    batches: int = 4,
    seed: int = 0,
    estimators: Iterable[Estimator] | Mapping[str, Estimator] | None = None,
    progress: bool = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
) -> Check:
    """Compare the estimators with the exact diagonal on your own model and the first batches of your data.

    Prints as a table with a verdict in words, and notes: which parameters are done per sample or per batch and why, on
    how many batches that was verified against autograd, whether samples influence each other, whether outputs, labels
    and data are what they are taken for.  Nothing of the model is changed.

    Arguments as in `fisher_diagonal`.  Only the first `batches` of the data are used, in two passes unless `data` is a
    generator.  Round r draws from `seed` + r.  `estimators`: several, perhaps by name; by default all that the data
    allow.  `progress`: say on standard error what it will take, and show a progress bar.

    The exact diagonal takes C - 1 backward passes for each batch of C classes, times the number of output positions of
    a sample, times the number of samples where a parameter is not done per sample.  If that is more than 1000, fewer
    batches are used, then fewer samples; if nothing helps, `Hutchinson` with 64 probes stands in for it.
    """
    batches = integer_in_range(batches, "batches", 1, 10**9, "at least one")
    seed = integer_in_range(seed, "seed", 0, 2**62, "a seed")
    problem = Problem.of(model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key)
    asked = _asked(estimators)
    taken, note = first(problem, batches)
    return run_check(taken, asked, seed, progress, note)


def _asked(estimators: Iterable[Estimator] | Mapping[str, Estimator] | None) -> list[Runs] | None:
    """The caller's estimators, by name."""
    if estimators is None:
        return None
    if isinstance(estimators, Estimator) or not isinstance(estimators, Iterable):
        advice = "Put it into a list." if isinstance(estimators, Estimator) else ""
        raise TypeError(message("estimators", "several estimators, or None", repr(estimators), advice))
    pairs = estimators.items() if isinstance(estimators, Mapping) else ((None, one) for one in estimators)
    asked = []
    for name, one in pairs:
        choose_granularity(one, "auto")  # refuses what is no estimator
        asked.append(Runs(name or short_name(one), one))
    if not asked:
        raise ValueError(message("estimators", "at least one, or None for all", "none"))
    return asked
