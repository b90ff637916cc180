"""What a run has found out about a model: it stays from batch to batch, and all but the plans is in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neuromanifold.persample.plan import Plan, Uses


@dataclass
class Findings:
    """Facts about a model and its parameters, which are named by number."""

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
    """By the signature of the graph, as all that follows."""
    every_batch: bool = False
    """Whether one of the plans has to be verified with every batch."""
    follows_values: bool = False
    """Whether data have decided which sample owns which rows: their values are read in each batch."""
    vectorizes: dict[int, bool] = field(default_factory=dict)
    """Whether several cotangents may go back in one pass."""

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


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
