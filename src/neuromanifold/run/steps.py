"""What is done with a window of batches, most often a single one: its passes, counting, and a look for mistakes."""

from __future__ import annotations

from functools import partial

from neuromanifold.estimators import Adaptive
from neuromanifold.persample.accumulate import DiagonalSums, GradientSums
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs
from neuromanifold.run.counts import Counts
from neuromanifold.run.dealing import Dealing, Window
from neuromanifold.run.graphs import CapturedSteps
from neuromanifold.run.methods import Method
from neuromanifold.run.settings import CudaGraphs
from neuromanifold.run.windows import AdaptiveSteps


class Steps:
    """Does windows: batch by batch, eagerly or as CUDA graphs; or all batches of a window together."""

    def __init__(
        self, method: Method, sums: GradientSums, counts: Counts, dealing: Dealing, cuda_graphs: CudaGraphs
    ) -> None:
        self._method, self._sums, self._counts, self._dealing = method, sums, counts, dealing
        captures = cuda_graphs is True or (cuda_graphs == "auto" and method.problem.device.type == "cuda")
        self._captured = CapturedSteps(method, sums, cuda_graphs) if captures else None
        adaptive = isinstance(method.settings.estimator, Adaptive)
        self._outputs_of = AdaptiveSteps(method, sums, counts) if adaptive else partial(map, self._one)
        self._inspected, self._left = method.passes > 0, method.left_to_autograd

    def __call__(self, window: Window) -> None:
        """Do the passes of all batches of a window, and count them."""
        if not window.items:
            return
        batches = [self._method.problem.read(item, number) for number, item in window.items]
        for batch, outputs in zip(batches, self._outputs_of(batches), strict=True):
            self._examine(batch, outputs)
            self._counts.add(outputs)
        self._counts.next = max(self._counts.next, window.end)
        self._counts.note(self._method)

    def synchronize(self) -> None:
        """Wait for what is still open, so that counts and sums are right."""
        if self._captured is not None:
            self._captured.synchronize()
        self._method.validation.flush()
        self._counts.note(self._method)
        self._counts.synchronize()

    def _one(self, batch: Batch) -> Outputs:
        """Do the passes of a single batch, and return its outputs without their activations."""
        if isinstance(self._sums, DiagonalSums):
            self._sums.begin_batch(self._dealing.index(batch.number), self._method.problem.samples_of(batch))
        outputs = self._captured(batch) if self._captured else self._method(batch, self._sums)
        self._sums.synchronize()
        return outputs.detached()

    def _examine(self, batch: Batch, outputs: Outputs) -> None:
        """Warn of what looks wrong, in the first batch and when parameters turn out to be slow; note noise."""
        problem, left, done = self._method.problem, self._method.left_to_autograd, self._counts.batches
        if (done & (done - 1) == 0 and not self._inspected) or left > self._left:  # 0, 1, 2, 4, ...: these are enough
            self._inspected = problem.inspect(batch, outputs)
        self._left = left
        index = self._dealing.index(batch.number)
        if index & (index - 1) == 0:
            core = problem.distributions(outputs, labels=False).core
            self._counts.add_noise_shares(self._method.settings.estimator.noise_shares(core))
            if isinstance(self._sums, DiagonalSums):
                self._sums.note_traces(outputs.per_sample(core.trace()))
