"""`check_rule`: a layer's rule against autograd, sample by sample, wherever a rule must be right.

for each case:
    found = the rule's gradients of single samples, and what the forms make of them: squares, fourth powers, norms
    expected = autograd, one sample after the other, in float64
    module, input and output gradient are as before

    a batch; one sample; none; one parameter at a time; float32         the rule alone
    called twice; samples in several rows; one input for all samples    in a small network, by the engine
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import integer_in_range, message, random_seed
from neuromanifold.persample.checking.examination import RuleExamination, RuleRow
from neuromanifold.persample.checking.inputs import check_inputs, own_parameters
from neuromanifold.persample.rules.registry import find_rule, known_rules, why_no_rule


@dataclass(frozen=True)
class RuleCheck:
    """What `check_rule` found: a row for each parameter, problems of the rule itself, and the cases."""

    module: str
    rule: str
    rows: tuple[RuleRow, ...]
    problems: tuple[str, ...]
    cases: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the rule is right in every case."""
        return not self.problems and all(row.passed for row in self.rows)

    def __str__(self) -> str:
        table = [("parameter", "relative error", "in float32", "form", "verdict")]
        table += [
            (r.parameter, _scientific(r.error), _scientific(r.error32), r.form, r.problem or "ok") for r in self.rows
        ]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in table]
        lines.insert(1, "-" * max(map(len, lines)))
        end = "passed" if self.passed else "FAILED"
        title = f"Rule `{self.rule}` on {self.module}: {end}"
        return "\n".join([title, *lines, *(f"problem: {p}" for p in self.problems), f"cases: {', '.join(self.cases)}"])

    __repr__ = __str__


def check_rule(
    module: nn.Module,
    inputs: Tensor | tuple[Any, ...],
    *,
    options: Mapping[str, Any] | None = None,
    samples: int = 8,
    seed: int = 0,
) -> RuleCheck:
    """Compare a module's rule with autograd, sample by sample; print the result, or read its `.passed`.

    The module is not changed: the checks run on copies, in eval mode, in float64 and in float32, with parameters
    perturbed at random.  Cost: one backward pass for each sample.

    Args:
        module: an example of the layer, with parameters of its own.  Take odd and different sizes, and buffers that are
            neither zeros nor ones.
        inputs: an example of what it is called with: a tensor, or a tuple of all positional arguments.  The first
            dimension of the first one holds the samples (two at least), and so does that of every other tensor of the
            same length.  Give positions, if the layer may have any: [samples, positions, features].
        options: keyword arguments of the call.
        samples: how many of the samples to use at most; each takes a backward pass.
        seed: random seed of the output gradient.

    Returns:
        A `RuleCheck`, with a verdict for each parameter.

    Raises:
        TypeError, ValueError: `module` or `inputs` is not what is expected.

    Example:
        >>> nm.check_rule(nn.Linear(5, 3), torch.randn(4, 7, 5)).passed
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(message("module", "a torch.nn.Module", type(module).__name__))
    samples = integer_in_range(samples, "samples", 2, 10**6, "a single one is a case of its own")
    seed = random_seed(seed)
    rule = find_rule(module)
    if rule is None:
        advice = f"Register one with @nm.rule. Rules are known for: {', '.join(known_rules())}."
        raise ValueError(message("module", "one with a rule", why_no_rule(module), advice))
    generator = torch.Generator().manual_seed(seed)
    perturbed = _perturbed(module, generator)
    given = check_inputs(perturbed, inputs, options, samples)
    examination = RuleExamination(perturbed, rule, given, generator)
    rows = examination.run()
    problems, cases = tuple(examination.problems), tuple(examination.cases)
    return RuleCheck(type(module).__name__, rule.function.__name__, rows, problems, cases)


@torch.no_grad()
def _perturbed(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy whose parameters have no ones and zeros, which would hide a wrong factor; signs are kept."""
    module = copy.deepcopy(module)
    for parameter in own_parameters(module).values():
        noise = torch.rand(parameter.shape, generator=generator).to(parameter)
        parameter.copy_(torch.where(parameter == 0, 0.5 * noise, parameter * (0.5 + noise)))
    return module


def _scientific(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}" if value else "0"
