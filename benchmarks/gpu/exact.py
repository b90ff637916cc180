"""The exact diagonal of 8192 samples over a loop over samples and classes."""

from __future__ import annotations

import statistics
from functools import partial

import torch
from models import Task

import neuromanifold as nm
from gpu.models import PRECISIONS, in_precision, logits, precision
from gpu.session import Missing, Row, Session

TASKS = ("DistilBERT-14", "ResNet-50")
SAMPLES, LOOP_SAMPLES, LOOP_CLASSES = 8192, 2, 5
NOTE = (
    f"{SAMPLES} samples, extrapolated from one batch; with CUDA graphs.  The loop is extrapolated from {LOOP_SAMPLES} "
    f"samples with {LOOP_CLASSES} classes each."
)


def run_exact(session: Session) -> None:
    """Time the exact diagonal and the loop of two tasks."""
    rows: list[Row] = []
    for name in (name for name in TASKS if name in (session.options.only or TASKS)):
        for which in (which for which in reversed(PRECISIONS) if which in session.options.precision):
            found = session.guarded(f"{name} {which} · exact", partial(_row, session, name, which))
            rows.append(
                {"task": name, "precision": which, "why": found.reason} if isinstance(found, Missing) else found
            )
            session.free()
            session.add("Exact diagonal", rows, NOTE)


def _row(session: Session, name: str, which: str) -> Row:
    """Return the seconds of the exact diagonal of all samples, from one batch, over the loop's, from a few passes."""
    with precision(which):
        task = in_precision(session.task(name), which)
        exact = partial(nm.fisher_diagonal, task.model, estimator=nm.Exact(), cuda_graphs=True)
        few, many = (1, 2) if session.options.quick else (6, 8)  # captured in batch 4, after two that are verified
        short, long = (session.seconds(lambda k=k: exact([task.batch] * k)).wall for k in (few, many))
        batch = (long - short) / (many - few)
        total = short - few * batch + batch * SAMPLES / len(task.labels)
        forward, backward = _loop_seconds(session, task)
    loop = SAMPLES * (forward + task.classes * backward)
    session.tell(f"{name} {which} · exact · {total:.0f} s, loop {loop:.0f} s · {loop / total:.0f} times")
    numbers = {"classes": task.classes, "a batch, s": batch, "exact, s": total, "loop, s": loop, "ratio": loop / total}
    return {"task": name, "precision": which, **numbers}


def _loop_seconds(session: Session, task: Task) -> tuple[float, float]:
    """Return seconds of one sample's forward pass, and of one backward pass with squares added up."""
    chosen = list(task.model.parameters())
    total = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in chosen]
    classes = min(LOOP_CLASSES, task.classes)

    def forward(n: int) -> torch.Tensor:
        z = logits(task.model, {key: value[n : n + 1] for key, value in task.inputs.items()})[0]
        return z.log_softmax(-1) * z.detach().softmax(-1).sqrt()

    def backward(scores: torch.Tensor) -> None:
        for score in scores[:classes]:
            gradients = torch.autograd.grad(score, chosen, retain_graph=True, allow_unused=True)
            for squares, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    squares.addcmul_(gradient, gradient)

    backward(forward(0))  # not timed
    times = []
    for n in range(LOOP_SAMPLES):
        scores: list[torch.Tensor] = []
        one = session.seconds(lambda n=n, scores=scores: scores.append(forward(n))).wall
        times.append((one, session.seconds(lambda scores=scores: backward(scores[0])).wall / classes))
    ones, passes = zip(*times, strict=True)
    return statistics.mean(ones), statistics.mean(passes)
