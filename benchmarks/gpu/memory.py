"""Peak memory of two batches on a GPU, by samples and plain, over the model's and the data's own."""

from __future__ import annotations

import torch
from common import table
from gpu_models import parameters
from gpu_profile import Work
from gpu_session import Session
from models import Task

GOAL = 1.15
MIB = 2**20
NOTE = (
    "Peak of two batches, over the model's and the data's own.  “Without result”: less two float32 for each parameter, "
    "the squares and error bars that the result holds in any case."
)


def memory_row(session: Session, name: str, which: str, task: Task, plain: Work, samplewise: Work) -> list[str]:
    """Peak of two batches by samples, of two iterations of plain, and the ratio, with and without 2·P float32."""
    own = session.guarded(f"{name} {which} · memory", lambda: _peak(session, task, samplewise))
    base = session.guarded(f"{name} {which} · memory of plain", lambda: _peak(session, task, plain))
    if isinstance(own, str) or isinstance(base, str):
        return [name, which, *(x if isinstance(x, str) else f"{x:.0f}" for x in (base, own)), "", "", "", ""]
    result = 2 * 4 * parameters(task.model) / MIB
    raw, net = own / base, (own - result) / base
    met = " / ".join("yes" if ratio <= GOAL else "no" for ratio in (raw, net))
    session.tell(f"{name} {which} · memory · {base:.0f} MiB plain, {own:.0f} MiB · {raw:.3f}, {net:.3f} without result")
    return [name, which, f"{base:.0f}", f"{own:.0f}", f"{raw:.3f}", f"{net:.3f}", f"≤ {GOAL:.2f}", met]


def memory_text(rows: list[list[str]]) -> str:
    """The section."""
    header = ["task", "precision", "plain, MiB", "sample-wise, MiB", "ratio", "without result", "goal", "met"]
    return f"{NOTE}\n\n{table(header, rows)}"


def _peak(session: Session, task: Task, work: Work) -> float:
    """Of two batches, in MiB, over what is held before: the model, the data, and what libraries keep to themselves."""
    work([task.batch])
    task.model.zero_grad(set_to_none=True)
    session.free()
    session.wait()
    before = torch.cuda.memory_allocated(session.device)
    torch.cuda.reset_peak_memory_stats(session.device)
    work([task.batch] * 2)
    session.wait()
    return (torch.cuda.max_memory_allocated(session.device) - before) / MIB
