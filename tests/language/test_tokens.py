"""Squares of single tokens: which layers have them, that they are unbiased, and that they have less noise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample import tokens as squares_of_tokens
from neuromanifold.persample.places import Layout
from tests.language.families import (
    VOCABULARY,
    assert_same,
    bert_tokens,
    gpt2,
    llama,
    make,
    mixtral,
    reference,
    t5,
    tokens,
)
from tests.zscores import allowed_z_score, mean_ratios, worst_z_score

pytestmark = pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")


def squared_per(fim: nm.DiagonalFisher, how: str) -> set[str]:
    return {name for name, squared in fim.provenance.granularity.items() if squared == how}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_above_the_last_attention_are_squared_per_token(attention: str) -> None:
    """All of the last block but its keys and values, whatever computes attention."""
    model = llama(num_hidden_layers=2, attn_implementation=attention)
    found = nm.fisher_diagonal(model, [tokens(2, 5)])
    inner = {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    expected = {f"model.layers.1.{name}.weight" for name in {*inner, "post_attention_layernorm"}}
    assert squared_per(found, "token") == expected | {"model.norm.weight", "lm_head.weight"}
    assert "squared per token, with less noise than per sequence: model.layers.1.self_attn.q_proj.weight" in str(found)


def test_heads_that_are_tied_and_routed_experts_are_not() -> None:
    """The gradient of a tied head is a sum with the embedding's, which all later tokens reach."""
    tied = nm.fisher_diagonal(llama(tie_word_embeddings=True), [tokens(2, 5)])
    assert "model.norm.weight" in squared_per(tied, "token")
    assert "model.embed_tokens.weight" in squared_per(tied, "sample")
    routed = nm.fisher_diagonal(mixtral(), [tokens(2, 5)])
    inner = {
        f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm")
    }
    assert squared_per(routed, "token") == inner | {"model.norm.weight", "lm_head.weight"}
    encoder_decoder = nm.fisher_diagonal(t5(), [{"input_ids": tokens(2, 5), "labels": tokens(2, 4)}])
    assert "decoder.block.0.layer.2.DenseReluDense.wi.weight" in squared_per(encoder_decoder, "token")
    assert not any(name.startswith("encoder") for name in squared_per(encoder_decoder, "token"))


