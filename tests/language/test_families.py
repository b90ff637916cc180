"""Families of language models: exact values against a float64 loop over single sequences; no bias at other sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import neuromanifold as nm
from tests.language.families import (
    BERT,
    LLAMA,
    LOOP,
    T5,
    assert_same,
    bert_masked,
    bert_tokens,
    gpt2,
    llama,
    make,
    mixtral,
    qwen2,
    qwen2_moe,
    reference,
    t5,
    tokens,
)
from tests.zscores import allowed_z_score, worst_z_score

pytestmark = pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")


def other(family: str, config: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: make(family, config, {**LLAMA, **more})


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "Llama, grouped queries": llama,
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
    "Llama, eager attention": lambda: llama(attn_implementation="eager"),
    "Llama, two layers": lambda: llama(num_hidden_layers=2),
    "Qwen2, tied": qwen2,
    "Qwen2-MoE": qwen2_moe,
    "Mixtral": mixtral,
    "GPT-2, tied": gpt2,
    "GPT-2, untied": lambda: gpt2(tie_word_embeddings=False),
    "Gemma2, capped logits": other("Gemma2ForCausalLM", "Gemma2Config", head_dim=4, final_logit_softcapping=3.0),
    "Granite, scaled logits": other("GraniteForCausalLM", "GraniteConfig", logits_scaling=2.0),
    "Phi, head with bias": other("PhiForCausalLM", "PhiConfig", num_key_value_heads=4),
    "OPT": other("OPTForCausalLM", "OPTConfig", ffn_dim=12, word_embed_proj_dim=8),
    "GPT-NeoX, parallel blocks": other("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "Falcon, one key for all queries": other("FalconForCausalLM", "FalconConfig"),
    "Mamba, no attention": other(
        "MambaForCausalLM", "MambaConfig", state_size=4, expand=2, time_step_rank=2, conv_kernel=3
    ),
    "BERT as a decoder": lambda: make("BertLMHeadModel", "BertConfig", {**BERT, "is_decoder": True}),
}


def singles(ids: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": row[None]} for row in ids]


@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models(family: str) -> None:
    model, ids = CAUSAL[family](), tokens(2, 4)
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": ids}], nm.Exact(), reduction="sum")
    assert_same(found, reference(model, singles(ids), lambda _: range(3)))
    assert (found.count, found.positions, found.unit) == (2, 6, "summed over sequences")


MASKED: dict[str, Callable[[], nn.Module]] = {
    "BERT, tied": bert_masked,
    "RoBERTa": lambda: make("RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 0}),
    "ALBERT, one layer used twice": lambda: make(
        "AlbertForMaskedLM", "AlbertConfig", {**BERT, "embedding_size": 4, "num_hidden_layers": 2}
    ),
    "ELECTRA": lambda: make("ElectraForMaskedLM", "ElectraConfig", {**BERT, "embedding_size": 4}),
}


@pytest.mark.parametrize("family", MASKED)
def test_masked_models(family: str) -> None:
    model, ids, masked = MASKED[family](), tokens(2, 4), [[1], [0, 3]]
    labels = torch.full_like(ids, -100)
    for row, places in enumerate(masked):
        labels[row, places] = ids[row, places]
    inputs = torch.where(labels == -100, ids, 2)
    found = nm.fisher_diagonal(model, [{"input_ids": inputs, "labels": labels}], nm.Exact(), reduction="sum")
    assert_same(found, reference(model, singles(inputs), lambda n: masked[n]))
    assert (found.count, found.positions) == (2, 3)


@pytest.mark.parametrize("family", ["BERT", "Llama"])
def test_token_classifiers(family: str) -> None:
    classifier = other("LlamaForTokenClassification", "LlamaConfig", num_labels=3)
    model, ids = (bert_tokens if family == "BERT" else classifier)(), tokens(2, 4)
    labels = (ids % 3).index_fill(1, torch.tensor([1]), -100)
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": labels}], nm.Exact(), reduction="sum")
    assert_same(found, reference(model, singles(ids), lambda _: [0, 2, 3]))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_encoder_and_decoder_with_padding_on_both_sides(tied: bool) -> None:
    sizes = {**T5, "decoder_start_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": tied}
    model: Any = t5() if tied else make("T5ForConditionalGeneration", "T5Config", sizes)
    ids, labels, mask = tokens(2, 4), tokens(2, 3, seed=1), torch.ones(2, 4, dtype=torch.long)
    mask[1, 2:], labels[0, 2:] = 0, -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    found = nm.fisher_diagonal(model, [batch], nm.Exact(), reduction="sum")
    decoder = model.prepare_decoder_input_ids_from_labels(labels=labels)
    alone = [
        {"input_ids": ids[:1], "decoder_input_ids": decoder[:1, :2]},
        {"input_ids": ids[1:, :2], "decoder_input_ids": decoder[1:]},
    ]
    assert_same(found, reference(model, alone, lambda n: range([2, 3][n])))
    assert (found.count, found.positions) == (2, 5)


@pytest.mark.parametrize("family", [qwen2_moe, mixtral])
def test_routed_experts_with_padding(family: Callable[[], nn.Module]) -> None:
    """The tokens of a sample are scattered over experts, and padding is routed, too."""
    model, ids, mask = family(), tokens(2, 5), torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:] = 0
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "attention_mask": mask}], nm.Exact(), reduction="sum")
    alone = [{"input_ids": ids[:1, :3]}, {"input_ids": ids[1:]}]
    assert_same(found, reference(model, alone, lambda n: range([2, 4][n])))


def test_the_default_of_routed_experts_in_float32() -> None:
    """The kernel that transformers takes by default has no float64."""
    ids = tokens(2, 5)
    expected = nm.fisher_diagonal(mixtral(), [ids], nm.Exact())
    found = nm.fisher_diagonal(mixtral(experts_implementation=None).float(), [ids], nm.Exact())
    assert_same({name: value.double() for name, value in found.items()}, dict(expected), 2e-3)


LARGER = {
    "Llama": lambda: llama(vocab_size=101),
    "Mixtral": lambda: mixtral(vocab_size=101),
    "GPT-2, tied": lambda: gpt2(vocab_size=101),
    "BERT, tied": lambda: make("BertForMaskedLM", "BertConfig", {**BERT, "vocab_size": 101}),
}
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("GPT-2, tied", "BERT, tied")]


@pytest.mark.parametrize("family", ["Llama", "Mixtral", *SLOW])
def test_no_bias_with_a_larger_vocabulary(family: str) -> None:
    """The reference: exact values of norms and biases alone.  False alarms: one in a million for each parameter."""
    model = LARGER[family]().float()
    batch = {"input_ids": torch.randint(3, 101, (2, 4), generator=torch.Generator().manual_seed(0))}
    small = [name for name, value in model.named_parameters() if value.ndim == 1 and len(value) < 100]
    exact = nm.fisher_diagonal(model, [batch], nm.Exact(), parameters=small)
    runs = [nm.fisher_diagonal(model, [batch], parameters=small, seed=seed) for seed in range(40)]
    seen = 0.0
    for name in small:
        values, allowed = torch.stack([run[name] for run in runs]).double(), allowed_z_score(exact[name].numel())
        if float(exact[name].max()) > 1e-6 * float(exact.trace):  # the bias of keys has none, but for rounding
            assert worst_z_score(values, exact[name].double()) < allowed, name
            seen = max(seen, worst_z_score(3 * values, exact[name].double()) / allowed)
    assert seen > 1  # a biased twin


def test_activation_checkpointing_changes_nothing() -> None:
    ids, plain, saving = tokens(2, 5), llama(num_hidden_layers=2), llama(num_hidden_layers=2)
    for number, layer in enumerate(saving.model.layers):
        saving.model.layers[number] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    for estimator in (nm.Exact(), nm.Hutchinson()):
        expected, found = (nm.fisher_diagonal(model, [ids], estimator) for model in (plain, saving))
        assert_same(found, dict(expected), 1e-9)
        assert found.provenance.granularity == expected.provenance.granularity


@pytest.mark.slow
def test_sums_of_bfloat16_models_are_float32() -> None:
    """A thousand batches of equal squares do not get stuck as they would in bfloat16."""
    model, ids = llama().bfloat16(), tokens(2, 5)
    once = nm.fisher_diagonal(model, [ids], nm.Exact(), reduction="sum", parameters="*norm*")
    often = nm.fisher_diagonal(model, [ids] * 300, nm.Exact(), reduction="sum", parameters="*norm*")
    for name, value in once.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(often[name], 300 * value, rtol=1e-4, atol=0)
    precise = nm.fisher_diagonal(model.double(), [ids], nm.Exact(), reduction="sum", parameters="*norm*")
    assert_same({name: value.double() for name, value in once.items()}, dict(precise), 0.05)


def test_router_losses_do_not_count() -> None:
    model, ids = mixtral(), tokens(2, 4)
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "output_router_logits": True}], nm.Exact())
    assert_same(found, dict(nm.fisher_diagonal(mixtral(**LOOP), [ids], nm.Exact())), 1e-9)
