"""What a Fisher diagonal costs on a GPU, by batches and by samples, over a plain forward and backward pass.

    PYTHONPATH=src python benchmarks/gpu.py [--only ResNet-50 GPT-2] [--precision fp32 bf16] [--repeats 3] [--quick]
                                            [--sections times exact] [--skip-checks] [--budget 450] [--copy FILE]
    PYTHONPATH=src python benchmarks/gpu.py --profile DistilBERT-2 bf16

in one process:

    checks      small versions of all networks against float64, and whether the mean over seeds is right (gpu_checks.py)
    exact       the exact diagonal of 8192 samples over a loop over samples and classes
    times       for each task and precision: all rows take turns, and so does plain
    memory      peak of two batches over the model's and the data's own, over that of plain
    kernels     fused kernels against cuBLAS by layer shape (gpu_kernels.py, where there is one)

"Plain" is forward and backward of the summed cross-entropy into .grad (eager).  A run over k batches takes
fixed + k·batch: "ms" is (time of 3k batches - time of k batches)/2k, for plain as for all others, and "fixed" what is
left, the passes of the trial and everything else that happens once a call.  Medians over the turns; ± is half the range
of their ratios.  fp32: no TF32 anywhere; tf32: matrix products and convolutions in TF32; bf16: model and inputs in
bfloat16.  An error costs its row only.  The result is written after each section; parts of it (--only, --quick, ...)
are printed and do not replace it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gpu_checks
import torch
import transformers
from common import keep, setting, table
from gpu_models import ARCHITECTURES, PRECISIONS, TASKS, full_task, in_precision, logits, parameters, precision
from gpu_models import small_task as small
from models import Task
from torch.nn.functional import cross_entropy

import neuromanifold as nm

DEFLATED = nm.Hutchinson(deflate=1)
ROWS = {
    "batch-wise, deflated": (DEFLATED, "batch"),
    "sample-wise, deflated": (DEFLATED, "auto"),
    "batch-wise, Full": (nm.Hutchinson(), "batch"),
    "batch-wise, Upper": (nm.Hutchinson(core=nm.Upper()), "batch"),
    "batch-wise, Lower(2)": (nm.Hutchinson(core=nm.Lower(2)), "batch"),
    "sample-wise, Hutchinson()": (nm.Hutchinson(), "auto"),
    "sample-wise, MonteCarlo()": (nm.MonteCarlo(), "auto"),
    "sample-wise, Empirical()": (nm.Empirical(), "auto"),
}
MAIN = ("batch-wise, deflated", "sample-wise, deflated")  # of every precision; all rows of fp32
GOALS = {"transformer": {"fp32": 1.05, "tf32": 1.20, "bf16": 1.20}, "convolutional": dict.fromkeys(PRECISIONS, 1.25)}
BATCHWISE_GOAL, LOWER_GOAL, EXACT_GOAL, MEMORY_GOAL = 1.03, 1.02, 50.0, 1.15
EXACT = {"ResNet-50": ("fp32", "bf16"), "DistilBERT-14": ("fp32", "bf16")}
EXACT_SAMPLES, LOOP_SAMPLES, LOOP_CLASSES = 8192, 2, 5
SECTIONS = ("checks", "exact", "times", "kernels")
SECONDS = 0.3  # of the 2k batches that a time per batch comes from
SLOW = 1.5  # seconds for one batch: then one turn, of one and of three batches
MIB = 2**20


class Session:
    """The options, the device and the clock of this run, and what it has found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.texts: dict[str, str] = {}  # by heading

    def tell(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", flush=True)

    @property
    def over(self) -> bool:
        """Whether no new row may begin."""
        return time.perf_counter() - self.start > self.options.budget

    def guarded(self, name: str, function: Callable[[], object]) -> object:
        """The function's value, or in one line why there is none."""
        if self.over:
            return "not run: out of time"
        try:
            return function()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            text = f"fails: {type(error).__name__}: {lines[0][:100]}".replace("|", "/")
        self.tell(f"{name} · {text}")
        self.free()
        return text

    def free(self) -> None:
        """Give back what is not used any more; also after an error that the device does not recover from."""
        gc.collect()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, with nothing under way before and after."""
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def task(self, name: str) -> Task:
        """Full size, or small for --quick."""
        return small(TASKS[name][0], self.device) if self.options.quick else full_task(name, self.device)

    def keep(self, heading: str, text: str) -> None:
        """Add a section and write everything down."""
        self.texts[heading] = text
        if self.options.copy:
            Path(self.options.copy).write_text(self.text + "\n")
        if self.whole:
            with contextlib.redirect_stdout(io.StringIO()):  # all of it is printed once, at the end
                keep("gpu-h200", self.text)

    @property
    def whole(self) -> bool:
        """Whether this run is the whole result; a part does not replace it."""
        o = self.options
        return not (o.quick or o.only or o.skip_checks or set(o.precision) != set(PRECISIONS) or o.sections != SECTIONS)

    @property
    def text(self) -> str:
        """All sections so far, in the order of reading."""
        command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
        head = f"{setting(command, self.device)} · transformers {transformers.__version__}"
        head += f" · {time.perf_counter() - self.start:.0f} s"
        order = sorted(self.texts, key=lambda heading: _ORDER.index(heading.split(":")[0]))
        title = "# On a GPU: time and memory over plain forward + backward"
        note = "Times are per batch, without what happens once a call (“fixed”); ± is half the range over the turns."
        return "\n\n".join([title, head, note, *(f"## {heading}\n\n{self.texts[heading]}" for heading in order)])


_ORDER = [*TASKS, "Memory", "Exact diagonal", "Checks", "Fused kernels"]


# -------------------------------------------------------------------------------------------------------------- works

Works = dict[str, Callable[[int], object]]
"""By name: what does so many batches."""


def plain(task: Task, batches: int) -> None:
    """Forward and backward into .grad."""
    for _ in range(batches):
        task.model.zero_grad(set_to_none=True)
        z = logits(task.model, task.inputs)
        cross_entropy(z.flatten(0, -2), task.labels.flatten(), reduction="sum").backward()


def fisher(task: Task, row: str, batches: int) -> nm.DiagonalFisher:
    """A row of this library."""
    estimator, granularity = ROWS[row]
    return nm.fisher_diagonal(task.model, [task.batch] * batches, estimator, granularity=granularity)


def works(task: Task, name: str, which: str) -> Works:
    """Plain and the rows of a task in a precision."""
    words = ARCHITECTURES[TASKS[name][0]].words
    rows = [row for row in (ROWS if which == "fp32" else MAIN) if not (words and "Empirical" in row)]
    ours = {row: lambda batches, row=row: fisher(task, row, batches) for row in rows}
    return {"plain": lambda batches: plain(task, batches), **ours}


# -------------------------------------------------------------------------------------------------------------- times


class Time(NamedTuple):
    """Seconds of a batch and of what happens once, for each turn."""

    batch: list[float]
    fixed: list[float]

    def over(self, plain: Time) -> tuple[float, float]:
        """The ratio of the medians, and half the range of the turns' ratios."""
        ratios = [own / other for own, other in zip(self.batch, plain.batch, strict=False)]
        return statistics.median(self.batch) / statistics.median(plain.batch), (max(ratios) - min(ratios)) / 2


def take_turns(session: Session, title: str, functions: Works) -> dict[str, Time | str]:
    """The time of each, or why there is none; plain comes first in every turn."""
    turns: dict[str, int] = {}  # how many for each
    slow: dict[str, bool] = {}
    failed: dict[str, str] = {}
    for name, work in functions.items():  # what happens once in a process, and how long it takes at all
        first = session.guarded(f"{title} · {name}", lambda work=work: session.seconds(lambda: work(1)))
        if not isinstance(first, str) and first > SLOW:
            first = session.guarded(f"{title} · {name}", lambda work=work: session.seconds(lambda: work(1)))
        if isinstance(first, str):
            failed[name] = first
        else:
            slow[name] = first > SLOW
            turns[name] = 1 if slow[name] else session.options.repeats
    if "plain" in failed:
        return failed
    one = session.seconds(lambda: functions["plain"](4)) / 4
    batches = 1 if session.options.quick else max(2, math.ceil(SECONDS / 2 / one))
    count = {name: 1 if slow[name] else batches for name in turns}
    times: dict[str, Time | str] = {name: Time([], []) for name in turns}
    gc.collect()
    gc.freeze()  # so that Python does not look through all modules in the middle of a run
    for turn in range(session.options.repeats):
        for name in (name for name in turns if turn < turns[name] and isinstance(times[name], Time)):
            k = count[name]
            pair = session.guarded(f"{title} · {name}", lambda name=name, k=k: _pair(session, functions[name], k))
            if not isinstance(pair, str):
                batch = (pair[1] - pair[0]) / (2 * k)
                times[name].batch.append(batch)
                times[name].fixed.append(pair[0] - k * batch)
            elif pair.startswith("fails") or not times[name].batch:
                times[name] = pair
    gc.unfreeze()
    return {name: times.get(name, failed.get(name, "")) for name in functions}


def _pair(session: Session, work: Callable[[int], object], k: int) -> tuple[float, float]:
    return session.seconds(lambda: work(k)), session.seconds(lambda: work(3 * k))


def goal(name: str, row: str, which: str) -> float | None:
    """The largest ratio that is good enough."""
    if row.startswith("batch-wise"):
        return BATCHWISE_GOAL
    return GOALS[ARCHITECTURES[TASKS[name][0]].kind][which] if row == "sample-wise, deflated" else None


def time_table(session: Session, name: str, which: str, task: Task) -> list[list[str]]:
    """Rows of a task in a precision."""
    times = take_turns(session, f"{name} {which}", works(task, name, which))
    base, lines = times["plain"], []
    for row, found in times.items():
        if isinstance(found, str) or isinstance(base, str):
            lines.append([row, which, "", found if isinstance(found, str) else "no plain", "", "", "", ""])
            continue
        ratio, spread = found.over(base)
        milliseconds = f"{1000 * statistics.median(found.batch):.2f}"
        fixed = f"{1000 * statistics.median(found.fixed):.0f}"
        limit = goal(name, row, which) if row != "plain" else None
        figures = [milliseconds, f"{ratio:.3f}", f"{spread:.3f}", fixed]
        lines.append([row, which, *figures, *_met(ratio, limit)])
        session.tell(f"{name} {which} · {row} · {milliseconds} ms · {ratio:.3f} ± {spread:.3f} · fixed {fixed} ms")
    lower, full = times.get("batch-wise, Lower(2)"), times.get("batch-wise, Full")
    if TASKS[name][1].classes == 100 and isinstance(lower, Time) and isinstance(full, Time):
        ratio, spread = lower.over(full)
        lines.append(["Lower(2) over Full", which, "", f"{ratio:.3f}", f"{spread:.3f}", "", *_met(ratio, LOWER_GOAL)])
        session.tell(f"{name} {which} · Lower(2) over Full · {ratio:.3f} ± {spread:.3f}")
    return lines


def _met(ratio: float, limit: float | None) -> list[str]:
    return ["", ""] if limit is None else [f"≤ {limit:.2f}", "yes" if 0 < ratio <= limit else "no"]


# ------------------------------------------------------------------------------------------------------------- memory


def memory_row(session: Session, name: str, which: str, task: Task) -> list[str]:
    """Peak of two batches by samples, of two iterations of plain, and the ratio, with and without 2·P float32."""
    own = session.guarded(f"{name} {which} · memory", lambda: _peak(session, task, _samplewise))
    base = session.guarded(f"{name} {which} · memory of plain", lambda: _peak(session, task, plain))
    if isinstance(own, str) or isinstance(base, str):
        return [name, which, *(x if isinstance(x, str) else f"{x:.0f}" for x in (base, own)), "", "", "", ""]
    result = 2 * 4 * parameters(task.model) / MIB
    raw, net = own / base, (own - result) / base
    met = " / ".join("yes" if ratio <= MEMORY_GOAL else "no" for ratio in (raw, net))
    session.tell(f"{name} {which} · memory · {base:.0f} MiB plain, {own:.0f} MiB · {raw:.3f}, {net:.3f} without result")
    return [name, which, f"{base:.0f}", f"{own:.0f}", f"{raw:.3f}", f"{net:.3f}", f"≤ {MEMORY_GOAL:.2f}", met]


def _samplewise(task: Task, batches: int) -> nm.DiagonalFisher:
    return fisher(task, "sample-wise, deflated", batches)


def _peak(session: Session, task: Task, work: Callable[[Task, int], object]) -> float:
    """Of two batches, in MiB, over what is held before: the model, the data, and what libraries keep to themselves."""
    work(task, 1)
    task.model.zero_grad(set_to_none=True)
    session.free()
    session.wait()
    before = torch.cuda.memory_allocated(session.device)
    torch.cuda.reset_peak_memory_stats(session.device)
    work(task, 2)
    session.wait()
    return (torch.cuda.max_memory_allocated(session.device) - before) / MIB


# -------------------------------------------------------------------------------------------------------------- exact


def exact_row(session: Session, name: str, which: str) -> list[str]:
    """The exact diagonal of 8192 samples, extrapolated from one batch, over the loop, from a few passes."""
    with precision(which):
        task = in_precision(session.task(name), which)
        warm = nm.Exact(core=nm.Lower(1))  # the same passes, but one of them
        nm.fisher_diagonal(task.model, [task.batch], warm)
        batches = EXACT_SAMPLES / len(task.labels)
        own = session.seconds(lambda: nm.fisher_diagonal(task.model, [task.batch], nm.Exact()))
        fixed = 0.0
        if own < SLOW:
            three = session.seconds(lambda: nm.fisher_diagonal(task.model, [task.batch] * 3, nm.Exact()))
            own, fixed = (three - own) / 2, (3 * own - three) / 2
        total = fixed + own * batches
        forward, backward = _loop_seconds(session, task)
        loop = EXACT_SAMPLES * (forward + task.classes * backward)
    speedup = loop / total
    passes = f"{1000 * backward:.1f} ms a pass"
    session.tell(f"{name} {which} · exact · {total:.0f} s, loop {loop:.0f} s ({passes}) · {speedup:.0f} times")
    goals = [f"≥ {EXACT_GOAL:.0f}", "yes" if speedup >= EXACT_GOAL else "no"]
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


# ------------------------------------------------------------------------------------------------------------ profile


def profile(session: Session, name: str, which: str, batches: int = 3) -> None:
    """Kernels, launches and processor time of a batch, by samples and plain; the batches of the trial do not count."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cuda = session.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with precision(which):
        task = in_precision(session.task(name), which)
        _samplewise(task, 2)
        plain(task, 2)
        session.wait()
        with profiler(activities=activities) as of_plain:
            plain(task, batches)
            session.wait()
        ours = profiler(activities=activities)

        def data() -> Iterator[object]:
            """Two batches, and then those that count."""
            yield task.batch
            yield task.batch
            session.wait()
            with ours:
                for _ in range(batches):
                    yield task.batch
                session.wait()

        nm.fisher_diagonal(task.model, data(), DEFLATED)
    for title, found in (("plain", of_plain), ("sample-wise, deflated", ours)):
        _print_profile(f"{name} {which} · {title}", found, batches, cuda)


def _print_profile(title: str, found: torch.profiler.profile, batches: int, cuda: bool, top: int = 40) -> None:
    events = found.key_averages()
    on_device = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    on_cpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    launches = sum(event.count for event in on_cpu if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    cpu = sum(event.self_cpu_time_total for event in on_cpu) / 1000 / batches  # ms
    shown, attribute = (on_device, "self_device_time_total") if cuda else (on_cpu, "self_cpu_time_total")
    total = sum(getattr(event, attribute) for event in shown) / 1000 / batches
    print(f"\n## {title}, per batch (mean of {batches})\n")
    where = f"device {total:.2f} ms · " if cuda else ""
    print(f"{where}processor {cpu:.2f} ms · {launches / batches:.0f} launches\n")
    rows = []
    for event in sorted(shown, key=lambda event: -getattr(event, attribute))[:top]:
        own = getattr(event, attribute) / 1000 / batches
        rows.append([f"{own:.3f}", f"{100 * own / total:.1f} %", f"{event.count / batches:.1f}", event.key[:110]])
    print(table(["ms", "share", "calls", "kernel" if cuda else "operation"], rows), flush=True)


# --------------------------------------------------------------------------------------------------------------- main


def run_checks(session: Session, tasks: list[str]) -> None:
    names = gpu_checks.architectures_of(tasks)
    arguments = (names, session.options.precision, session.device, session.guarded, session.tell)
    text = session.guarded("checks", lambda: gpu_checks.checks(*arguments))
    session.keep("Checks", f"{text}")
    session.free()


def run_exact(session: Session, tasks: list[str]) -> None:
    rows = []
    for name in (name for name in EXACT if name in tasks):
        for which in (which for which in EXACT[name] if which in session.options.precision):
            found = session.guarded(
                f"{name} {which} · exact", lambda name=name, which=which: exact_row(session, name, which)
            )
            rows.append([name, which, found, *[""] * 6] if isinstance(found, str) else found)
            session.free()
    if rows:
        header = ["task", "precision", "classes", "a batch, s", f"{EXACT_SAMPLES} samples, s", "loop, s", "speedup"]
        note = f"The loop is extrapolated from {LOOP_SAMPLES} samples with {LOOP_CLASSES} classes each."
        session.keep("Exact diagonal", f"{note}\n\n{table([*header, 'goal', 'met'], rows)}")


def run_times(session: Session, tasks: list[str]) -> None:
    memory: list[list[str]] = []
    for name in tasks:
        session.tell(name)
        task = session.guarded(name, lambda name=name: session.task(name))
        if isinstance(task, str):
            session.keep(name, task)
            continue
        shape = "×".join(str(size) for value in task.inputs.values() for size in value.shape)
        heading = f"{name}: {parameters(task.model) / 1e6:.1f} M parameters, inputs {shape}, C={task.classes}"
        rows: list[list[str]] = []
        for which in (which for which in PRECISIONS if which in session.options.precision):
            with precision(which):
                found = session.guarded(
                    f"{name} {which}",
                    lambda which=which, task=task, name=name: _one(session, name, which, task, memory),
                )
            rows += [["", which, "", found, "", "", "", ""]] if isinstance(found, str) else found
            header = ["row", "precision", "ms", "over plain", "±", "fixed, ms", "goal", "met"]
            session.keep(heading, table(header, rows))
            header = ["task", "precision", "plain, MiB", "sample-wise, MiB", "ratio", "without result", "goal", "met"]
            if memory:
                session.keep("Memory", f"{MEMORY_NOTE}\n\n{table(header, memory)}")
        del task
        session.free()


def _one(session: Session, name: str, which: str, task: Task, memory: list[list[str]]) -> list[list[str]]:
    """Memory and times of a task in a precision."""
    task = in_precision(task, which)
    if session.device.type == "cuda":
        memory.append(memory_row(session, name, which, task))
    return time_table(session, name, which, task)


MEMORY_NOTE = (
    "Peak of two batches, over the model's and the data's own.  “Without result”: less two float32 for each parameter, "
    "the squares and error bars that the result holds in any case."
)


def run_kernels(session: Session) -> None:
    try:
        from gpu_kernels import kernels
    except ImportError as error:
        session.tell(f"kernels · left out: {error}")
        return
    session.options.device = session.device
    text = session.guarded("kernels", lambda: kernels(session.options))  # its table; what it prints is only printed
    session.keep("Fused kernels", f"{text}" if text else "See the output.")
    session.free()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), metavar="NAME", help=", ".join(TASKS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--repeats", default=3, type=int, help="turns of everything that is timed")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small networks, also on a CPU: does everything run?")
    parser.add_argument(
        "--profile", nargs=2, metavar=("NAME", "PRECISION"), help="kernels of a sample-wise run instead"
    )
    parser.add_argument("--budget", default=450.0, type=float, help="seconds after which no new row begins")
    parser.add_argument("--copy", metavar="FILE", help="write the result there, too")
    options = parser.parse_args()
    options.repeats = 1 if options.quick else options.repeats
    options.precision, options.sections = tuple(options.precision), tuple(options.sections)
    if options.profile and not (options.profile[0] in TASKS and options.profile[1] in PRECISIONS):
        parser.error(f"--profile takes one of {', '.join(TASKS)} and one of {', '.join(PRECISIONS)}")
    if not torch.cuda.is_available() and not options.quick:
        parser.error("there is no GPU here; --quick runs on a CPU")
    return options


def main() -> None:
    options = arguments()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    session = Session(options)
    if options.profile:
        profile(session, *options.profile)
        return
    tasks = [name for name in TASKS if not options.only or name in options.only]
    if "checks" in options.sections and not options.skip_checks:
        run_checks(session, tasks)
    if "exact" in options.sections:
        run_exact(session, tasks)
    if "times" in options.sections:
        run_times(session, tasks)
    if "kernels" in options.sections and not options.only:
        run_kernels(session)
    print("\n" + session.text)
    session.tell("done" + (", written to benchmarks/results/gpu-h200.md" if session.whole else ""))


if __name__ == "__main__":
    main()
