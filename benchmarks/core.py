"""The spectrum of the core: secular equation, batched eigh, and the paper's 30 power iterations, side by side.

    python benchmarks/core.py [--device cuda] [--repeats 7] [--quick]

Every time is a median of interleaved runs for one and the same batch of float64 logits; errors are relative errors of
the two largest eigenvalues.  The reference of the errors is the secular equation itself, whose own error is bounded by
its residual: |λ - λ*| <= ‖Fv - λv‖ for a symmetric F and a unit vector v.
"""

from __future__ import annotations

import argparse

import torch
from common import interleaved, keep, setting, table

import neuromanifold as nm
from neuromanifold.reference.core import spectrum_by_eigh, spectrum_by_power_iteration

SIZES = {2: 256, 14: 256, 100: 256, 1000: 32, 50_000: 16}  # classes: samples (1000: 256 on a GPU)
REGIMES = {"near uniform": 0.1, "in between": 1.0, "peaked": 5.0}
LARGEST_DENSE = 1000


def core(classes: int, samples: int, scale: float, device: torch.device) -> nm.Categorical:
    generator = torch.Generator().manual_seed(classes)
    return nm.Categorical(scale * torch.randn(samples, classes, generator=generator, dtype=torch.float64).to(device))


def residual(of: nm.Categorical, pairs: nm.Spectrum) -> float:
    """max ‖Fv - λv‖/λ: a bound of the relative error of the eigenvalues."""
    products = of.matvec(pairs.vectors.movedim(-2, 0)).movedim(0, -2)
    lengths = (products - pairs.values[..., None] * pairs.vectors).norm(dim=-1)
    return float((lengths / pairs.values).amax())


def compare(device: torch.device, repeats: int, largest: int) -> str:
    rows = []
    for classes, few in ((classes, few) for classes, few in SIZES.items() if classes <= largest):
        samples = 256 if device.type == "cuda" and classes == LARGEST_DENSE else few
        for regime, scale in REGIMES.items():
            of, k = core(classes, samples, scale, device), min(2, classes - 1)
            noise = torch.Generator(device).manual_seed(0)
            functions = {
                "secular": lambda of=of, k=k: of.spectrum(k),
                "power": lambda of=of, k=k, noise=noise: spectrum_by_power_iteration(of.probs, k, generator=noise),
            }
            if classes <= LARGEST_DENSE:
                functions["eigh"] = lambda of=of, k=k: spectrum_by_eigh(of.fisher(), k)
            turns = repeats if classes < LARGEST_DENSE else min(3, repeats)
            seconds = {name: times.wall for name, times in interleaved(functions, turns, device).items()}
            ours = of.spectrum(k)
            errors = {
                name: float((function().values / ours.values - 1).abs().amax()) for name, function in functions.items()
            }
            dense = "eigh" in seconds
            eigh = [f"{seconds['eigh'] / seconds['secular']:.1f}", f"{errors['eigh']:.0e}"] if dense else ["-", "-"]
            rows.append(
                [
                    str(classes),
                    regime,
                    f"{1e6 * seconds['secular'] / samples:.1f}",
                    f"{residual(of, ours):.0e}",
                    *eigh,
                    f"{seconds['power'] / seconds['secular']:.1f}",
                    f"{100 * errors['power']:.2g} %",
                ]
            )
            print(" ".join(rows[-1]), flush=True)
    header = ["classes", "predictions", "ours, µs/sample", "error <=", "eigh, times slower", "difference"]
    return table([*header, "30 power iterations, times slower", "error"], rows)


def scaling(device: torch.device, repeats: int, largest: int) -> str:
    """Time against k at a fixed C, and against C at a fixed k, each divided by what is expected to be linear."""
    rows = []
    sizes = [(1000, 1), (1000, 4), (1000, 16), (1000, 64), (10_000, 4), (100_000, 4)]
    for classes, k in ((classes, k) for classes, k in sizes if classes * k <= 16 * largest):
        samples = max(4, 2_000_000 // (classes * k))
        of = core(classes, samples, 1.0, device)
        seconds = interleaved({"secular": lambda of=of, k=k: of.spectrum(k)}, repeats, device)["secular"].wall
        rows.append([str(classes), str(k), str(samples), f"{1e9 * seconds / (samples * classes * k):.1f}"])
    return table(["classes", "k", "samples", "ns per sample, class and eigenpair"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--quick", action="store_true", help="few classes, one repeat: does everything run?")
    options = parser.parse_args()
    device, repeats = options.device, 1 if options.quick else options.repeats
    largest = 100 if options.quick else max(SIZES)
    parts = [
        "# `spectrum(2)` beside `torch.linalg.eigh` and 30 power iterations",
        setting(f"python benchmarks/core.py --device {device}", device),
        compare(device, repeats, largest),
        "## Cost against C and k",
        scaling(device, repeats, largest),
    ]
    text = "\n\n".join(parts)
    print(text) if options.quick else keep(f"core-{device.type}", text)


if __name__ == "__main__":
    main()
