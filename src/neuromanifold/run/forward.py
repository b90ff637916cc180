"""One forward pass whose per-sample gradients are verified where that is due."""

from __future__ import annotations

from collections.abc import Callable

from neuromanifold.estimators import Estimator
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.engine import PerSampleGradients
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.unchanged import model_states


def captured_forward(
    problem: Problem, batch: Batch, engine: PerSampleGradients, estimator: Estimator | None = None
) -> tuple[Outputs, PerSampleBackward]:
    """Run the model until it is clear which of its parameters can be done per sample.

    All forward passes of a batch begin with the same random states, buffers and attributes, so that noise inside of a
    model is no difference, and a model that carries a state from batch to batch does so once for each batch.
    A model that fails with hooks, and not without, is left to autograd.
    """
    restore: Callable[[], bool] | None = model_states(problem.model) if engine.carries_state else None
    reference = None
    engine.release()
    while True:
        if engine.needs_reference and reference is None:
            restore = restore or model_states(problem.model)
            outputs = problem.evaluate(batch, estimator)
            reference = engine.reference(outputs.logits)
            del outputs
            engine.carries_state |= restore()
        try:
            with engine.capturing():
                outputs = problem.evaluate(batch, estimator)
        except Exception:
            if reference is None or len(engine.excluded) == len(engine.parameters):
                raise
            engine.exclude_all()
        else:
            backward = engine.plan(outputs.logits, reference)
            if backward is not None:
                return outputs, backward
        if restore is not None:
            restore()
