"""Per-sample gradients of one model, one forward pass after the other.

engine = PerSampleGradients(model, parameters)
with engine.attached():
    for batch in data:
        verifies, backward = engine.must_verify(), Again.UNVERIFIED
        while isinstance(backward, Again):
            if verifies and no reference yet:               first batch, a new kind of graph, and now and then
                reference = engine.reference(model(batch))  ordinary autograd, no hooks
            with engine.capturing():
                logits = model(batch)
            backward = engine.backward_of(logits, reference)     discover ─► plan, verified ─► backward pass
            verifies |= backward is Again.UNVERIFIED             else forward is repeated with fewer parameters
        backward(logits, cotangent, accumulator, ...)       one backward pass (backward.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import warn
from neuromanifold.kernels import dispatch
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.hooks import Hooks
from neuromanifold.persample.plan import Plan, Uses, discover
from neuromanifold.persample.shards import Shards, any_process, union_of_processes
from neuromanifold.persample.tokens import token_uses
from neuromanifold.persample.verify import Reference, Verification, make_plan, vectorizes_correctly

_EVERY = 16  # batches between two reads of a flag on a GPU


class VerificationError(RuntimeError):
    """Per-sample gradients that were verified on an earlier batch are wrong on a later one of the same kind.

    The run ends rather than return a wrong number.  `granularity="batch"` does not need per-sample gradients; please
    report the model.
    """


class Again(Enum):
    """Why a captured forward pass has to be repeated before it can be differentiated."""

    UNVERIFIED = "there is no plan for this kind of graph, and no reference to verify one against"
    EXCLUDED = "parameters were captured whose per-sample gradients did not pass the verification"


@dataclass
class Findings:
    """What a run has found out about a model, kept from batch to batch; `state` is what checkpoints hold of it.

    Parameters are given by their indices.
    """

    excluded: frozenset[int] = frozenset()
    """Parameters that are left to autograd from now on."""
    remaining: set[int] = field(default_factory=set)
    """Parameters that autograd has given gradients of, summed over the batch."""
    tokens: frozenset[int] | None = None
    """Parameters that were squared per token in all batches so far; None: tokens were not looked at."""
    batches: int = 0
    verified: int = 0
    """How many of the batches were verified."""
    late: Tensor | None = None
    """Whether gradients have come to a use that could not be verified; None: there is no such use."""
    plans: dict[int, Plan] = field(default_factory=dict)
    """Verified plans, by the signature of the graph."""
    every_batch: bool = False
    """Whether one of the plans has to be verified with every batch."""
    follows_values: bool = False
    """Whether data have decided which sample owns which rows: their values are read in each batch."""
    vectorizes: dict[int, bool] = field(default_factory=dict)
    """Whether several cotangents may go back in one pass, by the signature of the graph."""

    def add_plan(self, signature: int, plan: Plan) -> None:
        """Keep a plan that was verified on the present batch."""
        self.verified += 1
        self.plans[signature] = plan
        self.every_batch = any(not known.followed for known in self.plans.values())

    def note(self, uses: Uses, plan: Plan, device: torch.device) -> None:
        """Note how the parameters of a batch are done."""
        if uses.samples:  # of an empty batch nothing can be learnt
            self.remaining.update(uses.remaining)
        self.follows_values |= uses.following.by_values
        if plan.unverified and self.late is None:
            self.late = torch.zeros((), dtype=torch.bool, device=device)
        if plan.tokens is not None:
            found = uses.parameters_of(plan.tokens)
            self.tokens = found if self.tokens is None else self.tokens & found

    def state(self) -> dict[str, Any]:
        """Return all but the plans, as JSON can hold it."""
        return {
            "excluded": sorted(self.excluded),
            "remaining": sorted(self.remaining),
            "tokens": None if self.tokens is None else sorted(self.tokens),
            "batches": self.batches,
            "verified": self.verified,
            "late": self.late is not None and bool(self.late),
        }

    def set_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore what `state` returned; plans are made anew."""
        self.excluded, self.remaining = frozenset(state["excluded"]), set(state["remaining"])
        self.tokens = None if state["tokens"] is None else frozenset(state["tokens"])
        self.batches, self.verified = state["batches"], state["verified"]
        if state["late"]:
            self.late = torch.ones((), dtype=torch.bool, device=device)


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

        `shards`: those of parameters that are divided among processes, which then do the same and decide together.
        """
        dispatch.wanted_kernels()  # a wrong value is an error here, and no reason to leave parameters to autograd
        self.names, self.parameters = list(parameters), list(parameters.values()) if shards is None else shards.whole
        self.hooks = Hooks(model, self.parameters, None if shards is None else shards.held)
        self.findings = Findings(excluded=frozenset() if shards is None else shards.partial)
        self._numbers = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._batch_dim, self._wants_tokens, self._shards = batch_dim, tokens, shards

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on the model's modules while inside."""
        with self.hooks.attached():
            yield
            if self.findings.late is not None and bool(self.findings.late):
                text = "Gradients that were zero when per-sample gradients were verified came only with later batches, "
                text += "so that they could not be verified. To be sure, begin with a batch in which they are not zero."
                warn(text, RuntimeWarning)

    def must_verify(self, requested: bool = False) -> bool:
        """Whether the next forward pass is to be verified, against the gradients of one without hooks."""
        due = requested or self.findings.every_batch or _is_due(self.findings.batches)
        return any_process(self._shards, "must verify", due)

    def reference(self, logits: Tensor) -> Reference:
        """Differentiate the logits of a forward pass without hooks; its graph is freed."""
        return Reference.of(logits, self.parameters, self._shards)

    def capturing(self) -> AbstractContextManager[None]:
        """Capture the calls of modules with a rule inside."""
        return self.hooks.capturing(self.findings.excluded)

    def release(self) -> None:
        """Release the last forward pass: hooks do nothing until the next one is captured."""
        self.hooks.release()

    def end_batch(self) -> None:
        """Release the last forward pass, and count its batch."""
        self.hooks.release()
        self.findings.batches += 1

    @property
    def excludes_all(self) -> bool:
        """Whether all parameters are left to autograd."""
        return len(self.findings.excluded) == len(self.parameters)

    def exclude_all(self) -> None:
        """Leave all parameters to autograd."""
        self.hooks.release()
        self.findings.excluded = frozenset(range(len(self.parameters)))

    def backward_of(self, logits: Tensor, reference: Reference | None) -> PerSampleBackward | Again:
        """Return how to differentiate a captured forward pass, or why it has to be repeated."""
        plan: Plan | Again
        try:
            uses = self.uses(logits)
        except Exception:  # nested tensors, or whatever else has a graph that cannot be read
            if self._shards is not None:
                raise
            if not self.excludes_all:
                self.exclude_all()
                return Again.EXCLUDED
            uses, plan = Uses(len(logits), remaining=list(range(len(self.parameters)))), Plan({}, followed=True)
        else:
            plan = self._plan(uses, logits, reference)
        if isinstance(plan, Again):
            self.hooks.release()
            return plan
        self.findings.note(uses, plan, self.parameters[0].device)
        return PerSampleBackward(self.hooks, self.parameters, uses, plan, self.findings.late)

    def uses(self, logits: Tensor) -> Uses:
        """Return the uses of the parameters in the graph of a captured forward pass."""
        captures, parameters, findings = self.hooks.captures, self.parameters, self.findings
        args = (self._numbers, findings.excluded, self._batch_dim, findings.plans)
        return discover(captures, logits, parameters, *args)

    def _plan(self, uses: Uses, logits: Tensor, reference: Reference | None) -> Plan | Again:
        """Return the plan for a graph: one that is known, and verified again if there is a reference, or a new one."""
        if self._shards is None and (not uses.samples or not (self.hooks.modules or uses.supported)):
            return Plan({use.key: use.layouts[0] for use in uses.supported}, followed=True)  # nothing to verify
        plan = self.findings.plans.get(uses.signature)
        unknown = plan is None or not plan.followed or bool(uses.unsupported)
        new = any_process(self._shards, "unknown", unknown)
        if reference is None:
            return Again.UNVERIFIED if new or plan is None else plan
        tokens, failed = plan.tokens if plan is not None else None, frozenset[int]()
        if new or plan is None:
            plan, failed = make_plan(uses, logits, reference, self.hooks, self.parameters)
        else:
            plan = self._verified_again(uses, plan, logits, reference)
        excluded = self.findings.excluded | union_of_processes(self._shards, "failed", failed)
        if excluded != self.findings.excluded:
            self.findings.excluded = excluded
            return Again.EXCLUDED
        plan = self._with_tokens(uses, replace(plan, tokens=tokens), logits)
        self.findings.add_plan(uses.signature, plan)
        return plan

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
        unverified, late = plan.unverified & check.zero, self.findings.late
        if late is not None and (not unverified or (late.device.type == "cpu" and unverified < plan.unverified)):
            late.zero_()  # what came has been verified: on a CPU, in the batch with which it came
        return replace(plan, unverified=unverified)

    def _with_tokens(self, uses: Uses, plan: Plan, logits: Tensor) -> Plan:
        """Return a plan by which gradients are given per token, where that is asked for and right."""
        fits = logits.ndim == 3 and logits.shape[1] > 1
        if not self._wants_tokens or not (fits or self._shards is not None):
            return plan  # with shards, all processes ask, since those with other shapes have to take part
        if not any_process(self._shards, "tokens", plan.tokens is None):
            return plan
        backward = PerSampleBackward(self.hooks, self.parameters, uses, plan)
        return replace(plan, tokens=token_uses(backward, logits, self._shards))

    def vectorizes(self, backward: PerSampleBackward, logits: Tensor) -> bool:
        """Return whether several cotangents may go back in one pass; tried once for each kind of graph."""
        kind, known = backward.uses.signature, self.findings.vectorizes
        if kind not in known:
            known[kind] = vectorizes_correctly(backward, logits)
        return known[kind]

    def methods(self, otherwise: str) -> list[str]:
        """Return how each parameter was done: "sample", "token", or `otherwise` where autograd gave the gradients."""
        remaining, tokens = self.findings.remaining, self.findings.tokens or ()
        numbers = range(len(self.names))
        return [otherwise if i in remaining else "token" if i in tokens else "sample" for i in numbers]

    @property
    def came_late(self) -> bool:
        """Whether gradients have come to a use at which there were only zeros when it was verified.

        On a GPU, which reading waits for, this is looked at now and then.
        """
        late = self.findings.late
        if late is None:
            return False
        return (late.device.type == "cpu" or self.findings.batches % _EVERY == 0) and bool(late)


def _is_due(batch: int) -> bool:
    """Whether a batch is verified in any case: 0, 1, 128, 16384, ..."""
    while batch > 1 and batch % 128 == 0:
        batch //= 128
    return batch in (0, 1)


def merged_findings(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of several processes together, which have done different batches."""
    tokens = [set(state["tokens"]) for state in states if state["tokens"] is not None]
    return {
        "excluded": sorted({i for state in states for i in state["excluded"]}),
        "remaining": sorted({i for state in states for i in state["remaining"]}),
        "tokens": sorted(set.intersection(*tokens)) if tokens else None,
        "batches": max(state["batches"] for state in states),
        "verified": sum(state["verified"] for state in states),
        "late": any(state["late"] for state in states),
    }
