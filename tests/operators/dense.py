"""F by definition, dense in float64, once for all tests; and problems that metrics are tried on."""

from torch import Tensor

from neuromanifold.reference import network as reference
from tests.problems.architectures import ARCHITECTURES
from tests.problems.networks import PROBLEMS
from tests.problems.problem import Problem

ALL = {name: problem for name, problem in {**PROBLEMS, **ARCHITECTURES}.items() if name != "MobileNetV2"}  # 79,000 wide
SOME = {
    name: ALL[name]
    for name in (
        *("MLP", "CNN with BatchNorm", "depthwise conv", "LSTM", "transformer encoder", "tied embeddings"),
        *("frozen and unused", "two classes", "segmentation, class_dim=1", "multi-label", "regression"),
        *("a module called twice", "position ids [1, T]", "cross-attention", "time first, tokens"),
        *("a module called on some of the samples", "DistilBERT", "GPT-2 (tokens, tied)"),
    )
}

_DENSE: dict[int, Tensor] = {}


def dense(problem: Problem) -> Tensor:
    """F = Σ_x Jᵀ M J, [P, P]."""
    key = id(problem.model)
    if key not in _DENSE:
        _DENSE[key] = reference.reference_matrix(problem.model, problem.forward, problem.likelihood)
    return _DENSE[key]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖/‖expected‖."""
    return float((found.double() - expected).norm() / expected.norm())
