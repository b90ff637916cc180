"""Rules: from a layer's input and its output's gradient to per-sample gradients.  One file per family of layers."""

from neuromanifold.persample.rules import convolution, embedding, linear, normalisation, scales
from neuromanifold.persample.rules.parametrized import parametrized_places, parametrized_rule
from neuromanifold.persample.rules.registry import Call, NotApplicableError, Place, Rule, find_rule, rule

__all__ = [
    "Call",
    "NotApplicableError",
    "Place",
    "Rule",
    "convolution",
    "embedding",
    "find_rule",
    "linear",
    "normalisation",
    "parametrized_places",
    "parametrized_rule",
    "rule",
    "scales",
]
