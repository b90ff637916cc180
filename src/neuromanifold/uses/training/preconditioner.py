"""Precondition the gradients of a training step by the Kronecker-factored Fisher information, renewed now and then.

loss.backward()
preconditioner.step(batch)      every so many steps: F of this batch; each step: p.grad ← (F + damping I)⁻¹ p.grad
optimizer.step()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from neuromanifold.core.checks import finite_number, integer_in_range, message
from neuromanifold.operators.kronecker import KroneckerFisher, fisher_kronecker
from neuromanifold.problem.model import select_parameters


class KroneckerPreconditioner:
    """Turns gradients into damped natural gradients, (F + damping I)⁻¹ g, in front of any optimizer.

    F is that of the batch of every `every`-th step, in Kronecker form.  In between it is applied as it is.  Cost: every
    `every` steps one more forward and backward pass and the eigenvectors of small matrices; each step two matrix
    products for each layer.

    Args:
        model: the model in training.
        damping: added to the eigenvalues of F, the mean per sample.
        every: steps between two estimates of F.
        clip: the largest length of what replaces the gradient, in the metric F + damping I; None for any length.
        options: those of `fisher_kronecker`; eigenvalues are those of the factors unless said otherwise.

    Raises:
        TypeError, ValueError: an argument is out of range; in `step`, a parameter without a gradient.

    Example:
        >>> preconditioner = nm.KroneckerPreconditioner(model, damping=0.1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for x, y in data:
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        ...     rate = preconditioner.step((x, y))  # gradients are replaced
        ...     optimizer.step()
    """

    def __init__(
        self, model: nn.Module, damping: float = 1e-2, every: int = 10, clip: float | None = 1.0, **options: Any
    ) -> None:
        self.model = model
        self.damping = finite_number(damping, "damping", positive=True)
        self.every = integer_in_range(every, "every", 1, 10**9, "steps between two estimates of F")
        self.clip = None if clip is None else finite_number(clip, "clip", positive=True)
        self._options = {"eigenvalues": "kronecker", "seed": 0, **options}
        self.steps = 0
        self.fisher: KroneckerFisher | None = None
        """F of the last renewal, per sample."""

    @torch.no_grad()
    def step(self, batch: object) -> float:
        """Replace the gradients of all parameters of F, and return gᵀ (F + damping I)⁻¹ g before clipping.

        That is the squared length of the natural gradient, and the rate at which a small step along it lowers the loss.
        `batch` is what data yield: (inputs, labels), or inputs alone; labels are used by `nm.Empirical()` only.
        """
        if self.fisher is None or self.steps % self.every == 0:
            self._options["seed"] += 1  # else a batch that comes again has the noise that it had
            self.fisher = fisher_kronecker(self.model, [batch], **self._options).mean
        parameters = select_parameters(
            self.model, lambda name, _: self.fisher is not None and name in self.fisher.layout.shapes
        )
        missing = [name for name, parameter in parameters.items() if parameter.grad is None]
        if missing:
            advice = "Call loss.backward() first."
            raise ValueError(
                message("model", "a module whose parameters have gradients", f"none for {missing[0]!r}", advice)
            )
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        natural = self.fisher.solve(gradients, self.damping, tol=1e-2).x
        rate = sum(float((gradient.double() * natural[name]).sum()) for name, gradient in gradients.items())
        factor = 1.0 if self.clip is None or rate <= self.clip**2 else self.clip / rate**0.5
        for name, gradient in gradients.items():
            gradient.copy_(natural[name] * factor)
        self.steps += 1
        return rate
