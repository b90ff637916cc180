"""The obvious loop, and the verdict on what the library says about the same case.

One forward pass of the batch in eval mode and float64; one ordinary backward for each logit of each sample; no hooks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests.zoo.case import Case, Kind, Spec, make

ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError)
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}

ADVICE = re.compile(
    r"\b(Use|Pass|Leave|Give|Begin|Start|Write|Look|Set|Choose|Yield|Wrap|Replace|Remove|Compute|Call|Run|Return|Make|"
    r"Register|Exclude|Take|Split|Switch|Turn|Move|Convert|Train|Evaluate|Try|Put|Sort|Let)\b"
)
TORCH_SPEAKING = re.compile(
    r"allow_unused|retain_graph|inplace operation|does not have a grad_fn|is invalid for input|mat1 and mat2|must match"
    r"|size of tensor|Expected .* but got|not implemented for|view size|forward compat|functorch|_local_scalar_dense"
)
MIXING = re.compile(r"\bmix|influence|each other|other samples|rest of (the|its) batch", re.IGNORECASE)

Outcome = Literal["right", "refused", "refused needlessly", "wrong", "crashed", "changed", "false alarm", "silent"]


@dataclass
class Verdict:
    """How one call of the library ended, and the details of it."""

    outcome: Outcome
    detail: str = ""

    @property
    def fine(self) -> bool:
        return self.outcome in ("right", "refused")


def score_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """∂ log p(y)/∂z for given labels."""
    return torch.nn.functional.one_hot(labels, logits.shape[-1]) - logits.softmax(-1)


def reference(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exact and empirical diagonal, summed over samples, of a case in float64."""
    model = case.model.eval()
    if hasattr(model, "plain"):  # what ordinary autograd refuses is written down without
        model.plain = True
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    exact = {name: torch.zeros_like(p) for name, p in named.items()}
    empirical = {name: torch.zeros_like(p) for name, p in named.items()}
    for inputs, labels in case.data():
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        values = output.detach().clone()
        metric = torch.diag_embed(values.softmax(-1)) - values.softmax(-1)[..., None] * values.softmax(-1)[..., None, :]
        scores = score_rows(values, labels)
        for n in range(len(values)):
            total = {name: torch.zeros_like(p) for name, p in named.items()}
            positions = [(n, *index) for index in _indices(values.shape[1:-1])]
            for at in positions:
                rows = _jacobian(output, at, list(named.values()))  # for each parameter [C, ...]
                for (name, p), J in zip(named.items(), rows, strict=True):
                    J = J.reshape(J.shape[0], -1)
                    exact[name] += torch.einsum("cp,cd,dp->p", J, metric[at], J).view_as(p)
                    total[name] += (scores[at] @ J).view_as(p)
            for name, g in total.items():
                empirical[name] += g.square()
    return exact, empirical


def _indices(shape: torch.Size) -> list[tuple[int, ...]]:
    return [tuple(index.tolist()) for index in torch.ones(shape).nonzero()] if len(shape) else [()]