def ragged() -> dict[str, Tensor]:
    ids, mask = tokens(3, 6), (torch.arange(6) < torch.tensor([[6], [2], [4]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "Llama": llama,
    "GPT-2, untied": lambda: gpt2(tie_word_embeddings=False),
    "Mixtral": mixtral,
    "token classifier": bert_tokens,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_values_are_the_same_per_token_and_per_sequence(family: str) -> None:
    model, batch = FAMILIES[family](), ragged()
    if family == "token classifier":
        batch["labels"] = torch.where(batch["labels"] < 0, -100, batch["labels"] % 3)
    both = [nm.fisher_diagonal(model, [batch], nm.Exact(), granularity=g) for g in ("auto", "sample")]  # type: ignore[arg-type]
    assert squared_per(both[0], "token")
    assert not squared_per(both[1], "token")
    assert_same(both[0], dict(both[1]), 1e-9)


def test_exact_values_of_the_head_take_no_pass_for_each_position() -> None:
    model, ids = llama(), tokens(3, 6)
    chosen = ["lm_head.weight", "model.norm.weight"]
    found = nm.fisher_diagonal(model, [ids], nm.Exact(), parameters=chosen, reduction="sum")
    assert found.provenance.passes == VOCABULARY - 1
    assert_same(found, reference(model, [{"input_ids": row[None]} for row in ids], lambda _: range(5), chosen))


ESTIMATORS = [
    nm.Hutchinson(),
    nm.Hutchinson(deflate=0, noise="gaussian"),
    nm.Hutchinson(probes=3),
    nm.MonteCarlo(samples=2),
]
HEAD = ["lm_head.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"]


def estimates(model: nn.Module, estimator: Any, granularity: Any, runs: int) -> dict[str, Tensor]:
    """Diagonals of some parameters for so many seeds, [runs, ...]."""
    found = [
        nm.fisher_diagonal(model, [ragged()], estimator, parameters=HEAD, granularity=granularity, seed=seed)
        for seed in range(runs)
    ]
    return {name: torch.stack([one[name] for one in found]) for name in HEAD}


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_squares_of_tokens_are_unbiased_and_have_less_noise(estimator: Any) -> None:
    """False alarms: one in a million for each parameter."""
    model = llama()
    exact = nm.fisher_diagonal(model, [ragged()], nm.Exact(), parameters=HEAD)
    per_token = estimates(model, estimator, "auto", 50)
    for name in HEAD:
        allowed = allowed_z_score(exact[name].numel())
        assert worst_z_score(per_token[name], exact[name]) < allowed
        ratios, one = mean_ratios(per_token[name], exact[name]), torch.ones((), dtype=torch.float64)
        assert worst_z_score(ratios, one) < allowed_z_score(1)
        assert worst_z_score(1.3 * ratios, one) > allowed_z_score(1)  # a biased twin
    if estimator == ESTIMATORS[0]:
        per_sequence = estimates(model, estimator, "sample", 40)
        spread = [float(runs["lm_head.weight"].var(0).sum()) for runs in (per_token, per_sequence)]
        assert spread[0] < spread[1] / 2  # up to five tokens in a sequence


def test_keys_and_values_squared_per_token_would_be_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The biased twin: if positions were taken for apart everywhere, the verification would say no."""
    model, ids = llama(), tokens(3, 6)
    wanted = "model.layers.0.self_attn.v_proj.weight"
    monkeypatch.setattr(
        "neuromanifold.persample.plan.Uses.places_of_positions",
        lambda self, _: dict.fromkeys([use.key for use in self.supported], self.samples),
    )
    found = nm.fisher_diagonal(model, [ids])
    assert wanted in squared_per(found, "sample")
    assert "lm_head.weight" in squared_per(found, "token")
    monkeypatch.setattr(squares_of_tokens, "_wrong", lambda *_: set())
    exact = nm.fisher_diagonal(model, [ids], nm.Exact(), granularity="sample", parameters=wanted)[wanted]
    runs = [nm.fisher_diagonal(model, [ids], parameters=wanted, seed=seed) for seed in range(100)]
    assert squared_per(runs[0], "token") == {wanted}
    assert worst_z_score(torch.stack([run[wanted] for run in runs]), exact) > allowed_z_score(exact.numel())


def test_two_classes_have_no_noise_in_the_head() -> None:
    """One deflated probe of two classes has only a random sign, which the square of a single token does not have."""
    model = make("BertForTokenClassification", "BertConfig", {**bert_tokens().config.to_dict(), "num_labels": 2})
    found = nm.fisher_diagonal(model, [tokens(2, 5)])
    exact = nm.fisher_diagonal(model, [tokens(2, 5)], nm.Exact())
    torch.testing.assert_close(found["classifier.weight"], exact["classifier.weight"])
    assert not found.stderr["classifier.weight"].any()
    assert found.stderr["bert.encoder.layer.0.attention.self.value.weight"].any()


def test_standard_errors_of_tokens_are_those_of_their_noise() -> None:
    model = llama()
    runs = [nm.fisher_diagonal(model, [tokens(8, 6)], parameters="lm_head*", seed=seed) for seed in range(50)]
    values = torch.stack([run["lm_head.weight"] for run in runs])
    claimed = torch.stack([run.stderr["lm_head.weight"] for run in runs]).square().mean(0).sum()
    assert 0.8 < float(claimed / values.var(0).sum()) < 2.5  # a bound, and for deflated probes no tight one


def test_others_are_squared_per_sequence() -> None:
    """Given labels are not centred; adaptive passes keep whole sequences; traces and factors add up over parameters."""
    model, batch = llama(), ragged()
    for options in ({"estimator": nm.Empirical()}, {"passes": 1.0}, {"granularity": "sample"}):
        assert not squared_per(nm.fisher_diagonal(model, [batch] * 4, **options), "token")  # type: ignore[arg-type]
    assert not squared_per(nm.fisher_diagonal(model, [batch], granularity="batch"), "token")
    assert "token" not in nm.fisher_trace(model, [batch]).provenance.granularity.values()
    single = nm.fisher_diagonal(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4)), [torch.tensor([[1], [2]])])
    assert not squared_per(single, "token")  # of one token each


class Stacked(nn.Module):
    """Tokens in rows of their own, with the positions first or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.first = first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).tanh()  # [n, t, d]
        x = (x.transpose(0, 1) if self.first else x).flatten(0, 1)
        z = self.head(self.inner(x).tanh())
        samples, length = ids.shape
        return z.view(length, samples, 3).transpose(0, 1) if self.first else z.view(samples, length, 3)


@pytest.mark.parametrize("first", [True, False], ids=["positions first", "samples first"])
@pytest.mark.parametrize("shape", [(3, 4), (4, 4), (1, 5), (5, 2)], ids=str)
def test_tokens_in_rows_of_their_own(first: bool, shape: tuple[int, int]) -> None:
    model, ids = Stacked(first).double(), tokens(*shape)
    found = nm.fisher_diagonal(model, [ids], nm.Exact())
    assert squared_per(found, "token") == set(found)
    assert found.provenance.passes == 2
    assert_same(found, dict(nm.fisher_diagonal(model, [ids], nm.Exact(), granularity="sample")), 1e-9)


def test_where_layouts_have_their_positions() -> None:
    shapes = {(3, 5, 2): Layout(), (5, 3, 2): Layout(1), (15, 2): Layout(), (3, 2): Layout()}
    found = [layout.positions_of(torch.Size(shape), 3) for shape, layout in shapes.items()]
    assert found == [(5, 3), (5, 1), (5, 3), (2, 3)]
    assert Layout(0, "positions").positions_of(torch.Size((15, 2)), 3) == (5, 1)


def test_batches_of_other_kinds_and_a_checkpoint_keep_what_was_squared(tmp_path: Path) -> None:
    model, data = llama(), [tokens(2, 5), tokens(1, 3), tokens(2, 7), tokens(3, 5)]
    whole = nm.fisher_diagonal(model, data, checkpoint=tmp_path / "state")
    again = nm.fisher_diagonal(model, data, checkpoint=tmp_path / "state")
    assert squared_per(again, "token") == squared_per(whole, "token") != set()
    assert_same(again, dict(whole), 1e-12)
    parts = [nm.fisher_diagonal(model, data, shard=(k, 2)) for k in range(2)]
    assert squared_per(parts[0] + parts[1], "token") == squared_per(whole, "token")
    coarse = nm.fisher_diagonal(model, [tokens(2, 5, seed=3)], granularity="sample", seed=1)
    assert not squared_per(whole + coarse, "token")


def test_the_page_says_what_was_squared_per_token(tmp_path: Path) -> None:
    fim = nm.fisher_diagonal(llama(), [tokens(2, 5)])
    page = fim.report(tmp_path / "fim.html").read_text()
    assert "squared per token, with less noise than per sequence" in page
    assert "over 2 sequences" in page
