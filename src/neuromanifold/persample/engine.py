"""Per-sample gradients of one model, one forward pass after the other.

engine = PerSampleGradients(model, parameters)
with engine.attached():
    for batch in data:
        while True:
            if engine.needs_reference:                      first batch, a new kind of graph, and now and then
                reference = engine.reference(model(batch))  ordinary autograd, no hooks
            with engine.capturing():
                logits = model(batch)
            backward = engine.backward_of(logits, reference)
            if backward is not None:                        else forward has to be repeated
                break
        backward(logits, cotangent, accumulator, ...)       one backward pass (backward.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import warn
from neuromanifold.kernels import dispatch
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.hooks import Hooks
from neuromanifold.persample.plan import Key, Plan, Uses, discover
from neuromanifold.persample.shards import Shards
from neuromanifold.persample.tokens import token_uses
from neuromanifold.persample.verify import Reference, Verification, make_plan, together_as_alone

_EVERY = 16  # batches between two reads of a flag on a GPU


class VerificationError(RuntimeError):
    """Per-sample gradients that were verified on an earlier batch are wrong on a later one of the same kind.

    The run ends rather than return a wrong number.  `granularity="batch"` does not need per-sample gradients; please
    report the model.
    """


class PerSampleGradients:
    """Captures forward passes of a model and keeps a verified plan for each kind of graph.

    A plan is verified with the first batch of its kind, and with every batch if the samples cannot be followed through
    the graph.  Besides, batches 0, 1, 128, 16384, ... of a run are verified whatever is known about them.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        batch_dim: int = 0,
        *,
        tokens: bool = False,
        shards: Shards | None = None,
    ) -> None:
        """`tokens`: give gradients for each position of a sequence where they can be squared (`tokens.py`).

        `shards`: those of the parameters in FSDP2.  All processes then do the same, and decide together.
        """
        dispatch.wanted_kernels()  # a wrong value is an error here, and no reason to leave parameters to autograd
        self.names, self.parameters = list(parameters), list(parameters.values()) if shards is None else shards.whole
        self.hooks = Hooks(model, self.parameters, None if shards is None else shards.held)
        self._numbers = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._batch_dim, self._shards = batch_dim, shards
        self.remaining: set[int] = set()
        """Parameters that autograd has given gradients of, summed over the batch."""
        self.verified = 0
        """How many batches were verified."""
        self.excluded: frozenset[int] = frozenset()
        self.may_synchronize = True
        """Whether flags on a GPU may be read: not while a CUDA graph is captured."""
        self.every_batch = False
        """Whether some kind of graph seen so far has to be verified with every batch."""
        self.follows_values = False
        """Whether data have decided which sample owns which rows: their values are read in each batch."""
        self.carries_state = False
        """Whether a forward pass has changed buffers or attributes of the model, which a repeated one must not see."""
        self._plans: dict[int, Plan] = {}
        self._vectorizes: dict[int, bool] = {}
        self._wants_tokens = tokens
        self._token_uses: dict[int, frozenset[Key]] = {}
        self._by_token: frozenset[int] | None = None  # parameters, in all batches so far; None: there was none
        self._batches = 0
        self._requested = False  # a reference, for the next forward pass
        self._late: Tensor | None = None  # whether gradients have come to a use that could not be verified

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on the model's modules while inside."""
        with self.hooks.attached():
            yield
            self._warn_if_late()

    @property
    def needs_reference(self) -> bool:
        """Whether the next forward pass is to be verified, against the gradients of one without hooks."""
        return self._any("needs reference", self._requested or _is_due(self._batches) or self.every_batch)

    def reference(self, logits: Tensor) -> Reference:
        """Differentiate the logits of a forward pass without hooks; its graph is freed."""
        return Reference.of(logits, self.parameters, self._shards)

    def capturing(self) -> AbstractContextManager[None]:
        """Capture the calls of modules with a rule inside."""
        return self.hooks.capturing(self.excluded)

    def release(self) -> None:
        """Release the last forward pass: hooks do nothing until the next one is captured."""
        self.hooks.release()

    def require_reference(self) -> None:
        """Verify the next forward pass."""
        self._requested = True

    def exclude_all(self) -> None:
        """Leave all parameters to autograd."""
        self.hooks.release()
        self.excluded = frozenset(range(len(self.parameters)))

    def uses(self, logits: Tensor) -> Uses:
        """Return the uses of the parameters in the graph of a captured forward pass."""
        captures, parameters, excluded = self.hooks.captures, self.parameters, self.excluded
        uses = discover(captures, logits, parameters, self._numbers, excluded, self._batch_dim, self._plans)
        self.follows_values |= uses.following.by_values
        return uses

    def backward_of(self, logits: Tensor, reference: Reference | None) -> PerSampleBackward | None:
        """Return how to differentiate a captured forward pass; None if it has to be repeated.

        It has to if there is no plan yet for its kind and no reference was given, or if parameters were captured that
        have turned out to have no per-sample gradients that pass the verification.
        """
        try:
            uses = self.uses(logits)
        except Exception:  # nested tensors, or whatever else has a graph that cannot be read
            if self._shards is not None:
                raise
            if self.excluded != frozenset(range(len(self.parameters))):
                self.exclude_all()
                return None
            uses = Uses(len(logits), remaining=list(range(len(self.parameters))))
            return self._ready(uses, Plan({}, self.excluded, True), logits)
        nothing = not uses.samples or (not self.hooks.modules and not uses.supported)
        if nothing and self._shards is None:
            layouts = {use.key: use.layouts[0] for use in uses.supported}
            return self._ready(uses, Plan(layouts, self.excluded, True), logits)
        known = self._plans.get(uses.signature)
        needs_plan = self._any("unknown", known is None or not known.followed or bool(uses.unsupported))
        if reference is None:
            if needs_plan:
                self._requested = True
                self.hooks.release()
                return None
            assert known is not None
            return self._ready(uses, known, logits)
        if known is not None and not needs_plan:
            plan = self._verified_again(uses, known, logits, reference)
        else:
            plan = make_plan(uses, logits, reference, self.hooks, self.parameters, self.excluded)
        excluded = reference.union("excluded", plan.excluded)
        if excluded - self.excluded:
            self.excluded = excluded
            self.hooks.release()
            return None
        self.verified, self._requested = self.verified + 1, False
        self._plans[uses.signature] = plan
        self.every_batch = any(not known.followed for known in self._plans.values())
        return self._ready(uses, plan, logits)

    def _any(self, what: str, flag: bool) -> bool:
        """Whether a flag is set in any of the processes that have parts of the parameters."""
        return flag if self._shards is None else any(self._shards.processes.gather(what, flag))

    def vectorizes(self, backward: PerSampleBackward, logits: Tensor) -> bool:
        """Return whether several cotangents may go back in one pass; tried once for each kind of graph."""
        kind = backward.uses.signature
        if kind not in self._vectorizes:
            self._vectorizes[kind] = together_as_alone(backward, logits)
        return self._vectorizes[kind]

    def methods(self, otherwise: str) -> list[str]:
        """Return how each parameter was done: "sample", "token", or `otherwise` where autograd gave the gradients."""
        numbers, tokens = range(len(self.names)), self._by_token or ()
        return [otherwise if i in self.remaining else "token" if i in tokens else "sample" for i in numbers]

    def end_batch(self) -> None:
        """Release the last forward pass, and count its batch."""
        self.hooks.release()
        self._batches += 1

    def state(self) -> dict[str, Any]:
        """Return what has been found out about the model, as JSON can hold it; plans are made anew."""
        late = self._late is not None and bool(self._late)
        found = {"excluded": sorted(self.excluded), "remaining": sorted(self.remaining)}
        tokens = None if self._by_token is None else sorted(self._by_token)
        return found | {"batches": self._batches, "verified": self.verified, "late": late, "tokens": tokens}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the findings that `state` returned."""
        self.excluded, self.remaining = frozenset(state["excluded"]), set(state["remaining"])
        self._batches, self.verified = state["batches"], state["verified"]
        self._by_token = None if state["tokens"] is None else frozenset(state["tokens"])
        if state["late"]:
            self._late = torch.ones((), dtype=torch.bool, device=self.parameters[0].device)

    def _ready(self, uses: Uses, plan: Plan, logits: Tensor) -> PerSampleBackward:
        """Return the backward pass of a plan, per token where that was asked for and is right; note how all is done."""
        if uses.samples:  # of an empty batch nothing can be learnt
            self.remaining |= set(uses.remaining)
        if plan.unverified and self._late is None:
            self._late = torch.zeros((), dtype=torch.bool, device=self.parameters[0].device)
        backward = PerSampleBackward(self.hooks, self.parameters, uses, plan, self._late)
        fits = logits.ndim == 3 and logits.shape[1] > 1 and bool(uses.samples)
        if not self._wants_tokens or not (fits or self._shards is not None):
            return backward
        if self._any("tokens", uses.signature not in self._token_uses):
            self._token_uses[uses.signature] = token_uses(backward, logits, self._shards)
        backward = backward.with_tokens(self._token_uses[uses.signature])
        self._by_token = backward.by_token if self._by_token is None else self._by_token & backward.by_token
        return backward

    def _verified_again(self, uses: Uses, plan: Plan, logits: Tensor, reference: Reference) -> Plan:
        """Verify a plan that has been used before."""
        check = Verification(uses, plan, logits, reference, self.hooks, self.parameters)
        if check.failed:
            names = ", ".join(self.names[i] for i in sorted(check.failed)[:3])
            text = f"The per-sample gradients of {names} were right on an earlier batch and are wrong on this one, "
            text += "which has the same shapes: the model treats batches differently, or gradients that were zero came "
            text += "to rows that are not the samples. Leave these parameters out with `parameters`, begin with a "
            raise VerificationError(
                text + "batch that shows the difference, or use granularity='batch' (random probes)."
            )
        unverified = plan.unverified & check.zero
        if self._late is not None and not unverified:
            self._late.zero_()
        return Plan(plan.layouts, plan.excluded, plan.followed, unverified)

    @property
    def came_late(self) -> bool:
        """Whether gradients have come to a use at which there were only zeros when it was verified.

        On a GPU, which reading waits for, this is looked at now and then.
        """
        if self._late is None or not self.may_synchronize:
            return False
        is_read = self._late.device.type == "cpu" or self._batches % _EVERY == 0
        return is_read and bool(self._late)

    def _warn_if_late(self) -> None:
        if self._late is not None and bool(self._late):
            text = "Gradients that were zero when per-sample gradients were verified came only with later batches, so "
            text += "that they could not be verified. To be sure, begin with a batch in which they are not zero."
            warn(text, RuntimeWarning)


def _is_due(batch: int) -> bool:
    """Whether a batch is verified in any case: 0, 1, 128, 16384, ..."""
    while batch > 1 and batch % 128 == 0:
        batch //= 128
    return batch in (0, 1)
