"""Weights of routed experts, stored as one tensor [E, ...]: per-sample squares, however the rows are multiplied."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import neuromanifold as nm
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample import plan
from neuromanifold.persample.accumulate.diagonal import zero_sums
from neuromanifold.persample.gradients import Dense, Routed, add
from tests.language.families import MOE, assert_same, make, mixtral, own_score_squares, qwen2_moe, reference, tokens
from tests.zscores import allowed_z_score, worst_z_score

pytestmark = pytest.mark.filterwarnings("error::neuromanifold.SlowPathWarning")
EIGHT = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}  # grouped_mm takes rows of 16 bytes
LATENT = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
ROTARY = {"rope_parameters": {"rope_type": "default"}}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}


def other(family: str, **settings: Any) -> Callable[..., nn.Module]:
    return lambda **more: make(f"{family}ForCausalLM", f"{family}Config", {**MOE, **EIGHT, **settings}, **more)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "Mixtral": mixtral,
    "Qwen2-MoE": lambda **more: qwen2_moe(**{**EIGHT, **more}),
    "Qwen3-MoE": other("Qwen3Moe", num_experts=4, head_dim=4),
    "OLMoE": other("Olmoe", num_experts=4),
    "DeepSeek-V3": other("DeepseekV3", **LATENT, **GROUPS, num_key_value_heads=4),
    "GPT-OSS": other("GptOss", num_local_experts=4, head_dim=4, layer_types=["full_attention"], **ROTARY),
}
EAGER = {"experts_implementation": "eager"}
BATCHED, GROUPED = {"experts_implementation": "batched_mm"}, {"experts_implementation": "grouped_mm"}


def padded() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Three sequences of 6, 3 and 4 tokens: together, and alone."""
    ids, lengths = tokens(3, 6), [6, 3, 4]
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}, [{"input_ids": ids[None, n, :t]} for n, t in enumerate(lengths)]


