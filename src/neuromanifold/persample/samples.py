"""The sample-wise pullback: Σ_x (Jᵀu(x))², each sample squared on its own, in one backward pass.

with pullback.attached():
    for batch in data:
        outputs = pullback.forward(lambda: model(batch))    taps record the calls of modules with a rule
        for u in cotangents:
            rest = pullback(logits, u, sums, ...)           one backward; rules turn what taps pick up into squares
        pullback.finish(sums)

Which parameters are done so is the plan's decision (`plan.py`).  For the others the same backward pass gives the
gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from neuromanifold.persample.gradients import Form, Product, SquaredProduct, add
from neuromanifold.persample.plan import Plan
from neuromanifold.persample.sums import GradientSums, Pass
from neuromanifold.persample.taps import Record, Taps

T = TypeVar("T")

# How many numbers the gradients of all modules' outputs may have together, for several cotangents at once.
_AT_ONCE = {True: 2**22, False: 2**27}  # on a CPU; on a GPU


class SamplePullback:
    """Gradients of single samples through the modules with a rule, of whole batches for the rest."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], batch_dim: int = 0) -> None:
        self.parameters = parameters
        self.taps = Taps(model, parameters)
        self.plan = Plan(self.taps, parameters, batch_dim)
        self._several = True  # as far as is known, several cotangents can be sent back at once
        self._uses: dict[int, int] = {}
        self._waiting: dict[int, list[Form]] = {}  # what some uses of a parameter have given so far
        self._products: dict[tuple[int, Record], SquaredProduct] = {}
        self._pass: tuple[GradientSums, Pass, bool] | None = None
        self._last = False  # of the passes of a batch

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Taps on the model's modules while inside."""
        with self.taps.attached():
            try:
                yield
                self.plan.watch.finish()
            finally:
                self.release()

    def state(self) -> dict[str, Any]:
        """What has been found out about the model so far."""
        return {"plan": self.plan.state(), "several": self._several}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.plan.set_state(state["plan"])
        self._several = state["several"]

    def forward(self, evaluate: Callable[[], T], logits_of: Callable[[T], Tensor]) -> T:
        """Evaluate the model until it is clear which of its parameters rules can do."""
        while True:
            self.release()
            with self.taps.recording():
                outputs = evaluate()
            logits = logits_of(outputs)
            if not logits.requires_grad or not len(logits) or self.plan.settled(logits, self._try_out):
                self._uses = self.plan.uses()
                return outputs

    def rest(self) -> list[int]:
        """The parameters that no rule does, and that the outputs have depended on so far."""
        return sorted(self.plan.by_autograd)

    def __call__(
        self, logits: Tensor, cotangent: Tensor, keep_graph: bool, sums: GradientSums, made_by: Pass, *, waits: bool
    ) -> list[Tensor | None]:
        """One backward pass; gradients of the whole batch for the parameters that no rule does, None for the others.

        `waits`: more passes follow, so what they have in common may be left for `finish`.
        """
        self._pass, self._last = (sums, made_by, waits and sums.waits), not keep_graph
        try:
            gradients, at_edges = self._backward(logits, cotangent, keep_graph, self._take_at_tap)
            self._end_pass(at_edges)
        finally:
            self._pass, self._last, self._waiting = None, False, {}
        return gradients

    def several(self, logits: Tensor, sums: GradientSums, count: int) -> int:
        """How many of `count` cotangents to send back at once: as many as gradients of all outputs are small together.

        One, unless every parameter is done by rules at taps.
        """
        simple = self._several and sums.waits and not self.plan.by_autograd and not any(True for _ in self.plan.edges())
        if not simple or count < 2:
            return 1
        size = sum(record.shape.numel() for record in self.plan.records) + logits.numel()
        return max(1, min(count, _AT_ONCE[logits.device.type == "cpu"] // max(1, size)))

    def add_several(self, logits: Tensor, cotangents: Tensor, sums: GradientSums, made_by: list[Pass]) -> bool:
        """Send cotangents [k, *logits] back in one pass; False if some operation of the model does not allow that."""
        edges = [GradientEdge(record.node, 0) for record in self.plan.records]
        try:
            found = torch.autograd.grad(
                logits, edges, cotangents.to(logits.dtype), retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        except (RuntimeError, NotImplementedError):
            self._several = False  # an operation that cannot be vectorised; one by one it either works or says why not
            return False
        finally:
            self.taps.restore()
        try:
            for k, one in enumerate(made_by):
                self._pass = (sums, one, True)
                with torch.no_grad():
                    for record, g in zip(self.plan.records, found, strict=True):
                        if g is not None:
                            self._take_call(record, g[k])
                self._end_pass([])
        finally:
            self._pass, self._waiting = None, {}
        return True

    def plain_gradients(self, logits: Tensor, cotangent: Tensor, numbers: list[int]) -> list[Tensor | None]:
        """By autograd alone, for some of the parameters; the graph is kept."""
        targets = [self.parameters[i] for i in numbers]
        found = torch.autograd.grad(logits, targets, cotangent.to(logits.dtype), retain_graph=True, allow_unused=True)
        gradients: list[Tensor | None] = [None] * len(self.parameters)
        for i, g in zip(numbers, found, strict=True):
            gradients[i] = _dense(g)
        return gradients

    def finite(self, logits: Tensor, cotangent: Tensor) -> bool:
        """Whether a cotangent goes through the network without overflow."""
        sums: list[Tensor] = []
        gradients, at_edges = self._backward(logits, cotangent, True, lambda _, g: sums.append(g.float().sum()))
        sums.extend(g.float().sum() for g in (*gradients, *at_edges) if g is not None)
        return all(bool(torch.isfinite(value)) for value in sums)

    @torch.no_grad()
    def finish(self, sums: GradientSums) -> None:
        """All passes of a batch are done: add what was left for the end, and let go of the graph."""
        for (i, _), product in self._products.items():
            sums.add_samples(i, product, Pass(sample_noise=1.0))
        self.release()

    def release(self) -> None:
        """Let go of everything of the last batch."""
        self.plan.release()
        self._products, self._uses = {}, {}

    def _try_out(
        self, logits: Tensor, cotangent: Tensor, listener: Callable[[Record, Tensor], None]
    ) -> dict[int, Tensor | None]:
        return dict(enumerate(self._backward(logits, cotangent, True, listener)[1]))

    def _backward(
        self, logits: Tensor, cotangent: Tensor, keep_graph: bool, listener: Callable[[Record, Tensor], None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Send a cotangent through the graph: to the taps, to the plan's edges, to parameters that no rule does."""
        edges = self.plan.gradient_edges()
        asked = [i for i in self.plan.reached if i not in self.plan.direct]
        targets: list[Any] = [self.taps.root, *edges, *(self.parameters[i] for i in asked)]
        self.taps.listener = listener
        try:
            _, *found = torch.autograd.grad(
                logits, targets, cotangent.to(logits.dtype), retain_graph=keep_graph, allow_unused=True
            )
        finally:
            self.taps.listener = None
            self.taps.restore()
        gradients: list[Tensor | None] = [None] * len(self.parameters)
        for i, g in zip(asked, found[len(edges) :], strict=True):
            gradients[i] = _dense(g)
            if g is not None and i in self._uses:
                text = "Batches differ in a way that rules cannot follow: a parameter is used outside of its module in "
                raise RuntimeError(text + "some of them only. Use granularity='batch'.")
        return gradients, list(found[: len(edges)])

    def _take_at_tap(self, record: Record, g: Tensor) -> None:
        if not record.meetings:  # there it is the sum over the samples; its parts are picked up elsewhere
            self._take_call(record, g)

    def _take_call(self, record: Record, g: Tensor) -> None:
        if self.plan.watch.here:
            self.plan.watch.take(record, g)
        forms = record.site.rule.function(self.plan.call(record, g))
        for name, i in record.parameters.items():
            if name not in forms:
                kind = type(record.site.module).__name__
                raise TypeError(f"The rule of {kind} gives nothing for {name!r}, which it is registered for.")
            self._take(i, forms[name], record)
        if self._last:
            record.x = self.taps.nothing  # as autograd lets go of what it has used

    def _take(self, i: int, form: Form, record: Record | None) -> None:
        """Square at once, unless the parameter is used several times."""
        assert self._pass is not None
        sums, made_by, waits = self._pass
        if self._uses[i] > 1:
            forms = self._waiting.setdefault(i, [])
            forms.append(form)
            if len(forms) == self._uses[i]:
                del self._waiting[i]
                sums.add_samples(i, add(forms), made_by)
        elif waits and record is not None and isinstance(form, Product) and form.single:
            key = (i, record)
            if key not in self._products:
                dtype = torch.float64 if self.parameters[i].dtype == torch.float64 else torch.float32
                self._products[key] = SquaredProduct.of(form, dtype)
            self._products[key].add_cotangents(form.left[:, 0], made_by.scale, made_by.sample_noise)
        else:
            sums.add_samples(i, form, made_by)

    @torch.no_grad()
    def _end_pass(self, at_edges: list[Tensor | None]) -> None:
        """Take what was picked up at the edges; and what waits for uses of which no more will come."""
        assert self._pass is not None
        sums, made_by, _ = self._pass
        partial: dict[Record, Tensor] = {}
        for (what, meeting), g in zip(self.plan.edges(), at_edges, strict=False):
            if g is None:
                continue
            if isinstance(what, Record):
                one = meeting.gradients(g)
                partial[what] = partial[what] + one if what in partial else one
            else:
                self._take(what, self.plan.form(what, meeting, g), None)
        for record, g in partial.items():
            self._take_call(record, g)
        waiting, self._waiting = self._waiting, {}
        for i, forms in waiting.items():
            sums.add_samples(i, add(forms), made_by)


def _dense(g: Tensor | None) -> Tensor | None:
    return g.to_dense() if g is not None and g.layout != torch.strided else g
