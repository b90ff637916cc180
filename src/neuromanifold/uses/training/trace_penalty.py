"""`trace_penalty`: an unbiased estimate of tr F that can be added to a loss, with an unbiased gradient.

u_n = S(z_n) ξ_n                     ξ random signs, S Sᵀ = M: as in nm.Hutchinson, and differentiable in z
g = Σ_n J_nᵀ u_n                     one backward pass whose graph is kept
penalty = ‖g‖²/B                     the loss's backward differentiates through it: double backward
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical, Core
from neuromanifold.core.checks import message, promoted
from neuromanifold.persample.backward import dense
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.model import Selection, select_parameters
from neuromanifold.run.running import check_graph, check_mask

_WITHOUT_DOUBLE_BACKWARD = (
    "ScaledDotProductFlash",
    "ScaledDotProductEfficient",
    "ScaledDotProductCudnn",
    "ScaledDotProductFused",
    "CudnnRnn",
    "MkldnnRnn",
)


def trace_penalty(
    model: nn.Module,
    logits: Tensor,
    parameters: Selection = None,
    likelihood: Likelihood = Categorical,
    mask: Tensor | None = None,
    detach: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return an unbiased estimate of tr F per sample, whose gradient is unbiased for that of tr F: add it to the loss.

    The signs ξ_n are independent over samples, so that in ‖Σ_n J_nᵀu_n‖² the terms between samples vanish on average:
    E‖g‖² = Σ_n tr(J_nᵀ M_n J_n) for any model, in one more backward pass.  Squares of single samples would have less
    noise, and need a graph through each sample's gradient.  Since ξ does not depend on θ, the expectation of the
    gradient is the gradient of the expectation.

    Args:
        model: whose parameters F is about; those that are frozen do not count.
        logits: [B, ..., C], part of the training graph, which is kept: the outputs of `model`.
        parameters: a name pattern, several, or a function of name and parameter.
        likelihood: what the outputs mean, as in `fisher_diagonal`.
        mask: bool [B, ...], which positions count.
        detach: hold M, which is that of the predictions, constant.  The same value; but its gradient makes the network
            smoother only, while that of tr F can also make predictions more confident.
        generator: of the signs; the global random state if not given, as for dropout.

    Returns:
        A scalar with a graph.

    Raises:
        TypeError, ValueError: `logits` are not part of a graph, or an argument is not what is expected.

    Example:
        >>> logits = model(inputs)
        >>> loss = nn.functional.cross_entropy(logits, labels) + 0.01 * nm.trace_penalty(model, logits)
        >>> loss.backward()
    """
    check_graph(logits)
    if logits.dtype == torch.float16:
        advice = "Gradients of the signs would underflow. Use bfloat16, or float32 for this forward pass."
        raise ValueError(message("logits", "of bfloat16, float32 or float64", "float16", advice))
    check_mask(mask, logits)
    chosen = list(select_parameters(model, parameters).values())
    if fused := _fused(logits):
        advice = "Use the unfused one: attn_implementation='eager' in transformers, or torch.nn.attention.sdpa_kernel("
        advice += "SDPBackend.MATH); of recurrent layers, run them with torch.backends.mkldnn or cudnn disabled."
        raise ValueError(message("model", "twice differentiable", f"one with the fused operation {fused}", advice))
    core = likelihood(logits.detach() if detach else logits)
    if not isinstance(core, Core):
        raise TypeError(message("likelihood", "a function from outputs to a core", f"one to {type(core).__name__}"))
    signs = torch.randint(0, 2, logits.shape, generator=generator, device=logits.device)
    with torch.autocast(logits.device.type, enabled=False):
        cotangent = core.factor(signs.to(core.dtype) * 2 - 1)
        cotangent = cotangent if mask is None else torch.where(mask[..., None], cotangent, 0.0)
    gradients = torch.autograd.grad(logits, chosen, cotangent.to(logits.dtype), create_graph=True, allow_unused=True)
    if all(g is None for g in gradients):
        raise ValueError(message("logits", "outputs of `model`", "a graph without any of its parameters"))
    squares = [dense(g).to(promoted(g.dtype)).square().sum() for g in gradients if g is not None]
    samples = len(logits) if mask is None else mask.flatten(1).any(1).sum() if mask.ndim > 1 else mask.sum()
    return torch.stack([square.to(logits.device) for square in squares]).sum() / samples


def _fused(logits: Tensor) -> str:
    """The name of an operation in the graph that cannot be differentiated twice, "" if there is none."""
    waiting, seen = [logits.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(_WITHOUT_DOUBLE_BACKWARD):
            return str(node.name())
        waiting.extend(before for before, _ in node.next_functions)
    return ""
