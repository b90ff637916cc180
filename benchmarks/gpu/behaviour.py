"""CUDA graphs, verification and unbiasedness on this device.

graphs        captured runs give what eager ones do, by request and by default ("auto"), and a model that cannot be
              captured runs eagerly: with a warning by request, without one by default
verification  the same parameters pass in every precision as in float32 without TF32, and a wrong rule never does
unbiased      the mean over seeds is the exact diagonal, by a z-score; a twin that is 1.25 times too large is seen
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import NormalDist
from unittest import mock

import torch
from models import Task
from torch import Tensor, nn

import neuromanifold as nm
from gpu.models import ARCHITECTURES, HALF, in_precision, precision, small_task
from gpu.networks import LIMITS, ROUNDING, without_rounding, worst
from gpu.session import Missing, Row, Session
from neuromanifold.persample.gradients import Dense, Form, Product
from neuromanifold.persample.rules.registry import Call
from neuromanifold.run import loop
from neuromanifold.run.graphs import CapturedSteps

UNBIASED = ("DistilBERT", "ResNet-50")
SEEDS, FALSE_ALARMS, TWIN = 100, 1e-4, 1.25
BATCHES = 12  # 0 and 1 are verified, 2 and 3 eager, 4 is captured
NOTE_GRAPHS = "Runs over 12 different batches with CUDA graphs against eager ones, the same seed: the largest distance."
NOTE_UNBIASED = (
    f"Hutchinson(), {SEEDS} seeds, fp32: the largest |z| over sums of parameters; the twin is {TWIN} times it."
)


def run_behaviour(session: Session, architectures: list[str]) -> None:
    """Run all three; CUDA graphs only where there are any."""
    cuda = session.device.type == "cuda"
    graphs = {name: partial(_graphs, name, session.device) for name in architectures if cuda}
    _section(session, "CUDA graphs", graphs | ({"reads back": partial(_reads_back, session.device)} if cuda else {}))
    verified = {name: partial(_verification, name, session.device) for name in architectures}
    _section(session, "Verification", verified | {"wrong rule": partial(_wrong_rule, session.device)})
    _section(session, "Unbiased", {n: partial(_unbiased, n, session) for n in UNBIASED if n in architectures})


def _section(session: Session, heading: str, checks: Mapping[str, partial[list[tuple[Row, bool]]]]) -> None:
    rows: list[Row] = []
    for name, check in checks.items():
        found = session.guarded(f"{heading}, {name}", check)
        for row, passed in [] if isinstance(found, Missing) else found:
            session.checked(f"{heading}, {name}", {"network": name, **row}, passed, rows)
        if isinstance(found, Missing):
            rows.append({"network": name, "verdict": found.reason})
    session.add(heading, rows, {"CUDA graphs": NOTE_GRAPHS, "Unbiased": NOTE_UNBIASED}.get(heading, ""))


# ------------------------------------------------------------------------------------------------------------ graphs


def _graphs(name: str, device: torch.device) -> list[tuple[Row, bool]]:
    task = small_task(name, device)
    language = ARCHITECTURES[name].language  # whose exact diagonal reads back how many positions count
    return [
        _captured(task, _shuffled(task), estimator, may_be_eager=language and isinstance(estimator, nm.Exact))
        for estimator in (nm.Hutchinson(), nm.Exact())
    ]


def _captured(task: Task, batches: list[object], estimator: nm.Estimator, *, may_be_eager: bool) -> tuple[Row, bool]:
    made: list[CapturedSteps] = []

    def watched(*arguments: object) -> CapturedSteps:
        made.append(CapturedSteps(*arguments))
        return made[-1]

    with precision("fp32"):
        eager = nm.fisher_diagonal(task.model, batches, estimator, cuda_graphs=False).sum
        row: Row = {"estimator": repr(estimator)}
        for graphs in (True, "auto"):
            with mock.patch.object(loop, "CapturedSteps", watched), _reasons(row):
                found = nm.fisher_diagonal(task.model, batches, estimator, cuda_graphs=graphs).sum
            row[f"cuda_graphs={graphs}"] = worst(without_rounding(eager), found, eager)[0]
            row[f"replayed, {graphs}"] = sum(one.replayed for one in made)
            made.clear()
    right = max(row["cuda_graphs=True"], row["cuda_graphs=auto"]) <= LIMITS["fp32"]
    return row, right and (may_be_eager or row["replayed, True"] > 0)


@contextmanager
def _reasons(row: Row) -> Iterator[None]:
    """Note in a row why batches were not captured, if a warning says so inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if reasons := [str(one.message) for one in caught if issubclass(one.category, nm.NotCapturedWarning)]:
        row["eager"] = reasons[0]


