"""Two fine-tuned networks merged into one: Fisher-weighted, against averages, task arithmetic and TIES.

    PYTHONPATH=src:benchmarks python -m uses.merging
    PYTHONPATH=src:benchmarks python -m uses.merging memory     peak memory of merging two models of 400 MB

A network that knows the digits a little (200 images) is fine-tuned twice, and the two are merged.  Classes: on the
digits 0-4, and on 5-9.  Domains: on images turned by 90 degrees, and on mirrored ones.  Accuracy is that on test images
of both, on twelve seeds.  Each method may choose among the same number of settings, by validation accuracy on four
other seeds: the weight of the first model for averages, the scale for task arithmetic and TIES.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable

import torch
from common import peak_memory, table
from safetensors.torch import save_file
from torch import Tensor, nn

import neuromanifold as nm
from uses.study import accuracy, batches, cell, digits, figure, mean_error, mlp, progress, report, train

WEIGHTS = (0.2, 0.35, 0.5, 0.65, 0.8)  # of the first model
SCALES = (0.3, 0.5, 0.7, 1.0, 1.5)
TUNING, TESTING = range(100, 104), range(12)
METHODS = ("average", "task-arithmetic", "ties", "ties, by Fisher", "fisher, empirical", "fisher")
Split = tuple[Tensor, Tensor]


def tasks_of(kind: str, seed: int) -> tuple[Split, list[list[Split]]]:
    """Data of the common network, and for either task training, validation and test data."""
    parts = digits(seed)
    common = tuple(part[:200] for part in parts[0])
    if kind == "classes":
        return common, [[(x[y // 5 == t], y[y // 5 == t]) for x, y in parts] for t in range(2)]  # type: ignore[return-value]
    turns = (lambda x: torch.rot90(x, 1, (1, 2)), lambda x: x.flip(2))
    return common, [[(turn(x.view(-1, 8, 8)).flatten(1), y) for x, y in parts] for turn in turns]  # type: ignore[return-value]


def fine_tuned(kind: str, seed: int) -> dict[str, object]:
    """The common network, the two fine-tuned ones with their results, and the data."""
    common, tasks = tasks_of(kind, seed)
    base = train(mlp(seed), *common, epochs=30, seed=seed)
    models = [train(copy.deepcopy(base), *task[0], epochs=15, seed=seed) for task in tasks]
    both = list(zip(models, tasks, strict=True))
    found = {"base": base, "models": models, "tasks": tasks}
    found["fisher"] = [nm.fisher_diagonal(model, batches(*task[0])) for model, task in both]
    found["fisher, empirical"] = [nm.fisher_diagonal(m, batches(*task[0]), nm.Empirical()) for m, task in both]
    return found


def merged(found: dict[str, object], method: str, setting: float) -> nn.Module:
    models, base = found["models"], found["base"]
    if method in ("task-arithmetic", "ties", "ties, by Fisher"):
        fishers = found["fisher"] if "by Fisher" in method else ()
        result = nm.merge(models, fishers, method=method.split(",")[0], base=base, scale=setting)  # type: ignore[arg-type]
    else:
        fishers = found.get(method, ())
        result = nm.merge(models, fishers, method=method.split(",")[0], weights=[setting, 1 - setting])  # type: ignore[arg-type]
    model = copy.deepcopy(base)
    model.load_state_dict(dict(result))  # type: ignore[attr-defined]
    return model  # type: ignore[return-value]


def score(model: nn.Module, found: dict[str, object], part: int) -> float:
    return sum(accuracy(model, *task[part]) for task in found["tasks"]) / 2  # type: ignore[attr-defined]


def saving(folder: str, shard_size: str) -> Callable[[], object]:
    """The merge whose memory is measured."""
    models, fishers = ([f"{folder}/{kind}{i}.safetensors" for i in range(2)] for kind in ("model", "fisher"))
    return lambda: nm.merge(models, fishers).save(f"{folder}/out-{shard_size}", shard_size)


def memory() -> None:
    """Two models of 100 tensors with a million numbers each, with results as large."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(2):
            generator = torch.Generator().manual_seed(i)
            values = {f"layer.{k}.weight": torch.rand(1000, 1000, generator=generator) for k in range(100)}
            save_file(values, f"{folder}/model{i}.safetensors")
            noise = {name: torch.zeros(1000, 1000) for name in values}
            fim = nm.DiagonalFisher(values, noise, 1, 1, nm.Provenance("by hand", "exact"))
            fim.save(f"{folder}/fisher{i}.safetensors")
        del values, noise, fim
        peaks = {size: peak_memory("uses.merging:saving", folder, size) for size in ("4MB", "40MB", "5GB")}
    rows = [[size, f"{peak:.0f}"] for size, peak in peaks.items()]
    text = "# Memory of merging two models\n\nTwo models of 400 MB with results of 800 MB (sums, standard errors).\n\n"
    report("merging-memory", text + table(["shard size", "peak memory, MiB"], rows), rows)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["memory"]:
        memory()
        return
    numbers: dict[str, dict[str, object]] = {}
    text = "# Merging two fine-tuned networks: digits\n"
    for kind in ("classes", "domains"):
        tuning = [fine_tuned(kind, seed) for seed in progress(f"{kind}, tuning", TUNING)]
        testing = [fine_tuned(kind, seed) for seed in progress(f"{kind}, testing", TESTING)]
        names = ("common network", "first model", "second model")
        values = {
            "common network": [score(f["base"], f, 2) for f in testing],  # type: ignore[arg-type]
            **{names[i + 1]: [score(f["models"][i], f, 2) for f in testing] for i in range(2)},  # type: ignore[index]
        }
        rows = [[name, "–", "–", cell([100 * v for v in one], digits=1)] for name, one in values.items()]
        curves: dict[str, list[tuple[float, float]]] = {}
        for method in METHODS:
            settings = WEIGHTS if method.startswith(("average", "fisher")) else SCALES
            best = max(settings, key=lambda s: sum(score(merged(f, method, s), f, 1) for f in tuning))
            default = 0.5 if settings is WEIGHTS else 1.0
            plain = [score(merged(f, method, default), f, 2) for f in testing]
            values[method] = [score(merged(f, method, best), f, 2) for f in testing]
            columns = [cell([100 * v for v in one], digits=1) for one in (plain, values[method])]
            rows.append([method, columns[0], f"{best:g}", columns[1]])
            if settings is WEIGHTS:
                each = [[100 * score(merged(f, method, w), f, 2) for f in testing] for w in WEIGHTS]
                curves[method] = [mean_error(one) for one in each]
        numbers[kind] = {"accuracies": values, "curves": curves}
        text += f"\n## {kind}\n\nAccuracy on both tasks in %, mean of {len(TESTING)} seeds ± standard error.\n\n"
        text += table(["", "default setting", "tuned setting", "accuracy"], rows) + "\n"
        gain = [100 * (a - b) for a, b in zip(values["fisher"], values["average"], strict=True)]
        text += f"\nTuned, Fisher minus average on the same seeds: {cell(gain, digits=1)} points.\n"
    report("merging", text, numbers)

    def draw(axes: list) -> None:  # type: ignore[type-arg]
        for axis, (kind, found) in zip(axes, numbers.items(), strict=True):
            for method, points in found["curves"].items():  # type: ignore[attr-defined]
                means, errors = zip(*points, strict=True)
                axis.errorbar(WEIGHTS, means, errors, marker="o", ms=3, label=method)
            axis.set(title=kind, xlabel="weight of the first model", ylabel="accuracy on both tasks, %")
        axes[0].legend(fontsize=7)

    figure("merging", 2, draw)


if __name__ == "__main__":
    main()
