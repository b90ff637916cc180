"""What a per-sample Fisher diagonal costs over forward + backward: this library, others, and its verification.

    python benchmarks/samplewise.py [--only MLP] [--repeats 7] [--batches 4] [--skip-others] [--quick]
    python benchmarks/samplewise.py --only verification

Networks: everything takes turns in one run; ratios of medians, per batch: processor time (all threads together, which
says how much work there is) and wall-clock.  Memory is the peak of one call over what the process held before (model
and data), each in a process of its own.  "Without result" is less the float32 that a result itself holds: one for each
parameter, two where it has error bars.  Tools that are not installed are left out; those that fail or are wrong
(benchmarks/others.py) stay, and are named so.  Loops are timed on a few samples and torch.func on a few classes where
there are many, and multiplied: marked by ×.  This library runs over several batches, of which the first two are
verified; other tools over one.

Verification: a run of 128 batches as it is (0 and 1 are verified) against the same run in which only batch 0 is,
which a plan cannot be made without; the fixed cost of a call, which is that of one batch less a later batch; and what a
later batch takes over forward + backward.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import others
import torch
from common import BASELINE, Times, forward_backward, interleaved, interleaved_runs, keep, peak_memory, setting, table
from models import NETWORKS, Task, small_networks, task
from others_torch import Work

import neuromanifold as nm
from neuromanifold.persample import engine

OURS = {
    "Hutchinson()": (nm.Hutchinson(), "estimate", "auto"),
    "Hutchinson(deflate=0)": (nm.Hutchinson(deflate=0), "estimate", "auto"),
    "Hutchinson(deflate=0), batch": (nm.Hutchinson(deflate=0), "estimate", "batch"),
    "MonteCarlo()": (nm.MonteCarlo(), "estimate", "auto"),
    "Empirical()": (nm.Empirical(), "per sample", "auto"),
    "Exact()": (nm.Exact(), "exact", "auto"),
}
BATCHES = {"MLP": 32, "transformer": 12, "ResNet-18-like": 6, "DistilBERT": 6}  # of one run
SAMPLES, CLASSES, MANY = 4, 4, 20  # of a loop; of torch.func where there are many

RUN = 128  # batches of a run in which the cost of verification is measured
VERIFICATION_NOTE = (
    "Processor time, all in turn, medians.  One verification: a run with every batch verified, less one with only its "
    "first, by the number of batches.  Verification adds: as many as a run of this length has, its first included, "
    "over its later batches.  Fixed: a call with one batch, less a later batch."
)


class Entry(NamedTuple):
    """A row: what it computes, how it is built (copies and hooks, not timed), and how much of a batch it does."""

    quantity: str
    build: Callable[[int], Callable[[], object]]  # from the number of batches
    share: float = 1.0
    slow: bool = False  # one batch, few repeats


def entries(case: Task) -> dict[str, Entry]:
    many = case.classes > MANY
    found = {BASELINE: Entry("gradient", lambda batches: partial(forward_backward, case.model, [case.batch] * batches))}
    for name, (estimator, quantity, granularity) in OURS.items():
        found[f"nm.{name}"] = Entry(quantity, _ours(case, estimator, granularity), 1.0, many and quantity == "exact")
    for tool in others.TOOLS:
        for quantity, adapter in (("per sample", others.TOOLS[tool].per_sample), ("exact", others.TOOLS[tool].exact)):
            part, share = {}, 1.0
            if adapter in (others.loop, others.loop_exact):
                part, share = {"samples": SAMPLES}, SAMPLES / len(case.labels)
            elif adapter is others.func_exact and many:
                part, share = {"first": CLASSES}, CLASSES / case.classes
            if adapter is not None and others.version(tool) is not None:
                found[f"{tool}, {quantity}"] = Entry(quantity, _theirs(case, adapter, part), min(share, 1.0), slow=True)
    return found


def _ours(case: Task, estimator: nm.Estimator, granularity: str) -> Callable[[int], Callable[[], object]]:
    return lambda batches: (
        lambda: nm.fisher_diagonal(case.model, [case.batch] * batches, estimator, granularity=granularity)
    )


def _theirs(case: Task, adapter: Callable[..., Work], part: dict) -> Callable[[int], Callable[[], object]]:
    def build(batches: int) -> Callable[[], object]:
        work = adapter(*others.tensor_model(case), case.labels, case.classes, **part)
        return lambda: [work() for _ in range(batches)][-1]

    return build


def one_call(network: str, small: str, name: str) -> Callable[[], object]:
    """What `peak_memory` calls in a process of its own: one batch.

    First on the small network, because torch loads parts of itself (70 MiB for vmap) when they are first called.
    """
    warnings.simplefilter("ignore")
    entries(task(network, small=True))[name].build(1)()
    return entries(task(network, small == "small"))[name].build(1)


def verdict(network: str, name: str, entry: Entry) -> str:
    """Right, wrong or fails, on the small version of the network."""
    if entry.quantity not in ("per sample", "exact"):
        return ""
    exact = entry.quantity == "exact"
    if not name.startswith("nm."):
        return others.check(name.split(",")[0], network, exact, draws=20)
    small = task(network, small=True)
    truth = {key.removeprefix("model."): value for key, value in others.reference(small, exact).items()}
    try:
        fim = nm.fisher_diagonal(small.model, [small.batch], OURS[name.removeprefix("nm.")][0]).sum
        return others.compare(truth, {key: fim[key] for key in truth})
    except Exception as error:
        return others.failure(error)


def measure(network: str, options: argparse.Namespace) -> str:
    size = "small" if options.quick else "full"
    case = task(network, options.quick)
    batches = options.batches or (1 if options.quick else BATCHES[network])
    rows, memory, functions, verdicts = entries(case), {}, {}, {}
    if options.skip_others:
        rows = {name: entry for name, entry in rows.items() if name == BASELINE or name.startswith("nm.")}
    for name, entry in rows.items():
        verdicts[name] = verdict(network, name, entry)
        try:  # memory first, under a limit: what does not fit is never run in this process
            if verdicts[name].startswith("fails"):
                continue
            memory[name] = peak_memory("samplewise:one_call", network, size, name, limit=options.memory_limit)
            functions[name] = entry.build(1 if entry.slow else batches)
        except Exception as error:
            verdicts[name] = others.failure(error)
        gc.collect()
        print(f"{network} · {name} · {memory.get(name, float('nan')):.0f} MiB · {verdicts[name]}", flush=True)
    many = case.classes > MANY  # then a single one of the slow ones takes a minute
    slow = {name: min(1 if many else 2, options.repeats) for name in functions if rows[name].slow}
    times = interleaved(functions, options.repeats, torch.device("cpu"), slow)
    parameters = sum(parameter.numel() for parameter in case.model.parameters())
    held = {name: held_numbers(network, name, rows[name]) * 4 * parameters / 2**20 for name in times}
    lines = [_line(name, rows[name], times, memory, verdicts[name], batches, held) for name in rows]
    head = f"## {network}: {parameters / 1e6:.1f} M parameters, B={len(case.labels)}, C={case.classes}"
    base = f"Forward + backward: {1000 * times[BASELINE].wall / batches:.1f} ms a batch, {memory[BASELINE]:.0f} MiB."
    header = ["", "quantity", "processor time", "wall-clock", "memory, MiB", "memory over baseline"]
    header += ["memory without result, over baseline", "small version, float64"]
    return "\n\n".join([head, base, table(header, lines)])


def held_numbers(network: str, name: str, entry: Entry) -> int:
    """How many float32 a result holds for each parameter; error bars are there unless nothing is random."""
    if entry.quantity != "estimate":
        return int(entry.quantity != "gradient")
    small = entries(task(network, small=True))[name].build(1)()
    return 1 + any(noise.untyped_storage().nbytes() >= noise.nbytes for noise in small.noise.values())


def _line(
    name: str,
    entry: Entry,
    times: dict[str, Times],
    memory: dict[str, float],
    said: str,
    batches: int,
    held: dict[str, float],
) -> list[str]:
    if name not in times:
        return [name, entry.quantity, "", "", "", "", "", said]
    done = entry.share * (1 if entry.slow else batches)
    ratios = [
        own / done / (base / batches) for own, base in zip(times[name], times[BASELINE], strict=True)
    ]  # wall, processor
    mark = f" (×{1 / entry.share:.0f})" if entry.share < 1 else ""
    base = max(memory[BASELINE], 1.0)  # below 1 MiB on the small networks of --quick
    net = f"{max(0.0, memory[name] - held[name]) / base:.2f}" if held[name] else ""
    over = f"{memory[name] / base:.2f}", net
    figures = [f"{ratios[1]:.2f}{mark}", f"{ratios[0]:.2f}{mark}", f"{memory[name]:.0f}", *over]
    return [name, entry.quantity, *figures, said]


def verification(options: argparse.Namespace) -> str:
    """Measure what verification adds to a run, what a call costs once, and what a later batch costs."""
    device, rows, batches = torch.device("cpu"), [], 16 if options.quick else RUN
    only_first, every = (
        mock.patch.object(engine, "_is_due", due) for due in (lambda batch: batch == 0, lambda _: True)
    )
    verified = sum(engine._is_due(batch) for batch in range(batches))
    for name, (model, batch) in small_networks().items():
        estimate = partial(nm.fisher_diagonal, model)
        kinds = {BASELINE: partial(forward_backward, model), "first": only_first(estimate), "every": every(estimate)}
        times = interleaved_runs(kinds, batch, (1, batches), options.repeats, device)
        ms = {kind: {k: 1000 * one.cpu for k, one in times[kind].items()} for kind in kinds}
        base, later, checked = ((ms[kind][batches] - ms[kind][1]) / (batches - 1) for kind in kinds)
        once, one = ms["first"][1] - later, checked / later - 1
        figures = f"{base:.2f}", f"{later:.2f}", f"{later - base:.2f}", f"{later / base:.2f}"
        added = f"{one:.2f}", f"{100 * verified * one / batches:.1f} %"
        rows.append([name, *figures, f"{once:.1f}", f"{once / base:.1f}", *added])
        print(" · ".join(rows[-1]), flush=True)
    header = ["network", "forward + backward, ms", "later batch, ms", "overhead, ms", "ratio", "fixed, ms"]
    header += ["fixed, in forward + backward", "one verification, in later batches"]
    header += [f"verification adds, {batches} batches"]
    return "\n\n".join(["## Verification and fixed cost: nm.Hutchinson()", VERIFICATION_NOTE, table(header, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*NETWORKS, "verification"], help="one section instead of all")
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--batches", type=int, help="batches of one run (default: 6 to 32, by network)")
    parser.add_argument("--skip-others", action="store_true", help="this library only")
    parser.add_argument("--memory-limit", default=12.0, type=float, help="GiB that a tool may take (address space)")
    parser.add_argument("--quick", action="store_true", help="small networks, one repeat: does everything run?")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.repeats = 1 if options.quick else options.repeats
    arguments = [f"--only {options.only}"] if options.only else []
    arguments += [f"--repeats {options.repeats}"] + ([f"--batches {options.batches}"] if options.batches else [])
    arguments += [flag for flag in ("--skip-others", "--quick") if getattr(options, flag[2:].replace("-", "_"))]
    head = setting(f"python benchmarks/samplewise.py {' '.join(arguments)}", torch.device("cpu"))
    installed = [f"{tool} {others.version(tool)}" for tool in others.TOOLS if others.version(tool) is not None]
    if not options.skip_others and options.only != "verification":
        head += " · " + ", ".join(name for name in installed if not name.startswith(("loop", "torch.func")))
    chosen = [options.only] if options.only else [*NETWORKS, "verification"]
    sections = [verification(options) if name == "verification" else measure(name, options) for name in chosen]
    title = "# Per-sample Fisher diagonals: cost over forward + backward"
    note = "Processor time and wall-clock are ratios to forward + backward, per batch; "
    note += "×n: measured on a part of the batch and multiplied."
    text = "\n\n".join([title, head, *([] if options.only == "verification" else [note]), *sections])
    if options.quick or options.only in NETWORKS:
        print(text)  # a part of the result does not replace it
    elif options.only:
        keep("verification-cpu", text)
    else:
        keep("samplewise-cpu-ours" if options.skip_others else "samplewise-cpu", text)


if __name__ == "__main__":
    main()