class ReadsBack(nn.Module):
    """Cannot be captured: its forward pass waits for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 3]."""
        y = self.first(x)
        return self.last(torch.tanh(y) if float(y.detach().abs().sum()) >= 0 else y)


def _reads_back(device: torch.device) -> list[tuple[Row, bool]]:
    torch.manual_seed(0)
    model, data = ReadsBack().to(device), list(torch.randn(BATCHES, 5, 6, device=device))
    eager, rows = nm.fisher_diagonal(model, data, cuda_graphs=False).sum, []
    for graphs in (True, "auto"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = nm.fisher_diagonal(model, data, cuda_graphs=graphs).sum
        said = sum(issubclass(one.category, nm.NotCapturedWarning) for one in caught)
        distance = worst(dict(eager), found, eager)[0]
        row: Row = {"estimator": "Hutchinson()", f"cuda_graphs={graphs}": distance, "warnings": said}
        rows.append((row, distance <= LIMITS["fp32"] and said == (graphs is True)))
    return rows


def _shuffled(task: Task) -> list[object]:
    """Return batches with other inputs each, so that what is not replayed would be seen."""
    batches: list[object] = []
    for k in range(BATCHES):
        order = torch.randperm(len(task.labels), generator=torch.Generator().manual_seed(k)).to(task.labels.device)
        batches.append({**{key: value[order] for key, value in task.inputs.items()}, "labels": task.labels[order]})
    return batches


# ------------------------------------------------------------------------------------------------------ verification


def _verification(name: str, device: torch.device) -> list[tuple[Row, bool]]:
    """Compare which parameters pass with those that do in float32 without TF32."""
    expected: dict[str, str] = {}
    rows = []
    for which in ("fp32", "tf32", *HALF):
        task = in_precision(small_task(name, device), which)
        with precision(which):
            p = nm.fisher_diagonal(task.model, _shuffled(task)[:3], cuda_graphs=False).provenance
        expected = expected or p.granularity
        others = sum(method != "sample" for method in p.granularity.values())
        row: Row = {"precision": which, "verified batches": p.verified, "not per sample": others}
        rows.append((row, p.verified == 2 and p.granularity == expected))
    return rows


class WrongLinear(nn.Linear):
    """A layer whose rule is 1.25 times too large."""


@nm.rule(WrongLinear, extra_dims=True)
def _wrong(call: Call) -> dict[str, Form]:
    """Return gradients that no verification may accept."""
    return {"weight": Product(1.25 * call.g[:, None], call.x[:, None]), "bias": Dense(1.25 * call.g)}


def _wrong_rule(device: torch.device) -> list[tuple[Row, bool]]:
    rows = []
    for which in ("fp32", "tf32", *HALF):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), WrongLinear(64, 48), nn.Tanh(), nn.Linear(48, 10))
        model, x = model.to(device, HALF.get(which)), torch.randn(16, 32, device=device, dtype=HALF.get(which))
        with precision(which):
            methods = nm.fisher_diagonal(model, [x, x]).provenance.granularity
        found = [name for name, method in methods.items() if method != "sample"]
        rows.append(({"precision": which, "not per sample": ", ".join(found)}, found == ["2.weight", "2.bias"]))
    return rows


# ---------------------------------------------------------------------------------------------------------- unbiased


def _unbiased(name: str, session: Session) -> list[tuple[Row, bool]]:
    task = small_task(name, session.device)
    run = partial(nm.fisher_diagonal, task.model, [task.batch])
    with precision("fp32"):
        expected = _sums(run(nm.Exact()))
        runs = [_sums(run(nm.Hutchinson(), seed=seed)) for seed in range(10 if session.options.quick else SEEDS)]
    samples = torch.stack(runs)  # [seeds, parameters]
    counts = expected > ROUNDING * expected.max()  # where it is zero by symmetry there is only rounding
    samples, expected = samples[:, counts], expected[counts]
    z, twin = _z_score(samples, expected), _z_score(TWIN * samples, expected)
    limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / 2 / len(expected))
    return [({"largest z": z, "of the twin": twin, "limit": limit}, z <= limit and (twin > limit or len(runs) < SEEDS))]


def _sums(fim: nm.DiagonalFisher) -> Tensor:
    return torch.stack([value.double().sum() for value in fim.sum.values()])


def _z_score(samples: Tensor, expected: Tensor) -> float:
    """Return the largest |mean - expected| in standard errors, of which 10⁻⁴ of the expected is the least."""
    error = (samples.mean(0) - expected).abs()
    return float((error / (samples.std(0) / math.sqrt(len(samples))).clamp(min=1e-4 * expected)).max())
