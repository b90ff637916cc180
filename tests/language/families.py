"""Tiny language models of transformers, made on the spot in float64; and a slow, obvious reference."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs neuromanifold[hf]")

VOCABULARY = 11
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {**LLAMA, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6, "num_experts_per_tok": 2}
LOOP = {"experts_implementation": "eager"}  # a loop over experts; the default takes no float64
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 32,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}


def make(family: str, config: str, settings: dict[str, Any], **more: Any) -> nn.Module:
    """A model in eval mode with weights large enough that predictions differ."""
    torch.manual_seed(0)
    chosen = getattr(transformers, config)(**{**settings, **more})
    model: nn.Module = getattr(transformers, family)(chosen).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(0.1 * torch.randn_like(parameter))
    return model


def gpt2(**more: Any) -> nn.Module:
    """Conv1D layers and tied embeddings."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return make("GPT2LMHeadModel", "GPT2Config", {**sizes, "bos_token_id": 1, "eos_token_id": 2}, **more)


def llama(**more: Any) -> nn.Module:
    """Grouped queries, rotary positions, RMS norms."""
    return make("LlamaForCausalLM", "LlamaConfig", LLAMA, **more)


def qwen2(**more: Any) -> nn.Module:
    """Biases of queries, keys and values; tied embeddings."""
    return make("Qwen2ForCausalLM", "Qwen2Config", LLAMA, tie_word_embeddings=True, **more)


def qwen2_moe(**more: Any) -> nn.Module:
    """Four routed experts, two for each token, and a shared one."""
    return make("Qwen2MoeForCausalLM", "Qwen2MoeConfig", MOE, num_experts=4, **{**LOOP, **more})


def mixtral(**more: Any) -> nn.Module:
    """Three routed experts, two for each token."""
    sizes = {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}
    return make("MixtralForCausalLM", "MixtralConfig", sizes, **{**LOOP, **more})


def bart_decoder() -> nn.Module:
    """A decoder whose inputs are labels shifted already."""
    return make("BartForCausalLM", "BartConfig", BART)


def t5() -> nn.Module:
    """Encoder and decoder, whose inputs are made from labels."""
    return make("T5ForConditionalGeneration", "T5Config", T5, decoder_start_token_id=0, pad_token_id=0)


def bert_masked() -> nn.Module:
    """Predicts masked tokens; tied embeddings."""
    return make("BertForMaskedLM", "BertConfig", BERT)


def bert_tokens() -> nn.Module:
    """A class for each token."""
    return make("BertForTokenClassification", "BertConfig", BERT, num_labels=3)


CAUSAL: dict[str, Callable[..., nn.Module]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "Qwen2": qwen2,
    "Qwen2-MoE": qwen2_moe,
    "Mixtral": mixtral,
}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random tokens that are no special ones."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def reference(
    model: nn.Module,
    sequences: Iterable[dict[str, Tensor]],
    positions: Callable[[int], Iterable[int]],
    parameters: list[str] | None = None,
) -> dict[str, Tensor]:
    """Σ Σ_c p_c (∂ log p_c/∂θ)² by one backward pass for each sequence, position and class; as a sum."""
    chosen = {n: p for n, p in model.named_parameters() if p.requires_grad and (parameters is None or n in parameters)}
    sums = {name: torch.zeros_like(parameter) for name, parameter in chosen.items()}
    for number, sequence in enumerate(sequences):
        log_probs = model(**sequence).logits[0].log_softmax(-1)
        for t in positions(number):
            for log_p in log_probs[t]:
                gradients = torch.autograd.grad(log_p, chosen.values(), retain_graph=True, allow_unused=True)
                for name, gradient in zip(chosen, gradients, strict=True):
                    if gradient is not None:
                        sums[name] += log_p.exp().detach() * gradient.square()
    return sums


def own_score_squares(model: nn.Module, sequences: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Σ over sequences of the squared gradient of the model's own loss, times its number of labels."""
    chosen = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums = {name: torch.zeros_like(parameter) for name, parameter in chosen.items()}
    for sequence in sequences:
        loss = model(**sequence, num_items_in_batch=1).loss  # the sum over labels
        gradients = torch.autograd.grad(loss, chosen.values(), allow_unused=True)
        for name, gradient in zip(chosen, gradients, strict=True):
            sums[name] += 0 if gradient is None else gradient.square()
    return sums


FLOAT32 = 1e-5  # transformers computes norms, rotary positions and losses in float32


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = FLOAT32) -> None:
    """Each tensor agrees with the expected one, relative to its largest entry.

    But for those that are zero up to rounding, as the bias of keys, which attention does not change with.
    """
    assert set(found) == set(expected)
    largest = max(float(value.max()) for value in expected.values())
    for name, value in expected.items():
        atol = max(rtol * float(value.max()), 1e-10 * largest)
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]
        )
