"""Language models at full size on a GPU: time and memory over forward + backward, and where the time goes.

    PYTHONPATH=src:benchmarks python -m gpu.language --out DIR [--budget 350] [--only GPT-2 Qwen] [--profile Qwen]

Weights and tokens are random.  A run goes through `WARM` batches first, which are verified, captured and compiled;
seconds and peak memory are those of the batches after that.  Memory is what is allocated beyond the weights, at the
most; of a run without the sums that are its result.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

import neuromanifold as nm

WARM = 12


class Shape(NamedTuple):
    """A model's kind and sizes, and those of a batch."""

    config: Callable[[], Any]
    samples: int
    length: int
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


SHAPES = {
    "GPT-2": Shape(_gpt2, 8, 512, 24),
    "Qwen": Shape(_qwen, 4, 1024, 12),
    "Llama-1B": Shape(lambda: _llama(large=False), 4, 1024, 8),
    "Llama-8B": Shape(lambda: _llama(large=True), 1, 2048, 4),
}
RUNS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"cuda_graphs": False},
    "rows": {"error_bars": "rows"},
    "rows, eager": {"error_bars": "rows", "cuda_graphs": False},
    "per batch": {"granularity": "batch"},
    "per batch, no error bars": {"granularity": "batch", "error_bars": False},
}


class Meter:
    """Yields a batch again and again, and measures those after the first."""

    def __init__(self, batch: dict[str, Tensor], warm: int, batches: int, profiler: Any = None) -> None:
        self._batch, self._warm, self._count, self._profiler = batch, warm, batches, profiler
        self.seconds = 0.0
        self.peak = self.first_peak = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        start, before = 0.0, torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for i in range(self._warm + self._count):
            if i == self._warm:
                torch.cuda.synchronize()
                self.first_peak = torch.cuda.max_memory_allocated() - before
                torch.cuda.reset_peak_memory_stats()
                if self._profiler:
                    self._profiler.start()
                start = time.perf_counter()
            yield self._batch
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - start) / self._count
        self.peak = torch.cuda.max_memory_allocated() - before
        if self._profiler:
            self._profiler.stop()


def baseline(model: nn.Module, meter: Meter) -> None:
    """Forward and ordinary backward passes, with a cotangent that takes no time to make."""
    cotangent = None
    parameters = [p for p in model.parameters() if p.requires_grad]
    for batch in meter:
        logits = model(**batch).logits
        cotangent = torch.randn_like(logits) if cotangent is None else cotangent
        torch.autograd.grad(logits, parameters, cotangent)


def made(shape: Shape) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of this shape in bfloat16, and a batch."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = hf.AutoModelForCausalLM.from_config(shape.config()).eval()
    finally:
        torch.set_default_dtype(before)
    vocabulary = model.config.vocab_size
    return model, {"input_ids": torch.randint(5, vocabulary, (shape.samples, shape.length), device="cuda")}


