"""Optimizers that divide by the Fisher information: that of the model's own predictions, not the squared gradient.

    optimizer = nm.optim.FisherAdam(model.parameters(), lr=1e-3)
    for step, (inputs, labels) in enumerate(loader):
        logits = model(inputs)
        if step % 10 == 0:
            optimizer.update_fisher(logits)         one more backward pass, F̄ <- β F̄ + (1 - β) F̂
        loss(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

F̂ = (Σ_n J_nᵀu_n)²/R over the R output distributions of the batch, u random with E[u uᵀ] = M: unbiased for the diagonal
of F per distribution.  Adam's second moment is (Σ_n ∂ℓ_n/∂θ)²/R² with the labels of the data: F/R if these were drawn
from the model, plus the square of the gradient's mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neuromanifold.core import Categorical
from neuromanifold.core.checks import finite_number, message, promoted
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.run.running import TrainingProbes, check_decay, check_graph, check_mask

__all__ = ["FisherAdam", "FisherSGD"]


class FisherOptimizer(Optimizer):
    """What both optimizers share: the moving average of the Fisher diagonal, and the frame of a step.

    For each parameter the state has `fisher`, the average of F per output distribution in float32 or better, and
    `buffer`, that of its gradients.  Each group counts its `steps` and `updates`, and `positions` is the number of
    output distributions in the last batch that updated F; all of it is in the state dict.
    """

    _probes: TrainingProbes | None = None

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], fisher_decay: float, likelihood: Likelihood, seed: int
    ) -> None:
        advice = "Try 1e-3 for FisherAdam, 1e-2 for FisherSGD."
        finite_number(defaults["lr"], "lr", advice=advice)
        finite_number(defaults["weight_decay"], "weight_decay")
        check_decay(fisher_decay, "fisher_decay")
        self.likelihood = likelihood
        counters = {"steps": 0, "updates": 0, "positions": 0}
        super().__init__(params, {**defaults, "fisher_decay": fisher_decay, **counters})
        self.seed = TrainingProbes(likelihood, seed=seed).seed

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "likelihood": self.likelihood, "seed": self.seed}  # for copies and pickles

    @torch.no_grad()
    def update_fisher(self, logits: Tensor, mask: Tensor | None = None) -> None:
        """Add the batch's estimate to the average: call it after the forward pass and before the loss's backward.

        `logits` [B, ..., C] are part of the training graph, which is kept; .grad is left alone.  `mask` [B, ...] says
        which positions count, for padded sequences.
        """
        check_graph(logits)
        check_mask(mask, logits)
        positions = logits[..., 0].numel() if mask is None else int(mask.sum())
        _check_alone()
        if self._probes is None:
            self._probes = TrainingProbes(self.likelihood, seed=self.seed)
        places = [(group, p) for group in self.param_groups for p in group["params"] if p.requires_grad]
        number = max(group["updates"] for group in self.param_groups)
        for squares in self._probes.squares(logits, [p for _, p in places], number, mask=mask):
            if all(square is None for square in squares):
                got = "a graph without any of them"
                raise ValueError(message("logits", "outputs of a model whose parameters the optimizer has", got))
            for (group, p), square in zip(places, squares, strict=True):  # a single pass
                fisher = self._tensor(p, "fisher").mul_(group["fisher_decay"])
                if square is not None:
                    fisher.add_(square, alpha=(1 - group["fisher_decay"]) / positions)
        for group in self.param_groups:
            group["updates"] += 1
            group["positions"] = positions

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; return what the closure returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if not group["updates"]:
                text = "No Fisher information yet: call optimizer.update_fisher(logits) before the first step, and "
                raise RuntimeError(text + "every few steps from then on.")
            if any(p.grad.layout != torch.strided for p in parameters):
                advice = "Use sparse=False in the embedding."
                raise ValueError(message("gradients", "dense", "sparse ones", advice))
            group["steps"] += 1
            fishers = [self._tensor(p, "fisher") for p in parameters]
            buffers = [self._tensor(p, "buffer") for p in parameters]
            gradients = [p.grad.to(b.dtype) for p, b in zip(parameters, buffers, strict=True)]
            unbiased = list(torch._foreach_div(fishers, 1 - group["fisher_decay"] ** group["updates"]))
            changes = self._changes(group, gradients, buffers, unbiased)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, [c.to(p.dtype) for c, p in zip(changes, parameters, strict=True)])
        return loss

    @abstractmethod
    def _changes(
        self, group: dict[str, Any], gradients: list[Tensor], buffers: list[Tensor], fishers: list[Tensor]
    ) -> list[Tensor]:
        """Return what is added to the parameters, and update the buffers; `fishers` may be overwritten."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its averages keep their precision, where torch would cast them to the parameters'."""
        for group in state_dict["param_groups"]:
            if missing := sorted(self.defaults.keys() - group.keys()):
                got = f"one without {', '.join(missing[:3])}"
                raise ValueError(message("state_dict", f"a state of {type(self).__name__}", got))
        super().load_state_dict(state_dict)
        given = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(given, mine, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[p][name] = value.detach().clone().to(p.device)

    def _tensor(self, p: Tensor, name: str) -> Tensor:
        """The state of a parameter under this name, zeros at first."""
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p, dtype=promoted(p.dtype), memory_format=torch.preserve_format)
        found: Tensor = state[name]
        return found