def left_to_autograd(fim: nm.DiagonalFisher) -> list[str]:
    return [name for name, how in fim.provenance.granularity.items() if how not in ("sample", "token")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", [EAGER, GROUPED], ids=["eager", "grouped"])
def test_exact_values(family: str, how: dict[str, str]) -> None:
    """A loop in float64; the kernel for all experts, which has no float64, in float32."""
    batch, alone = padded()
    expected = reference(FAMILIES[family](**EAGER), alone, lambda n: range([5, 2, 3][n]))
    model = FAMILIES[family](**how)
    found = nm.fisher_diagonal(model if how is EAGER else model.float(), [batch], nm.Exact(), reduction="sum")
    assert not left_to_autograd(found)
    assert_same({name: value.double() for name, value in found.items()}, expected, 1e-5 if how is EAGER else 2e-3)


@pytest.mark.parametrize("how", [EAGER, BATCHED], ids=["eager", "batched"])
@pytest.mark.parametrize("settings", [{"num_experts_per_tok": 1}, {"num_experts": 9}, {"num_hidden_layers": 2}])
def test_one_expert_for_each_token_and_experts_without_any(how: dict[str, str], settings: dict[str, int]) -> None:
    model, ids = FAMILIES["OLMoE"](**how, **settings), tokens(2, 4)
    found = nm.fisher_diagonal(model, [ids], nm.Exact(), reduction="sum")
    assert not left_to_autograd(found)
    assert_same(found, reference(model, [{"input_ids": row[None]} for row in ids], lambda _: range(3)))
    if "num_experts" in settings:
        assert any(not squares.any() for squares in found["model.layers.0.mlp.experts.down_proj"])


def test_samples_are_followed_by_values_and_not_verified_in_each_batch() -> None:
    model, ids = mixtral(**BATCHED), [tokens(3, 5, seed=seed) for seed in range(6)]
    data = [{"input_ids": one, "labels": one} for one in ids]
    found = nm.fisher_diagonal(model, data, nm.Empirical(), reduction="sum")
    assert (found.provenance.verified, left_to_autograd(found)) == (2, [])
    alone = [{"input_ids": row[None], "labels": row[None]} for one in ids for row in one]
    assert_same(found, own_score_squares(model, alone))


def test_random_probes_are_unbiased() -> None:
    """False alarms: one in a million for each parameter."""
    model, batch = mixtral(**BATCHED), padded()[0]
    names = [name for name, _ in model.named_parameters() if "experts" in name]
    exact = nm.fisher_diagonal(model, [batch], nm.Exact(), parameters=names)
    runs = [nm.fisher_diagonal(model, [batch], parameters=names, seed=seed) for seed in range(60)]
    for name in names:
        values, allowed = torch.stack([run[name] for run in runs]), allowed_z_score(exact[name].numel())
        assert worst_z_score(values, exact[name]) < allowed
        assert worst_z_score(3 * values, exact[name]) > allowed  # a biased twin
        claimed = torch.stack([run.stderr[name] for run in runs]).square().mean(0).sum()
        assert 0.7 < float(claimed / values.var(0).sum()) < 3  # a bound


def test_wrong_owners_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = plan.owners
    monkeypatch.setattr(plan, "owners", lambda *args: None if (rows := owners(*args)) is None else rows.roll(1))
    found = nm.fisher_diagonal(mixtral(**BATCHED), [tokens(3, 5)])
    weights = ("gate_up_proj", "down_proj")
    assert set(left_to_autograd(found)) == {f"model.layers.0.mlp.experts.{name}" for name in weights}


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(found) if isinstance(one, Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return found


def test_no_gradients_of_all_samples_are_held() -> None:
    model, ids = mixtral(**GROUPED, num_local_experts=8, intermediate_size=64).float(), tokens(8, 6)
    weight = max(value.numel() for value in model.parameters())
    with Largest() as seen:
        found = nm.fisher_diagonal(model, [ids])
    assert not left_to_autograd(found)
    assert seen.entries <= 2 * weight < len(ids) * weight


class Layers(nn.Module):
    """Tokens go to two of four experts, which are modules of their own, and come back to their places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = (nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 6, bias=False))
        self.table, self.router, self.head = nn.Embedding(11, 6), nn.Linear(6, 4), nn.Linear(6, 5)
        self.experts = nn.ModuleList(nn.Sequential(*parts) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            z = expert(x.index_select(0, rows)) + self.bias[number]
            found.index_add_(0, rows, z * weights[rows, place, None])
        return self.head((x + found).view(*ids.shape, -1).tanh()).mean(1)


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (2, 1), (1, 6)], ids=str)
def test_experts_that_are_modules(shape: tuple[int, int]) -> None:
    """Also where an expert gets as many rows as there are samples, and not one from each."""
    model, ids = Layers().double(), tokens(*shape)
    alone = [nm.fisher_diagonal(model, [row[None]], nm.Exact(), reduction="sum") for row in ids]
    found = nm.fisher_diagonal(model, [ids], nm.Exact(), reduction="sum")
    assert not left_to_autograd(found)
    assert_same(found, {name: torch.stack([one[name] for one in alone]).sum(0) for name in found}, 1e-9)
    assert nm.fisher_trace(model, [ids], nm.Exact(), reduction="sum").value == pytest.approx(float(found.trace))


@pytest.mark.parametrize("turned", [False, True])
def test_the_form_against_gradients_written_out(turned: bool) -> None:
    torch.manual_seed(0)
    rows, samples, experts = 40, 5, 3
    left, right = torch.randn(rows, 4).double(), torch.randn(rows, 2).double()
    owners, chosen = torch.randint(samples, (rows,)), torch.randint(experts, (rows,)).clamp(max=1)
    written = torch.zeros(samples, experts, 4, 2).double()
    for r in range(rows):
        written[owners[r], chosen[r]] += left[r, :, None] * right[r]
    parts = [slice(0, 15), slice(15, 15), slice(15, rows)]
    forms = [Routed(left[s], right[s], owners[s], chosen[s], samples, written.shape[1:], turned) for s in parts]
    form, dense = add(forms), Dense(written)
    for both in ("fourths", "row_fourths"):
        sums = [zero_sums(written[0]), zero_sums(written[0] if both == "fourths" else written[0, :, 0, 0])]
        again = [torch.zeros_like(one) for one in sums]
        form.add_squares(PowerSums(sums[0], unit=0.5, scale=2.0, **{both: sums[1]}))
        dense.add_squares(PowerSums(again[0], unit=0.5, scale=2.0, **{both: again[1]}))
        for one, expected in zip(sums, again, strict=True):
            torch.testing.assert_close(one, expected)
    weights = torch.randn(samples).double()
    torch.testing.assert_close(form.weighted_sum(weights), dense.weighted_sum(weights))
    torch.testing.assert_close(form.gradients(1, 4, torch.float64), written[1:4])
    torch.testing.assert_close(form.squared_norms(torch.float64), dense.squared_norms(torch.float64))
    assert 0.3 < float(form.magnitude() / dense.magnitude()) < 3
