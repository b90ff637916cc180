"""What squares of single tokens are worth: noise and time of a small language model, per batch, sequence and token.

python benchmarks/tokens.py                       on a CPU: noise against the exact diagonal
python benchmarks/tokens.py --device cuda         on a GPU: time with a vocabulary of 128,000
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import neuromanifold as nm

RESULTS = Path(__file__).parent / "results"
SIZES = {"cpu": (97, 32, 2, 4, 12), "cuda": (128_000, 2048, 4, 16, 512)}  # classes, width, layers, heads, length


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n, t, d] to tokens [n, t, d]."""
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """A decoder with learned positions, and a head that is not tied."""

    def __init__(self, classes: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(classes, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [n, t] to logits [n, t, c]."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


GROUPS = {  # patterns of names, of a model with two blocks; each name belongs to the first group that it matches
    "head": ("head.*",),
    "last norm": ("norm.*",),
    "last block: keys, values and their norm": ("blocks.1.[kv].*", "blocks.1.norm1.*"),
    "last block: the rest": ("blocks.1.*",),
    "first block": ("blocks.0.*",),
    "embeddings": ("embedding.*", "positions.*"),
}


def group_of(name: str) -> str:
    """Return the group that a parameter belongs to."""
    return next(group for group, patterns in GROUPS.items() if any(fnmatchcase(name, one) for one in patterns))


def noise() -> list[str]:
    """Train a model on a Markov chain, and return a table of relative errors, by group of parameters."""
    torch.manual_seed(0)
    classes, *_, length = SIZES["cpu"]
    model, chain = LanguageModel(*SIZES["cpu"]), torch.softmax(4 * torch.randn(classes, classes), 1)

    def draw(samples: int) -> Tensor:
        ids = [torch.randint(classes, (samples,))]
        for _ in range(length):
            ids.append(torch.multinomial(chain[ids[-1]], 1)[:, 0])
        return torch.stack(ids, 1)

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(300):
        ids = draw(64)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    data = [draw(16)[:, :-1] for _ in range(4)]
    exact = nm.fisher_diagonal(model, data, nm.Exact(), granularity="sample")
    lines = [f"Loss {loss.item():.3f} after 300 steps; 64 sequences of {length} tokens, {classes} classes.", ""]
    lines += ["Mean relative error Σ|F̂ - F| / ΣF of one probe, mean of 20 seeds:", ""]
    lines += ["| | per batch | per sequence | per token where it can be had | of which squared per token |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    runs = {how: [nm.fisher_diagonal(model, data, granularity=how, seed=seed) for seed in range(20)]
            for how in ("batch", "sample", "auto")}  # fmt: skip
    for group in GROUPS:
        names = [name for name in exact if group_of(name) == group]
        total = sum(float(exact[name].sum()) for name in names)
        errors = [
            sum(float((run[name] - exact[name]).abs().sum()) for run in found for name in names) / total / len(found)
            for found in runs.values()
        ]
        fine = sum(runs["auto"][0].provenance.granularity[name] == "token" for name in names)
        lines.append(f"| {group} | {' | '.join(f'{error:.3f}' for error in errors)} | {fine} of {len(names)} |")
    seconds = {how: min(timed(lambda how=how: nm.fisher_diagonal(model, data * 4, granularity=how)) for _ in range(3))  # type: ignore[misc]
               for how in runs}  # fmt: skip
    times = ", ".join(f"{how} {value:.3f} s" for how, value in seconds.items())
    return [*lines, "", f"Time of one call with 16 batches of 16 sequences, best of 3 (granularity): {times}."]


def timed(function: Callable[[], object]) -> float:
    """Wall-clock seconds of a call, the GPU's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def speed() -> list[str]:
    """Time a bfloat16 model with a large vocabulary on a GPU, and compare its head's values."""
    torch.manual_seed(0)
    classes, *_, length = SIZES["cuda"]
    model = LanguageModel(*SIZES["cuda"]).cuda().bfloat16()
    data = [torch.randint(classes, (8, length), device="cuda") for _ in range(8)]

    def baseline() -> None:
        for ids in data:
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            torch.autograd.grad(loss, list(model.parameters()))

    lines = ["| | seconds | against forward + backward | peak memory, GiB |", "| --- | --- | --- | --- |"]
    calls: dict[str, Callable[[], object]] = {"forward + backward": baseline}
    for how in ("batch", "sample", "auto"):
        calls[f"granularity {how!r}"] = lambda how=how: nm.fisher_diagonal(model, data, granularity=how)  # type: ignore[misc]
    first = 0.0
    for name, call in calls.items():
        call()
        torch.cuda.reset_peak_memory_stats()
        seconds = min(timed(call) for _ in range(2))
        first, peak = first or seconds, torch.cuda.max_memory_allocated() / 2**30
        lines.append(f"| {name} | {seconds:.3f} | {seconds / first:.2f} | {peak:.1f} |")
    found = [nm.fisher_diagonal(model, data[:2], granularity=how, parameters="head*") for how in ("sample", "auto")]  # type: ignore[arg-type]
    ratio = found[1].trace.sum / found[0].trace.sum
    precise = nm.fisher_diagonal(model.float(), data[:2], parameters="head*")
    lines += ["", f"Trace of the head, per token over per sequence: {ratio:.4f}; "
              f"bfloat16 over float32, per token: {found[1].trace.sum / precise.trace.sum:.4f}."]  # fmt: skip
    return lines


def main() -> None:
    """Print the table, and write it to benchmarks/results/."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU ({platform.machine()})"
    head = [f"# Squares per token: {'time on a GPU' if arguments.device == 'cuda' else 'noise'}", ""]
    head += [f"{time.strftime('%Y-%m-%d')}, `python {' '.join(sys.argv)}`, {device}, torch {torch.__version__},"]
    sizes = ", ".join(map(str, SIZES[arguments.device]))
    head += [f"neuromanifold {nm.__version__}; classes, width, layers, heads, length: {sizes}.", ""]
    text = "\n".join([*head, *(speed() if arguments.device == "cuda" else noise())]) + "\n"
    print(text)
    name = "tokens-h200.md" if arguments.device == "cuda" else "tokens-cpu.md"
    (arguments.out or RESULTS / name).write_text(text)


if __name__ == "__main__":
    main()
