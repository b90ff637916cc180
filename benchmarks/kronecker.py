"""Kronecker-factored Fisher information beside curvlinops (KFAC, EKFAC), kronfluence (EKFAC) and laplace-torch (Kron).

    python benchmarks/kronecker.py [--repeats 3] [--seeds 3] [--only MLP] [--quick]

Networks are trained on scikit-learn's digits.  Small ones: the relative error ‖K - F‖/‖F‖ to the dense blocks of F, one
for each layer's weight and bias, the mean over seeds of the noise.  Large ones: time and memory.  Everything takes
turns in one run; times are medians of processor time over that of a forward + backward of the same data.  Biases are
joint with weights everywhere but in laplace-torch, and only layers are compared that all have: nn.Linear and
nn.Conv2d.  A tool that is not installed is left out (see others-requirements.txt; kronfluence needs accelerate).

The floor of the time is a loop for these networks alone (`bare`): forward, backward, the products and eigenvectors that
EKFAC consists of, with nothing checked or verified, and no other parameter, model or data possible.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import torch
from common import BASELINE, forward_backward, interleaved, keep, peak_memory, setting, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, unfold

import neuromanifold as nm
from neuromanifold.experiments.digits import load_digits
from neuromanifold.persample.accumulate.factors import add_gram

Data = list[tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
EIGENVECTORS = "eigenvectors of the factors, alone"
FLOOR = "bare loop, EKFAC, Monte Carlo"
KRONFLUENCE, LAPLACE = "kronfluence EKFAC, Monte Carlo", "laplace-torch Kron"
MEASURED = ("nm EKFAC, Monte Carlo", "curvlinops EKFAC, Monte Carlo", KRONFLUENCE, f"{LAPLACE}, Monte Carlo")  # memory
TIMED = (*MEASURED, "nm KFAC, Monte Carlo", "nm EKFAC, Hutchinson", "curvlinops KFAC, Monte Carlo")


class Attention(nn.Module):
    """Self-attention whose projections are nn.Linear, which every tool knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend in two heads."""
        parts = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """An image of 8 rows as 8 tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.attention = nn.ModuleList(Attention(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 1, 8, 8]."""
        x = self.embed(x.flatten(1, 2))
        for i, (attention, up, down) in enumerate(zip(self.attention, self.up, self.down, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + down(torch.relu(up(self.norms[2 * i + 1](x))))
        return self.head(x.mean(1))


def mlp(*sizes: int) -> nn.Module:
    layers = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def cnn(width: int) -> nn.Module:
    convolutions = nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(2 * width * 9, 10))


SMALL = {"MLP": lambda: mlp(64, 24, 10), "CNN": lambda: cnn(4), "transformer": lambda: Transformer(12, 1)}
LARGE = {"MLP": lambda: mlp(64, 512, 512, 10), "CNN": lambda: cnn(32), "transformer": lambda: Transformer(128, 2)}


def network(name: str, large: bool = False, steps: int = 150) -> tuple[nn.Module, Data]:
    """A network after some steps of training, and 1,024 images in batches of 128; twice as many for a large one."""
    torch.manual_seed(0)
    model = (LARGE if large else SMALL)[name]()
    images, labels = load_digits()
    images, labels = images[:1024], labels[:1024]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        batch = torch.randint(0, 1024, (64,))
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    optimizer.zero_grad()
    data = list(zip(images.split(128), labels.split(128), strict=True))
    return model.eval(), [*data, *((x.roll(1, -1), y) for x, y in data)] if large else data


# ---------------------------------------------------------------------------------------------------------- the tools

Made = Callable[[int], Any]  # from a seed to a result


def ours(model: nn.Module, data: Data) -> dict[str, Made]:
    def made(estimator: nm.Estimator, eigenvalues: Any) -> Made:
        def run(seed: int) -> nm.KroneckerFisher:  # without error bars, which no other tool has
            options = {"eigenvalues": eigenvalues, "error_bars": False, "seed": seed}
            return nm.fisher_kronecker(model, data, estimator, **options)

        return run

    found = {}
    for name, eigenvalues in (("KFAC", "kronecker"), ("EKFAC", "corrected")):
        found[f"nm {name}, Hutchinson"] = made(nm.Hutchinson(), eigenvalues)
        found[f"nm {name}, adaptive"] = made(nm.Adaptive(1.0), eigenvalues)
        found[f"nm {name}, Monte Carlo"] = made(nm.MonteCarlo(), eigenvalues)
        found[f"nm {name}, exact"] = made(nm.Exact(), eigenvalues)
    return found


def of_curvlinops(model: nn.Module, data: Data) -> dict[str, Made]:
    if importlib.util.find_spec("curvlinops") is None:
        return {}
    from curvlinops import EKFACLinearOperator, KFACLinearOperator

    loss, parameters = nn.CrossEntropyLoss(reduction="mean"), list(model.parameters())
    known = {"check_deterministic": False, "num_per_example_loss_terms": 1, "separate_weight_and_bias": False}
    known["num_data"] = sum(len(y) for _, y in data)

    def kfac(kind: str, seed: int) -> Any:
        operator = KFACLinearOperator(model, loss, parameters, data, fisher_type=kind, seed=seed, **known)
        operator.compute_kronecker_factors()
        return operator

    def ekfac(kind: str, seed: int) -> Any:
        operator = EKFACLinearOperator(model, loss, parameters, data, fisher_type=kind, seed=seed, **known)
        operator._maybe_compute_ekfac()
        return operator

    found = {}
    for name, function in (("KFAC", kfac), ("EKFAC", ekfac)):
        for kind, label in (("mc", "Monte Carlo"), ("type-2", "exact")):
            found[f"curvlinops {name}, {label}"] = lambda seed, f=function, k=kind: f(k, seed)
    return found


def of_kronfluence(model: nn.Module, data: Data) -> dict[str, Made]:
    if importlib.util.find_spec("kronfluence") is None:
        return {}
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task

    class Digits(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            if not sample:
                return cross_entropy(logits, batch[1], reduction="sum")
            with torch.no_grad():
                labels = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
            return cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    dataset = torch.utils.data.TensorDataset(*(torch.cat(side) for side in zip(*data, strict=True)))
    prepared = prepare_model(copy.deepcopy(model), Digits())

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            options = {"output_dir": folder, "cpu": True, "disable_tqdm": True, "log_level": 50}
            analyzer = Analyzer("digits", prepared, Digits(), **options)
            arguments = FactorArguments(strategy="ekfac")
            analyzer.fit_all_factors("f", dataset, per_device_batch_size=128, factor_args=arguments)
            return {**analyzer.load_eigendecomposition("f"), **analyzer.load_lambda_matrices("f")}

    return {KRONFLUENCE: made}


def of_laplace_torch(model: nn.Module, data: Data) -> dict[str, Made]:
    """Factors of weights and of biases apart, with their eigenvectors; the loss's second derivatives for F."""
    if importlib.util.find_spec("laplace") is None:
        return {}
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    dataset = torch.utils.data.TensorDataset(*(torch.cat(side) for side in zip(*data, strict=True)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=128)

    def made(seed: int, stochastic: bool) -> Any:
        torch.manual_seed(seed)
        options = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": CurvlinopsGGN}
        found = Laplace(model, "classification", **options, backend_kwargs={"stochastic": stochastic})
        found.fit(loader)
        return found

    kinds = {f"{LAPLACE}, Monte Carlo": True, f"{LAPLACE}, exact": False}
    return {name: lambda seed, kind=kind: made(seed, kind) for name, kind in kinds.items()}


def tools(model: nn.Module, data: Data) -> dict[str, Made]:
    others = of_curvlinops(model, data), of_kronfluence(model, data), of_laplace_torch(model, data)
    return {name: made for some in (ours(model, data), *others) for name, made in some.items()}


def bare(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """EKFAC with sampled labels of a network of nn.Linear and nn.Conv2d: what no implementation can do without."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = given[0].detach(), output

        return hook

    def passes(take: Callable[[str, Tensor, Tensor], None]) -> None:
        for x, _ in data:
            logits = model(x)
            p = logits.detach().softmax(-1)
            cotangent = p.scatter_add(1, torch.multinomial(p, 1), -torch.ones_like(p[:, :1]))
            gradients = torch.autograd.grad(logits, [outputs[name] for name in layers], cotangent)
            for (name, layer), g in zip(layers.items(), gradients, strict=True):
                a = inputs[name]
                if isinstance(layer, nn.Conv2d):
                    a = unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
                    g = g.flatten(2).mT
                take(name, a.reshape(len(x), -1, a.shape[-1]), g.reshape(len(x), -1, g.shape[-1]))

    sizes = {name: (prod(layer.weight.shape[1:]) + 1, layer.weight.shape[0]) for name, layer in layers.items()}
    factors = {name: tuple(torch.zeros(n, n) for n in pair) for name, pair in sizes.items()}
    found = {name: torch.zeros(o, i) for name, (i, o) in sizes.items()}

    def add_factors(name: str, a: Tensor, g: Tensor) -> None:
        (left, right), a, g = factors[name], a.flatten(0, 1), g.flatten(0, 1)
        add_gram(left[:-1, :-1], a)
        left[-1, :-1] += a.sum(0)
        add_gram(right, g)

    def add_squares(name: str, a: Tensor, g: Tensor) -> None:
        u, v = bases[name]
        a, g = torch.addmm(u[-1], a.flatten(0, 1), u[:-1]).view(*a.shape[:2], -1), g @ v
        if a.shape[1] == 1:
            found[name].addmm_(g[:, 0].square().mT, a[:, 0].square())
            return
        for start in range(0, len(a), 8):
            found[name] += torch.bmm(g[start : start + 8].mT, a[start : start + 8]).square_().sum(0)

    hooks = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    passes(add_factors)
    bases = {name: tuple(torch.linalg.eigh(factor)[1] for factor in pair) for name, pair in factors.items()}
    passes(add_squares)
    for hook in hooks:
        hook.remove()
    return found


# ------------------------------------------------------------------------------------------------------------- errors


def dense_of(found: Any, model: nn.Module) -> Tensor:
    """Return the matrix [P, P] per sample of a result of any tool."""
    size = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(found, nm.KroneckerFisher):
        return found.dense()
    if type(found).__name__ == "KronLaplace":
        return found.H.to_matrix() / found.n_data
    if not isinstance(found, dict):
        return found @ torch.eye(size)
    dense, start = torch.zeros(size, size), 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        u, v = (found[f"{side}_eigenvectors"][name].float() for side in ("gradient", "activation"))
        values = found["lambda_matrix"][name].float() / found["num_lambda_processed"][name]
        basis = torch.kron(u, v)
        block = (basis * values.flatten()) @ basis.mT
        order = torch.arange(len(block)).view(len(u), len(v))
        order = torch.cat([order[:, :-1].flatten(), order[:, -1]])  # weights, then biases
        where = slice(start, start := start + len(block))
        dense[where, where] = block[order][:, order]
    return dense


def blocks_of(model: nn.Module, data: Data) -> Tensor:
    """Return F per sample with zeros between layers, exactly."""
    return nm.fisher_matrix(model, data, blocks="layer").dense()


def errors(name: str, seeds: int) -> dict[str, tuple[float, float]]:
    model, data = network(name)
    expected, found = blocks_of(model, data), {}
    for tool, made in tools(model, data).items():
        runs = range(1 if "exact" in tool else seeds)
        values = [float((dense_of(made(seed), model) - expected).norm() / expected.norm()) for seed in runs]
        found[tool] = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return found


def agreement(name: str) -> list[tuple[str, float]]:
    """Return the relative difference of our exact results to those of curvlinops, both in float64."""
    model, data = network(name)
    model, data = model.double(), [(x.double(), y) for x, y in data]
    known, size = of_curvlinops(model, data), sum(parameter.numel() for parameter in model.parameters())
    found = []
    for kind in ("KFAC", "EKFAC") if known else ():
        theirs = known[f"curvlinops {kind}, exact"](0) @ torch.eye(size, dtype=torch.float64)
        own = ours(model, data)[f"nm {kind}, exact"](0).dense()
        found.append((kind, float((own - theirs).norm() / theirs.norm())))
    return found


# -------------------------------------------------------------------------------------------------------------- costs


def one_run(name: str, tool: str) -> Callable[[], object]:
    """Return the run of a tool on a large network, for its memory."""
    model, data = network(name, large=True, steps=1)
    tools(*network(name, steps=1))[tool](0)  # so that imports are not counted
    made = tools(model, data)[tool]
    return lambda: made(0)


def eigenvectors_of(model: nn.Module, data: Data) -> Callable[[], object]:
    """Return what only computes the eigenvectors of all factors, which takes the same time in every tool."""
    blocks = nm.fisher_kronecker(model, data, eigenvalues="kronecker").blocks.values()
    factors = [factor for block in blocks for factor in block.factors()]
    return lambda: [torch.linalg.eigh(factor) for factor in factors]


def costs(name: str, repeats: int) -> dict[str, tuple[float, float]]:
    """Return processor time over the baseline, and peak memory in MiB."""
    model, data = network(name, large=True, steps=20)
    runs: dict[str, Callable[[], object]] = {BASELINE: lambda: forward_backward(model, data)}
    runs |= {tool: lambda made=made: made(0) for tool, made in tools(model, data).items() if tool in TIMED}
    runs |= {FLOOR: lambda: bare(model, data), EIGENVECTORS: eigenvectors_of(model, data)}
    times = interleaved(
        runs, repeats, CPU, slow={KRONFLUENCE: 1, f"{LAPLACE}, Monte Carlo": 2} if repeats > 1 else None
    )
    model.zero_grad()
    memory = {tool: peak_memory("kronecker:one_run", name, tool) for tool in MEASURED if tool in runs}
    found = {tool: (times[tool].cpu / times[BASELINE].cpu, memory.get(tool, 0.0)) for tool in runs if tool != BASELINE}
    return {**found, "baseline, ms": (1e3 * times[BASELINE].cpu, 0.0)}


NOTES = """\
Error: relative, in Frobenius norm, to the dense blocks of a small trained network (weight and bias together; laplace-
torch takes them apart, which is part of its error), mean ± standard deviation over {seeds} seeds. Time: processor
time over forward + backward ({baselines}) of a larger network, 2,048 images in batches of 128, medians of {repeats}
turns, each of which has an untimed call before (kronfluence: one call; it writes every step to disk, and takes
eigenvectors in float64). Error bars are switched off in ours, since no other tool has them. Eigenvectors are part of
all but curvlinops' KFAC. MiB: peak memory above that before the call, in a fresh process.

The bare loop is what EKFAC consists of: two forward and backward passes, four products for factors and rotations and
one for eigenvalues in each layer and batch, and the eigenvectors; for these networks alone, with nothing checked.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=SMALL)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = [options.only] if options.only else list(SMALL)
    repeats, seeds = (1, 2) if options.quick else (options.repeats, options.seeds)
    same = [[name, kind, f"{value:.1e}"] for name in names for kind, value in agreement(name)]
    found = {}
    for name in names:
        begin = time.process_time()
        found[name] = errors(name, seeds), costs(name, repeats)
        print(name, *found[name], f"{time.process_time() - begin:.0f} s", sep="\n", flush=True)
    rows = []
    for tool in [*next(iter(found.values()))[0], FLOOR, EIGENVECTORS]:
        row = [tool]
        for error, cost in found.values():
            ratio, memory = cost.get(tool, (0.0, 0.0))
            row.append(f"{error[tool][0]:.3f} ± {error[tool][1]:.3f}" if tool in error else "")
            row += [f"{ratio:.2f}" if ratio else "", f"{memory:.0f}" if memory else ""]
        rows.append(row)
    header = ["", *(f"{name}: {what}" for name in found for what in ("error", "time", "MiB"))]
    baselines = ", ".join(f"{name} {cost['baseline, ms'][0]:.0f} ms" for name, (_, cost) in found.items())
    text = f"# Kronecker-factored Fisher information\n\n{setting(command(options), CPU)}\n\n"
    text += f"{table(header, rows)}\n\n{NOTES.format(seeds=seeds, repeats=repeats, baselines=baselines)}\n"
    text += "## The same numbers\n\nOur exact results against curvlinops' type 2, in float64:\n\n"
    text += table(["", "", "relative difference"], same)
    if options.quick or options.only:
        print(text)
    else:
        keep("kronecker-cpu", text)


def command(options: argparse.Namespace) -> str:
    return f"python benchmarks/kronecker.py --repeats {options.repeats} --seeds {options.seeds}"


if __name__ == "__main__":
    main()
