"""Is it right on this device?  Small versions of all architectures against a float64 loop over samples and classes.

`neuromanifold.reference` says what is right, for the very weights and inputs that were used (rounded ones for bf16).
Wide ones have layers of real size, of which a kernel does many tiles; there the loop takes given labels only.
An error is ‖a - b‖/‖b‖ of a parameter, the worst one counts; where b is zero by symmetry (the keys' biases), it is
divided by the norm of the largest parameter.  "Plain loop" is the same error of autograd by itself in the same
precision, a backward pass for each sample (and class) of the same batch: what rounding costs without this library,
which in bf16 can be much (a ReLU that rounding switches on).  "From loop" is the distance to that loop.  One of the
two, error or distance, must be below the limit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from unittest import mock

import gpu_models
import torch
from common import table
from gpu_models import PRECISIONS, WIDE, cast_inputs, in_precision, logits, precision, small_task, wide_task
from models import Task
from torch import Tensor

import neuromanifold as nm
from neuromanifold.reference import network as reference
from neuromanifold.run import loop
from neuromanifold.run.graphs import Replay

LIMITS = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 5e-2}
ZERO = 1e-20  # of the largest norm: float64's rounding, squared, is 1e-32
ROUNDING = 1e-9  # the same for float32, squared 1e-14, with room for many of them
UNBIASED = ("DistilBERT", "ResNet-50")
SEEDS, FALSE_ALARMS, TWIN = 200, 1e-4, 1.25

Diagonal = dict[str, Tensor]
Scores = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities [T, C] and labels [T] of a sample to what is differentiated."""
Tell = Callable[[str], None]
Guarded = Callable[[str, Callable[[], object]], object]
"""Calls a function; gives its value, or 'fails: ...' in one line after having told so."""


def checks(architectures: list[str], precisions: list[str], device: torch.device, guarded: Guarded, tell: Tell) -> str:
    """Both tables, as Markdown."""
    rows = []
    wide = {
        f"{name}, wide": lambda which, name=name: _wide(name, which, device) for name in architectures if name in WIDE
    }
    small = {f"{name}, small": lambda which, name=name: _small(name, which, device) for name in architectures}
    for name, errors in (small | wide).items():
        for which in (which for which in PRECISIONS if which in precisions):
            found = guarded(f"check {name} {which}", lambda which=which, errors=errors: errors(which))
            found = [[found, *[""] * 5]] if isinstance(found, str) else found
            new = [[name, which, *cells] for cells in found]
            rows += new
            for row in new:
                tell(" · ".join(cell for cell in row if cell))
    header = ["network", "precision", "estimator", "worst error", "plain loop", "from loop", "limit", ""]
    first = table(header, rows)
    rows = []
    for name in (name for name in UNBIASED if name in architectures):
        found = guarded(f"unbiased {name}", lambda name=name: _unbiased(name, device))
        rows.append([name, found, "", "", ""] if isinstance(found, str) else found)
        tell(" · ".join(cell for cell in rows[-1] if cell))
    replays = []
    for name in architectures if device.type == "cuda" else ():
        found = guarded(f"replay {name}", lambda name=name: _replay(name, device))
        replays.append([name, found, "", ""] if isinstance(found, str) else found)
        tell(" · ".join(cell for cell in replays[-1] if cell))
    second = "Ten batches replayed (CUDA graphs) against ten as always, the same seed: the largest distance."
    second += "\n\n" + table(["network, small", "Hutchinson()", "Exact()", ""], replays)
    note = f"Hutchinson() by samples, {SEEDS} seeds, fp32: is its mean that of Exact()?  The largest |z| over "
    note += f"sums of parameters; the twin is the same times {TWIN} and must be seen."
    header = ["network, small", "largest z", "of the twin", "limit", ""]
    parts = [first, *([second] if replays else []), *([note, table(header, rows)] if rows else [])]
    return "\n\n".join(parts)


# ----------------------------------------------------------------------------------------- against the float64 loop


def _small(name: str, which: str, device: torch.device) -> list[list[str]]:
    """A row for each estimator."""
    task = in_precision(small_task(name, device), which)
    inputs = cast_inputs(task.inputs, torch.float64)
    exact = reference.fisher_diagonal(task.model, lambda model: logits(model, inputs))
    empirical = reference.empirical_diagonal(task.model, lambda model: logits(model, inputs), task.labels)
    return [_errors(task, which, nm.Exact(), exact, _all), _errors(task, which, nm.Empirical(), empirical, _given)]


def _wide(name: str, which: str, device: torch.device) -> list[list[str]]:
    """A row; the loop is that of `_loop`, in float64, since a Jacobian of all classes would be large."""
    task = in_precision(wide_task(name, device), which)
    model = copy.deepcopy(task.model).double()
    truth = _loop(task._replace(model=model, inputs=cast_inputs(task.inputs, torch.float64)), _given, torch.float64)
    return [_errors(task, which, nm.Empirical(), truth, _given)]


def _errors(task: Task, which: str, estimator: nm.Estimator, truth: Diagonal, scores: Scores) -> list[str]:
    """A row without its name: errors of this library and of the loop in this precision, and how far apart they are."""
    limit = LIMITS[which]
    with precision(which):
        loop = _loop(task, scores)
        found = nm.fisher_diagonal(task.model, [task.batch], estimator).sum
    (error, where), (own, _), (apart, _) = (
        _worst(truth, *pair) for pair in ((found, truth), (loop, truth), (found, loop))
    )
    verdict = "PASS" if error <= limit else "PASS, as the loop" if apart <= limit else "FAIL"
    return [repr(estimator), f"{error:.1e} ({where})", f"{own:.1e}", f"{apart:.1e}", f"{limit:.0e}", verdict]


