"""Adaptive passes: error against measured cost, and the coverage of intervals, on trained networks.

    python benchmarks/adaptive.py digits
    python benchmarks/adaptive.py cifar --images DIR/data.npz        two networks, which are trained first, on a GPU
    python benchmarks/adaptive.py residual --images DIR/data.npz     a small one, trained in minutes on a CPU; or: vgg
    python benchmarks/adaptive.py text --model DIR/pairs             a folder with model/ and data.csv
    python benchmarks/adaptive.py --figure                           docs/images/adaptive.png from the results

Cost: time of a run over that of forward + backward of the same batches, taking turns, medians over the seeds
(wall-clock on a GPU, processor time on a CPU).  It is the time of all batches minus that of half of them, so that what
a call costs once is left out.  Error: mean over entries with F > 0 of |F̂ - F|/F, and over seeds; F by nm.Exact().
Stated: what the result says of Σ error / Σ F.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, forward_backward, keep, setting, table
from common import seconds as seconds_of
from torch import Tensor, nn

import neuromanifold as nm

COSTS = (0.5, 0.7, 1.0, 1.1, 1.2, 1.5, 2.0, 4.0)
ONE, PLAIN = "one pass", "forward + backward"
LEVEL = 0.95
ROUNDING = 2e-4  # of float32 sums in another order


class Case(NamedTuple):
    """A trained network and data; `rare` marks entries to which at most two samples contribute."""

    name: str
    model: nn.Module
    batches: list[Any]
    embeddings: tuple[str, ...] = ()
    rare: Mapping[str, Tensor] = {}


def estimators() -> dict[str, dict[str, Any]]:
    """Name: arguments of nm.fisher_diagonal."""
    found: dict[str, dict[str, Any]] = {ONE: {"estimator": nm.Hutchinson()}}
    found |= {f"orthogonal, {m} passes": {"estimator": nm.Hutchinson(m)} for m in (2, 4)}
    found |= {f"peeled, {m} passes": {"estimator": nm.Hutchinson(m, deflate=8)} for m in (2, 4)}
    return found | {f"adaptive, {cost:g}": {"passes": cost} for cost in COSTS}


# ---------------------------------------------------------------------------------------------------------- networks


def digits(size: int = 512) -> list[Case]:
    """A convolutional network on scikit-learn's digits, after 0, 6 and 40 epochs, with its training images."""
    from neuromanifold.experiments.digits import TRAINING, load_digits

    images, labels = load_digits()
    images, labels = images[:TRAINING], labels[:TRAINING]
    cases = []
    for epochs in (0, 6, 40):
        torch.manual_seed(0)
        convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10))
        train(model, images, labels, epochs, batch=32)
        cases.append(Case(f"digits, {epochs} epochs", model, batches_of(images, labels, TRAINING, size)))
    return cases


def batches_of(images: Tensor, labels: Tensor, samples: int, size: int = 64) -> list[Any]:
    """The first samples in batches."""
    return [(images[i : i + size], labels[i : i + size]) for i in range(0, samples, size)]


class Residual(nn.Module):
    """Convolutions with identity around them, as in a small ResNet; 0.9 M parameters."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.first = _convolution(3, width)
        stages, channels = [], width
        for stage in range(3):
            outs = width * 2**stage
            stages += [nn.Sequential(_convolution(channels, outs, 2 if stage else 1), nn.ReLU())]
            stages += [
                _Identity(nn.Sequential(_convolution(outs, outs), nn.ReLU(), _convolution(outs, outs)))
                for _ in range(blocks - 1)
            ]
            channels = outs
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        logits: Tensor = self.head(self.stages(self.first(x).relu()).mean((2, 3)))
        return logits


class _Identity(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.inner(x)).relu()


def _convolution(ins: int, outs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs))


def vgg() -> nn.Module:
    """Thirteen convolutions and a linear layer; 14.7 M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for outs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512):
        layers += [_convolution(channels, outs), nn.ReLU()] if outs else [nn.MaxPool2d(2)]
        channels = outs or channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def small_residual(width: int = 24) -> nn.Module:
    """Fourteen convolutions with identities around pairs of them; 0.5 M parameters."""
    layers: list[nn.Module] = [_convolution(3, width, 2), nn.ReLU()]
    channels = width
    for stage in range(3):
        outs = width * 2**stage
        layers += [_convolution(channels, outs, 2 if stage else 1), nn.ReLU()]
        layers += [
            _Identity(nn.Sequential(_convolution(outs, outs), nn.ReLU(), _convolution(outs, outs))) for _ in "ab"
        ]
        channels = outs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def small_vgg() -> nn.Module:
    """Seven convolutions and a linear layer; 1.2 M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for outs in (32, 0, 64, 64, 0, 128, 128, 0, 256, 256):
        layers += [*_convolution(channels, outs), nn.ReLU()] if outs else [nn.MaxPool2d(2)]
        channels = outs or channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


SMALL: dict[str, tuple[Callable[[], nn.Module], int, float]] = {  # network, epochs, learning rate
    "residual": (small_residual, 24, 0.1),
    "vgg": (small_vgg, 20, 0.05),
}


def small_network(name: str, path: Path, weights: Path, samples: int, size: int) -> list[Case]:
    """A network that is trained on the first 4,096 images until it knows them, with the first `samples` of these."""
    images, labels = images_and_labels(path)
    torch.manual_seed(0)
    make, epochs, rate = SMALL[name]
    model, file = make(), weights / f"{name}.pt"
    if not file.exists():
        train(model, images[:4096], labels[:4096], epochs, rate=rate, shift=False)
        torch.save(model.state_dict(), file)
    model.load_state_dict(torch.load(file))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    title = f"small {name} network, {millions:.2f} M, {samples} of the 4,096 images that it was trained on"
    return [Case(title, model.eval(), batches_of(images, labels, samples, size))]


def images_and_labels(path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32], about standardised, and labels [N]."""
    import numpy as np

    data = np.load(path)
    images = torch.as_tensor(data["images"]).permute(0, 3, 1, 2).float().div_(255).sub_(0.47).div_(0.25)
    return images, torch.as_tensor(data["labels"]).long()


