"""Exactness on a GPU of what language models use: kernels against float64, small models, CUDA graphs, error bars.

PYTHONPATH=src:benchmarks python -m gpu.language_checks
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.kernels import dispatch
from neuromanifold.kernels.triton.product import launch_product_squares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
failures: list[str] = []


def expect(name: str, error: float, limit: float) -> None:
    """Print one comparison."""
    good = error <= limit
    print(f"{'ok  ' if good else 'FAIL'} {name}: {error:.2e} (limit {limit:.0e})", flush=True)
    if not good:
        failures.append(name)


def guarded(check: Callable[[], None]) -> None:
    """Run a check; an exception is a failure."""
    try:
        check()
    except Exception:
        failures.append(check.__name__)
        print(f"FAIL {check.__name__}: {traceback.format_exc()[-1200:]}", flush=True)


def distance(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖/‖expected‖."""
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())


def kernels() -> None:
    """Squares of products with norms of rows."""
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        for n, t, o, i in ((4, 1024, 1000, 896), (3, 37, 130, 64), (8, 64, 64, 200)):
            left, right = (torch.randn(n, t, k, device=DEVICE, dtype=dtype) for k in (o, i))
            squares = torch.zeros(o, i, device=DEVICE)
            norms = torch.zeros(n, o, device=DEVICE)
            launch_product_squares(left, right, squares, norms=norms, factors=(4.0, 1.0, 0.5))
            truth = 0.5 * (left.double().mT @ right.double())
            expect(f"squares {dtype} {n, t, o, i}", distance(squares, 4 * truth.square().sum(0)), limit)
            expect(f"norms {dtype} {n, t, o, i}", distance(norms, truth.square().sum(2)), limit)


def small(kind: str, vocabulary: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A language model with two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "vocab_size": vocabulary, "use_cache": False, "max_position_embeddings": 64}
    if kind == "gpt2":
        own = {"n_positions": 64, "n_layer": 2, "n_head": 2, "n_embd": 32, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=vocabulary, use_cache=False, **own)).to(dtype).eval()
    if kind == "qwen":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, **more, tie_word_embeddings=True)).to(dtype).eval()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **more, tie_word_embeddings=False)).to(dtype).eval()


def data(vocabulary: int, batches: int, length: int) -> list[dict[str, Tensor]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, vocabulary, (2, length), generator=generator)} for _ in range(batches)]


def compared(name: str, found: Any, expected: Any, limit: float) -> None:
    """Compare all entries of two results, and their standard errors."""
    for what in ("sums", "noise"):
        a, b = (dict(getattr(one, what)) for one in (found, expected))
        if any(bool(value.any()) for value in b.values()):
            error = max(distance(a[key], b[key]) for key in b if float(b[key].norm()) > 0)
            expect(f"{name} {what}", error, limit)


def exact() -> None:
    """The exact diagonal on the GPU against float64 on the CPU."""
    for kind in ("qwen", "llama", "gpt2"):
        batches = data(12, 2, 6)
        found = nm.fisher_diagonal(small(kind, 12).to(DEVICE), batches, nm.Exact())
        expected = nm.fisher_diagonal(small(kind, 12, torch.float64), batches, nm.Exact())
        compared(f"exact {kind}", found, expected, 1e-4)


def with_and_without_kernels() -> None:
    """The same probes, squared by kernels and by torch; eagerly, and by CUDA graphs."""
    for kind in ("qwen", "llama", "gpt2"):
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            model, batches = small(kind, 700, dtype).to(DEVICE), data(700, 10, 40)
            for options in ({}, {"error_bars": "rows"}, {"error_bars": False}, {"granularity": "batch"}):
                name = f"{kind} {dtype} {options}"
                eager = nm.fisher_diagonal(model, batches, cuda_graphs=False, **options)
                with dispatch.disabled("add_squares_of_products"):
                    plain = nm.fisher_diagonal(model, batches, cuda_graphs=False, **options)
                compared(f"{name} kernels against torch", eager, plain, limit)
                if DEVICE == "cuda":
                    graphs = nm.fisher_diagonal(model, batches, cuda_graphs=True, **options)
                    compared(f"{name} graphs against eager", graphs, eager, 1e-5 if dtype is torch.float32 else 1e-3)


def main() -> int:
    """Run all checks."""
    warnings.simplefilter("ignore")
    for check in (kernels, exact, with_and_without_kernels):
        guarded(check)
    print(f"{len(failures)} failures: {failures}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
