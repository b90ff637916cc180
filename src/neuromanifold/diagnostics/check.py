"""`nm.check`: every estimator against the exact diagonal, on the user's own model.

look: one forward pass for each batch; does the model repeat itself, do samples leave each other alone?
forecast: how many passes would the exact diagonal take?  too many: fewer batches, fewer samples, or a good estimate
reference = fisher_diagonal(Exact())
for each round:                                             interleaved, so that a busy machine is busy for all
    seconds of forward + ordinary backward over the batches
    for each estimator: fisher_diagonal(estimator, a fresh seed): seconds, errors, coverage
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from torch import nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.diagnostics.check_result import Check
from neuromanifold.diagnostics.check_run import Run
from neuromanifold.diagnostics.trials import Trial, short_name
from neuromanifold.estimators import Estimator
from neuromanifold.problem.batches import model_device, read_batch
from neuromanifold.problem.parameters import Selection, select_parameters
from neuromanifold.problem.problem import _check_data as check_data
from neuromanifold.problem.unchanged import unchanged
from neuromanifold.problem.validation import Likelihood
from neuromanifold.run.granularity import choose_granularity


def check(
    model: nn.Module,
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
) -> Check:
    """Compare the estimators with the exact diagonal on your own model and the first batches of your data.

    Prints as a table with a verdict in words.  Arguments as in `fisher_diagonal`, and:

    Args:
        model: nothing of it is changed.
        data: only the first batches are used.
        likelihood: what the outputs mean.
        parameters: which.
        batches: how many batches to use.
        seed: of the noise; round r draws from `seed` + r.
        estimators: which to compare, perhaps by name; by default all that the data allow.
        progress: say on standard error what it will take, and how far it is.
        class_dim: as in `fisher_diagonal`.
        batch_dim: as in `fisher_diagonal`.
        ignore_index: as in `fisher_diagonal`.

    The exact diagonal takes C - 1 backward passes for each batch of C classes, times the number of output positions of
    a sample, times the number of samples where a parameter has no rule.  If that is more than 1000, fewer batches are
    used, then fewer samples; if nothing helps, `Hutchinson` with 64 probes stands in for it.  Notes say what was done.
    """
    batches = integer_in_range(batches, "batches", 1, 10**9, "at least one")
    seed = integer_in_range(seed, "seed", 0, 2**62, "a seed")
    if not callable(likelihood):
        expected = "nm.Categorical, nm.Bernoulli, nm.Gaussian, or a function from outputs to one of them"
        raise TypeError(message("likelihood", expected, repr(likelihood)))
    parameters = (
        parameters if parameters is None or callable(parameters) or isinstance(parameters, str) else list(parameters)
    )
    chosen, asked = select_parameters(model, parameters), _asked(estimators)
    check_data(data)
    with unchanged(model):
        items = [read_batch(item, i).to(model_device(model)) for i, item in enumerate(islice(data, batches))]
    if not items:
        advice = "A generator can be used up only once; pass a list or a DataLoader."
        raise ValueError(message("data", "an iterable with at least one batch", "an empty one", advice))
    run = Run(model, chosen, likelihood, parameters, class_dim, batch_dim, ignore_index, seed, progress)
    return run.check(items, asked)


def _asked(estimators: Iterable[Estimator] | Mapping[str, Estimator] | None) -> list[Trial] | None:
    """The caller's estimators, by name."""
    if estimators is None:
        return None
    if isinstance(estimators, Estimator) or not isinstance(estimators, Iterable):
        advice = "Put it into a list." if isinstance(estimators, Estimator) else ""
        raise TypeError(message("estimators", "several estimators, or None", repr(estimators), advice))
    pairs = estimators.items() if isinstance(estimators, Mapping) else ((None, one) for one in estimators)
    trials = []
    for name, one in pairs:
        choose_granularity(one, "auto")  # refuses what is no estimator
        trials.append(Trial(name or short_name(one), one))
    if not trials:
        raise ValueError(message("estimators", "at least one, or None for all", "none"))
    return trials
