"""What each kernel gains: the same estimate with it, and with torch doing the same, side by side.

    python benchmarks/ablation.py [--repeats 5] [--quick]

On a CPU: the kernels in C.  `benchmarks/gpu_session.py` has a section with those in Triton.  Both runs take turns;
times are those of a later batch, without what happens once a call.  `kernels.dispatch.disabled` leaves an operation
to torch.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from common import Run, forward_backward, interleaved_runs, keep, setting, table
from models import small_networks, task
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.kernels import dispatch

SOURCES = {  # of the kernels in C
    "deflated_probe": "probe.c",
    "add_squares_of_products": "square.c",
    "add_squares_of_convolution": "square.c",
}


FEW, MANY = (2, 6), (17, 57)  # batches of the two runs that a time comes from: none in between is verified


class Case(NamedTuple):
    """A network, a batch, which operations it has, and the batches of its two runs."""

    model: nn.Module
    batch: object
    operations: tuple[str, ...]
    counts: tuple[int, int] = MANY


def with_and_without(run: Run, *operations: str) -> dict[str, Run]:
    """Return the same run with all kernels, and with torch instead of some."""

    def without(data: Iterable[object]) -> object:
        with dispatch.disabled(*operations):
            return run(data)

    return {"kernel": run, "torch": without}


def cpu_cases() -> dict[str, Case]:
    """Return small networks, one with many classes, whose probes take longer than its layers, and larger ones."""
    found = small_networks()
    products, convolutions = "add_squares_of_products", "add_squares_of_convolution"
    operations = {
        "two-layer MLP, B=64": ("deflated_probe", products),
        "small CNN, B=32": ("deflated_probe", products, convolutions),
        "small transformer, B=16": ("deflated_probe", products),
    }
    cases = {name: Case(*found[name], chosen) for name, chosen in operations.items()}
    many = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1000))
    labels: Tensor = torch.randint(0, 1000, (64,))
    cases["1000 classes, B=64"] = Case(many, (torch.randn(64, 64), labels), ("deflated_probe", products))
    for name, counts in (("MLP", MANY), ("transformer", FEW)):
        large = task(name)
        size = sum(parameter.numel() for parameter in large.model.parameters()) / 1e6
        title = f"{name}, {size:.1f} M parameters, B={len(large.labels)}"
        cases[title] = Case(large.model, large.batch, ("deflated_probe", products), counts)
    return cases


def cpu_rows(repeats: int, quick: bool) -> list[list[str]]:
    """Time each case with all kernels and without each one; processor time, medians over the turns."""
    rows, device = [], torch.device("cpu")
    for name, (model, batch, operations, full) in cpu_cases().items():
        counts = (2, 4) if quick else full
        estimate = partial(nm.fisher_diagonal, model)
        runs: dict[str, Run] = {"baseline": partial(forward_backward, model), "kernel": estimate}
        for operation in operations:
            runs[operation] = with_and_without(estimate, operation)["torch"]
        runs["all"] = with_and_without(estimate, *SOURCES)["torch"]
        times, (few, many) = interleaved_runs(runs, batch, counts, repeats, device), counts
        later = {kind: 1000 * (times[kind][many].cpu - times[kind][few].cpu) / (many - few) for kind in runs}
        for kind in (*operations, "all"):
            source = SOURCES.get(kind, "all of them")
            figures = [f"{later[one]:.2f}" for one in ("baseline", "kernel", kind)]
            rows.append([name, kind, source, *figures, f"{later[kind] / later['kernel']:.2f}"])
            print(" · ".join(rows[-1]), flush=True)
    return rows


HEADER = ["network", "operation", "kernel", "forward + backward, ms", "with the kernel, ms", "with torch, ms"]
HEADER += ["torch / kernel"]
NOTE = (
    "Processor time of a later batch of `nm.fisher_diagonal` (Hutchinson(), per sample), with all kernels and with "
    "torch instead of one of them; all in turn, medians.  Above 1, the kernel pays.  An operation that a network does "
    "not have is left out."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--quick", action="store_true", help="few batches, one repeat, printed: does everything run?")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    repeats = 1 if options.quick else options.repeats
    head = setting(f"python benchmarks/ablation.py --repeats {repeats}", torch.device("cpu"))
    text = "\n\n".join(["# What each kernel in C gains", head, NOTE, table(HEADER, cpu_rows(repeats, options.quick))])
    print(text) if options.quick else keep("ablation-cpu", text)


if __name__ == "__main__":
    main()
