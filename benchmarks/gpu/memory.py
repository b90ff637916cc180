"""Peak memory of two batches on a GPU, per sample and forward + backward, over the model's and the data's own.

The first two batches are verified, so that this is the peak of a whole run.
"""

from __future__ import annotations

import torch
from common import Run
from models import Task

from gpu.models import parameters
from gpu.session import Missing, Row, Session

MIB = 2**20
NOTE = (
    "Peak of two batches, both of them verified, over the model's and the data's own.  “Without result”: less two "
    "float32 for each parameter, the squares and error bars that the result holds in any case."
)


def memory_row(session: Session, name: str, which: str, task: Task, baseline: Run, per_sample: Run) -> Row:
    """Return both peaks and their ratio, with and without the result's own two float32 for each parameter."""
    own = session.guarded(f"{name} {which} · memory", lambda: _peak(session, task, per_sample))
    base = session.guarded(f"{name} {which} · memory of the baseline", lambda: _peak(session, task, baseline))
    if isinstance(own, Missing) or isinstance(base, Missing):
        return {"task": name, "precision": which, "why": next(x.reason for x in (own, base) if isinstance(x, Missing))}
    result = 2 * 4 * parameters(task.model) / MIB
    raw, net = own / base, (own - result) / base
    session.tell(f"{name} {which} · memory · {base:.0f} and {own:.0f} MiB · {raw:.3f}, {net:.3f} without result")
    found = {"forward + backward, MiB": base, "per sample, MiB": own, "ratio": raw, "without result": net}
    return {"task": name, "precision": which, **found}


def _peak(session: Session, task: Task, run: Run) -> float:
    """Return MiB over what is held before: the model, the data, and what libraries keep to themselves."""
    run([task.batch])
    task.model.zero_grad(set_to_none=True)
    session.free()
    session.wait()
    before = torch.cuda.memory_allocated(session.device)
    torch.cuda.reset_peak_memory_stats(session.device)
    run([task.batch] * 2)
    session.wait()
    peak = (torch.cuda.max_memory_allocated(session.device) - before) / MIB
    task.model.zero_grad(set_to_none=True)
    return peak
