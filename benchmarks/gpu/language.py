"""Language models at full size, with random weights and tokens, and checks of small ones.

exact      the exact diagonal against float64
eager      the same probes, squared by kernels and by torch; CUDA graphs against eager runs
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

import neuromanifold as nm
from gpu.session import Missing, Row, Session
from neuromanifold.kernels import dispatch

KINDS = ("qwen", "llama", "gpt2")
RUNS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "rows": {"error_bars": "rows"},
    "no error bars": {"error_bars": False},
    "per batch": {"granularity": "batch"},
}


class Shape(NamedTuple):
    """A model's kind and sizes, and those of a batch."""

    config: Callable[[], Any]
    samples: int
    length: int
    warm: int  # batches that are not timed: verified, captured, compiled
    batches: int  # that are timed


def _gpt2() -> Any:
    return hf.GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0)


def _qwen() -> Any:
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    return hf.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, use_cache=False)


def _llama(large: bool) -> Any:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    eight = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
    more = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "use_cache": False}
    return hf.LlamaConfig(**(eight if large else sizes), **more, tie_word_embeddings=not large, rope_theta=500000.0)


# Of the first 128 samples all fourth powers are taken: those batches are not timed, but with Llama-8B, where all are.
SHAPES = {
    "GPT-2": Shape(_gpt2, 8, 512, 28, 24),
    "Qwen-0.5B": Shape(_qwen, 4, 1024, 36, 12),
    "Llama-1B": Shape(lambda: _llama(large=False), 4, 1024, 36, 8),
    "Llama-8B": Shape(lambda: _llama(large=True), 1, 2048, 4, 6),
}


def made(
    name: str, device: torch.device, *, layers: int = 0, small: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in bfloat16 and a batch; `layers` in place of its own number."""
    shape, dtype = SHAPES[name], torch.get_default_dtype()
    config = shape.config()
    if layers:
        config.num_hidden_layers = layers
        config.layer_types = (getattr(config, "layer_types", None) or [])[:layers] or None
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = tiny(KINDS[0], 50) if small else hf.AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(dtype)
    samples, length = (2, 16) if small else (shape.samples, shape.length)
    return model, {"input_ids": torch.randint(5, model.config.vocab_size, (samples, length), device=device)}


def tiny(kind: str, vocabulary: int) -> nn.Module:
    """Return a language model with two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "vocab_size": vocabulary, "use_cache": False, "max_position_embeddings": 64}
    if kind == "gpt2":
        own = {"n_positions": 64, "n_layer": 2, "n_head": 2, "n_embd": 32, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=vocabulary, use_cache=False, **own)).eval()
    if kind == "qwen":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, **more, tie_word_embeddings=True)).eval()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **more, tie_word_embeddings=False)).eval()


def run_language(session: Session) -> None:
    """Check small language models."""
    checks = {f"{kind}, exact": partial(_exact, kind, session.device) for kind in KINDS}
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            for run in RUNS:
                checks[f"{kind}, {run}, {dtype}"] = partial(_eager, kind, run, dtype, session)
    run_comparisons(session, "Language models", checks)


Errors = list[tuple[str, float, float]]
"""What was compared, ‖found - expected‖/‖expected‖ of the worst parameter, and its limit."""


def run_comparisons(session: Session, heading: str, checks: Mapping[str, Callable[[], Errors]]) -> None:
    """Add a section with the errors of each check, and its verdicts."""
    rows: list[Row] = []
    for name, check in checks.items():
        found = session.guarded(f"{heading}, {name}", check)
        if isinstance(found, Missing):
            rows.append({"check": name, "verdict": found.reason})
            continue
        for what, error, limit in found:
            row: Row = {"check": name, "of": what, "error": error, "limit": limit}
            session.checked(f"{heading}, {name}", row, error <= limit, rows)
    session.add(heading, rows)


def random_batches(vocabulary: int, batches: int, length: int) -> list[dict[str, Tensor]]:
    """Return batches of two sequences of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, vocabulary, (2, length), generator=generator)} for _ in range(batches)]


def distances(name: str, found: nm.DiagonalFisher, expected: nm.DiagonalFisher, limit: float) -> Errors:
    """Compare sums and squared standard errors."""
    errors: Errors = []
    for what in ("sums", "noise"):
        a, b = (dict(getattr(one, what)) for one in (found, expected))
        pairs = [(a[key].double().cpu(), b[key].double().cpu()) for key in b if bool(b[key].any())]
        if pairs:
            errors.append((f"{name}, {what}", max(float((x - y).norm() / y.norm()) for x, y in pairs), limit))
    return errors


def _exact(kind: str, device: torch.device) -> Errors:
    model, batches = tiny(kind, 12), random_batches(12, 2, 6)
    expected = nm.fisher_diagonal(copy.deepcopy(model).double(), batches, nm.Exact())
    return distances("float64", nm.fisher_diagonal(model.to(device), batches, nm.Exact()), expected, 1e-4)


def _eager(kind: str, run: str, dtype: torch.dtype, session: Session) -> Errors:
    vocabulary, count = (50, 3) if session.options.quick else (700, 10)
    model, batches = tiny(kind, vocabulary).to(session.device, dtype), random_batches(vocabulary, count, 40)
    eager = nm.fisher_diagonal(model, batches, cuda_graphs=False, **RUNS[run])
    with dispatch.disabled("add_squares_of_products"):
        unfused = nm.fisher_diagonal(model, batches, cuda_graphs=False, **RUNS[run])
    errors = distances("kernels and torch", eager, unfused, 1e-4 if dtype is torch.float32 else 2e-2)
    if session.device.type == "cuda":
        graphs = nm.fisher_diagonal(model, batches, cuda_graphs=True, **RUNS[run])
        errors += distances("graphs and eager", graphs, eager, 1e-6 if dtype is torch.float32 else 1e-3)
    return errors