class FisherSGD(FisherOptimizer):
    """Gradient descent with momentum, preconditioned by the diagonal of F: a natural gradient.

        b ← momentum b + g/(F̄ + damping),     θ ← (1 - lr weight_decay) θ - lr b

    F̄ is per output distribution, as g is if the loss is a mean over them, so that lr = 1 without momentum is a full
    step of the diagonal natural gradient.  Cost: that of SGD, and one more backward pass for each call of
    `update_fisher`.

    Args:
        params: parameters or groups of them, as for every optimizer of torch.
        lr: learning rate.
        momentum: weight of the past in b.
        damping: added to F̄, whose entries may be zero.
        weight_decay: decoupled, as in AdamW.
        fisher_decay: weight of the past in F̄.
        likelihood: what the logits mean, as in `fisher_diagonal`.
        seed: random seed of the probes.

    Raises:
        TypeError, ValueError: an argument is out of range.
        RuntimeError: `step` before the first `update_fisher`.

    Example:
        >>> optimizer = nm.optim.FisherSGD(model.parameters(), lr=1e-2)
        >>> for step, (x, y) in enumerate(data):
        ...     logits = model(x)
        ...     if step % 2 == 0:
        ...         optimizer.update_fisher(logits)  # before the loss's backward pass
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(logits, y).backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        momentum: float = 0.9,
        damping: float = 1e-2,
        weight_decay: float = 0.0,
        fisher_decay: float = 0.95,
        likelihood: Likelihood = Categorical,
        seed: int = 0,
    ) -> None:
        check_decay(momentum, "momentum")
        finite_number(damping, "damping", positive=True, advice="Entries of F may be zero, and are divided by.")
        defaults = {"lr": lr, "momentum": momentum, "damping": damping, "weight_decay": weight_decay}
        super().__init__(params, defaults, fisher_decay, likelihood, seed)

    def _changes(
        self, group: dict[str, Any], gradients: list[Tensor], buffers: list[Tensor], fishers: list[Tensor]
    ) -> list[Tensor]:
        torch._foreach_add_(fishers, group["damping"])
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_addcdiv_(buffers, gradients, fishers)
        return list(torch._foreach_mul(buffers, -group["lr"]))


class FisherAdam(FisherOptimizer):
    """Adam with the Fisher diagonal in place of the squared gradient, and AdamW's weight decay.

        θ ← (1 - lr weight_decay) θ - lr clamp(m̂/(√(F̄/R) + eps), ±clip)

    with m̂ as in Adam and R the output distributions of a batch: F/R is the variance of the gradient of a mean loss, so
    that learning rates are about Adam's.  A squared gradient is never much smaller than the gradient of the same step
    is large; F̄ can be, where the model is confident and wrong, so each entry moves by lr·clip at most (as in Adam,
    about). Cost: that of Adam, and one more backward pass for each call of `update_fisher`.

    Args:
        params: parameters or groups of them, as for every optimizer of torch.
        lr: learning rate.
        beta: weight of the past in m, Adam's β₁.
        eps: added to the denominator.
        clip: the largest change of an entry, in units of lr.
        weight_decay: decoupled, as in AdamW.
        fisher_decay: weight of the past in F̄.
        likelihood: what the logits mean, as in `fisher_diagonal`.
        seed: random seed of the probes.

    Raises:
        TypeError, ValueError: an argument is out of range.
        RuntimeError: `step` before the first `update_fisher`.

    Example:
        >>> optimizer = nm.optim.FisherAdam(model.parameters(), lr=1e-3)
        >>> logits = model(inputs)
        >>> optimizer.update_fisher(logits)  # every step, or every tenth
        >>> nn.functional.cross_entropy(logits, labels).backward()
        >>> _ = optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        beta: float = 0.9,
        eps: float = 1e-8,
        clip: float = 1.0,
        weight_decay: float = 0.0,
        fisher_decay: float = 0.95,
        likelihood: Likelihood = Categorical,
        seed: int = 0,
    ) -> None:
        check_decay(beta, "beta")
        finite_number(eps, "eps", positive=True)
        finite_number(clip, "clip", positive=True)
        defaults = {"lr": lr, "beta": beta, "eps": eps, "clip": clip, "weight_decay": weight_decay}
        super().__init__(params, defaults, fisher_decay, likelihood, seed)

    def _changes(
        self, group: dict[str, Any], gradients: list[Tensor], buffers: list[Tensor], fishers: list[Tensor]
    ) -> list[Tensor]:
        torch._foreach_lerp_(buffers, gradients, 1 - group["beta"])
        torch._foreach_div_(fishers, group["positions"])
        torch._foreach_sqrt_(fishers)
        torch._foreach_add_(fishers, group["eps"])
        changes = torch._foreach_div(buffers, fishers)
        torch._foreach_div_(changes, 1 - group["beta"] ** group["steps"])
        torch._foreach_clamp_min_(changes, -group["clip"])
        torch._foreach_clamp_max_(changes, group["clip"])
        torch._foreach_mul_(changes, -group["lr"])
        return list(changes)


def _check_alone() -> None:
    """Refuse several processes, each of which would average over its own data alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
        if processes > 1:
            advice = "Averages of F are not exchanged between processes, so that models would drift apart."
            raise NotImplementedError(message("optimizer", "used in a single process", f"{processes} of them", advice))
