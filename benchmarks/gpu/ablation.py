"""What each Triton kernel gains: a batch of an estimate with it, and with torch doing the same, side by side."""

from __future__ import annotations

from functools import partial

from ablation import with_and_without
from common import Run, interleaved_runs
from models import Task

import neuromanifold as nm
from gpu.device import device_seconds
from gpu.models import PRECISIONS, in_precision, precision
from gpu.session import Missing, Row, Session

OPERATIONS = {
    "DistilBERT-14": ("add_squares_of_products", "hutchinson_probes"),
    "ResNet-50": ("add_squares_of_convolution", "channel_norm_sums"),
    "EfficientNet-B0": ("depthwise_gradients",),
    "GPT-2": ("hutchinson_probes",),
}
NOTE = (
    "A later batch of `nm.fisher_diagonal`, eager, with all kernels and with torch instead of one of them; all in "
    "turn.  Above 1, the kernel pays.  “Device” is the sum of all kernels of a batch: in half precision the wall-clock "
    "times Python."
)


def run_ablation(session: Session) -> None:
    """Time every operation where it matters, in fp32 and bf16."""
    rows: list[Row] = []
    names = [name for name in OPERATIONS if name in (session.options.only or OPERATIONS)]
    for k, name in enumerate(names):
        with session.share(1 / (len(names) - k)):
            task = session.guarded(f"ablation, {name}", partial(session.task, name))
            for which in [] if isinstance(task, Missing) else [w for w in PRECISIONS if w in session.options.precision]:
                cast = in_precision(task, which)
                for operation in OPERATIONS[name] if which != "tf32" else ():
                    title = f"ablation, {name} {which}, {operation}"
                    with precision(which):
                        found = session.guarded(title, partial(_row, session, cast, operation))
                    start: Row = {"task": name, "precision": which, "operation": operation}
                    rows.append({**start, **({"why": found.reason} if isinstance(found, Missing) else found)})
                    session.tell(f"{title} · " + " · ".join(f"{key} {value}" for key, value in rows[-1].items()))
                    session.free()
            del task
        session.free()
        session.add("Ablation of kernels", rows, NOTE)


def _row(session: Session, task: Task, operation: str) -> Row:
    own: Run = partial(nm.fisher_diagonal, task.model, cuda_graphs=False)
    runs, counts = (
        with_and_without(own, operation),
        (1, 2) if session.options.quick else (2, 6),
    )  # no verified batch between
    times, (few, many) = interleaved_runs(runs, task.batch, counts, session.options.repeats, session.device), counts
    ms = {name: 1000 * (times[name][many].wall - times[name][few].wall) / (many - few) for name in runs}
    device = {name: 1000 * device_seconds(session, task, run) for name, run in runs.items()}
    return {
        "kernel, ms": ms["kernel"],
        "torch, ms": ms["torch"],
        "torch / kernel": ms["torch"] / ms["kernel"],
        "device, kernel, ms": device["kernel"],
        "device, torch, ms": device["torch"],
        "device, torch / kernel": device["torch"] / device["kernel"],
    }
