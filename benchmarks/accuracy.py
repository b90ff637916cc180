"""How accurate each estimator is, against the exact diagonal, on real networks; and what it costs.

    python benchmarks/accuracy.py digits
    python benchmarks/accuracy.py TASK_DIR [--samples 512] [--batch-size 64] [--seeds 3] [--device cuda]
    python benchmarks/accuracy.py TASK_DIR --export DIR          a smaller task for another machine, then as TASK_DIR

TASK_DIR is a folder made by shared/realdata/prepare.py, or an export of one (see tasks.py).

exact = fisher_diagonal(Exact())                                  C - 1 passes for each batch
for each estimator, per batch and per sample; for each seed:
    errors of fisher_diagonal(estimator, seed) against exact, for embeddings, for everything else, and for all
times: all of them in turn on the first batches, over forward + backward of the same

Embeddings stand apart: the row of a rare word has the class noise of the one or two samples that contain it, whatever
the estimator does.  Results: benchmarks/results/accuracy-TASK.md, and .json with the same numbers for the docs' figure.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import ClassVar, NamedTuple

import common
import tasks
import torch
from tasks import RealTask
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.diagnostics.runs import EPSILON, coverage, short_name

ROUNDING = 1e-5  # an error below is that of float32
GROUPS = {"embeddings": "embeddings", "rest": "all but embeddings", "all": "all"}
Numbers = dict[str, float]


class Entry(NamedTuple):
    """A row: an estimator, and what is squared."""

    estimator: nm.Estimator
    granularity: str  # "batch", or "auto": samples
    curve: bool = False  # part of the curve over `probes`

    @property
    def name(self) -> str:
        """As code, and by what."""
        return f"{short_name(self.estimator)}, by {'batches' if self.granularity == 'batch' else 'samples'}"


@dataclass(frozen=True)
class AllLabels(nm.Estimator):
    """F = Σ_y p(y) (∂ log p(y))², a pass for each label: the definition itself, to check `nm.Exact` by."""

    centred: ClassVar[bool] = False
    target: ClassVar[str] = "exact"

    def passes(self, core: nm.Core) -> int:
        """One for each label."""
        return core.dim

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        """√p(y) (e_y - p)."""
        del labels, generator
        for y in range(core.dim):
            score = core.score(torch.full(core.batch_shape, y, device=core.device))
            yield score * core.probs[..., y, None].sqrt()


def entries(classes: int) -> list[Entry]:
    """All rows; the probes of the curve double until C - 1, where nothing random is left."""
    H = nm.Hutchinson
    coarse = [
        H(deflate=0),
        H(),
        H(envelope=nm.Lower(1)),
        H(envelope=nm.Lower(2)),
        H(envelope=nm.Upper()),
        nm.MonteCarlo(),
    ]
    rows = [Entry(one, "batch") for one in [*coarse, nm.SquaredBatchGradient()]]
    rows += [Entry(one, "auto") for one in (H(deflate=0), nm.MonteCarlo(), nm.Empirical())]
    powers = [2**k for k in range(20) if 2**k < classes - 1]
    return rows + [Entry(H(probes=m), "auto", curve=True) for m in [*powers, classes - 1]]


def embedding_names(model: nn.Module) -> set[str]:
    own = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def errors(estimate: nm.DiagonalFisher, exact: nm.DiagonalFisher) -> Numbers:
    """RelMAE and its value over positive entries, as `DiagonalFisher.compare` has them, tensor by tensor; and s.e."""
    total, over_positive, entries, positive = 0.0, 0.0, 0, 0
    for name, truth in exact.sums.items():
        b = truth.double()
        relative = (estimate.sums[name].double() - b).abs() / (b + EPSILON)
        total += float(relative.sum())
        over_positive += float(relative[b > 0].sum())
        entries, positive = entries + b.numel(), positive + int((b > 0).sum())
    return {
        "relmae": total / max(1, entries),
        "relmae_positive": over_positive / max(1, positive),
        "relative_error": estimate.relative_error,
        "coverage": coverage(estimate, exact),
        "scale": float(estimate.trace.sum / exact.trace.sum) if exact.trace.sum else float("nan"),
    }


def part(fim: nm.DiagonalFisher, names: set[str]) -> nm.DiagonalFisher:
    kept = [{name: value for name, value in one.items() if name in names} for one in (fim.sums, fim.noise)]
    return replace(fim, sums=kept[0], noise=kept[1])


def groups(model: nn.Module) -> dict[str, set[str]]:
    """Names of parameters; a network without embeddings has no such group."""
    every, apart = {name for name, _ in model.named_parameters()}, embedding_names(model)
    return {key: names for key, names in (("embeddings", apart), ("rest", every - apart), ("all", every)) if names}


def measure(task: RealTask, seeds: int, tell: Callable[[str], None]) -> tuple[list[dict], nm.DiagonalFisher]:
    """The rows without times: each estimator with its errors, means over the seeds."""
    run = nm.fisher_diagonal
    exact = run(task.model, task.batches, nm.Exact())
    tell(f"exact: {exact.provenance.passes} passes, trace {exact.trace.sum:.4g}")
    names, rows = groups(task.model), []
    exact_parts = {key: part(exact, own) for key, own in names.items()}
    for entry in entries(task.classes):
        found: dict[str, list[Numbers]] = {key: [] for key in names}
        for seed in range(seeds if entry.estimator.noise_factor else 1):
            fim = run(task.model, task.batches, entry.estimator, granularity=entry.granularity, seed=seed)
            for key, own in names.items():
                found[key].append(errors(part(fim, own), exact_parts[key]))
        methods, p = fim.provenance.granularity, fim.provenance
        rows.append(
            {
                "name": entry.name,
                "estimator": short_name(entry.estimator),
                "granularity": "batch" if entry.granularity == "batch" else "sample",
                "target": p.target,
                "random": entry.estimator.noise_factor > 0,
                "curve": entry.curve,
                "passes": p.passes / p.batches,
                "runs": len(found["all"]),
                "by_batches": []
                if entry.granularity == "batch"
                else [n for n, method in methods.items() if method == "batch"],
                "errors": {key: {q: fmean(n[q] for n in runs) for q in runs[0]} for key, runs in found.items()},
                "seeds": {key: [n["relmae"] for n in runs] for key, runs in found.items()},
            }
        )
        numbers = ", ".join(f"{key} {value['relmae']:.3g}" for key, value in rows[-1]["errors"].items())
        tell(f"{entry.name}: {rows[-1]['passes']:g} passes, RelMAE {numbers}")
        del fim
    return rows, exact


def reference_check(task: RealTask) -> float:
    """RelMAE of the exact diagonal of the first batch against the definition."""
    made = (nm.fisher_diagonal(task.model, task.batches[:1], one) for one in (nm.Exact(), AllLabels()))
    return errors(*made)["relmae_positive"]


def add_times(rows: list[dict], task: RealTask, count: int, repeats: int, device: torch.device) -> Numbers:
    """Add times over forward + backward: processor time on a CPU, which others may use too; else wall-clock."""
    batches = task.batches[:count]
    own = {entry.name: entry for entry in entries(task.classes)} | {"Exact()": Entry(nm.Exact(), "auto")}

    def job(entry: Entry) -> Callable[[], object]:
        return lambda: nm.fisher_diagonal(task.model, batches, entry.estimator, granularity=entry.granularity)

    functions: dict[str, Callable[[], object]] = {common.BASELINE: lambda: common.forward_backward(task.model, batches)}
    functions |= {name: job(entry) for name, entry in own.items()}
    passes = {row["name"]: row["passes"] for row in rows} | {"Exact()": task.classes - 1, common.BASELINE: 1}
    long = common.seconds(functions[common.BASELINE], device).wall > 1
    slow = {name: 1 if m > 8 else repeats for name, m in passes.items() if m > 8 or long}
    times = common.interleaved(functions, repeats, device, slow)
    kind = "cpu" if device.type == "cpu" else "wall"
    seconds = {name: getattr(one, kind) for name, one in times.items()}
    for row in rows:
        row["time"] = seconds[row["name"]] / seconds[common.BASELINE]
    return {
        "timed_batches": len(batches),
        "baseline_seconds": seconds[common.BASELINE] / len(batches),
        "exact_time": seconds["Exact()"] / seconds[common.BASELINE],
    }


def statements(rows: list[dict], classes: int, size: int, check: float) -> list[dict]:
    """What is claimed of the library, each with its numbers and whether it holds here; on all but embeddings."""
    error = {row["name"]: row["errors"]["rest"]["relmae"] for row in rows}
    one = error[Entry(nm.Hutchinson(), "auto").name]
    by_batches = [error[Entry(nm.Hutchinson(deflate=k), "batch").name] for k in (1, 0)]
    ratios = [value / one if one else float("inf") for value in by_batches]
    made = [
        {
            "text": f"Per sample, one backward has at least four times less error than per batch of {size}",
            "holds": min(ratios) >= 4,
            "detail": f"{one:.3g} against {by_batches[0]:.3g} (deflated, {ratios[0]:.3g} times) "
            f"and {by_batches[1]:.3g} (𝔽, {ratios[1]:.3g} times)",
        }
    ]
    if classes == 2:
        every = next(row for row in rows if row["curve"])["errors"]["all"]["relmae_positive"]
        text = "Two classes: one backward is exact up to rounding (1e-5), embeddings too"
        made.append({"text": text, "holds": every <= ROUNDING, "detail": f"{every:.2g} over all positive entries"})
    curve = [(row["passes"], row["errors"]["rest"]["relmae"]) for row in rows if row["curve"]]
    values = [value for _, value in curve]
    falls = all(b < a for a, b in pairwise(values))
    made.append(
        {
            "text": "More probes, less error, down to rounding (1e-5) at C - 1",
            "holds": falls and values[-1] <= ROUNDING,
            "detail": ", ".join(f"{m:g}: {value:.3g}" for m, value in curve)
            + f" (with C - 1 the passes are those of Exact(), which is off by {check:.2g} from the definition)",
        }
    )
    return made


def report(r: dict) -> str:
    """Everything as Markdown."""
    keys = list(GROUPS) if "embeddings" in r["entries"] else ["all"]
    columns = [
        ("relmae", "RelMAE"),
        ("relmae_positive", "positive"),
        ("relative_error", "s.e."),
        ("coverage", "2 s.e."),
    ]
    parts = [f"# {r['task']}: accuracy against the exact diagonal", r["setting"], r["about"]]
    parts.append("Made from " + r["provenance"] + ".")
    parts.append(_facts(r))
    verdicts = {True: "holds", False: "DOES NOT HOLD"}
    parts.append("\n".join(f"- {verdicts[one['holds']]}: {one['text']}: {one['detail']}." for one in r["statements"]))
    header = ["estimator", "passes", "time", *(f"RelMAE, {GROUPS[key]}" for key in keys)]
    lines = [_line(row, [_number(row["errors"][key]["relmae"]) for key in keys]) for row in r["rows"]]
    parts.append(common.table(header, lines))
    for key in keys:
        header = ["estimator", "passes", "time", *(label for _, label in columns), "scale"]
        lines = [_line(row, _numbers(row, key, columns)) for row in r["rows"]]
        parts += [f"## {GROUPS[key]}: {r['entries'][key]:,} entries, {r['positive'][key]:,} positive"]
        parts.append(common.table(header, lines))
    return "\n\n".join([*parts, _NOTE])


_NOTE = """RelMAE: mean of |estimate - F|/(F + 1e-12), F summed over the samples; positive: over entries with F > 0.
s.e.: the standard error that the result reports of itself, Σ s.e./Σ F.  2 s.e.: the share of positive entries within
two of them (95 % is what they promise).  scale: trace over that of F.  time: over forward + backward of the same
batches, all in turn, medians; processor time on a CPU.  Per sample, batches 0, 1, 128, 16384, ... of a call
have more passes, in which gradients are verified: calls with few batches show it.  Means over the seeds."""


def _facts(r: dict) -> str:
    shape = f"{r['parameters']:,} parameters, C={r['classes']}, {r['samples']} samples in batches of {r['batch_size']}"
    mean = f"mean largest probability {r['mean_largest_probability']:.3f}"
    tiny = f"{r['below_epsilon']['all']:,} of {r['positive']['all']:,} positive entries below the 1e-12 of RelMAE"
    cost = f"forward + backward {1000 * r['baseline_seconds']:.0f} ms a batch, exact {r['exact_time']:.1f} times that "
    cost += f"(times are those of calls with {r['timed_batches']} batches)"
    check = f"exact against Σ_y p(y) (∂ log p(y))² on the first batch: RelMAE {r['reference_check']:.2g}"
    coarse = sorted({name for row in r["rows"] for name in row["by_batches"]})
    left = f"no rule, so squared per batch: {', '.join(coarse)}" if coarse else "every parameter has a rule"
    return f"{shape}; {mean}; {cost}; {check}; {tiny}; {left}; {r['seeds']} seeds; {r['dtype']}, TF32 off."


def _line(row: dict, rest: list[str]) -> list[str]:
    return [row["name"], f"{row['passes']:g}", f"{row['time']:.2f}", *rest]


def _numbers(row: dict, key: str, columns: list[tuple[str, str]]) -> list[str]:
    numbers = row["errors"][key]
    texts = [_number(numbers[quantity]) for quantity, _ in columns[:2]]
    noise = [_number(numbers["relative_error"]), f"{100 * numbers['coverage']:.0f} %"] if row["random"] else ["-", "-"]
    return [*texts, *noise, f"{numbers['scale']:.4g}"]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1e-3 else f"{value:.4f}" if value < 10 else f"{value:.3g}"


@torch.no_grad()
def mean_largest_probability(task: RealTask) -> float:
    found: list[Tensor] = []
    for batch in task.batches:
        labelled = isinstance(batch, dict)
        inputs = {key: value for key, value in batch.items() if key != "labels"} if labelled else batch[0]
        logits = task.model(**inputs).logits if labelled else task.model(inputs)
        found.append(logits.double().softmax(-1).max(-1).values)
    return float(torch.cat(found).mean())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", metavar="TASK_DIR", help="a prepared task, an export of one, or: digits")
    parser.add_argument("--samples", default=512, type=int)
    parser.add_argument("--batch-size", default=64, type=int)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--repeats", default=3, type=int, help="of the timing")
    parser.add_argument("--timed-batches", default=8, type=int, help="batches that are timed, at most")
    parser.add_argument("--pixels", default=0, type=int, help="width of images, instead of the task's")
    parser.add_argument("--export", metavar="DIR", help="write a smaller task instead")
    parser.add_argument("--print-only", action="store_true", help="print, and keep nothing")
    options = parser.parse_args(arguments)
    if options.export:
        return tasks.export(options.task, options.export, options.samples)
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dtype = getattr(torch, options.dtype)
    task = tasks.load(options.task, options.samples, options.batch_size, options.device, dtype, options.pixels)
    rows, exact = measure(task, options.seeds, lambda text: print(text, flush=True))
    check = reference_check(task)
    cost = add_times(rows, task, options.timed_batches, options.repeats, options.device)
    parts = {key: part(exact, own) for key, own in groups(task.model).items()}
    result = {
        "task": task.name,
        "setting": common.setting(_command(options, parser), options.device),
        "about": task.about,
        "provenance": tasks.provenance_line(task.provenance),
        "classes": task.classes,
        "samples": exact.count,
        "batch_size": options.batch_size,
        "seeds": options.seeds,
        "dtype": options.dtype,
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "mean_largest_probability": mean_largest_probability(task),
        "entries": {key: sum(v.numel() for v in fim.sums.values()) for key, fim in parts.items()},
        "positive": {key: sum(int((v > 0).sum()) for v in fim.sums.values()) for key, fim in parts.items()},
        "below_epsilon": {
            key: sum(int(((v > 0) & (v < EPSILON)).sum()) for v in fim.sums.values()) for key, fim in parts.items()
        },
        "reference_check": check,
        **cost,
        "statements": statements(rows, task.classes, options.batch_size, check),
        "rows": rows,
    }
    text = report(result)
    if options.print_only:
        return print(text)
    common.keep(f"accuracy-{task.name}", text)
    (common.RESULTS / f"accuracy-{task.name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return None


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    given = {key: value for key, value in vars(options).items() if str(value) != str(parser.get_default(key))}
    given.pop("task")
    flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}") for key, value in given.items()]
    name = options.task.rstrip("/").split("/")[-1]
    return " ".join(["python benchmarks/accuracy.py", name, *flags])


if __name__ == "__main__":
    main()
