"""What each estimator costs, as a ratio to a plain forward and backward pass over the same batch.

    python benchmarks/estimators.py [--device cuda] [--repeats 9] [--only MLP]

All of them take turns in one run; medians over runs of several batches.  "Plain" is forward and backward of the mean
cross-entropy into .grad, what a training step does before its optimizer.  An estimate also squares the gradients and
adds squares and fourth powers; the trace only adds up ‖g‖².  Batches are larger on a GPU, so that it has work to do.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping

import torch
from common import interleaved_medians, keep, setting, table
from models import CASES, Case
from torch import Tensor, nn

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


def to(batch: object, device: torch.device) -> object:
    return {key: value.to(device) for key, value in batch.items()} if isinstance(batch, Mapping) else batch.to(device)


def plain(case: Case, labels: Tensor, batches: int) -> Callable[[], None]:
    def step() -> None:
        for _ in range(batches):
            case.model.zero_grad(set_to_none=True)
            output = case.model(**case.batch) if isinstance(case.batch, dict) else case.model(case.batch)
            logits = output.logits if hasattr(output, "logits") else output
            nn.functional.cross_entropy(logits, labels).backward()

    return step


def measure(name: str, classes: int, device: torch.device, repeats: int) -> list[str]:
    torch.manual_seed(0)
    case = CASES[name](classes, large=device.type != "cpu")
    case = Case(case.model.to(device).eval(), to(case.batch, device), case.samples)
    labels = torch.randint(0, classes, (case.samples,), device=device)
    batch = {**case.batch, "labels": labels} if isinstance(case.batch, dict) else (case.batch, labels)
    batches = BATCHES[name] if device.type == "cpu" else 16
    functions = {"plain": plain(case, labels, batches)}
    for key, estimator in ESTIMATORS.items():
        functions[key] = lambda estimator=estimator: nm.fisher_diagonal(case.model, [batch] * batches, estimator)
    functions["trace, 𝔽"] = lambda: nm.fisher_trace(case.model, [batch] * batches, nm.Hutchinson(deflate=0))
    seconds = interleaved_medians(functions, repeats, device)
    ratios = [f"{seconds[key] / seconds['plain']:.2f}" for key in functions if key != "plain"]
    return [f"{name}, B={case.samples}", str(classes), f"{1000 * seconds['plain'] / batches:.1f}", *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", default=9, type=int)
    parser.add_argument("--only", choices=list(CASES), help="one network instead of all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in [options.only] if options.only else CASES:
        for classes in CLASSES[name]:
            rows.append(measure(name, classes, options.device, options.repeats))
            print(" ".join(rows[-1]), flush=True)
    header = ["network", "classes", "plain, ms/batch", *ESTIMATORS, "trace, 𝔽"]
    title = "# One backward pass: time over plain forward + backward"
    head = setting(
        f"python benchmarks/estimators.py --device {options.device} --repeats {options.repeats}", options.device
    )
    keep(f"estimators-{options.device.type}", "\n\n".join([title, head, table(header, rows)]))


if __name__ == "__main__":
    main()
