"""Calibration of Laplace posteriors from a Fisher diagonal against the point estimate, on digits and on diabetes.

    PYTHONPATH=src:benchmarks python -m uses.laplace

Classification: a perceptron trained on few digits.  Temperature and prior precision are chosen from as many
values on the same validation images, or the prior precision by evidence, without any.  Scores are those of the other
images, and of the same with noise.  Regression: a perceptron on scikit-learn's diabetes data; the noise's variance is
chosen on the validation data for each method.  Where laplace-torch is installed, its diagonal posterior stands beside.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from common import table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import neuromanifold as nm
from uses.trained import IMAGES, Scores, Split, digits, plus_minus, scores, seeded, shuffled, write

COMMAND = "PYTHONPATH=src:benchmarks python -m uses.laplace"
GRID = [10.0**k for k in range(-1, 6)]  # prior precisions
TEMPERATURES = [2 ** (k / 2) for k in range(-1, 6)]
assert len(GRID) == len(TEMPERATURES)
POINT = "point estimate"
Predict = Callable[[Tensor], Tensor]


def trained(part: Split, seed: int, epochs: int) -> nn.Module:
    """A network trained with Adam and a little weight decay."""
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)), seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    for x, y in shuffled(part, seed, epochs, 32):
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def best(candidates: list[Predict], part: Split) -> Predict:
    """The one with the least negative log-likelihood."""
    return min(candidates, key=lambda predict: scores(predict(part.x), part.y).nll)


def predictors(model: nn.Module, training: Split, validation: Split, draws: int) -> dict[str, Predict]:
    """All methods, tuned."""

    @torch.no_grad()
    def scaled(temperature: float, x: Tensor) -> Tensor:
        return (model(x) / temperature).softmax(-1)

    def bayesian(laplace: nm.Laplace, method: str, x: Tensor) -> Tensor:
        return laplace.predict(list(x.split(256)), method, samples=draws).mean  # type: ignore[arg-type]

    found: dict[str, Predict] = {POINT: partial(scaled, 1.0)}
    found["temperature, validation"] = best([partial(scaled, t) for t in TEMPERATURES], validation)
    data = training.batches()
    for layers, pattern in (("last layer", "3.*"), ("all layers", None)):
        fim = nm.fisher_diagonal(model, data, nm.Exact(), parameters=pattern)
        grid = [nm.Laplace(model, fim, prior) for prior in GRID]
        evident = nm.Laplace(model, fim).optimize_prior_precision()
        for method in ("probit", "linearised", "sampled"):
            found[f"{layers}, {method}, evidence"] = partial(bayesian, evident, method)
            if method != "linearised":
                chosen = best([partial(bayesian, laplace, method) for laplace in grid], validation)
                found[f"{layers}, {method}, validation"] = chosen
    one_pass = nm.Laplace(model, nm.fisher_diagonal(model, data)).optimize_prior_precision()
    found["all layers, probit, evidence, F by one pass"] = partial(bayesian, one_pass, "probit")
    return found | laplace_torch(model, data)


def laplace_torch(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Predict]:
    """The same posterior by laplace-torch, if it is installed; prior precision by evidence."""
    try:
        from laplace import Laplace
    except ImportError:
        return {}
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    found: dict[str, Predict] = {}
    for layers, subset in (("last layer", "last_layer"), ("all layers", "all")):
        other = Laplace(model, "classification", subset_of_weights=subset, hessian_structure="diag")
        other.fit(loader)
        other.optimize_prior_precision(method="marglik")

        def predict(x: Tensor, other: object = other) -> Tensor:
            return torch.cat([other(part, link_approx="probit").detach() for part in x.split(256)])  # type: ignore[operator]

        found[f"{layers}, probit, evidence (laplace-torch)"] = predict
    return found


def classification(seeds: int, epochs: int, draws: int) -> dict[str, dict[str, list[Scores]]]:
    """Scores of each method on clean and on noisy images, for each seed."""
    found: dict[str, dict[str, list[Scores]]] = {}
    for seed in range(seeds):
        training, validation, test = digits(seed, 200, 200)
        test = Split(test.x[:800], test.y[:800])
        model = trained(training, seed, epochs)
        noise = torch.randn(test.x.shape, generator=torch.Generator().manual_seed(seed))
        noisy = Split(test.x + 0.3 * noise, test.y)
        for name, predict in predictors(model, training, validation, draws).items():
            for data, part in (("test", test), ("noisy", noisy)):
                found.setdefault(name, {}).setdefault(data, []).append(scores(predict(part.x), part.y))
        print(f"seed {seed}: {found[POINT]['test'][-1]}", flush=True)
    return found


# --------------------------------------------------------------------------------------------------------- regression


def diabetes(seed: int) -> tuple[Split, Split, Split]:
    """Ten features and the progression of the disease, standardized; 242 patients, 100 and 100."""
    from sklearn.datasets import load_diabetes

    x, y = (torch.as_tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True, scaled=False))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    x, y = ((part - part[order[:242]].mean(0)) / part[order[:242]].std(0) for part in (x, y[:, None]))
    first, second, third = (Split(x[part], y[part]) for part in order.split([242, 100, 100]))
    return first, second, third


def regression(seeds: int, epochs: int) -> dict[str, list[float]]:
    """Negative log-likelihood of the test targets for each method and seed."""
    found: dict[str, list[float]] = {}
    variances = [0.05 * 1.3**k for k in range(16)]
    for seed in range(seeds):
        training, validation, test = diabetes(seed)
        model = seeded(lambda: nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)), seed)
        optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
        for x, y in shuffled(training, seed, epochs, 32):
            optimiser.zero_grad()
            mse_loss(model(x), y).backward()
            optimiser.step()

        def fixed(variance: float, part: Split, model: nn.Module = model) -> float:
            with torch.no_grad():
                mean = model(part.x)
            return gaussian_nll(mean, torch.full_like(mean, variance), part.y)

        found.setdefault(POINT, []).append(fixed(min(variances, key=lambda v: fixed(v, validation)), test))
        for layers, pattern in (("last layer", "2.*"), ("all layers", None)):
            fitted = {}
            for variance in variances:
                likelihood = partial(nm.Gaussian, variance=variance)
                fim = nm.fisher_diagonal(model, training.batches(), nm.Exact(), likelihood, pattern)
                fitted[variance] = nm.Laplace(model, fim, 1.0, likelihood).optimize_prior_precision()

            def bayesian(variance: float, part: Split, fitted: dict[float, nm.Laplace] = fitted) -> float:
                predicted = fitted[variance].predict([part.x])
                return gaussian_nll(predicted.mean, predicted.variance, part.y)

            chosen = min(variances, key=lambda v: bayesian(v, validation))
            found.setdefault(f"{layers}, prior by evidence", []).append(bayesian(chosen, test))
    return found


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    return float((0.5 * ((y - mean).square() / variance + (2 * math.pi * variance).log())).mean())


# ------------------------------------------------------------------------------------------------------------- output


def figure(found: dict[str, dict[str, list[Scores]]]) -> None:
    """Write docs/images/uses-laplace.png: error bars of NLL and ECE for each method."""
    import matplotlib.pyplot as plt

    names = list(found)
    drawing, axes = plt.subplots(1, 2, figsize=(9, 0.28 * len(names) + 1), sharey=True, layout="constrained")
    for axis, score, label in zip(axes, ("nll", "ece"), ("NLL", "ECE"), strict=True):
        for data, colour in (("test", "C0"), ("noisy", "C1")):
            values = [torch.tensor([getattr(one, score) for one in found[name][data]]) for name in names]
            means, errors = [v.mean() for v in values], [v.std() / len(v) ** 0.5 for v in values]
            axis.errorbar(means, range(len(names)), xerr=errors, fmt="o", color=colour, label=data, markersize=4)
        axis.set_xlabel(label)
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(names)), names, fontsize=7)
    axes[0].invert_yaxis()
    axes[1].legend()
    drawing.savefig(IMAGES / "uses-laplace.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, nargs="+", default=[60, 600])
    parser.add_argument("--draws", type=int, default=30)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found, text = {}, ""
    header = ["method", "NLL", "NLL, noisy", "ECE %", "ECE %, noisy", "accuracy %", "accuracy %, noisy"]
    for epochs in given.epochs:
        found[epochs] = classification(given.seeds, epochs, given.draws)
        rows = []
        for name, by in found[epochs].items():
            row = [plus_minus([s.nll for s in by[d]]) for d in by]
            row += [plus_minus([s.ece for s in by[d]], 1, 100) for d in by]
            rows.append([name, *row, *(plus_minus([s.accuracy for s in by[d]], 1, 100) for d in by)])
        text += (
            f"## Digits, {epochs} epochs\n\n200 images to train on, 200 to validate, 800 to test; {given.seeds} seeds, "
        )
        text += f"mean ± standard error. Sampled and linearised: {given.draws} draws.\n\n{table(header, rows)}\n\n"
    numbers = regression(given.seeds, 300)
    text += f"## Diabetes\n\n242 patients, 100 to validate, 100 to test; {given.seeds} seeds.\n\n"
    text += table(["method", "NLL"], [[name, plus_minus(values)] for name, values in numbers.items()])
    write("uses-laplace", "Calibration of Laplace posteriors", COMMAND, text, {"digits": found, "diabetes": numbers})
    figure(found[given.epochs[-1]])


if __name__ == "__main__":
    main()
