"""Intervals: how often nominal 95 % intervals hold the exact value, and how wide they are, on real networks.

    python benchmarks/coverage.py digits
    python benchmarks/coverage.py glosses --model DIR/glosses      last layers of a folder with model/ and data.csv
    python benchmarks/coverage.py words --model DIR/glosses        its embeddings of words
    python benchmarks/coverage.py pairs --model DIR/pairs          embeddings and last layers of such a folder
    python benchmarks/coverage.py resnet50 --model DIR/resnet50    last layers of a folder with model/ and data.npz

Covered: the share of entries with F > 0 whose interval holds F by nm.Exact(), of all and of those to which one or two
samples contribute: for digits (Σ F_n)² <= 2 Σ F_n² over samples n, for texts the embeddings of words that are in one or
two of them.  Of the large networks some layers are looked at.  Width: median of (upper - lower)/F.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adaptive
import torch
from adaptive_networks import Case, batches_of, text
from adaptive_networks import digits as trained_digits
from common import keep, setting, table

import neuromanifold as nm

LAYERS = {
    "glosses": ("*.layer.5.*", "*classifier*"),
    "words": ("*word_embeddings*",),
    "pairs": ("*embeddings*", "*.layer.5.*", "*pooler*", "*classifier*"),
}
RESNET = ("*stages.3.layers.2.*", "*classifier*")


def digits(samples: int, size: int) -> list[tuple[Case, Any]]:
    """The networks of adaptive.py, with entries to which few samples contribute found one sample at a time."""
    found: list[tuple[Case, Any]] = []
    for case in trained_digits(size)[1:]:
        images, labels = (torch.cat(parts)[:samples] for parts in zip(*case.batches, strict=True))
        singles = [
            nm.fisher_diagonal(case.model, [(x[None], y[None])], nm.Exact())
            for x, y in zip(images, labels, strict=True)
        ]
        rare = {}
        for name in singles[0]:
            each = torch.stack([one[name].double() for one in singles])
            rare[name] = each.sum(0).square() <= 2 * each.square().sum(0)
        found.append((case._replace(batches=batches_of(images, labels, samples, size), rare=rare), None))
    return found


def texts(path: Path, samples: int, size: int, layers: Any) -> list[tuple[Case, Any]]:
    """A sentence classifier, without the embeddings of words that do not occur."""
    (case,) = text(path, torch.device("cpu"), samples, size)
    words = torch.cat([batch["input_ids"].flatten() for batch in case.batches]).unique()
    embedding: Any = case.model.get_input_embeddings()  # type: ignore[operator]
    assert embedding.padding_idx in (None, 0)  # which stays the first
    assert int(words[0]) == 0
    embedding.weight = torch.nn.Parameter(embedding.weight.detach()[words])
    for batch in case.batches:
        batch["input_ids"] = torch.searchsorted(words, batch["input_ids"])
    return [(case._replace(rare={name: rare[words] for name, rare in case.rare.items()}), layers)]


def resnet50(path: Path, samples: int, size: int) -> list[tuple[Case, Any]]:
    """Images of 32 × 32 pixels, as they are, and a head with 100 classes that is not trained."""
    import numpy as np
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(path / "model", dtype=torch.float32).eval()
    data = np.load(path / "data.npz")
    how = json.loads((path / "task.json").read_text())["preprocessing"]
    mean, std = (torch.tensor(how[name])[:, None, None] for name in ("mean", "std"))
    images = (torch.as_tensor(data["images"][:samples]).permute(0, 3, 1, 2) * how["rescale"] - mean) / std
    labels = torch.as_tensor(data["labels"][:samples]).long()
    batches = [{"pixel_values": images[i : i + size], "labels": labels[i : i + size]} for i in range(0, samples, size)]
    return [(Case(f"ResNet-50, {samples} images", model, batches), RESNET)]


@dataclass
class Selected:
    """Only some parameters of a network, in every call."""

    case: Case
    parameters: Any
    exact: nm.DiagonalFisher

    def estimate(self, seed: int, **arguments: Any) -> nm.DiagonalFisher:
        """Return one estimate."""
        return nm.fisher_diagonal(
            self.case.model, self.case.batches, parameters=self.parameters, seed=seed, **arguments
        )


def estimators(few_classes: bool) -> dict[str, dict[str, Any]]:
    """Name: arguments of nm.fisher_diagonal; with three classes two passes are exact."""
    found: dict[str, dict[str, Any]] = {"one pass": {"estimator": nm.Hutchinson()}}
    for m in () if few_classes else (2, 4):
        found[f"orthogonal, {m} passes"] = {"estimator": nm.Hutchinson(m)}
        found[f"peeled, {m} passes"] = {"estimator": nm.Hutchinson(m, deflate=8)}
    return found | {f"adaptive, {cost:g}": {"passes": cost} for cost in (0.7, 1.0, 1.2, 1.5)}


def measure(case: Case, layers: Any, seeds: int) -> str:
    """A table for one network."""
    exact = nm.fisher_diagonal(case.model, case.batches, nm.Exact(), parameters=layers)
    probed = Selected(case, layers, exact)
    with torch.no_grad():
        logits = [adaptive._logits(case.model, batch) for batch in case.batches]
    peak, classes = float(torch.cat(logits).softmax(-1).amax(-1).mean()), logits[0].shape[-1]
    few = sum(int(((exact[name] > 0) & mask).sum()) for name, mask in case.rare.items() if name in exact)
    rows = []
    for name, arguments in estimators(classes <= 3).items():
        runs = [adaptive.compare(case, probed.estimate(seed, **arguments), exact) for seed in range(seeds)]
        mean = [
            sum(getattr(one, field) for one in runs) / seeds
            for field in ("coverage", "rare", "width", "total", "stated")
        ]
        rare = f"{100 * mean[1]:.1f} %" if few else "-"
        rows.append([name, f"{100 * mean[0]:.1f} %", rare, *(f"{one:.4f}" for one in mean[2:])])
        print(" · ".join(rows[-1]), flush=True)
    total = sum(int((exact[name] > 0).sum()) for name in exact)
    about = f"{classes} classes, mean largest probability {peak:.4f}; {len(case.batches)} batches; {seeds} seeds; "
    about += f"{total} entries with F > 0, to {few} of them one or two samples contribute."
    head = ["", "covered", "of one or two samples", "median width", "Σ error / Σ F", "stated"]
    return f"## {case.name}\n\n{about}\n\n{table(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["digits", "glosses", "words", "pairs", "resnet50"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.what == "digits":
        cases = digits(options.samples, options.batch)
    elif options.what == "resnet50":
        cases = resnet50(options.model, options.samples, options.batch)
    else:
        cases = texts(options.model, options.samples, options.batch, LAYERS[options.what])
    command = f"python benchmarks/coverage.py {options.what} --samples {options.samples} --batch {options.batch} "
    parts = [
        "# Intervals: coverage of nominal 95 %",
        setting(command + f"--seeds {options.seeds}", torch.device("cpu")),
    ]
    for case, layers in cases:
        parts.append(measure(case, layers, options.seeds))
        keep(f"coverage-{options.what}", "\n\n".join(parts))


if __name__ == "__main__":
    main()