def free() -> None:
    """Give all memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def measured(name: str, budget: Callable[[], float], only: list[str], repeats: int, tell: Callable[[str], None]) -> Any:
    """Measure one model: the baseline and each kind of run in turns, as medians."""
    shape = SHAPES[name]
    model, batch = made(shape)
    sums = 4 * sum(p.numel() for p in model.parameters())
    found: dict[str, list[tuple[float, float, float]]] = {}
    chosen = only or list(RUNS)
    for turn in range(repeats):
        for kind in ("baseline", *chosen):
            if budget() < 15 or (turn and kind not in found):
                continue
            free()
            meter = Meter(batch, 3 if kind == "baseline" else WARM, shape.batches)
            try:
                if kind == "baseline":
                    baseline(model, meter)
                    extra = 0.0
                else:
                    fim = nm.fisher_diagonal(model, meter, **RUNS[kind])
                    extra = sum(t.numel() * t.element_size() for t in (*fim.sums.values(), *fim.noise.values()))
                    extra = max(extra, sums) if fim.noise else extra
                    del fim
            except torch.OutOfMemoryError as error:
                tell(f"{name} {kind}: out of memory: {str(error)[:100]}")
                continue
            except Exception:
                tell(f"{name} {kind}: {traceback.format_exc()[-1500:]}")
                continue
            found.setdefault(kind, []).append((meter.seconds, meter.peak - extra, meter.first_peak - extra))
            ms, gib, first = meter.seconds * 1e3, (meter.peak - extra) / 2**30, (meter.first_peak - extra) / 2**30
            tell(f"{name} {kind}: {ms:.1f} ms, {gib:.2f} GiB beyond the sums, first batches {first:.2f}")
    rows = {kind: [median(column) for column in zip(*values, strict=True)] for kind, values in found.items()}
    base = rows.get("baseline")
    for kind, (seconds, peak, first) in rows.items():
        if base:
            tell(
                f"  {name:9} {kind:26} x{seconds / base[0]:.2f}  memory x{peak / base[1]:.2f} (x{first / base[1]:.2f})"
            )
    return rows


def print_profile(name: str, kind: str, out: Path, tell: Callable[[str], None]) -> None:
    """Write tables of the kernels and operations of two batches."""
    model, batch = made(SHAPES[name])
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    meter = Meter(batch, 3 if kind == "baseline" else WARM, 2, profiler)
    if kind == "baseline":
        baseline(model, meter)
    else:
        nm.fisher_diagonal(model, meter, **RUNS[kind])
    label = f"{name}-{kind}".replace(" ", "-").replace(",", "")
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            one = kernels.setdefault(event.name[:150], [0.0, 0])
            one[0] += event.device_time_total if hasattr(event, "device_time_total") else event.cuda_time_total
            one[1] += 1
    ranked = sorted(kernels.items(), key=lambda item: -item[1][0])
    total = sum(value[0] for value in kernels.values()) / 2e3
    lines = [f"{t / 2e3:8.2f} ms {int(n) // 2:5} x  {key}" for key, (t, n) in ranked[:60]]
    (out / f"kernels-{label}.txt").write_text(f"{total:.1f} ms of kernels a batch\n" + "\n".join(lines))
    table = profiler.key_averages(group_by_input_shape=True)
    order = "self_device_time_total" if hasattr(table[0], "self_device_time_total") else "self_cuda_time_total"
    (out / f"operations-{label}.txt").write_text(
        table.table(sort_by=order, row_limit=60, max_name_column_width=60, max_shapes_column_width=90)
    )
    wall = meter.seconds * 1e3
    tell(
        f"profile {name} {kind}: {total:.1f} ms of kernels, {wall:.1f} ms wall-clock (profiled)\n"
        + "\n".join(lines[:14])
    )


def main() -> int:
    """Profiles first, then rows, as far as the budget goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--budget", default=350.0, type=float)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--runs", nargs="*", default=[], choices=list(RUNS))
    parser.add_argument("--profile", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--repeats", default=1, type=int)
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    warnings.simplefilter("ignore")
    log: list[str] = []

    def tell(text: str) -> None:
        log.append(text)
        print(text, flush=True)
        (options.out / "language.txt").write_text("\n".join(log))

    options.out.mkdir(parents=True, exist_ok=True)
    tell(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {hf.__version__}")
    rows = {}
    for name in options.profile:
        for kind in ("baseline", "rows, eager"):
            if end - time.monotonic() > 20:
                free()
                try:
                    print_profile(name, kind, options.out, tell)
                except Exception:
                    tell(f"profile {name} {kind}: {traceback.format_exc()[-1500:]}")
    for name in options.only:
        if end - time.monotonic() > 25:
            free()
            try:
                rows[name] = measured(name, lambda: end - time.monotonic(), options.runs, options.repeats, tell)
            except Exception:
                tell(f"{name}: {traceback.format_exc()[-1500:]}")
            (options.out / "language.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