def cifar(path: Path, device: torch.device, epochs: int, samples: int, size: int) -> list[Case]:
    """Two networks, trained on all but 1,000 of the images, with the first `samples` of these."""
    images, labels = (one.to(device) for one in images_and_labels(path))
    cases = []
    for name, make in (("residual network", Residual), ("VGG-like network", vgg)):
        torch.manual_seed(0)
        model = make().to(device)
        train(model, images[:-1000], labels[:-1000], epochs)
        with torch.no_grad():
            right = [float((model(x[i]).argmax(-1) == y[i]).float().mean()) for x, y, i in _ends(images, labels)]
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        title = f"{name}, {millions:.2f} M, accuracy {right[0]:.3f} in training, {right[1]:.3f} on other images"
        cases.append(Case(title, model, batches_of(images, labels, samples, size)))
    return cases


def _ends(images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor, slice]]:
    return [(images, labels, slice(0, 1000)), (images, labels, slice(-1000, None))]


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    batch: int = 128,
    rate: float | None = None,
    shift: bool = True,
) -> None:
    """Stochastic gradient descent with momentum, one cycle; images are shifted by up to an eighth, and mirrored."""
    size, rate = images.shape[-1], rate or (0.1 if images.shape[1] == 3 else 0.02)
    steps = epochs * (len(labels) // batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(1, steps))
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), device=labels.device).split(batch):
            if len(rows) < batch:
                continue
            x = images[rows]
            if images.shape[1] == 3:
                if shift:
                    x = nn.functional.pad(x, (size // 8,) * 4)
                    i, j = torch.randint(0, size // 4 + 1, (2,)).tolist()
                    x = x[..., i : i + size, j : j + size]
                x = x.flip(-1) if bool(torch.rand(()) < 0.5) else x
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()


def text(path: Path, device: torch.device, samples: int, size: int) -> list[Case]:
    """A sentence classifier of transformers with its own data, in batches padded to their longest text."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(path / "model", dtype=torch.float32).to(device).eval()
    with (path / "data.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:samples]
    batches = []
    for i in range(0, len(rows), size):
        part = rows[i : i + size]
        pairs = [[row["text"] for row in part]]
        pairs += [[row["text_pair"] for row in part]] if "text_pair" in part[0] else []
        made = tokenizer(*pairs, padding=True, truncation=True, max_length=128, return_tensors="pt").to(device)
        batches.append({**made, "labels": torch.tensor([int(row["label"]) for row in part], device=device)})
    names = [name for name, _ in model.named_parameters() if "word_embeddings" in name]
    words = torch.zeros(model.get_input_embeddings().num_embeddings, device=device)
    for batch in batches:
        for ids in batch["input_ids"]:
            words[ids.unique()] += 1
    rare = dict.fromkeys(names, ((words > 0) & (words <= 2))[:, None])
    everywhere = tuple(name for name, _ in model.named_parameters() if "embeddings" in name)
    return [Case(f"{path.name}, {len(rows)} texts", model, batches, everywhere, rare)]


# ------------------------------------------------------------------------------------------------------- measurements


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


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a call returns, and its seconds: wall-clock on a GPU, of the processor otherwise."""
    results: list[Any] = []
    taken = seconds_of(lambda: results.append(call()), device)
    return results[0], taken.wall if device.type == "cuda" else taken.cpu


def measure(case: Case, seeds: int, device: torch.device) -> tuple[str, dict[str, Any]]:
    """One network: a table, and its numbers."""
    exact = nm.fisher_diagonal(case.model, case.batches, nm.Exact(), seed=0)
    runs: dict[str, list[nm.DiagonalFisher]] = {name: [] for name in estimators()}
    seconds: dict[tuple[str, bool], list[float]] = {}
    for seed, (name, half) in product(range(seeds), product([PLAIN, *estimators()], (True, False))):
        batches = case.batches[: len(case.batches) // 2] if half else case.batches
        call: Callable[[], Any] = partial(forward_backward, case.model, batches)
        if name != PLAIN:
            call = partial(nm.fisher_diagonal, case.model, batches, seed=seed, **estimators()[name])
        found, taken = timed(call, device)
        seconds.setdefault((name, half), []).append(taken)
        if name != PLAIN and not half:
            runs[name].append(found)
    slopes = {
        name: statistics.median(seconds[name, False]) - statistics.median(seconds[name, True])
        for name in [PLAIN, *runs]
    }
    rows, numbers = [], []
    for name in estimators():
        compared = [compare(case, one, exact) for one in runs[name]]
        mean = Found(*(statistics.fmean(values) for values in zip(*compared, strict=True)))
        cost, left_out = slopes[name] / slopes[PLAIN], runs[name][0].provenance.left_out
        numbers.append({"name": name, "cost": cost, "left out": left_out, **mean._asdict()})
        rest = [f"{mean.without_embeddings:.4f}"] if case.embeddings else []
        rare = [f"{100 * mean.rare:.1f} %"] if case.rare else []
        shown = [f"{100 * mean.coverage:.1f} %", *rare, f"{mean.width:.3f}", str(left_out)]
        errors = [f"{mean.error:.4f}", *rest, f"{mean.total:.4f}", f"{mean.stated:.4f}"]
        rows.append([name, f"{cost:.2f}", *errors, *shown])
        print(" · ".join(rows[-1]), flush=True)
    with torch.no_grad():
        peaks = [_logits(case.model, batch).softmax(-1).amax(-1).mean() for batch in case.batches]
    peak = float(torch.stack(peaks).mean())
    header = ["", "measured cost", "error"] + (["without embeddings"] if case.embeddings else [])
    header += [
        "Σ error / Σ F",
        "stated",
        "covered",
        *(["of one or two samples"] if case.rare else []),
        "median width",
        "left out",
    ]
    title = f"## {case.name}\n\nMean largest probability {peak:.4f}; {len(case.batches)} batches; {seeds} seeds."
    return f"{title}\n\n{table(header, rows)}", {"name": case.name, "peak": peak, "rows": numbers}


def _logits(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        logits: Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        return logits
    output: Tensor = model(batch[0])
    return output


def figure() -> None:
    """Error against measured cost of all networks that have been measured."""
    import matplotlib.pyplot as plt

    networks = [one for path in sorted(RESULTS.glob("adaptive-*.json")) for one in json.loads(path.read_text())]
    shown = [one for one in networks if ", 0 epochs" not in one["name"]]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    drawing, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for axis, network in zip(axes.flat, shown, strict=False):
        for kind in ("one pass", "orthogonal", "peeled", "adaptive"):
            points = [row for row in network["rows"] if row["name"].startswith(kind)]
            points = [*(row for row in network["rows"] if row["name"] == ONE and kind != "adaptive"), *points]
            points = [row for row in points if row["without_embeddings"] > 0]
            if kind != ONE:
                axis.loglog(
                    *zip(*((p["cost"], p["without_embeddings"]) for p in points), strict=True), "o-", label=kind
                )
        axis.set_title(f"{network['name'].split(',')[0]}, largest probability {network['peak']:.3f}", fontsize=9)
        axis.set_xlabel("cost, forward + backward = 1")
        axis.set_ylabel("mean relative error")
        axis.grid(alpha=0.3, which="both")
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    axes.flat[0].legend()
    drawing.savefig(RESULTS.parents[1] / "docs" / "images" / "adaptive.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["digits", "cifar", *SMALL, "text"])
    parser.add_argument("--images", type=Path, help="data.npz with images [N, 32, 32, 3] and labels")
    parser.add_argument("--model", type=Path, help="a folder with model/ and data.csv")
    parser.add_argument("--weights", type=Path, default=Path("/tmp"), help="where trained networks are kept")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--figure", action="store_true")
    options = parser.parse_args()
    if options.figure:
        return figure()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() and options.what != "digits" else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # which would hide small errors
    if options.what == "digits":
        cases = digits(options.batch)
    elif options.what in SMALL:
        cases = small_network(options.what, options.images, options.weights, options.samples, options.batch)
    elif options.what == "cifar":
        cases = cifar(options.images, device, options.epochs, options.samples, options.batch)
    else:
        cases = text(options.model, device, options.samples, options.batch)
    name = options.model.name if options.what == "text" else options.what
    command = f"python benchmarks/adaptive.py {options.what} --batch {options.batch} --samples {options.samples} "
    command += f"--seeds {options.seeds}"
    parts, numbers = ["# Adaptive passes: error against measured cost", setting(command, device)], []
    for case in cases:
        shown, found = measure(case, options.seeds, device)
        parts, numbers = [*parts, shown], [*numbers, found]
        keep(f"adaptive-{name}", "\n\n".join(parts))
        (RESULTS / f"adaptive-{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
