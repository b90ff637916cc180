"""The cases in which `check_rule` compares a rule with autograd."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.persample.accumulate import KeptForms, Pass
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.checking.inputs import Inputs, Network, own_parameters, rows, shared, twice
from neuromanifold.persample.engine import Again, PerSampleGradients
from neuromanifold.persample.gradients import Form, PowerSums
from neuromanifold.persample.rules.registry import Call, NotApplicableError, Rule
from neuromanifold.reference.layer import sample_gradients

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of ‖found - expected‖/‖expected‖


@dataclass(frozen=True)
class RuleRow:
    """One parameter: the largest error of all cases, the form, and what is wrong with it."""

    parameter: str
    error: float  # relative, in float64
    error32: float  # in float32
    form: str
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the rule is right for this parameter in all cases."""
        return not self.problem


@dataclass
class RuleExamination:
    """All cases of one rule; each has a fresh copy of the module."""

    module: nn.Module
    rule: Rule
    given: Inputs
    generator: torch.Generator
    errors: dict[tuple[str, torch.dtype], float] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)  # the first problem of each parameter
    problems: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)

    def run(self) -> tuple[RuleRow, ...]:
        """Run all cases, which fills `problems` and `cases`, and return a row for each parameter."""
        names = [name for name, parameter in self.module._parameters.items() if parameter is not None]
        self._alone("a batch", self.given, names)
        self._alone("one sample", self.given.first(1), names)
        if self._takes_none():
            self._alone("no sample", self.given.first(0), names)
        for name in names if len(names) > 1 else ():
            self._alone(f"only {name} wanted", self.given, [name])
        self._in_network("called twice", twice, self.given)
        if self.rule.extra_dims and self.given.single:
            self._in_network("samples in several rows", rows, self.given)
            self._in_network("one input for all samples", shared, self.given)
        self._alone("float32", self.given, names, torch.float32)
        return tuple(self._row(name) for name in names)

    def _takes_none(self) -> bool:
        """Whether the module itself can be called without samples."""
        module, given = self.given.first(0).ready(self.module, torch.float64)
        try:
            return len(module(*given.args, **given.options)) == 0
        except Exception:
            return False

    def _row(self, name: str) -> RuleRow:
        double, single = (self.errors.get((name, dtype), math.nan) for dtype in (torch.float64, torch.float32))
        return RuleRow(name, double, single, self.kinds.get(name, "-"), self.found.get(name, ""))

    def _alone(self, case: str, given: Inputs, names: list[str], dtype: torch.dtype = torch.float64) -> None:
        """Compare what the rule's function returns for one call."""
        self.cases.append(case)
        module, given = given.ready(self.module, dtype)
        exact, args = given.ready(self.module, torch.float64)
        parameters = [own_parameters(exact)[name] for name in names]
        output = exact(*args.args, **args.options)
        g = torch.randn(output.shape, generator=self.generator).to(output)
        expected = dict(zip(names, sample_gradients(output, parameters, g), strict=True))
        call = Call(module, given.args[0], given.args[1:], given.options, g.to(dtype), frozenset(names))
        with self._reported(case, names), self._pure(case, call), torch.no_grad():
            forms = self.rule.function(call)
            if not isinstance(forms, dict):
                self.problems.append(f"{case}: returns a {type(forms).__name__}, not a dict from names to forms")
                return
            for name in names:
                self._compare_form(case, name, forms.get(name), expected[name], dtype)

    def _compare_form(self, case: str, name: str, form: object, expected: Tensor, dtype: torch.dtype) -> None:
        """Compare one form: its shape first, then its numbers."""
        n, shape = expected.shape[0], expected.shape[1:]
        if form is None:
            self._blame(name, f"{case}: nothing is returned for it")
            return
        self.kinds[name] = type(form).__name__
        if not isinstance(form, Form):
            self._blame(name, f"{case}: a {type(form).__name__} is returned, not a form such as Dense")
            return
        if form.samples != n:
            why = "positions of a sample are not samples: add them up, or give them to Product or Rows"
            self._blame(name, f"{case}: gradients of {form.samples} samples for {n} samples; {why}")
            return
        if form.shape != shape:
            why = "sum over everything that is neither sample nor parameter"
            self._blame(name, f"{case}: gradients of shape {list(form.shape)}, it has {list(shape)}; {why}")
            return
        for what, found, wanted in _numbers(form, expected.double(), dtype):
            self._compare(case + what, name, found, wanted, dtype)

    def _in_network(self, case: str, call: Callable[..., Tensor], given: Inputs) -> None:
        """Compare the forms that the engine captures in a network, those of several uses added up."""
        self.cases.append(case)
        module, given = given.ready(self.module, torch.float64)
        own = own_parameters(module)
        net = Network(module, call)
        output = net(given)
        g = torch.randn(output.shape, generator=self.generator).to(output)
        expected = sample_gradients(output, list(own.values()), g)
        engine, kept = PerSampleGradients(net, own), KeptForms()
        backward: PerSampleBackward | Again = Again.UNVERIFIED
        with self._reported(case, list(own)), torch.enable_grad(), engine.attached():
            reference = engine.reference(net(given))
            while isinstance(backward, Again):
                with engine.capturing():
                    logits = net(given)
                backward = engine.backward_of(logits, reference)
            backward(logits, g, kept, Pass(), keep_graph=False)
            for i, name in enumerate(own):
                if i in engine.findings.remaining:
                    self._blame(name, f"{case}: the rule is not used, since its gradients are not those of autograd")
                elif i not in kept.forms:
                    self._blame(name, f"{case}: nothing is returned for it")
                else:
                    for what, found, wanted in _numbers(kept.forms[i], expected[i], torch.float64):
                        self._compare(case + what, name, found, wanted, torch.float64)

    def _compare(self, case: str, name: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        if found.shape != expected.shape:
            self._blame(name, f"{case}: shape {list(found.shape)} instead of {list(expected.shape)}")
            return
        error = _relative(found.double(), expected)
        self.errors[name, dtype] = max(error, self.errors.get((name, dtype), 0.0))
        if error <= TOLERANCE[dtype]:
            return
        size = float(expected.flatten() @ expected.flatten())
        factor = float(found.double().flatten() @ expected.flatten()) / size if size else math.nan
        if factor and _relative(found.double(), factor * expected) <= 10 * TOLERANCE[dtype]:
            self._blame(name, f"{case}: {factor:.4g} times what autograd has")
        else:
            self._blame(name, f"{case}: off by {error:.2g} of its size")

    def _blame(self, name: str, problem: str) -> None:
        self.found.setdefault(name, problem)

    @contextmanager
    def _reported(self, case: str, names: list[str]) -> Iterator[None]:
        """Turn an exception of the rule into a problem of these parameters, with the line that raised it."""
        try:
            yield
        except NotApplicableError as error:
            advice = "Its rule does not apply to this module, which is treated as one without a rule."
            raise ValueError(message("module", "one that its rule applies to", str(error), advice)) from error
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}, line {last.lineno}"
            for name in names:
                self._blame(name, f"{case}: {type(error).__name__}: {str(error).splitlines()[0]} ({where})")

    @contextmanager
    def _pure(self, case: str, call: Call) -> Iterator[None]:
        """Report a rule that changes the module, its input, or the output gradient."""
        before, x, g = _state(call.module), call.x.clone(), call.g.clone()
        yield
        for what, changed in (
            ("the module", not _same(before, _state(call.module))),
            ("its input in place", not torch.equal(call.x, x)),
            ("the output gradient in place, which others still need", not torch.equal(call.g, g)),
        ):
            if changed and not any(f"changes {what}" in problem for problem in self.problems):
                self.problems.append(f"{case}: changes {what}")


