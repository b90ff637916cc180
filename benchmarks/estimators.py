"""What each estimator costs, as a ratio to forward + backward over the same batch.

    python benchmarks/estimators.py [--device cuda] [--repeats 9] [--only MLP] [--quick]

All of them take turns in one run; medians over runs of several batches.  An estimate also squares the gradients and
adds squares and fourth powers; the trace only adds up ‖g‖².  Batches are larger on a GPU, so that it has work to do.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from common import BASELINE, forward_backward, interleaved, keep, setting, table
from models import CASES
from torch.utils._pytree import tree_map

import neuromanifold as nm

ESTIMATORS = {
    "𝔽": nm.Hutchinson(deflate=0),
    "𝔽 DG": nm.Hutchinson(envelope=nm.Upper()),
    "𝔽 LR(1)": nm.Hutchinson(envelope=nm.Lower(1)),
    "𝔽 LR(2)": nm.Hutchinson(envelope=nm.Lower(2)),
    "𝔽 deflated": nm.Hutchinson(),
    "Monte Carlo": nm.MonteCarlo(),
    "squared batch gradient": nm.SquaredBatchGradient(),
}
CLASSES = {"MLP": (2, 10, 100, 1000), "ResNet-18-like": (10, 1000), "DistilBERT": (2, 1000)}
BATCHES = {"MLP": 16, "ResNet-18-like": 6, "DistilBERT": 4}  # of one run on a CPU; 16 on a GPU


def measure(name: str, classes: int, device: torch.device, repeats: int, batches: int) -> list[str]:
    torch.manual_seed(0)
    case = CASES[name](classes, large=device.type != "cpu")
    model, inputs = case.model.to(device).eval(), tree_map(lambda tensor: tensor.to(device), case.batch)
    labels = torch.randint(0, classes, (case.samples,), device=device)
    data = [{**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)] * batches
    functions: dict[str, Callable[[], object]] = {BASELINE: lambda: forward_backward(model, data)}
    for key, estimator in ESTIMATORS.items():
        functions[key] = lambda estimator=estimator: nm.fisher_diagonal(model, data, estimator)
    functions["trace, 𝔽"] = lambda: nm.fisher_trace(model, data, nm.Hutchinson(deflate=0))
    seconds = {key: times.wall for key, times in interleaved(functions, repeats, device).items()}
    ratios = [f"{seconds[key] / seconds[BASELINE]:.2f}" for key in functions if key != BASELINE]
    return [f"{name}, B={case.samples}", str(classes), f"{1000 * seconds[BASELINE] / batches:.1f}", *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", default=9, type=int)
    parser.add_argument("--only", choices=list(CASES), help="one network instead of all")
    parser.add_argument("--quick", action="store_true", help="one batch, one repeat, printed: does everything run?")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, device = [], options.device
    for name in [options.only] if options.only else CASES:
        batches = 1 if options.quick else BATCHES[name] if device.type == "cpu" else 16
        for classes in CLASSES[name][: 1 if options.quick else None]:
            rows.append(measure(name, classes, device, 1 if options.quick else options.repeats, batches))
            print(" ".join(rows[-1]), flush=True)
    header = ["network", "classes", f"{BASELINE}, ms/batch", *ESTIMATORS, "trace, 𝔽"]
    head = setting(f"python benchmarks/estimators.py --device {device} --repeats {options.repeats}", device)
    text = "\n\n".join(["# One backward pass: time over forward + backward", head, table(header, rows)])
    if options.quick or options.only:
        print(text)  # a part of the result does not replace it
    else:
        keep(f"estimators-{device.type}", text)


if __name__ == "__main__":
    main()
