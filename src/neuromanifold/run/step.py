"""What is done with one batch: one forward pass, and for each cotangent a backward pass whose squares are added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuromanifold.core.checks import random_seed
from neuromanifold.estimators import Estimator
from neuromanifold.persample.accumulate import DiagonalSums, GradientSums
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.cotangents import batch_seed, cotangents, weighted
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.run.methods import Granularity, Method, choose_granularity, make_method


@dataclass(frozen=True)
class Settings:
    """How a problem is estimated."""

    estimator: Estimator
    granularity: Granularity = "auto"
    seed: int = 0

    @classmethod
    def of(cls, estimator: Estimator, granularity: str, seed: int) -> Settings:
        """Check the arguments; probes that are squared by whole batches are independent."""
        seed = random_seed(seed)
        level = choose_granularity(estimator, granularity)
        return cls(estimator.for_batches() if level == "batch" else estimator, level, seed)

    @property
    def window(self) -> int:
        """How many batches are taken together."""
        return self.estimator.window


class Step:
    """Forward and backward passes for a batch, whose noise depends on the seed and the batch's number alone."""

    def __init__(self, problem: Problem, settings: Settings, sums: GradientSums, method: Method | None = None) -> None:
        """`method`: that of an earlier run of the same problem, with what it knows of the model."""
        self.problem, self.settings, self.sums = problem, settings, sums
        self.generator = torch.Generator(problem.device)
        self.validation = problem.validation()
        tokens = isinstance(sums, DiagonalSums)  # others keep one gradient for each sample
        self.method = method or make_method(problem, settings.estimator, settings.granularity, tokens=tokens)

    def __call__(self, batch: Batch) -> Outputs:
        """Run forward and backward for a batch, and accumulate its squares."""
        outputs = self.forward(batch)
        self.complete(batch, outputs)
        return outputs

    def complete(self, batch: Batch, outputs: Outputs, estimator: Estimator | None = None) -> None:
        """Do all that comes after the forward pass of a batch."""
        self.seed(batch.number)
        self.backward(outputs, estimator)
        self.end_batch(batch)

    def end_batch(self, batch: Batch) -> None:
        """Release a batch whose passes are done, and verify what could not be verified before."""
        self.method.end_batch()
        self.method.verify_late(batch)

    def synchronize(self) -> None:
        """Do nothing: a step that runs eagerly leaves no work behind."""

    def seed(self, number: int) -> None:
        """Set the generator to the noise of batch `number`."""
        self.generator.manual_seed(batch_seed(self.settings.seed, number))

    def forward(self, batch: Batch) -> Outputs:
        """Run the model on a batch, as often as its method needs."""
        return self.method.forward(batch)

    def backward(
        self,
        outputs: Outputs,
        estimator: Estimator | None = None,
        keep: Tensor | None = None,
        mean_keep: float = 1.0,
    ) -> None:
        """Send all cotangents of an estimator back; of samples that were kept at random, as `weighted` does."""
        drawn = cotangents(outputs, estimator or self.settings.estimator, self.generator, self.validation)
        self.method.add(outputs, drawn if keep is None else weighted(drawn, keep, mean_keep), self.sums)
        self.sums.end_batch()
