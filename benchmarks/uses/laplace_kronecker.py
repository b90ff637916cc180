"""Laplace posteriors from a Kronecker-factored Fisher beside laplace-torch's: digits, and small CIFAR-10 images.

    PYTHONPATH=src:benchmarks python -m uses.laplace_kronecker --images data.npz

Each method predicts by probit; the prior precision is that of most evidence, or the best of seven on validation images,
as is the temperature.  Scores are those of other images.  `--images` is a file with "images" [N, 32, 32, 3] and
"labels" [N], such as the test images of CIFAR-10; they are shrunk to 16 x 16.  Without it, or without laplace-torch,
those rows are left out.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import table
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import neuromanifold as nm
from uses.laplace import GRID, POINT, TEMPERATURES, Predict, best, trained
from uses.trained import Scores, Split, digits, plus_minus, scores, seeded, shuffled, write

COMMAND = "PYTHONPATH=src:benchmarks python -m uses.laplace_kronecker --images data.npz"
EVIDENCE, VALIDATION = "evidence", "validation"


def images(path: Path, seed: int) -> tuple[Split, Split, Split]:
    """2,000 small images to train on, 200 to validate, 500 to test, each channel standardized."""
    import numpy as np

    held = np.load(path)
    x = torch.as_tensor(held["images"]).permute(0, 3, 1, 2).float() / 255
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:2700]
    x, y = avg_pool2d(x[order], 2), torch.as_tensor(held["labels"])[order]
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    first, second, third = (Split(x[part], y[part]) for part in torch.arange(2700).split([2000, 200, 500]))
    return first, second, third


def convolutional(part: Split, seed: int, epochs: int) -> nn.Module:
    """Two convolutions and a linear layer, 3,962 parameters, trained with Adam."""

    def make() -> nn.Module:
        features = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        features += [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*features, nn.Flatten(), nn.Linear(256, 10))

    model = seeded(make, seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for x, y in shuffled(part, seed, epochs, 64):
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def predictors(model: nn.Module, training: Split, validation: Split) -> dict[str, Predict]:
    """All methods, tuned; last layers have the pattern of the last module's name."""

    @torch.no_grad()
    def scaled(temperature: float, x: Tensor) -> Tensor:
        return (model(x) / temperature).softmax(-1)

    def by(laplace: nm.Laplace, x: Tensor, method: str = "probit") -> Tensor:
        return laplace.predict(list(x.split(50)), method, samples=30).mean  # type: ignore[arg-type]

    def both(make: Callable[[float], nm.Laplace], evident: nm.Laplace, name: str) -> None:
        found[f"{name}, {EVIDENCE}"] = partial(by, evident)
        found[f"{name}, {VALIDATION}"] = best([partial(by, make(prior)) for prior in GRID], validation)

    found: dict[str, Predict] = {POINT: partial(scaled, 1.0)}
    found[f"temperature, {VALIDATION}"] = best([partial(scaled, t) for t in TEMPERATURES], validation)
    data = training.batches()
    for layers, pattern in (("last layer", f"{len(model) - 1}.*"), ("all layers", None)):  # type: ignore[arg-type]
        results = {
            "diagonal": nm.fisher_diagonal(model, data, nm.Exact(), parameters=pattern),
            "Kronecker": nm.fisher_kronecker(model, data, nm.Exact(), parameters=pattern),
        }
        if pattern is None:
            results["Kronecker, one pass of noise"] = nm.fisher_kronecker(model, data)
        for name, fim in results.items():
            make = partial(nm.Laplace, model, fim)
            both(make, make().optimize_prior_precision(), f"{layers}, {name}")
            if pattern is None and name == "Kronecker":
                drawn = [partial(by, make(prior), method="sampled") for prior in GRID]
                found[f"{layers}, {name}, sampled, {VALIDATION}"] = best(drawn, validation)
    return found | of_laplace_torch(model, training, validation)


def of_laplace_torch(model: nn.Module, training: Split, validation: Split) -> dict[str, Predict]:
    """The Kronecker posteriors of laplace-torch, from the loss's second derivatives."""
    try:
        from laplace import Laplace
        from laplace.curvature import CurvlinopsGGN
    except ImportError:
        return {}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*training), batch_size=64)
    found: dict[str, Predict] = {}

    def by(laplace: Laplace, prior: Tensor, x: Tensor) -> Tensor:
        laplace.prior_precision = prior
        return torch.cat([laplace(part, link_approx="probit").detach() for part in x.split(50)])

    for layers, subset in (("last layer", "last_layer"), ("all layers", "all")):
        options = {"subset_of_weights": subset, "hessian_structure": "kron", "backend": CurvlinopsGGN}
        laplace = Laplace(model, "classification", **options)
        laplace.fit(loader)
        laplace.optimize_prior_precision(method="marglik")
        name = f"{layers}, Kronecker, laplace-torch"
        found[f"{name}, {EVIDENCE}"] = partial(by, laplace, laplace.prior_precision.detach().clone())
        candidates: list[Predict] = [partial(by, laplace, torch.tensor(prior)) for prior in GRID]
        found[f"{name}, {VALIDATION}"] = best(candidates, validation)
    return found


def study(
    parts: Callable[[int], tuple[Split, Split, Split]], fit: Callable[[Split, int], nn.Module], seeds: int
) -> dict[str, list[Scores]]:
    """Scores of each method for each seed."""
    found: dict[str, list[Scores]] = {}
    for seed in range(seeds):
        begin = time.process_time()
        training, validation, test = parts(seed)
        model = fit(training, seed)
        for name, predict in predictors(model, training, validation).items():
            found.setdefault(name, []).append(scores(predict(test.x), test.y))
        print(f"seed {seed}: {found[POINT][-1]}, {time.process_time() - begin:.0f} s", flush=True)
    return found


def digit_parts(seed: int) -> tuple[Split, Split, Split]:
    training, validation, test = digits(seed, 200, 200)
    return training, validation, Split(test.x[:800], test.y[:800])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {"Digits": study(digit_parts, partial(trained, epochs=600), given.seeds)}
    if given.images is not None:
        found["Small images"] = study(partial(images, given.images), partial(convolutional, epochs=40), given.seeds)
    what = {
        "Digits": "A perceptron, 600 epochs; 200 images to train on, 200 to validate, 800 to test",
        "Small images": "CIFAR-10 at 16 x 16, a small convolutional network, 40 epochs; 2,000, 200 and 500 images",
    }
    header, text = ["method", "NLL", "ECE %", "accuracy %"], ""
    for task, by in found.items():
        rows = [
            [name, plus_minus([s.nll for s in some]), *(plus_minus([s[i] for s in some], 1, 100) for i in (1, 2))]
            for name, some in by.items()
        ]
        text += f"## {task}\n\n{what[task]}; {given.seeds} seeds, mean ± standard error.\n\n{table(header, rows)}\n\n"
    text += (
        "Predictions are by probit unless called sampled (30 draws). F is exact but in the rows of one pass of noise."
    )
    title = "Laplace posteriors in Kronecker form, beside laplace-torch"
    write("uses-laplace-kronecker", title, COMMAND, text, found)


if __name__ == "__main__":
    main()
