"""What the bounds of section 3 cost: `nm.fisher_bounds` over forward + backward.

    python benchmarks/bounds.py [--only DistilBERT] [--repeats 3] [--quick]

Everything takes turns in one run; ratios of medians, for one batch, of wall-clock and of processor time.  Memory is the
peak of one call over what the process held before (model and data), each in a process of its own; the goal for the
bounds themselves is twice that of forward + backward.
"Bounds" are all statements that follow from single samples; "and diagonals" adds those of F^LR(1), F and F^DG, of which
the result holds three float32 for each parameter; "and norms" the actual norms of sums, exact or estimated.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable

import torch
from common import BASELINE, forward_backward, interleaved, keep, peak_memory, setting, table
from models import Task, task
from torch import nn

import neuromanifold as nm

NETWORKS = {"MLP": (64, 10), "ResNet-18-like": (16, 10), "DistilBERT": (16, 14)}  # samples, classes
TOKENS = 128
NORMS = 2e7  # parameters: beyond, norms of sums are estimated by hundreds of products with F, which takes minutes
GOAL = 2.0


def case_of(network: str, small: bool) -> Task:
    """The network of the sample-wise benchmark, with so many samples and classes."""
    samples, classes = (5, 4) if small else NETWORKS[network]
    case = task(network, small)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    if network == "DistilBERT":
        from transformers import DistilBertForSequenceClassification

        case.model.config.num_labels = classes
        model: nn.Module = DistilBertForSequenceClassification(case.model.config).eval()
        tokens = 8 if small else TOKENS
        ids = torch.randint(0, model.config.vocab_size, (samples, tokens), generator=generator)
        return Task(model, {"input_ids": ids}, labels, classes)
    assert isinstance(case.inputs, torch.Tensor)
    model = nn.Sequential(*list(case.model.children())[:-1], nn.Linear(case.model[-1].in_features, classes)).eval()
    return Task(model, torch.randn(samples, *case.inputs.shape[1:], generator=generator), labels, classes)


def entries(case: Task) -> dict[str, Callable[[], object]]:
    """What is measured, on one batch."""
    data = [case.batch]
    found = {
        BASELINE: lambda: forward_backward(case.model, data),
        "bounds": lambda: nm.fisher_bounds(case.model, data, diagonals=False, actual="none"),
        "bounds and diagonals": lambda: nm.fisher_bounds(case.model, data, actual="none"),
        "bounds and norms": lambda: nm.fisher_bounds(case.model, data, diagonals=False),
        "Exact() diagonal": lambda: nm.fisher_diagonal(case.model, data, nm.Exact()),
    }
    if sum(parameter.numel() for parameter in case.model.parameters()) > NORMS:
        del found["bounds and norms"]
    return found


def one_call(network: str, size: str, name: str) -> Callable[[], object]:
    """What `peak_memory` calls in a process of its own; first on the small network, so that torch is all loaded."""
    warnings.simplefilter("ignore")
    entries(case_of(network, small=True))[name]()
    return entries(case_of(network, size == "small"))[name]


def measure(network: str, options: argparse.Namespace) -> str:
    """One section."""
    size, case = "small" if options.quick else "full", case_of(network, options.quick)
    functions, memory = entries(case), {}
    for name in functions:
        memory[name] = peak_memory("bounds:one_call", network, size, name)
        gc.collect()
        print(f"{network} · {name} · {memory[name]:.0f} MiB", flush=True)
    slow = {} if options.quick else {name: options.repeats for name in functions if name != BASELINE}
    times = interleaved(functions, options.repeats, torch.device("cpu"), slow)
    rows = []
    for name in functions:
        wall, cpu = (own / base for own, base in zip(times[name], times[BASELINE], strict=True))
        over = memory[name] / max(memory[BASELINE], 1.0)
        met = ("yes" if over < GOAL else "no") if name == "bounds" else ""
        rows.append([name, f"{cpu:.2f}", f"{wall:.2f}", f"{memory[name]:.0f}", f"{over:.2f}", met])
    result = nm.fisher_bounds(case.model, [case.batch], diagonals=False, actual="none")
    passes = next(cost.passes for cost in result.costs if cost.part == "Gram matrices")
    parameters = sum(parameter.numel() for parameter in case.model.parameters()) / 1e6
    head = f"## {network}: {parameters:.1f} M parameters, B={len(case.labels)}, C={case.classes}"
    parts = passes // case.classes
    note = f"The Gram matrices took {passes} passes: {parts} for each class, each over a part of the batch."
    header = ["", "processor time", "time", "memory, MiB", "memory over baseline", f"below {GOAL:.0f}"]
    return "\n\n".join([head, note, table(header, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NETWORKS, help="one network instead of all")
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument("--quick", action="store_true", help="small networks, one repeat: does everything run?")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.repeats = 1 if options.quick else options.repeats
    flags = [f"--only {options.only}"] if options.only else []
    flags += [f"--repeats {options.repeats}"] + (["--quick"] if options.quick else [])
    head = setting(f"python benchmarks/bounds.py {' '.join(flags)}", torch.device("cpu"))
    sections = [measure(network, options) for network in ([options.only] if options.only else NETWORKS)]
    title = "# Bounds of section 3: cost over forward + backward"
    text = "\n\n".join([title, head, __doc__.split("\n\n")[2].strip(), *sections])
    if options.quick or options.only:
        print(text)  # a part of the result does not replace it
    else:
        keep("bounds-cpu", text)


if __name__ == "__main__":
    main()
