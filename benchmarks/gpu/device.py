"""How long the device works on a batch: the sum of all kernels, over that of plain, and the share of time it is busy.

Filled into the tables of times once they are complete: a profiler that has been used may make launching kernels slower
for the rest of the process, which the clock would see.
"""

from __future__ import annotations

from itertools import groupby

from common import table
from gpu_models import in_precision, precision
from gpu_profile import device_seconds
from gpu_session import Clocked, Session
from gpu_times import works


def run_device(session: Session, tasks: list[str]) -> None:
    """Measure again, with a profiler, plain and the main rows of all tasks that have been timed."""
    timed = [clocked for clocked in session.clocked if clocked.task in tasks]
    for (name, times), of_task in groupby(timed, key=lambda clocked: (clocked.task, clocked.times)):
        task = session.guarded(f"{name}, device", lambda name=name, times=times: session.task(name, times))
        if isinstance(task, str):
            continue
        for which, rows in groupby(of_task, key=lambda clocked: clocked.which):  # in the order of PRECISIONS
            task, plain = in_precision(task, which), 0.0
            for clocked in rows:
                work, title = works(task, name, which, main=False)[clocked.row], f"{name} {which}, B={len(task.labels)}"
                with precision(which):
                    found = session.guarded(
                        f"{title} · {clocked.row}, device",
                        lambda task=task, work=work: device_seconds(session, task, work),
                    )
                plain = found if clocked.row == "plain" and not isinstance(found, str) else plain
                cells = _fill(clocked, found, plain)
                session.tell(f"{title} · {clocked.row} · device, over plain, busy: {', '.join(cells)}")
            header, lines = session.tables[clocked.heading]
            session.keep(clocked.heading, table(header, lines))
        del task, work
        session.free()


def _fill(clocked: Clocked, found: object, plain: float) -> list[str]:
    """Milliseconds, over plain, and the share of the time by the clock, into the places for them (see HEADER)."""
    if isinstance(found, float):
        ratio = f"{found / plain:.3f}" if plain > 0 else ""
        cells = [f"{1000 * found:.2f}", ratio, f"{100 * found / clocked.seconds:.0f} %"]
    else:
        cells = [f"{found}", "", ""]
    clocked.line[-5:-2] = cells
    return cells
