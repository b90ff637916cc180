"""Adaptive passes: error against measured cost, and the coverage of intervals, on trained networks.

    python benchmarks/adaptive.py digits
    python benchmarks/adaptive.py residual --images DIR/data.npz     a small one, trained in minutes on a CPU; or: vgg
    python benchmarks/adaptive.py text --model DIR/pairs             a folder with model/ and data.csv
    python benchmarks/adaptive.py pack --images DIR/data.npz --model DIR/pairs --data OUT     small enough to travel
    python benchmarks/adaptive.py gpu --data OUT --budget 170        two networks on images and one on texts of OUT,
                                                                     which are trained first; --quick: does it run?
    python benchmarks/adaptive.py --figure                           docs/images/adaptive.png from the results

Cost: time of a run over that of forward + backward of the same batches, taking turns, medians over the turns
(wall-clock on a GPU, processor time on a CPU).  It is the time of a window of batches once a run is under way, so
that what a call costs once is left out.  Error: mean over entries with F > 0 of |F̂ - F|/F, and over seeds; F
by nm.Exact().  Stated: what the result says of Σ error / Σ F.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from adaptive_networks import SMALL, Case, digits, packed_texts, small_network, text, trained_images
from adaptive_pack import pack_images, pack_texts
from common import RESULTS, forward_backward, keep, setting, synchronize, table
from torch import Tensor, nn

import neuromanifold as nm

COSTS = (0.5, 0.7, 1.0, 1.1, 1.2, 1.5, 2.0, 4.0)
FEW = (0.7, 1.1, 0.9, 1.0, 1.05, 1.2)  # where time is short, the most important ones first
BEGUN = time.perf_counter()
ONE, PLAIN = "one pass", "forward + backward"
LEVEL = 0.95
EVERYONE, SOME = "adaptive, everyone kept", "adaptive, samples left out"
ROUNDING = 2e-4  # of float32 sums in another order


def estimators(window: int = 16, costs: Iterable[float] = COSTS, classes: int = 10) -> dict[str, nm.Estimator]:
    """Name: estimator; of probes for all samples those that differ from the exact metric."""
    found: dict[str, nm.Estimator] = {ONE: nm.Hutchinson()}
    few = [m for m in (2, 4) if m <= max(2, classes - 1)]
    adaptive = {f"adaptive, {cost:g}": nm.Adaptive(cost, window=window) for cost in costs}
    peeled = {f"peeled, {m} passes": nm.Hutchinson(m, deflate=8) for m in few if m < classes - 1}
    return found | adaptive | {f"orthogonal, {m} passes": nm.Hutchinson(m) for m in few} | peeled


class Found(NamedTuple):
    """Of one estimate: errors with and without embeddings, what it says itself, and the coverage of intervals."""

    error: float
    without_embeddings: float
    total: float  # Σ|F̂ - F| / Σ F
    stated: float
    coverage: float
    rare: float
    width: float


@torch.no_grad()
def compare(case: Case, found: nm.DiagonalFisher, exact: nm.DiagonalFisher) -> Found:
    """Hold an estimate against the exact values."""
    lower, upper = found.interval(LEVEL)
    errors, covered, widths, rare = {}, [], [], []
    for name in exact:
        f, positive = exact[name].double(), exact[name] > 0
        errors[name] = ((found[name].double() - f).abs() / f)[positive]
        low, high = lower[name], upper[name]
        inside = (low <= f * (1 + ROUNDING)) & (f * (1 - ROUNDING) <= high)
        covered.append(inside[positive])
        widths.append(((high - low) / f)[positive])
        if name in case.rare:
            rare.append(inside[positive & case.rare[name]])
    plain = [one for name, one in errors.items() if name not in case.embeddings]
    middle = torch.cat(widths).float()
    return Found(
        float(torch.cat(list(errors.values())).mean()),
        float(torch.cat(plain).mean()),
        sum(float((found[n] - f).abs().double().sum()) for n, f in exact.items()) / float(exact.trace.value),
        found.relative_error,
        float(torch.cat(covered).double().mean()),
        float(torch.cat(rare).double().mean()) if rare else math.nan,
        float(middle[torch.randperm(len(middle), device=middle.device)[: 10**6]].median()),
    )


def seconds_of_window(run: Callable[[Iterable[Any]], Any], window: list[Any], device: torch.device) -> float:
    """Seconds of a window of batches, once a run is under way: wall-clock on a GPU, of the processor otherwise.

    The batches are given twice, and those of the second half are timed: what happens once is left out.
    """
    marks = list[float]()

    def now() -> None:
        synchronize(device)
        marks.append(time.perf_counter() if device.type == "cuda" else time.process_time())

    def batches() -> Iterator[Any]:
        yield from window
        now()
        yield from window
        now()

    run(batches())
    return marks[1] - marks[0]


def measure(
    case: Case, seeds: int, turns: int, device: torch.device, until: float = math.inf, costs: Iterable[float] = COSTS
) -> dict[str, Any]:
    """One network: numbers for each estimator, of as many turns as there is time for, if possible of one at least."""
    window = min(16, len(case.batches))
    with torch.no_grad():
        logits = torch.cat([_logits(case.model, batch) for batch in case.batches])
    given = estimators(window, costs, classes=logits.shape[-1])
    exact = nm.fisher_diagonal(case.model, case.batches, nm.Exact(), seed=0)
    found: dict[str, list[Found]] = {name: [] for name in given}
    seconds: dict[str, list[float]] = {name: [] for name in (PLAIN, *given)}
    left_out: dict[str, int] = {}
    some, turn, begun = case.batches[:window], 0, time.perf_counter()
    partial(forward_backward, case.model)(some)
    while turn < max(1, turns):
        taken = (time.perf_counter() - begun) / max(1, turn)
        if turn and time.perf_counter() + taken > until:
            break
        for name, estimator in {PLAIN: None, **given}.items():
            if not turn and name != PLAIN and time.perf_counter() > until and found[ONE]:
                continue  # better some rows than none
            run: Callable[[Iterable[Any]], Any] = partial(forward_backward, case.model)
            if estimator is not None:
                run = partial(_diagonal, case.model, estimator, turn)
                if turn < seeds:
                    result = run(case.batches)
                    found[name].append(compare(case, result, exact))
                    left_out[name] = result.provenance.left_out
            seconds[name].append(seconds_of_window(run, some, device))
        turn += 1
    rows, plain = [], seconds[PLAIN]
    for name in given:
        if not found[name]:
            continue
        mean = Found(*(statistics.fmean(values) for values in zip(*found[name], strict=True)))
        ratios = [own / other for own, other in zip(seconds[name], plain, strict=False)]
        cost = statistics.median(seconds[name]) / statistics.median(plain)
        spread, taken = (max(ratios) - min(ratios)) / 2, statistics.median(seconds[name])
        about = {"name": name, "cost": cost, "spread": spread, "seconds": taken, "left out": left_out[name]}
        rows.append({**about, **mean._asdict()})
    return {
        "name": case.name,
        "peak": float(logits.softmax(-1).amax(-1).mean()),
        "batches": [len(case.batches), window],
        "seeds": len(found[ONE]),
        "turns": turn,
        "seconds": statistics.median(plain),
        "embeddings": bool(case.embeddings),
        "words": bool(case.rare),
        "rows": rows,
    }


def _diagonal(model: nn.Module, estimator: nm.Estimator, seed: int, batches: Iterable[Any]) -> nm.DiagonalFisher:
    return nm.fisher_diagonal(model, batches, estimator, seed=seed)


def shown(numbers: dict[str, Any]) -> str:
    """The table of a network."""
    embeddings, words = numbers["embeddings"], numbers["words"]
    header = ["", "measured cost", "error"] + (["without embeddings"] if embeddings else [])
    header += ["Σ error / Σ F", "stated", "covered", *(["of one or two samples"] if words else [])]
    header += ["median width", "left out", "cost ±", "seconds"]
    rows = []
    for row in numbers["rows"]:
        errors = [row["error"], *([row["without_embeddings"]] if embeddings else []), row["total"], row["stated"]]
        shares = [row["coverage"], *([row["rare"]] if words else [])]
        texts = [f"{row['cost']:.2f}", *map(_number, errors)]
        texts += [*(f"{100 * one:.1f} %" for one in shares), f"{row['width']:.4f}", str(row["left out"])]
        texts += [f"{row['spread']:.2f}", f"{row['seconds']:.3f}"]
        rows.append([row["name"], *texts])
    (many, window), seeds, turns = numbers["batches"], numbers["seeds"], numbers["turns"]
    about = f"Mean largest probability {numbers['peak']:.4f}; {many} batches in windows of {window}; {seeds} seeds; "
    about += f"times of a window, of {turns} turns, ± half their range; forward + backward {numbers['seconds']:.3f} s."
    return f"## {numbers['name']}\n\n{about}\n\n{table(header, rows)}"


def _number(error: float) -> str:
    """Four decimals; two digits of what is smaller."""
    return f"{error:.4f}" if error >= 5e-4 or not error else f"{error:.1e}"


def _logits(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        logits: Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        return logits
    output: Tensor = model(batch[0])
    return output


def on_a_gpu(options: argparse.Namespace, device: torch.device, write: Callable[[dict[str, Any]], None]) -> None:
    """Train and measure three networks, each within its share of the seconds left; what fails is said."""
    end, quick = BEGUN + options.budget, options.quick
    names = ["residual", "pairs", "vgg"]
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        now = time.perf_counter()
        share = (end - now) / left
        trained, until = now + 0.45 * share, now + share
        try:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            if name == "pairs":
                case = packed_texts(options.data / name, device, *((32, 8, 0) if quick else (7168, 448, 6)))
            else:
                samples, size = {"residual": (8192, 512), "vgg": (4096, 256)}[name]
                samples, size = (32, 8) if quick else (samples, size)
                ready = partial(_is_past, trained)
                case = trained_images(name, options.data, device, options.epochs, ready, samples, size)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            print(f"{name} is ready, {end - time.perf_counter():.0f} s left", flush=True)
            write(measure(case, options.seeds, options.turns, device, until, FEW))
        except Exception:
            traceback.print_exc()
        print(f"{name} is done, {end - time.perf_counter():.0f} s left", flush=True)
        case = None
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _is_past(moment: float) -> bool:
    return time.perf_counter() > moment


def figure() -> None:
    """Error against measured cost of all networks that have been measured."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

    found = [
        (path.stem, one) for path in sorted(RESULTS.glob("adaptive-*.json")) for one in json.loads(path.read_text())
    ]
    exact = [one["name"] for _, one in found if one["rows"][0]["error"] < 1e-3]  # after one pass, for two classes
    shown = [(file, one) for file, one in found if ", 0 epochs" not in one["name"] and one["name"] not in exact]
    shown.sort(key=lambda pair: "h200" not in pair[0])
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    drawing, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 3 * rows), squeeze=False, layout="constrained")
    for axis, (file, network) in zip(axes.flat, shown, strict=False):
        measured = [row for row in network["rows"] if row["without_embeddings"] > 0]
        measured.sort(key=lambda row: float(row["name"].split()[1]) if row["name"] != ONE else 0)
        kinds = {
            "orthogonal": [row for row in measured if row["name"].startswith("orthogonal")],
            "peeled": [row for row in measured if row["name"].startswith("peeled")],
            EVERYONE: [row for row in measured if row["name"].startswith("adaptive") and not row["left out"]],
            SOME: [row for row in measured if row["name"].startswith("adaptive") and row["left out"]],
        }
        for label, points in kinds.items():
            axis.plot(*_costs_and_errors(points), "o--" if label == SOME else "o-", label=label, markersize=4)
            for row in points if label in (EVERYONE, SOME) else []:
                place, offset = (row["cost"], row["without_embeddings"]), (4, 3) if label == EVERYONE else (-11, -10)
                axis.annotate(row["name"].split()[1], place, offset, textcoords="offset points", fontsize=7)
        axis.plot(*_costs_and_errors(network["rows"][:1]), "k*", label=ONE, markersize=10)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.margins(0.14)
        errors = [math.log10(row["without_embeddings"]) for row in measured]
        axis.set_ylim(10 ** math.floor(min(errors)), 10 ** math.ceil(max(errors)))
        axis.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2, 3, 5]))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        where = "H200" if "h200" in file else "CPU"
        axis.set_title(f"{network['name'].split(',')[0]}, p = {network['peak']:.3f}, {where}", fontsize=8)
        axis.set_xlabel("cost, forward + backward = 1")
        axis.set_ylabel("mean relative error")
        axis.grid(alpha=0.3, which="major")
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    drawing.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    drawing.savefig(RESULTS.parents[1] / "docs" / "images" / "adaptive.png", dpi=110)


