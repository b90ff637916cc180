"""What is done with one batch: squares of each sample's gradient, Σ_x (Jᵀu(x))², or of whole batches' gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import warn
from neuromanifold.estimators import Adaptive, Estimator, Exact
from neuromanifold.persample.accumulate import GradientSums, Pass
from neuromanifold.persample.backward import BatchBackward, HalfPrecisionScale, PerSampleBackward
from neuromanifold.persample.engine import Again, PerSampleGradients
from neuromanifold.persample.shards import Shards
from neuromanifold.problem.batches import Batch, dtypes_in_use
from neuromanifold.problem.cotangents import Cotangent, batch_seed, by_position, by_sample, cotangents
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.unchanged import CarriedState, model_states
from neuromanifold.run.settings import Settings


class SlowPathWarning(UserWarning):
    """Some parameters take one backward pass for each sample: the result is right, but slow.

    It is raised for `nm.Exact`, `nm.Empirical` and `granularity="sample"`, where the message names parameters without a
    per-sample rule.  Use `nm.Hutchinson()`, leave these parameters out, or add a rule (`nm.rule`).
    """


class Method(ABC):
    """How gradients are squared, per sample or per batch: a forward pass, and a backward pass for each cotangent.

    The noise of a batch depends on the seed and the batch's number alone.
    """

    passes = 0
    """Backward passes so far."""
    verified = 0
    """Batches whose per-sample gradients were verified against autograd."""
    left_to_autograd = 0
    """Parameters whose per-sample gradients were found to be wrong, or that have none."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self.problem, self.settings = problem, settings
        self.generator = torch.Generator(problem.device)
        self.validation = problem.validation()

    def again(self, settings: Settings) -> Method:
        """Return the method for another run of the same problem, with all that is known of the model."""
        other = copy(self)
        other.settings, other.validation = settings, self.problem.validation()
        return other

    def __call__(self, batch: Batch, sums: GradientSums) -> Outputs:
        """Run forward and backward for a batch, and accumulate its squares."""
        outputs = self.forward(batch)
        self.complete(batch, outputs, sums)
        return outputs

    def complete(self, batch: Batch, outputs: Outputs, sums: GradientSums, estimator: Estimator | None = None) -> None:
        """Run the backward passes of a batch and end it, after its forward pass."""
        self.seed(batch.number)
        self.backward(outputs, sums, estimator)
        self.end_batch(batch)

    def seed(self, number: int) -> None:
        """Set the generator to the noise of batch `number`."""
        self.generator.manual_seed(batch_seed(self.settings.seed, number))

    def cotangents(self, outputs: Outputs, estimator: Estimator | None = None) -> Iterator[Cotangent]:
        """Draw all cotangents of an estimator; without one, of that of the run."""
        return cotangents(outputs, estimator or self.settings.estimator, self.generator, self.validation)

    def backward(self, outputs: Outputs, sums: GradientSums, estimator: Estimator | None = None) -> None:
        """Send all cotangents of an estimator back, and accumulate the squares of their gradients."""
        self.send(outputs, self.cotangents(outputs, estimator), sums)

    def send(self, outputs: Outputs, drawn: Iterator[Cotangent], sums: GradientSums) -> None:
        """Send cotangents back, and accumulate the squares of their gradients."""
        self._add(outputs, drawn, sums)
        sums.end_batch()

    def end_batch(self, batch: Batch) -> None:
        """Release a batch whose passes are done, and verify what could not be verified before."""
        self.release()
        self.verify_late(batch)

    @property
    def must_run_eagerly(self) -> bool:
        """Whether the next batch cannot be replayed from a CUDA graph: it is verified, or its values are read."""
        return False

    @property
    def verifies_every_batch(self) -> bool:
        """Whether all further batches have to be verified."""
        return False

    @abstractmethod
    def forward(self, batch: Batch) -> Outputs:
        """Run the model on a batch."""

    @abstractmethod
    def _add(self, outputs: Outputs, drawn: Iterator[Cotangent], sums: GradientSums) -> None:
        """Send cotangents of the last forward pass back, and hand their gradients to an accumulator."""

    @abstractmethod
    def methods(self) -> list[str]:
        """Return how each parameter was done: "sample", "token", "batch", or "sample, one by one"."""

    def attached(self) -> AbstractContextManager[None]:
        """Prepare the model, such as with hooks, while inside, and restore it."""
        return nullcontext()

    def release(self) -> None:  # noqa: B027 (nothing to do for most)
        """Release what is kept of the batch."""

    def verify_late(self, batch: Batch) -> None:
        """Verify gradients of this batch that the verification of an earlier one has not seen, if there are any."""
        del batch

    def state(self) -> dict[str, Any]:
        """Return all that the rest of a run depends on, as JSON can hold it."""
        return {"passes": self.passes}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, in this process or in another."""
        self.passes = state["passes"]


class PerBatch(Method):
    """(Σ_x Jᵀu(x))² by one ordinary backward pass, for any module."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        super().__init__(problem, settings)
        half = torch.float16 in dtypes_in_use(problem.model.parameters(), problem.device)
        self._backward = BatchBackward(list(problem.parameters.values()), half)

    @override
    def forward(self, batch: Batch) -> Outputs:
        return self.problem.evaluate(batch, self.settings.estimator)

    @override
    def _add(self, outputs: Outputs, drawn: Iterator[Cotangent], sums: GradientSums) -> None:
        for cotangent in drawn:
            gradients, scale = self._backward(outputs.logits, cotangent.values, keep_graph=cotangent.to_come > 1)
            sums.add(gradients, Pass(scale, cotangent.noise_factors))
            sums.end_pass()
            self.passes += 1

    @override
    def methods(self) -> list[str]:
        return ["batch"] * len(self.problem.parameters)

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "exponent": self._backward.scale.exponent}

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._backward.scale.exponent = state["exponent"]


