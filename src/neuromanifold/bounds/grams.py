"""K(x) = J Jᵀ, [C, C] for each sample, with J = ∂z/∂θ never written out.

for group of layers:                                        as many as fit into the budget
    for c in classes:                                       one backward pass, that stops at the group
        forms[c] = rules(gradients at the group's modules)
    K += Σ over the group's parameters of inner products between forms[c] and forms[d]

All gradients of C passes would be C times what an ordinary backward pass holds one after the other.  So a run takes
fewer samples at a time where a batch can be split (splitting.py); where it cannot, the layers are done in groups, each
with C passes of its own, as small as fit into what an ordinary backward pass takes: one layer at least, C times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from neuromanifold.persample.accumulate import KeptForms, Pass
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.gradients.stacks import Flat, Stack, stack
from neuromanifold.persample.plan import Use, connected

_LEAST = 2**24  # bytes that may be held in any case


class ClassGradients:
    """Per-sample gradients of all classes through one forward pass, a group of parameters at a time."""

    def __init__(self, backward: PerSampleBackward, vectorizes: bool = True) -> None:
        """`vectorizes`: whether the cotangents of several classes may go back in one pass."""
        self._backward, self._vectorizes, self.passes = backward, vectorizes, 0
        layouts = backward.plan.layouts
        self._sizes = [
            (parameters, sum(_bytes(use, layouts[use.key].shared) for use in uses))
            for parameters, uses in connected(backward.uses.supported)
        ]

    @property
    def ordinary(self) -> int:
        """About how many bytes an ordinary backward pass takes: modules' outputs, and a gradient for each parameter."""
        return max(_LEAST, self.outputs + sum(p.numel() * p.element_size() for p in self._backward.parameters))

    @property
    def outputs(self) -> int:
        """Bytes of the gradients of all modules' outputs, for one class."""
        return sum(size for _, size in self._sizes)

    def stacks(
        self, logits: Tensor, cotangent: Callable[[int], Tensor], scale: float = 1.0, budget: int | None = None
    ) -> Iterator[tuple[int, Stack]]:
        """Yield each parameter's gradients of all classes, `scale` times too large; the graph is kept.

        `cotangent(c)` is that of class c, of the logits' shape.  `budget`: how many bytes gradients of several classes
        may take together; None: half of what an ordinary backward pass takes, since activations are held all the time.
        """
        classes = logits.shape[-1]
        for group in self._groups(classes, self.ordinary // 2 if budget is None else budget):
            kept = [KeptForms() for _ in range(classes)]
            several = self._vectorizes and logits.dtype.itemsize >= 4
            at_once = self._backward.how_many_at_once(logits, classes) if several else 1
            for start in range(0, classes, at_once):
                some = range(start, min(start + at_once, classes))
                cotangents = [cotangent(c) * scale for c in some]
                self._backward.to_uses(logits, cotangents, kept[some.start : some.stop], [Pass()] * len(some), group)
                self.passes += len(some)
            for i in sorted({i for one in kept for i in one.forms}):
                yield i, stack([one.forms.pop(i, None) for one in kept])

    def remaining_stacks(
        self, logits: Tensor, cotangent: Callable[[int], Tensor], n: int, numbers: list[int], scale: float = 1.0
    ) -> dict[int, Flat]:
        """Return the gradients of all classes of one sample, for parameters without a rule, by autograd."""
        found: dict[int, list[Tensor | None]] = {i: [] for i in numbers}
        for c in range(logits.shape[-1]):
            one = torch.zeros_like(logits)
            one[n] = cotangent(c)[n] * scale
            gradients = self._backward.remaining_gradients(logits, one, numbers)
            self.passes += 1
            for i in numbers:
                g = gradients[i]
                found[i].append(None if g is None else g[None])
        return {
            i: Flat(values, self._backward.parameters[i].shape)
            for i, values in found.items()
            if any(value is not None for value in values)
        }

    def _groups(self, classes: int, budget: int) -> list[set[int]]:
        """Return sets of parameters whose gradients of all classes fit into the budget; uses of one stay together."""
        groups: list[set[int]] = []
        filled = 0
        for parameters, size in self._sizes:
            if not groups or filled + classes * size > budget:
                groups.append(set())
                filled = 0
            groups[-1] |= parameters
            filled += classes * size
        return groups


def _bytes(use: Use, shared: bool) -> int:
    """Return the bytes of the gradient at a use, in float32."""
    if use.capture is not None and not shared:
        return 4 * use.capture.shape.numel()
    return sum(4 * site.result.numel() for site in use.sites)