def _costs_and_errors(points: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["cost"] for row in points], [row["without_embeddings"] for row in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["digits", "gpu", "pack", *SMALL, "text"])
    parser.add_argument("--images", type=Path, help="data.npz with images [N, 32, 32, 3] and labels")
    parser.add_argument("--model", type=Path, help="a folder with model/ and data.csv")
    parser.add_argument("--data", type=Path, help="a folder that `pack` writes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--weights", type=Path, default=Path("/tmp"), help="where trained networks are kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--costs", type=float, nargs="+", default=list(COSTS), help="of adaptive passes")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5, help="how often each run is timed")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further turn begins")
    parser.add_argument("--figure", action="store_true")
    options = parser.parse_args()
    if options.figure:
        return figure()
    if options.what == "pack":
        pack_images(options.images, options.data)
        return pack_texts(options.model, options.data / "pairs", 7168)
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() and options.what != "digits" else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # which would hide small errors
    name = {"gpu": "h200"}.get(options.what, options.what)
    if options.what == "text":
        name = options.model.name + ("" if device.type == "cuda" else "-cpu")
    command = f"python benchmarks/adaptive.py {options.what} --batch {options.batch} --samples {options.samples} "
    command += f"--seeds {options.seeds} --turns {options.turns}"
    if options.what == "gpu":
        command = f"python benchmarks/adaptive.py gpu --budget {options.budget:g} --seeds {options.seeds}"
    numbers: list[dict[str, Any]] = []

    def write(one: dict[str, Any]) -> None:
        numbers.append(one)
        parts = ["# Adaptive passes: error against measured cost", setting(command, device), *map(shown, numbers)]
        keep(f"adaptive-{name}", "\n\n".join(parts), options.out)
        (options.out / f"adaptive-{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")

    if options.what == "gpu":
        return on_a_gpu(options, device, write)
    if options.what == "digits":
        cases = digits(options.batch)
    elif options.what in SMALL:
        cases = small_network(options.what, options.images, options.weights, options.samples, options.batch)
    else:
        cases = text(options.model, device, options.samples, options.batch, 8)
    for case in cases:
        write(measure(case, options.seeds, options.turns, device, costs=options.costs))
    return None


if __name__ == "__main__":
    main()