def _jacobian(output: Tensor, at: tuple[int, ...], parameters: list[nn.Parameter]) -> list[Tensor]:
    """∂z_c/∂θ at one position, by C ordinary backward passes with fresh cotangents."""
    rows = []
    for c in range(output.shape[-1]):
        cotangent = torch.zeros_like(output)
        cotangent[(*at, c)] = 1
        found = torch.autograd.grad(output, parameters, cotangent, retain_graph=True, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        rows.append([torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for g, p in pairs])
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def judge_all(spec: Spec, kinds: dict[str, Kind]) -> dict[str, Verdict]:
    """Exact, empirical, orthogonal probes that leave no noise, and the trace, each of a fresh model."""
    exact, empirical = reference(make(spec, kinds, torch.float64))
    total = sum((value.sum() for value in exact.values()), torch.zeros((), dtype=torch.float64))
    probes = nm.Hutchinson(probes=max(1, spec.classes - 1))
    calls: dict[str, tuple[dict[str, Tensor], Callable[[Case], Any]]] = {
        "exact": (exact, lambda case: _diagonal(case, nm.Exact())),
        "empirical": (empirical, lambda case: _diagonal(case, nm.Empirical())),
        "trace": ({"": total}, lambda case: {"": _trace(case)}),
    }
    if make(spec, kinds).labels[0].ndim == 1 and spec.classes > 2:  # orthogonal probes are two at least
        calls["probes, sample"] = exact, lambda case: _diagonal(case, probes, granularity="sample")
        calls["probes, auto"] = exact, lambda case: _done_by_sample(_diagonal(case, probes), spec)
    tolerance = TOLERANCE[spec.dtype]
    return {  # a trace is added up in float32
        name: _compare(make(spec, kinds), expected, call, max(tolerance, 1e-6) if name == "trace" else tolerance)
        for name, (expected, call) in calls.items()
    }


def judge_mixing(spec: Spec, kinds: dict[str, Kind], estimator: nm.Estimator | None) -> Verdict:
    """A case in which samples influence each other: a warning that says so, or a refusal."""
    case = make(spec, kinds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _diagonal(case, estimator)
        except Exception as error:
            return _refusal(error, needless=False)
    told = [w for w in caught if issubclass(w.category, UserWarning) and MIXING.search(str(w.message))]
    return Verdict("right") if told else Verdict("silent", str([str(w.message)[:80] for w in caught]))


def _diagonal(case: Case, estimator: nm.Estimator | None, **options: Any) -> Mapping[str, Tensor]:
    return nm.fisher_diagonal(case.model, case.data(), estimator, reduction="sum", **case.options, **options)


def _trace(case: Case) -> float:
    return float(nm.fisher_trace(case.model, case.data(), nm.Exact(), reduction="sum", **case.options))


def _done_by_sample(result: Any, spec: Spec) -> dict[str, Tensor]:
    """The parameters for which probes leave no noise: per sample, or where each batch is a sample."""
    methods = result.provenance.granularity
    return {name: result[name] for name in result if max(spec.sizes) == 1 or methods[name] != "batch"}


def _compare(
    case: Case, expected: dict[str, Tensor], call: Callable[[Case], Mapping[str, Any]], tolerance: float
) -> Verdict:
    before = {name: value.clone() for name, value in case.model.state_dict().items() if isinstance(value, Tensor)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = call(case)
        except Exception as error:
            return _refusal(error, needless=len(case.inputs) == 1 and not case.may_refuse)
    after = case.model.state_dict()
    different = [name for name, value in before.items() if not torch.equal(after[name], value)]
    if (different and not case.changes_itself) or any(p.grad is not None for p in case.model.parameters()):
        return Verdict("changed", f"{different or '.grad'}")
    scale = max(float(value.abs().max()) for value in expected.values() if value.numel())
    for name, value in found.items():
        wanted = expected[name]
        error = (torch.as_tensor(value).double() - wanted).abs().max().item() if wanted.numel() else 0.0
        size = float(wanted.abs().max()) if wanted.numel() else 0.0
        if not error <= tolerance * size + tolerance * 1e-4 * scale:
            return Verdict("wrong", f"{name}: off by {error / (size or scale):.2g} of its largest entry")
    alarm = next((str(w.message) for w in caught if MIXING.search(str(w.message))), None)
    if alarm is not None and not case.may_warn:
        return Verdict("false alarm", alarm[:100])
    return Verdict("right")


def _refusal(error: Exception, *, needless: bool) -> Verdict:
    text = str(error)
    if not isinstance(error, ERRORS) or not ADVICE.search(text) or TORCH_SPEAKING.search(text):
        return Verdict("crashed", f"{type(error).__name__}: {text[:160]}")
    return Verdict("refused needlessly" if needless else "refused", text[:160])
