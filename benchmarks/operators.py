"""What a product F v costs: this library's operator and curvlinops' GGN, over forward + backward.

    python benchmarks/operators.py [--only MLP] [--device cuda] [--repeats 7] [--batches 4] [--columns 1 8] [--quick]

Everything takes turns in one run; ratios of medians of wall-clock time, for the same vectors and the same data.
The products are compared before they are timed: the GGN of cross-entropy is the Fisher information.  curvlinops is left
out where it is not installed (see others-requirements.txt).  Fused attention has no forward mode, so that curvlinops is
run with torch's own formula, which this library chooses by itself.  Padding tokens are left out: forward mode gives an
embedding's padding row a derivative and backward mode gives it none, so that theirs is not symmetric then.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable

import torch
from common import BASELINE, forward_backward, interleaved, keep, setting, table
from models import NETWORKS, Task, task
from others_torch import tensor_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import neuromanifold as nm

Product = Callable[[Tensor], Tensor]
HEADER = ["network", "parameters", "columns", f"{BASELINE}, ms"]
HEADER += ["nm / baseline", "curvlinops / baseline", "nm / curvlinops"]


def ours(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[Product, str]:
    operator = nm.fisher_operator(model, data, reduction="sum")
    return operator.matvec, operator.method


def theirs(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Product | None:
    if importlib.util.find_spec("curvlinops") is None:
        return None
    from curvlinops import GGNLinearOperator

    loss, parameters = nn.CrossEntropyLoss(reduction="sum"), list(model.parameters())
    operator = GGNLinearOperator(model, loss, parameters, data, check_deterministic=False)

    def product(v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return operator @ v

    return product


def measure(name: str, case: Task, columns: int, options: argparse.Namespace) -> tuple[list[str], str]:
    model, inputs = tensor_model(case)
    inputs = inputs if inputs.is_floating_point() else inputs.clamp(min=1)  # no padding: see above
    device = options.device
    model, batch = model.to(device), (inputs.to(device), case.labels.to(device))
    data = [batch] * options.batches
    size = sum(parameter.numel() for parameter in model.parameters())
    v = torch.randn(size, columns, generator=torch.Generator().manual_seed(0)).to(device)
    v = v[:, 0] if columns == 1 else v
    product, method = ours(model, data)
    other = theirs(model, data)
    work: dict[str, Callable[[], object]] = {
        BASELINE: lambda: forward_backward(model, data),
        "nm": lambda: product(v),
    }
    if other is not None:
        difference = float((product(v) - other(v)).norm() / other(v).norm())
        assert difference < 1e-3, f"{name}: the products differ by {difference:.1e}"
        work["curvlinops"] = lambda: other(v)
    seconds = {key: times.wall for key, times in interleaved(work, options.repeats, device).items()}
    ratios = [f"{seconds[key] / seconds[BASELINE]:.2f}" if key in seconds else "-" for key in ("nm", "curvlinops")]
    relative = f"{seconds['nm'] / seconds['curvlinops']:.2f}" if other is not None else "-"
    label = f"{name}, {options.batches} × B={len(case.labels)}"
    return [label, f"{size:,}", str(columns), f"{1000 * seconds[BASELINE]:.1f}", *ratios, relative], method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--batches", default=4, type=int)
    parser.add_argument("--columns", default=[1, 8], type=int, nargs="+", help="vectors that are multiplied at once")
    parser.add_argument("--only", choices=NETWORKS, help="one network instead of all")
    parser.add_argument("--quick", action="store_true", help="small networks, printed and not kept: to try the script")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, methods = [], []
    for name in [options.only] if options.only else NETWORKS:
        for columns in options.columns:
            row, method = measure(name, task(name, small=options.quick), columns, options)
            rows.append(row)
            print(" ".join(row), flush=True)
        methods.append(f"{name}: {method}")
    title = "# Products F v: time over forward + backward"
    head = setting(
        f"python benchmarks/operators.py --device {options.device} --repeats {options.repeats}", options.device
    )
    text = "\n\n".join([title, head, table(HEADER, rows), "How this library finds J v: " + "; ".join(methods) + "."])
    if options.quick:
        print(text)
    else:
        keep(f"operator-{options.device.type}", text)


if __name__ == "__main__":
    main()
