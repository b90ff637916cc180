"""What per-sample squares of routed experts are worth: error and time of a small Mixtral against squares per batch.

python benchmarks/experts.py
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import transformers
from common import BASELINE, forward_backward, interleaved, keep, setting, table
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample import follow, graph, sites

EXACT = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_local_experts": 8}
LARGER = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_local_experts": 8}


def mixtral(sizes: dict[str, int], implementation: str | None = None) -> nn.Module:
    """Two layers, eight experts, two for each token; random weights, so large that predictions differ."""
    torch.manual_seed(0)
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **more, max_position_embeddings=128)
    config._experts_implementation = implementation or config._experts_implementation
    model: nn.Module = transformers.MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def as_before(call: Callable[[], nm.DiagonalFisher]) -> nm.DiagonalFisher:
    """Run without the rule for experts, and without following samples by the values of indices."""
    nothing = mock.patch.object(sites, "expert_site", return_value=None)
    unread = mock.patch.object(graph, "reads_values", return_value=False)
    with nothing, unread, mock.patch.object(follow, "_picked", side_effect=ValueError), mock.patch.dict(follow._RULES):
        del follow._RULES["IndexAdd"]
        return call()


def batches(sizes: dict[str, int], count: int, shape: tuple[int, int]) -> list[Tensor]:
    return [torch.randint(sizes["vocab_size"], shape) for _ in range(count)]


def errors() -> str:
    """Return a table of mean relative errors, by kind of parameter."""
    model, data = mixtral(EXACT), batches(EXACT, 4, (8, 12))
    exact = nm.fisher_diagonal(model, data, nm.Exact())
    kinds = {"experts": [name for name in exact if "experts" in name]}
    kinds["all others"] = [name for name in exact if name not in kinds["experts"]]
    runs: dict[str, list[nm.DiagonalFisher]] = {"per batch, as before": [], "per sample": []}
    for seed in range(20):
        call = partial(nm.fisher_diagonal, model, data, seed=seed)
        runs["per batch, as before"].append(as_before(call))
        runs["per sample"].append(call())
    rows = []
    for kind, names in kinds.items():
        total = sum(float(exact[name].sum()) for name in names)
        mean = [
            sum(float((run[name] - exact[name]).abs().sum()) for run in found for name in names) / total / len(found)
            for found in runs.values()
        ]
        rows.append([kind, f"{sum(exact[name].numel() for name in names):,}", *(f"{error:.3f}" for error in mean)])
    return table(["parameters", "how many", *runs], rows)


def times(repeats: int) -> str:
    """Return a table of processor times over those of forward + backward."""
    rows, data = [], batches(LARGER, 8, (8, 64))
    pairs = [{"input_ids": ids, "labels": ids} for ids in data]
    for implementation in ("grouped_mm", "eager"):
        model = mixtral(LARGER, implementation)
        call = partial(nm.fisher_diagonal, model, data)
        functions: dict[str, Callable[[], object]] = {
            BASELINE: partial(forward_backward, model, pairs),
            "before": partial(as_before, call),
            "now": call,
        }
        found = interleaved(functions, repeats, torch.device("cpu"))
        verified = [as_before(call).provenance.verified, call().provenance.verified]
        base, before, now = (found[name].cpu for name in functions)
        row = [implementation, f"{base:.2f}", f"{before / base:.2f}", f"{now / base:.2f}"]
        rows.append([*row, f"{verified[0]} of {len(data)}", f"{verified[1]} of {len(data)}"])
        print(" · ".join(rows[-1]), flush=True)
    header = ["experts", "forward + backward, s", "before, ratio", "now, ratio"]
    return table([*header, "verified batches before", "now"], rows)


def main() -> None:
    """Print both tables, and write them to benchmarks/results/."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", default=5, type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    head = setting(f"python benchmarks/experts.py --repeats {options.repeats}", torch.device("cpu"))
    text = [
        "# Routed experts: squares per sample",
        f"{head} · transformers {transformers.__version__}",
        "A Mixtral with 2 layers, 8 experts and 2 of them for each token, `nm.Hutchinson()`. Before: without the rule "
        "for experts and without following samples through indices, as until now.",
        f"## Error\n\nΣ|F̂ - F| / ΣF, mean of 20 seeds; 4 batches of 8 sequences of 12 tokens; {EXACT}.",
        errors(),
        f"## Time\n\nProcessor time over that of forward + backward (interleaved, medians of {options.repeats}); 8 "
        f"batches of 8 sequences of 64 tokens; {LARGER}.",
        times(options.repeats),
    ]
    keep("experts-cpu", "\n\n".join(text))


if __name__ == "__main__":
    main()
