"""Backward passes: one that gives per-sample gradients, which executes a plan and decides nothing, and an ordinary one.

Where float16 is involved, cotangents are scaled.

autograd ─► gradients at captured calls and at broadcast sites ─► forms (rules) ─► accumulator
         ─► gradients of the remaining parameters, summed over the batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from neuromanifold.persample.accumulate.base import Pass, TakesForms
from neuromanifold.persample.gradients import Form, add
from neuromanifold.persample.hooks import Capture, Hooks
from neuromanifold.persample.places import Layout
from neuromanifold.persample.plan import Key, Plan, Use, Uses
from neuromanifold.persample.shards import on_this_process, own_part
from neuromanifold.persample.sites import BroadcastSite, Site


class VerificationObserver(Protocol):
    """Callbacks during a backward pass that verifies a plan."""

    def captured(self, use: Use, g: Tensor) -> None:
        """Take the gradient captured at a use, before its rule runs."""

    def refused(self, use: Use) -> None:
        """Take note that the rule of a use does not apply."""


# How many numbers the gradients of all captured outputs may have together, for several cotangents in one pass.
_CPU_AT_ONCE, _GPU_AT_ONCE = 2**22, 2**27
_LARGEST, _LEAST_EXPONENT = 2.0**15, -24  # in float16, with some room; where the scale is given up
_DTYPE = attrgetter("dtype")
T = TypeVar("T")


class PerSampleBackward:
    """Backward passes through one forward pass whose calls were captured."""

    def __init__(
        self,
        hooks: Hooks,
        parameters: list[nn.Parameter],
        uses: Uses,
        plan: Plan,
        late: Tensor | None = None,
    ) -> None:
        """`late`: a flag that is set if gradients come to a use of which the verification has seen only zeros."""
        self._hooks, self.parameters, self.uses, self.plan, self._late = hooks, parameters, uses, plan, late
        self._tokens = plan.tokens or frozenset()
        self._edges: list[tuple[Use, Site, GradientEdge]] = []
        """Where gradients are asked for, besides the captured calls."""
        for use in uses.supported:
            if use.sites and (use.capture is None or plan.layouts[use.key].shared):
                self._edges += [(use, site, site.edge) for site in use.sites]
        self._targets: list[Any] = [hooks.root, *map(itemgetter(2), self._edges)]
        self._targets += map(parameters.__getitem__, uses.remaining)
        self._waiting: dict[int, list[Form]] = {}  # of parameters that are used several times

    def __call__(
        self,
        logits: Tensor,
        cotangent: Tensor,
        to: TakesForms,
        made_by: Pass,
        *,
        keep_graph: bool,
        observer: VerificationObserver | None = None,
    ) -> list[Tensor | None]:
        """Add per-sample gradients to `to`; return the remaining parameters' gradients, summed over the batch."""

        def consume(capture: Capture, g: Tensor) -> bool:
            use = self.uses.by_capture.get(capture)
            if use is None:
                return False
            layout = self.plan.layouts[use.key]
            if layout.shared:  # g is the sum over the samples; its parts are taken where it is broadcast
                return False
            self._take(use, g, layout, to, made_by, observer)
            return not keep_graph

        self._waiting = {}
        with self._hooks.consumed_by(consume):
            _, *found = _gradients(logits, self._targets, cotangent, keep_graph)
        if self._edges or self._waiting:
            self._finish(self._edges, found[: len(self._edges)], to, made_by, observer)
        return self._by_number(self.uses.remaining, found[len(self._edges) :])

    def with_tokens(self, tokens: frozenset[Key]) -> PerSampleBackward:
        """Return the same with gradients of each position for these uses."""
        plan = replace(self.plan, tokens=tokens)
        return PerSampleBackward(self._hooks, self.parameters, self.uses, plan, self._late)

    @property
    def all_by_token(self) -> bool:
        """Whether the gradients of all parameters are given for each position."""
        return not self.uses.remaining and self.uses.parameters_of(self._tokens) == self.uses.counts.keys()

    def how_many_at_once(self, logits: Tensor, count: int) -> int:
        """Return how many of `count` cotangents to send back in one pass: one, unless all uses are captured calls."""
        if count < 2 or self._edges:
            return 1
        size = sum(capture.shape.numel() for capture in self.uses.by_capture) + logits.numel()
        most = _CPU_AT_ONCE if logits.device.type == "cpu" else _GPU_AT_ONCE
        return max(1, min(count, most // max(1, size)))

    def to_uses(
        self,
        logits: Tensor,
        cotangents: Sequence[Tensor],
        to: Sequence[TakesForms],
        made_by: Sequence[Pass],
        wanted: Set[int] | None = None,
    ) -> bool:
        """Send cotangents back together, only as far as the uses of the wanted parameters; the graph is kept.

        Each cotangent is a pass of its own, which is ended before the next one: two may go to the same accumulator.
        Gradients of the remaining parameters are not computed.  Returns False, having done nothing, if several
        cotangents are given and an operation of the model cannot be vectorised.
        """
        uses = [use for use in self.uses.supported if wanted is None or not wanted.isdisjoint(use.parameters.values())]
        calls = [use for use in uses if use.capture is not None and not self.plan.layouts[use.key].shared]
        edges = [edge for edge in self._edges if edge[0] in uses]
        targets = [GradientEdge(use.capture.node, 0) for use in calls if use.capture is not None]
        targets += [edge for _, _, edge in edges]
        if not targets:
            return True
        found = _several_gradients(logits, targets, cotangents)
        self._hooks.restore()  # activation checkpoints call modules again
        if found is None:
            return False
        for gradients, sink, one in zip(found, to, made_by, strict=True):
            self._waiting = {}
            with torch.no_grad():
                for use, g in zip(calls, gradients, strict=False):
                    if g is not None:
                        self._take(use, g, self.plan.layouts[use.key], sink, one, None)
            self._finish(edges, gradients[len(calls) :], sink, one, None)
            sink.end_pass()
        return True

    def remaining_gradients(self, logits: Tensor, cotangent: Tensor, numbers: list[int]) -> list[Tensor | None]:
        """Return autograd's gradients of some of the parameters; the graph is kept."""
        return self._by_number(numbers, _gradients(logits, [self.parameters[i] for i in numbers], cotangent))

    def _by_number(self, numbers: list[int], found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients for all parameters, None for those that are not among the numbers."""
        gradients: list[Tensor | None] = [None] * len(self.parameters)
        for i, g in zip(numbers, found, strict=True):
            gradients[i] = dense(g)
        return gradients

    def is_finite(self, logits: Tensor, cotangent: Tensor) -> bool:
        """Return whether a cotangent goes through the network without overflow; the graph is kept."""
        sums: list[Tensor] = []

        def consume(_: Capture, g: Tensor) -> bool:
            sums.append(g.float().sum())
            return False

        with self._hooks.consumed_by(consume):
            _, *found = _gradients(logits, self._targets, cotangent)
        sums.extend(dense(g).float().sum() for g in found if g is not None)
        return all(bool(torch.isfinite(value)) for value in sums)

    def _take(
        self, use: Use, g: Tensor, layout: Layout, to: TakesForms, made_by: Pass, observer: VerificationObserver | None
    ) -> None:
        """Add the gradients of a use; those of a parameter with several uses once all of them are there."""
        by_token, capture = use.key in self._tokens, use.capture
        if self._hooks.in_parts:
            g = on_this_process(g)
            if capture is not None:
                capture.x = on_this_process(capture.x)
        if observer is not None:
            forms = self._observed(use, g, layout, observer)
        else:
            if self._late is not None and use.key in self.plan.unverified:
                self._late.logical_or_((g != 0).any().to(self._late.device))
            forms = self._forms(use, g, layout, tokens=by_token)
        if by_token:
            made_by = made_by.of_tokens
        for i, form in forms.items():
            uses = self.uses.counts[i]
            if uses == 1:
                to.add_samples(i, form, made_by)
                continue
            waiting = self._waiting.setdefault(i, [])
            waiting.append(form)
            if len(waiting) == uses:
                to.add_samples(i, add(self._waiting.pop(i)), made_by)

    def _observed(self, use: Use, g: Tensor, layout: Layout, observer: VerificationObserver) -> dict[int, Form]:
        """Return the gradients of a use; none if the rule does not apply."""
        observer.captured(use, g)
        try:
            return self._forms(use, g, layout, validating=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of any kind: a rule may fail on inputs that it was not written for
            observer.refused(use)
            return {}

    def _forms(self, use: Use, g: Tensor, layout: Layout, **options: bool) -> dict[int, Form]:
        """Return the gradients of what this process has of the parameters: all of it, but in tensor parallelism."""
        forms = use.forms(g, self.uses.samples, layout, **options)
        return {i: own_part(form, self.parameters[i]) for i, form in forms.items()} if self._hooks.in_parts else forms

    @torch.no_grad()
    def _finish(
        self,
        edges: list[tuple[Use, Site, GradientEdge]],
        gradients: Sequence[Tensor | None],
        to: TakesForms,
        made_by: Pass,
        observer: VerificationObserver | None,
    ) -> None:
        """Take the gradients at broadcast sites, and add parameters of which some uses got no gradient."""
        shared: dict[Use, Tensor] = {}
        for (use, site, _), g in zip(edges, gradients, strict=True):
            if g is None:
                continue
            layout = self.plan.layouts[use.key]
            if use.capture is None:
                self._take(use, g, layout, to, made_by, observer)
            else:
                assert isinstance(site, BroadcastSite)
                one = site.gradients(g, layout)
                shared[use] = shared[use] + one if use in shared else one
        for use, g in shared.items():
            self._take(use, g, self.plan.layouts[use.key], to, made_by, observer)
        waiting, self._waiting = self._waiting, {}
        for i, forms in waiting.items():
            to.add_samples(i, add(forms), made_by)


@dataclass
class HalfPrecisionScale:
    """The power of two by which cotangents are multiplied in float16: the largest at which no gradient overflows.

    In float16, gradients below 6e-8 would vanish, and those above 65,504 overflow.  The caller divides gradients by the
    scale in float32.  It is kept from pass to pass.
    """

    half: bool  # float16 is involved somewhere, even if the logits do not have it
    exponent: int | None = None

    def fit(self, logits: Tensor, cotangent: Tensor, attempt: Callable[[Tensor, bool], T | None]) -> tuple[T, float]:
        """Return what `attempt` makes of the scaled cotangent, and the scale.

        `attempt(scaled, checked)` returns None if gradients overflow, and must look for that if `checked`.
        """
        largest = largest_scale(cotangent) if self.is_needed(logits) else None
        scale = 1.0
        if largest is not None:
            if self.exponent is None:
                self.exponent = round(math.log2(largest))
            while True:
                scale = min(2.0**self.exponent, largest)
                found = attempt(cotangent * scale, True)
                if found is not None:
                    return found, scale
                if self.exponent < _LEAST_EXPONENT:
                    break  # not an overflow: the gradient itself is not a number, and the result shows it
                self.exponent -= 4
        found = attempt(cotangent if scale == 1.0 else cotangent * scale, False)
        assert found is not None
        return found, scale

    def is_needed(self, logits: Tensor) -> bool:
        """Return whether float16 is involved in these logits."""
        return self.half or logits.dtype == torch.float16


def largest_scale(cotangent: Tensor) -> float | None:
    """Return the largest power of two by which a cotangent may be multiplied in float16; None if it is zero."""
    largest = float(cotangent.abs().amax()) if cotangent.numel() else 0.0
    return 2.0 ** math.floor(math.log2(_LARGEST / largest)) if largest else None


class BatchBackward:
    """Gradients summed over a batch, g = Σ_x Jᵀu(x), by one ordinary backward pass, without underflow in float16.

    The square of g is unbiased for Σ_x E[(Jᵀu(x))²] if the u(x) are centred and independent over the samples, because
    then the cross terms between samples vanish on average.  Their variance is about that of the square itself.
    """

    def __init__(self, parameters: Sequence[Tensor], half: bool = False) -> None:
        """`half`: float16 is involved somewhere, even if neither these parameters nor the logits have it."""
        self.parameters = list(parameters)
        self.scale = HalfPrecisionScale(half or torch.float16 in {*map(_DTYPE, parameters)})

    def __call__(self, logits: Tensor, cotangent: Tensor, keep_graph: bool) -> tuple[list[Tensor | None], float]:
        """Return the gradients of Σ cotangent·logits, None where there are none, times a scale; and that scale."""

        def attempt(scaled: Tensor, checked: bool) -> list[Tensor | None] | None:
            gradients = _gradients(logits, self.parameters, scaled, keep_graph or checked)
            found: list[Tensor | None] = [dense(g) for g in gradients]
            if checked:
                sums = torch.stack([g.float().sum() for g in found if g is not None] or [torch.zeros(())])
                if not bool(torch.isfinite(sums).all()):
                    return None
            return found

        return self.scale.fit(logits, cotangent, attempt)


def _gradients(
    logits: Tensor, targets: Sequence[Any], cotangent: Tensor, keep_graph: bool = True, several: bool = False
) -> tuple[Tensor | None, ...]:
    """Return autograd's gradients of Σ cotangent·logits, None where there are none; of `several` cotangents at once."""
    return torch.autograd.grad(
        *(logits, targets, cotangent.to(logits.dtype)),
        retain_graph=keep_graph,
        allow_unused=True,
        is_grads_batched=several,
    )


def _several_gradients(
    logits: Tensor, targets: list[Any], cotangents: Sequence[Tensor]
) -> list[list[Tensor | None]] | None:
    """Return the gradients of each cotangent, in one vectorised pass; None if an operation cannot be vectorised.

    The graph is kept.
    """
    if len(cotangents) == 1:
        return [list(_gradients(logits, targets, cotangents[0]))]
    try:
        found = _gradients(logits, targets, torch.stack(list(cotangents)), several=True)
    except (RuntimeError, NotImplementedError):
        return None
    return [[None if g is None else g[k] for g in found] for k in range(len(cotangents))]


def dense(g: Tensor | None) -> Any:
    """Return a sparse gradient as a dense one, and any other as it is."""
    return g.to_dense() if g is not None and g.layout != torch.strided else g
