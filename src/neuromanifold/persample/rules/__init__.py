"""Rules: from a layer's input and its output's gradient to per-sample gradients.  One file per family of layers."""

from neuromanifold.persample.rules import convolution, embedding, linear, normalisation, scales
from neuromanifold.persample.rules.parametrized import parametrized_rule, parametrized_slots
from neuromanifold.persample.rules.registry import Call, NotApplicableError, Rule, Slot, find_rule, rule

__all__ = [
    "Call",
    "NotApplicableError",
    "Rule",
    "Slot",
    "convolution",
    "embedding",
    "find_rule",
    "linear",
    "normalisation",
    "parametrized_rule",
    "parametrized_slots",
    "rule",
    "scales",
]
