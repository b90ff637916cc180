"""The exact diagonal of 8192 samples over a loop over samples and classes."""

from __future__ import annotations

import statistics

import torch
from common import table
from gpu_models import in_precision, logits, precision
from gpu_session import Session
from models import Task

import neuromanifold as nm

TASKS = dict.fromkeys(("ResNet-50", "DistilBERT-14"), ("fp32", "tf32", "bf16"))  # in which precisions
GOAL = 50.0
SAMPLES, LOOP_SAMPLES, LOOP_CLASSES = 8192, 2, 5


def run_exact(session: Session, tasks: list[str]) -> None:
    """The section."""
    rows = []
    for name in (name for name in TASKS if name in tasks):
        for which in (which for which in TASKS[name] if which in session.options.precision):
            title = f"{name} {which} · exact"
            found = session.guarded(title, lambda name=name, which=which: _row(session, name, which))
            rows.append([name, which, found, *[""] * 6] if isinstance(found, str) else found)
            session.free()
    if rows:
        header = ["task", "precision", "classes", "a batch, s", f"{SAMPLES} samples, s", "loop, s", "speedup"]
        note = (
            f"With replay=True.  The loop is extrapolated from {LOOP_SAMPLES} samples with {LOOP_CLASSES} classes each."
        )
        session.keep("Exact diagonal", f"{note}\n\n{table([*header, 'goal', 'met'], rows)}")


def _row(session: Session, name: str, which: str) -> list[str]:
    """The exact diagonal of 8192 samples, extrapolated from one batch, over the loop, from a few passes."""
    with precision(which):
        task = in_precision(session.task(name), which)
        warm = nm.Exact(envelope=nm.Lower(1))  # the same passes, but one of them
        nm.fisher_diagonal(task.model, [task.batch], warm)
        batches = SAMPLES / len(task.labels)
        if session.options.quick:
            own, fixed = session.seconds(lambda: nm.fisher_diagonal(task.model, [task.batch], nm.Exact())), 0.0
        else:  # two batches as always, one that is recorded; then it is replayed
            four, six = (
                session.seconds(lambda k=k: nm.fisher_diagonal(task.model, [task.batch] * k, nm.Exact(), replay=True))
                for k in (4, 6)
            )
            own, fixed = (six - four) / 2, 3 * four - 2 * six
        total = fixed + own * batches
        forward, backward = _loop_seconds(session, task)
        loop = SAMPLES * (forward + task.classes * backward)
    speedup = loop / total
    passes = f"{1000 * backward:.1f} ms a pass"
    session.tell(f"{name} {which} · exact · {total:.0f} s, loop {loop:.0f} s ({passes}) · {speedup:.0f} times")
    goals = [f"≥ {GOAL:.0f}", "yes" if speedup >= GOAL else "no"]
    return [name, which, str(task.classes), f"{own:.3f}", f"{total:.0f}", f"{loop:.0f}", f"{speedup:.0f}", *goals]


def _loop_seconds(session: Session, task: Task) -> tuple[float, float]:
    """Of one sample's forward pass, and of one backward pass with squares added up."""
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
        one = session.seconds(lambda n=n, scores=scores: scores.append(forward(n)))
        times.append((one, session.seconds(lambda scores=scores: backward(scores[0])) / classes))
    ones, passes = zip(*times, strict=True)
    return statistics.mean(ones), statistics.mean(passes)