def _worst(truth: Diagonal, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest distance of a from b in norms of the truth, and of which parameter."""
    norms = {key: float(torch.linalg.vector_norm(value)) for key, value in truth.items()}
    largest, errors = max(norms.values()), {}
    for key in truth:
        scale = norms[key] if norms[key] > ZERO * largest else largest
        error = float(torch.linalg.vector_norm(a[key].double() - b[key].double())) / scale
        errors[key] = error if math.isfinite(error) else math.inf  # also what is not a number
    where = max(errors, key=errors.__getitem__)
    return errors[where], where


def _loop(task: Task, scores: Scores, dtype: torch.dtype = torch.float32) -> Diagonal:
    """Σ_n Σ (∂ score/∂θ)², one forward pass, a backward pass for each score, squares in float32 or better."""
    named = dict(task.model.named_parameters())
    total = {key: torch.zeros_like(parameter, dtype=dtype) for key, parameter in named.items()}
    z = logits(task.model, task.inputs)  # [B, C] or [B, T, C]
    for n in range(len(z)):
        for score in scores(z[n].view(-1, z.shape[-1]).log_softmax(-1), task.labels[n].view(-1)):
            gradients = torch.autograd.grad(score, list(named.values()), retain_graph=True, allow_unused=True)
            for key, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    total[key] += gradient.to(dtype).square()
    return total


def _all(log_p: Tensor, labels: Tensor) -> Tensor:
    """√p · log p of every position and class."""
    del labels
    return (log_p * (log_p.detach() / 2).exp()).flatten()


def _given(log_p: Tensor, labels: Tensor) -> Tensor:
    """The log-likelihood of a sample's labels, of all positions together."""
    return log_p.gather(-1, labels[:, None]).sum()[None]


class _Watched(Replay):
    """Remembers itself, so that one can ask how many batches were replayed."""

    last: Replay

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        _Watched.last = self


def _replay(name: str, device: torch.device) -> list[str]:
    """Other inputs in each batch, so that what is not replayed would be seen."""
    task, cells, replayed = small_task(name, device), [], []
    batches = []
    for k in range(10):
        order = torch.randperm(len(task.labels), generator=torch.Generator().manual_seed(k)).to(device)
        batches.append({**{key: value[order] for key, value in task.inputs.items()}, "labels": task.labels[order]})
    with precision("fp32"):
        for estimator in (nm.Hutchinson(), nm.Exact()):
            with mock.patch.object(loop, "Replay", _Watched):
                found = nm.fisher_diagonal(task.model, batches, estimator, replay=True).sum
            replayed.append(_Watched.last.replayed)
            expected = nm.fisher_diagonal(task.model, batches, estimator).sum
            cells.append(_worst(_without_rounding(expected), found, expected)[0])
    shown = [f"{cell:.1e}, {number} replayed" for cell, number in zip(cells, replayed, strict=True)]
    return [name, *shown, "FAIL" if max(cells) > LIMITS["fp32"] else "PASS" if min(replayed) else "not replayed"]


def _without_rounding(found: Mapping[str, Tensor]) -> Diagonal:
    """Zero where the truth is zero (biases of keys in attention) and float32 has squares of rounding errors."""
    largest = max(float(torch.linalg.vector_norm(value)) for value in found.values())
    return {key: value * (float(torch.linalg.vector_norm(value)) > ROUNDING * largest) for key, value in found.items()}


# --------------------------------------------------------------------------------------------------------- unbiased?


def _unbiased(name: str, device: torch.device) -> list[str]:
    task = small_task(name, device)
    with precision("fp32"):
        expected = _sums(nm.fisher_diagonal(task.model, [task.batch], nm.Exact()))
        runs = [
            _sums(nm.fisher_diagonal(task.model, [task.batch], nm.Hutchinson(), seed=seed)) for seed in range(SEEDS)
        ]
    samples = torch.stack(runs)  # [seeds, parameters]
    counts = expected > 1e-9 * expected.max()  # where it is zero by symmetry there is only rounding
    samples, expected = samples[:, counts], expected[counts]
    z, twin = _z_score(samples, expected), _z_score(TWIN * samples, expected)
    limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / 2 / len(expected))
    verdict = "PASS" if z <= limit < twin else "FAIL"
    return [name, f"{z:.1f}", f"{twin:.1f}", f"{limit:.1f}", verdict]


def _sums(fim: nm.DiagonalFisher) -> Tensor:
    return torch.stack([value.double().sum() for value in fim.sum.values()])


def _z_score(samples: Tensor, expected: Tensor) -> float:
    """The largest |mean - expected| in standard errors; of what has (almost) no noise, 10⁻⁴ of it counts as one."""
    error = (samples.mean(0) - expected).abs()
    return float((error / (samples.std(0) / math.sqrt(len(samples))).clamp(min=1e-4 * expected)).max())


def architectures_of(tasks: list[str]) -> list[str]:
    """The architectures of some tasks, each once."""
    return list(dict.fromkeys(gpu_models.TASKS[task][0] for task in tasks))