def _numbers(form: Form, expected: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each number that a form computes (its name, found, expected): gradients, squares, norms."""
    zeros = torch.zeros(form.shape, dtype=dtype, device=form.device)
    size = float(form.magnitude())
    unit = 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0
    to = PowerSums(zeros, torch.zeros_like(zeros), unit, weight=0.5)
    yield "", form.gradients(0, form.samples, dtype), expected
    form.add_squares(to)
    yield ", squares", to.squares, expected.square().sum(0)
    assert to.fourths is not None
    yield ", fourth powers", to.fourths.double() * 2, (expected / unit).square().square().sum(0)
    yield ", norms", form.squared_norms(dtype), expected.flatten(1).square().sum(1)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return ‖found - expected‖/‖expected‖; where that is 0/0, 0, and 1 where only ‖expected‖ is 0."""
    if not expected.numel():
        return 0.0
    error, size = (float(torch.linalg.vector_norm(t)) for t in (found - expected, expected))
    return error / size if size else float(error > 0)


def _state(module: nn.Module) -> list[Any]:
    """Return the attributes of a module and of its submodules, and copies of the values of their tensors."""
    found: list[Any] = []
    for part in module.modules():
        for key, value in vars(part).items():
            found.append(key)
            found.extend([*value, *value.values()] if isinstance(value, dict) else [value])
            found.extend(copy.copy(value) if isinstance(value, (list, set)) else ())
        tensors = (*part._parameters.values(), *part._buffers.values())
        found.extend(tensor.detach().clone() for tensor in tensors if tensor is not None)
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    """Whether two states have the same objects or equal values."""

    def equal(a: Any, b: Any) -> bool:
        if a is b:
            return True
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and torch.equal(a, b)
        return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b

    return len(before) == len(after) and all(equal(a, b) for a, b in zip(before, after, strict=True))
