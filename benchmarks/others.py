"""What other tools give for the diagonal of a Fisher information, each behind one small function.

    pip install --no-deps -r benchmarks/others-requirements.txt  # see there
    python benchmarks/others.py [--only MLP]

checks every tool on small versions of the benchmark's networks against a float64 loop over samples (and classes) and
prints right, wrong (by how much, where) or fails (why).  Two quantities, both sums over the samples of a batch:

    per sample   Σ_n (∂ℓ_n/∂θ)², the empirical Fisher of given labels
    exact        Σ_n Σ_c p_c (∂ log p_c/∂θ)², the Fisher

The functions are in `others_torch.py` (PyTorch by itself) and `others_libraries.py` (other libraries).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import warnings
from typing import NamedTuple

import others_libraries as libraries
import torch
from common import keep, setting, table
from models import NETWORKS, Task, task
from others_torch import Adapter, Diagonal, func, func_exact, loop, loop_exact, tensor_model


class Tool(NamedTuple):
    """The distribution it comes in, and an adapter for each quantity it has."""

    distribution: str
    per_sample: Adapter
    exact: Adapter | None
    random: bool = False  # an estimate, to be judged by its spread


TOOLS = {
    "loop": Tool("torch", loop, loop_exact),
    "torch.func": Tool("torch", func, func_exact),
    "BackPACK": Tool("backpack-for-pytorch", libraries.backpack, libraries.backpack_exact),
    "Opacus": Tool("opacus", libraries.opacus, None),
    "ASDL": Tool("asdfghjkl", libraries.asdl, libraries.asdl_exact),
    "NNGeometry": Tool("nngeometry", libraries.nngeometry, libraries.nngeometry_exact),
    "curvlinops": Tool("curvlinops-for-pytorch", libraries.curvlinops, libraries.curvlinops_exact, random=True),
}


def version(tool: str) -> str | None:
    """Its version, or None where it is not installed.  Imports nothing: that takes long, and memory.

    By the name of the distribution, since ASDL shares its import name with another package.
    """
    try:
        return importlib.metadata.version(TOOLS[tool].distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def reference(small: Task, exact: bool) -> Diagonal:
    """The loop in float64."""
    model, inputs = tensor_model(small)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return (loop_exact if exact else loop)(model.double(), inputs, small.labels, small.classes)()


def check(tool: str, name: str, exact: bool, draws: int = 100) -> str:
    """Right, wrong or fails, in one line, on the small version of a network."""
    adapter = TOOLS[tool].exact if exact else TOOLS[tool].per_sample
    if adapter is None:
        return "not offered"
    small = task(name, small=True)
    truth = reference(small, exact)
    try:
        work = adapter(*tensor_model(small), small.labels, small.classes)
        if TOOLS[tool].random:
            return _spread(truth, [work() for _ in range(draws)])
        found = {key: value.detach().clone() for key, value in work().items()}
        again = work()  # a second batch must not remember the first
    except Exception as error:
        return failure(error)
    verdict = compare(truth, found)
    second = compare(truth, again)
    return verdict if second.split(" (")[0] == verdict.split(" (")[0] else f"{verdict}; second call: {second}"


def failure(error: Exception) -> str:
    """An exception in one line."""
    return f"fails: {type(error).__name__}: {' '.join(str(error).split())[:160]}"


def compare(truth: Diagonal, found: Diagonal) -> str:
    """Per parameter, the largest error over the largest entry (one that is zero but for rounding counts as zero)."""
    floor = 1e-6 * max(value.max().item() for value in truth.values())
    errors = {}
    for name, value in found.items():
        if name not in truth or value.shape != truth[name].shape:
            return f"wrong: {name} is no parameter, or has another shape"
        error = (value.double() - truth[name]).abs().max().item() / max(truth[name].max().item(), floor)
        errors[name] = error if math.isfinite(error) else math.inf
    bad = {name: error for name, error in errors.items() if error > 1e-3}
    missing = [name for name in truth if name not in found]
    worst = max(errors, key=errors.__getitem__, default="")
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(truth)} parameters left out ({', '.join(missing[:2])}, ...)")
    if bad:
        parts.append(
            f"{len(bad)} of {len(truth)} parameters wrong ({', '.join(list(bad)[:2])}, ...), up to {bad[worst]:.2g}"
        )
    if parts:
        return "wrong: " + "; ".join(parts)
    return f"right ({errors[worst]:.0e})"


def _spread(truth: Diagonal, draws: list[Diagonal]) -> str:
    """For a random estimate: is its mean right, by z-scores, and how far off is one draw?"""
    flat = torch.stack([torch.cat([draw[name].flatten() for name in truth]) for draw in draws]).double()
    exact = torch.cat([value.flatten() for value in truth.values()])
    counted = exact > 1e-6 * exact.max()
    deviation = flat.std(0)[counted]
    z = (flat.mean(0)[counted] - exact[counted]) / (deviation / math.sqrt(len(draws)))
    relative = (deviation / exact[counted]).median().item()
    negative = (flat[:, counted] < 0).double().mean().item()
    verdict = "unbiased" if z.square().mean().sqrt() < 1.5 else "biased"
    return f"{verdict} estimate; relative spread of one draw {relative:.1f} (median entry), {negative:.0%} negative"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NETWORKS, help="one network instead of all")
    parser.add_argument("--tool", choices=list(TOOLS), help="one tool instead of all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for tool in [options.tool] if options.tool else TOOLS:
        number = version(tool)
        for name in [options.only] if options.only else NETWORKS:
            for quantity in ("per sample", "exact"):
                verdict = "not installed" if number is None else check(tool, name, quantity == "exact")
                rows.append([f"{tool} {number or ''}".strip(), name, quantity, verdict.replace("|", "\\|")])
                print(" · ".join(rows[-1]), flush=True)
    text = table(["tool", "network (small)", "quantity", "against a float64 loop"], rows)
    head = setting("python benchmarks/others.py", torch.device("cpu"))
    text = "\n\n".join(["# What other tools give, against a float64 loop over samples and classes", head, text])
    if options.only or options.tool:
        print(f"\n{text}")  # a part of the result does not replace it
    else:
        keep("others", text)


if __name__ == "__main__":
    main()