class PerSample(Method):
    """Σ_x (Jᵀu(x))² for the parameters whose per-sample gradients are verified.

    The others: the square of the same backward pass's gradient of the whole batch, where the probe is centred and
    `granularity` is "auto"; else one backward pass for each sample, with one warning that names them.
    """

    def __init__(
        self, problem: Problem, settings: Settings, *, tokens: bool = False, shards: Shards | None = None
    ) -> None:
        """`tokens`: the accumulator takes squares of single tokens, too, where the estimator's are independent.

        `shards`: those of a model that is divided among processes (`lockstep/`).
        """
        super().__init__(problem, settings)
        estimator, granularity = settings.estimator, settings.granularity
        tokens = tokens and granularity == "auto" and _independent_tokens(estimator)
        parameters = problem.parameters
        self.engine = PerSampleGradients(problem.model, parameters, problem.batch_dim, tokens=tokens, shards=shards)
        self._scale = HalfPrecisionScale(torch.float16 in dtypes_in_use(problem.model.parameters(), problem.device))
        # Exact columns have no random signs: in the square of their sum over positions, cross terms would not vanish.
        self._needs_pass_per_position = isinstance(estimator, Exact)
        self._remaining_per_batch = estimator.centred and granularity == "auto"
        """Whether the gradient of the batch is squared for parameters without per-sample gradients; else each sample
        has a backward pass of its own for them."""
        self._carried = CarriedState(problem.model)
        self.captured: PerSampleBackward | None = None
        """The last forward pass, captured, ready to be differentiated; None once it is released."""
        self._warned: set[int] = set()  # parameters that a warning about slow passes has named

    @property
    @override
    def verified(self) -> int:  # type: ignore[override]
        return self.engine.findings.verified

    @property
    @override
    def left_to_autograd(self) -> int:  # type: ignore[override]
        return len(self.engine.findings.excluded)

    @property
    @override
    def must_run_eagerly(self) -> bool:
        return self.engine.must_verify() or self.engine.findings.follows_values

    @property
    @override
    def verifies_every_batch(self) -> bool:
        return self.engine.findings.every_batch

    @override
    def attached(self) -> AbstractContextManager[None]:
        return self.engine.attached()

    @override
    def forward(self, batch: Batch, *, verify: bool = False) -> Outputs:
        """Run the model with hooks, and verify if that is due, or asked for.

        The forward pass is repeated until all parameters that are captured have per-sample gradients that pass the
        verification.  All forward passes of a batch begin with the same random states, buffers and attributes, so that
        noise inside of a model is no difference, and a model that carries a state from batch to batch does so once for
        each batch.  A model that fails with hooks, and not without, is left to autograd.
        """
        engine, carried, estimator = self.engine, self._carried, self.settings.estimator
        restore, reference = carried.snapshot() if carried.found else None, None
        engine.release()
        verify = engine.must_verify(verify)
        while True:
            if verify and reference is None:
                restore = restore or carried.snapshot()
                reference = engine.reference(self.problem.evaluate(batch, estimator).logits)
                restore()
            try:
                with engine.capturing():
                    outputs = self.problem.evaluate(batch, estimator)
            except Exception:
                if reference is None or engine.excludes_all:
                    raise
                engine.exclude_all()
            else:
                found = engine.backward_of(outputs.logits, reference)
                if not isinstance(found, Again):
                    break
                verify = verify or found is Again.UNVERIFIED
            if restore is not None:
                restore()
        self.captured = found
        if not self._remaining_per_batch:
            self._warn_if_slow()
        return outputs

    def _add(self, outputs: Outputs, drawn: Iterator[Cotangent], sums: GradientSums) -> None:
        """Send several cotangents back in one vectorised pass where they are small and the model allows it."""
        logits, backward = outputs.logits, self.captured
        assert backward is not None
        if not len(logits):
            return  # an empty batch, of which nothing can be learnt
        per_position = self._pass_per_position(backward)
        single = (per_position and logits.ndim > 2) or bool(backward.uses.remaining) or self._scale.is_needed(logits)
        while group := list(islice(drawn, 1)):
            at_once = 1 if single else backward.how_many_at_once(logits, group[0].to_come)
            if at_once > 1 and self.engine.vectorizes(backward, logits):
                group.extend(islice(drawn, at_once - 1))
                made_by = [self._pass(one, 1.0, more=True) for one in group]
                backward.to_uses(logits, [one.values for one in group], [sums] * len(group), made_by)
                self.passes += len(group)
            else:
                self._add_one(outputs, group[0], sums, backward, per_position)

    @override
    def release(self) -> None:
        self.captured = None
        self.engine.end_batch()

    @override
    def verify_late(self, batch: Batch) -> None:
        if self.engine.came_late:
            restore = model_states(self.problem.model)
            self.forward(batch, verify=True)
            self.captured = None
            self.engine.release()
            restore()

    @override
    def methods(self) -> list[str]:
        return self.engine.methods("batch" if self._remaining_per_batch else "sample, one by one")

    @override
    def state(self) -> dict[str, Any]:
        return super().state() | {"engine": self.engine.findings.state(), "exponent": self._scale.exponent}

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.engine.findings.set_state(state["engine"], self.problem.device)
        self._scale.exponent = state["exponent"]

    def _add_one(
        self,
        outputs: Outputs,
        cotangent: Cotangent,
        sums: GradientSums,
        backward: PerSampleBackward,
        per_position: bool,
    ) -> None:
        """Send one cotangent back: in one pass, or in one pass for each position.

        Parameters without per-sample gradients get the square of the batch's gradient from the same pass, or one pass
        for each sample.
        """
        logits, remaining = outputs.logits, backward.uses.remaining
        one_by_one = [] if self._remaining_per_batch else remaining
        pieces = by_position(cotangent.values, outputs.valid) if per_position else iter([cotangent.values])
        for piece in pieces:
            keep = cotangent.to_come > 1 or per_position or bool(one_by_one)
            scale = self.scale_of(logits, [piece], backward)
            made_by, values = self._pass(cotangent, scale), piece if scale == 1.0 else piece * scale
            sent = values.clone() if one_by_one else values  # a backward that works in place would change it
            gradients = backward(logits, sent, sums, made_by, keep_graph=keep)
            if self._remaining_per_batch and remaining:
                sums.add(gradients, made_by)
            for single in by_sample(values) if one_by_one else ():
                sums.add(backward.remaining_gradients(logits, single, one_by_one), made_by.of_one_sample)
                self.passes += 1
            sums.end_pass()
            self.passes += 1

    def _pass_per_position(self, backward: PerSampleBackward) -> bool:
        """Whether each position needs a pass of its own: not if all parameters are squared per token anyway."""
        return self._needs_pass_per_position and not backward.all_by_token

    def _pass(self, cotangent: Cotangent, scale: float, more: bool = False) -> Pass:
        """Describe the backward pass of a cotangent, multiplied by `scale`, to the accumulator."""
        more, independent = more or cotangent.to_come > 1, self.settings.estimator.independent_passes
        return Pass(scale, cotangent.noise_factors, independent, more, cotangent.weights)

    def scale_of(self, logits: Tensor, drawn: Iterable[Tensor], backward: PerSampleBackward) -> float:
        """Return a scale by which no gradient of these cotangents overflows in float16; 1 without float16."""
        if not self._scale.is_needed(logits):
            return 1.0

        def attempt(scaled: Tensor, checked: bool) -> bool | None:
            return True if not checked or backward.is_finite(logits, scaled) else None

        return min(self._scale.fit(logits, one, attempt)[1] for one in drawn)

    def _warn_if_slow(self) -> None:
        remaining = self.engine.findings.remaining
        if remaining <= self._warned:
            return
        new = [self.engine.names[i] for i in sorted(remaining - self._warned)]
        self._warned |= remaining
        shown = ", ".join(new[:8]) + (f" and {len(new) - 8} more" if len(new) > 8 else "")
        text = f"No per-sample rule covers {shown}: these take one backward pass for each sample, which is exact but "
        text += (
            "slow. Leave them out with `parameters`, write a rule (nm.rule), or use an estimator with random probes."
        )
        warn(text, SlowPathWarning)


def _independent_tokens(estimator: Estimator) -> bool:
    """Whether the squares of a sequence's tokens have the same mean as that of their sum, and independent noise.

    Given labels are not centred, and adaptive passes keep or drop the tokens of a sequence together.
    """
    return isinstance(estimator, Exact) or (estimator.centred and not isinstance(estimator, Adaptive))


def make_method(problem: Problem, settings: Settings, *, tokens: bool = False) -> Method:
    """Return the method for a granularity: whole batches only if asked for."""
    if settings.granularity == "batch":
        return PerBatch(problem, settings)
    return PerSample(problem, settings, tokens=tokens)
