"""Influence scores against leaving samples out and training again, beside kronfluence: convex and not convex.

    PYTHONPATH=src:benchmarks python -m uses.influence

A softmax regression and a small perceptron on few digits, with weight decay, at a minimum in float64.  For 40 training
samples at random: the losses of the test samples at the minimum without it.  The perceptron goes on from the weights of
all samples: from others it would end in another minimum.  Scores: the correlation of predicted and actual changes over
the samples left out, for the mean loss of the test samples and for each of them.  Damping is the weight decay.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import table
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import neuromanifold as nm
from uses.trained import Split, digits, plus_minus, seeded, write

COMMAND = "PYTHONPATH=src:benchmarks python -m uses.influence"
DECAY, TRAINING, TEST, LEFT_OUT = 0.005, 150, 100, 40
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "softmax regression": lambda: nn.Sequential(nn.Linear(16, 10)),
    "perceptron": lambda: nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10)),
}
ALONE = "gradients alone"
Scorer = Callable[[nn.Module, Split, Split], Tensor]


def parts(seed: int) -> tuple[Split, Split]:
    """Digits of 4 x 4 pixels."""
    splits = digits(seed, TRAINING, TEST)[:2]
    first, second = (Split(avg_pool2d(part.x.view(-1, 1, 8, 8), 2).flatten(1).double(), part.y) for part in splits)
    return first, second


def minimised(model: nn.Module, part: Split, steps: int) -> nn.Module:
    """The minimum of Σ loss/TRAINING + DECAY/2 ‖θ‖² that L-BFGS comes to from the model's weights."""
    options = {"max_iter": steps, "tolerance_grad": 1e-9, "tolerance_change": 1e-14, "history_size": 30}
    optimiser = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **options)

    def closure() -> Tensor:
        optimiser.zero_grad()
        decay = DECAY / 2 * sum(p.square().sum() for p in model.parameters())
        loss = cross_entropy(model(part.x), part.y, reduction="sum") / TRAINING + decay
        loss.backward()
        return loss

    optimiser.step(closure)
    model.zero_grad()
    return model


@torch.no_grad()
def losses(model: nn.Module, part: Split) -> Tensor:
    return cross_entropy(model(part.x), part.y, reduction="none")


def ours(make: Callable[[nn.Module, list[Any]], Any]) -> Scorer:
    def scored(model: nn.Module, train: Split, test: Split) -> Tensor:
        return nm.influence(model, train.batches(), test.batches(), make(model, train.batches()), DECAY)

    return scored


def gradients_alone(model: nn.Module, train: Split, test: Split) -> Tensor:
    """Dot products of gradients: any F, with so much damping that it does not count."""
    fisher = nm.fisher_kronecker(model, train.batches())
    return nm.influence(model, train.batches(), test.batches(), fisher, 1e6)


def of_kronfluence(model: nn.Module, train: Split, test: Split) -> Tensor:
    """EKFAC of kronfluence with the same damping, in float32."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Digits(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            labels = torch.multinomial(logits.detach().softmax(-1), 1).flatten() if sample else batch[1]
            return cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    sets = [torch.utils.data.TensorDataset(part.x.float(), part.y) for part in (train, test)]
    prepared = prepare_model(copy.deepcopy(model).float(), Digits())
    with tempfile.TemporaryDirectory() as folder:
        options = {"output_dir": folder, "cpu": True, "disable_tqdm": True, "log_level": 50}
        analyzer = Analyzer("digits", prepared, Digits(), **options)
        analyzer.fit_all_factors("f", sets[0], per_device_batch_size=64, factor_args=FactorArguments(strategy="ekfac"))
        sizes = {"per_device_query_batch_size": 100, "per_device_train_batch_size": 64}
        damped = ScoreArguments(damping_factor=DECAY)
        analyzer.compute_pairwise_scores("s", "f", sets[1], sets[0], **sizes, score_args=damped)
        return analyzer.load_pairwise_scores("s")["all_modules"].double() / len(train.y)


def scorers() -> dict[str, Scorer]:
    """All methods by name."""
    found: dict[str, Scorer] = {
        "nm, dense F": ours(lambda model, data: nm.fisher_matrix(model, data)),
        "nm, EKFAC, exact": ours(lambda model, data: nm.fisher_kronecker(model, data, nm.Exact())),
        "nm, EKFAC, one pass": ours(lambda model, data: nm.fisher_kronecker(model, data)),
        "nm, KFAC, one pass": ours(lambda model, data: nm.fisher_kronecker(model, data, eigenvalues="kronecker")),
        ALONE: gradients_alone,
    }
    if importlib.util.find_spec("kronfluence") is not None:
        found["kronfluence, EKFAC"] = of_kronfluence
    return found


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's, of rows."""
    a, b = (t - t.mean(-1, keepdim=True) for t in (a, b))
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def ranks(values: Tensor) -> Tensor:
    return values.argsort(-1).argsort(-1).double()


def one_seed(make: Callable[[], nn.Module], seed: int) -> dict[str, dict[str, float]]:
    train, test = parts(seed)
    model = minimised(seeded(make, seed).double(), train, 2000)
    before, chosen = losses(model, test), torch.randperm(TRAINING, generator=torch.Generator().manual_seed(seed))
    chosen, changes = chosen[:LEFT_OUT], []
    for n in chosen:
        kept = torch.arange(TRAINING) != n
        again = minimised(copy.deepcopy(model), Split(train.x[kept], train.y[kept]), 300)
        changes.append(losses(again, test) - before)
    actual, found = torch.stack(changes, 1), {}  # [Q, n]
    for name, score in scorers().items():
        torch.manual_seed(seed)
        begin = time.process_time()
        scores = score(model, train, test)
        seconds, predicted = time.process_time() - begin, scores[:, chosen]
        found[name] = {
            "mean": float(correlation(predicted.mean(0), actual.mean(0))),
            "each": float(correlation(predicted, actual).mean()),
            "rank": float(correlation(ranks(predicted), ranks(actual)).mean()),
            "slope": float((predicted * actual).sum() / predicted.square().sum()),
            "seconds": seconds,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    header = ["method", "correlation, mean test loss", "each test sample", "ranks", "actual / predicted", "seconds"]
    text, numbers = "", {}
    for network, make in NETWORKS.items():
        runs = []
        for seed in range(given.seeds):
            runs.append(one_seed(make, seed))
            print(network, seed, {name: round(one["each"], 3) for name, one in runs[-1].items()}, flush=True)
        by = {name: {key: [run[name][key] for run in runs] for key in runs[0][name]} for name in runs[0]}
        rows = [
            [
                *(name, *(plus_minus(one[key]) for key in ("mean", "each", "rank"))),
                *("" if name == ALONE else plus_minus(one["slope"], 2), plus_minus(one["seconds"], 2)),
            ]
            for name, one in by.items()
        ]
        size = sum(p.numel() for p in make().parameters())
        text += f"## {network.capitalize()}, {size} parameters\n\n{table(header, rows)}\n\n"
        numbers[network] = by
    text += f"{TRAINING} digits of 4 x 4 pixels to train on, {TEST} to test, weight decay {DECAY} on the mean loss; "
    text += f"{LEFT_OUT} samples at random left out, one after the other; {given.seeds} seeds, mean ± standard error. "
    text += "Actual / predicted: the slope of the best line through zero. Seconds: of processor time, factors included."
    write("uses-influence", "Influence against leaving samples out", COMMAND, text, numbers)


if __name__ == "__main__":
    main()
