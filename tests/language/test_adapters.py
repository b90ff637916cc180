"""Adapters of PEFT on causal models: their parameters alone, the base frozen, against a loop over single sequences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests.language.families import assert_same, gpt2, llama, mixtral, qwen2, reference, tokens

peft: Any = pytest.importorskip("peft", reason="needs neuromanifold[peft]")
pytestmark = pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning", "ignore::UserWarning:peft.*")


def adapted(config: Any, base: nn.Module | None = None) -> Any:
    """A model with an adapter that is not at its start, where half of LoRA's gradients are zero."""
    torch.manual_seed(1)
    model = peft.get_peft_model(llama() if base is None else base, config).double().eval()
    return disturb(model)


def disturb(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def lora(base: nn.Module | None = None, **more: Any) -> Any:
    options = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "down_proj"], **more}
    return adapted(peft.LoraConfig(**options), base)


def tuned(kind: str, **more: Any) -> Any:
    return adapted(getattr(peft, kind)(task_type="CAUSAL_LM", **more))


ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "LoRA, scaled by the root of its rank": lambda: lora(use_rslora=True),
    "LoRA with dropout": lambda: lora(lora_dropout=0.3),
    "LoRA and biases": lambda: lora(qwen2(), bias="lora_only", target_modules=["q_proj"]),
    "LoRA of Conv1D": lambda: lora(gpt2(), target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    "LoRA of the head": lambda: lora(target_modules=["lm_head"]),
    "LoRA and a trained head": lambda: lora(modules_to_save=["lm_head"]),
    "LoRA and a trained tied embedding": lambda: lora(
        llama(tie_word_embeddings=True), modules_to_save=["embed_tokens"]
    ),
    "LoRA and some trained tokens": lambda: lora(trainable_token_indices=[3, 4, 5]),
    "LoRA and some trained tied tokens": lambda: lora(
        llama(tie_word_embeddings=True), trainable_token_indices={"embed_tokens": [3, 4, 5]}
    ),
    "LoRA of the embedding": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "LoRA of a model with routed experts": lambda: lora(mixtral(), target_modules=["q_proj"]),
    "LoRA of routed experts": lambda: lora(mixtral(), target_parameters=["mlp.experts.gate_up_proj"]),
    "DoRA": lambda: lora(use_dora=True),
    "IA3": lambda: tuned("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: tuned("LoHaConfig", r=2, target_modules=["q_proj"]),
    "VeRA": lambda: tuned("VeraConfig", r=2, target_modules=["q_proj"]),
    "norms": lambda: tuned("LNTuningConfig", target_modules=["input_layernorm", "norm"]),
    "prefixes of keys and values": lambda: tuned("PrefixTuningConfig", num_virtual_tokens=3),
}


def singles(ids: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": row[None]} for row in ids]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_against_a_loop(kind: str) -> None:
    model, ids = ADAPTERS[kind](), tokens(2, 4)
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": ids}], nm.Exact(), reduction="sum")
    assert_same(found, reference(model, singles(ids), lambda _: range(3)))
    assert set(found) == {name for name, value in model.named_parameters() if value.requires_grad}
    assert found.positions == 6


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_trained_prompts(kind: str) -> None:
    """Labels and masks of the text are enough; the prompt's last position predicts the first token."""
    model, ids = tuned(kind, num_virtual_tokens=3), tokens(2, 4)
    expected = reference(model, singles(ids), lambda _: range(2, 6))
    padded = torch.cat([torch.full((2, 3), -100), ids], 1)
    for batch in ({"input_ids": ids}, {"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": padded}):
        found = nm.fisher_diagonal(model, [batch], nm.Exact(), reduction="sum")
        assert_same(found, expected)
        assert (found.count, found.positions) == (2, 8)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "attention_mask": mask}], nm.Exact(), reduction="sum")
    alone = [{"input_ids": ids[:1, :2]}, {"input_ids": ids[1:]}]
    assert_same(found, reference(model, alone, lambda n: range(2, [4, 6][n])))
    if kind == "PromptTuningConfig":
        assert set(nm.fisher_diagonal(model, [ids]).provenance.granularity.values()) == {"sample"}


def test_the_own_loss_of_a_trained_prompt() -> None:
    model, ids = tuned("PromptTuningConfig", num_virtual_tokens=3), tokens(2, 4)
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": ids}], nm.Empirical(), reduction="sum")
    (name,) = found
    weight = dict(model.named_parameters())[name]
    expected = torch.zeros_like(weight)
    for row in ids:
        loss = model(input_ids=row[None], labels=row[None]).loss * 4  # the mean over four labels
        expected += torch.autograd.grad(loss, weight)[0].square()
    assert_same(found, {name: expected})


def test_merged_adapters_are_refused_and_unmerged_ones_are_as_before() -> None:
    model, ids = lora(), tokens(2, 4)
    before = nm.fisher_diagonal(model, [ids], nm.Exact())
    model.merge_adapter()
    with pytest.raises(ValueError, match="adapters that are merged into frozen weights"):
        nm.fisher_diagonal(model, [ids])
    model.unmerge_adapter()
    assert_same(nm.fisher_diagonal(model, [ids], nm.Exact()), dict(before))
    with model.disable_adapter(), pytest.raises(ValueError, match="a selection with trainable parameters"):
        nm.fisher_diagonal(model, [ids])
    with pytest.raises(ValueError, match="frozen parameters are left out"):
        nm.fisher_diagonal(model.merge_and_unload(), [ids])


def test_the_active_one_of_two_adapters() -> None:
    model, ids = lora(), tokens(2, 4)
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["v_proj"]))
    model.set_adapter("other")
    found = nm.fisher_diagonal(disturb(model.double()), [ids], nm.Exact(), reduction="sum")
    assert all("other" in name for name in found)
    assert_same(found, reference(model, singles(ids), lambda _: range(3)))


def test_checkpointing_with_an_adapter() -> None:
    model, ids = lora(), tokens(2, 4)
    expected = nm.fisher_diagonal(model, [ids], nm.Exact())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    assert_same(nm.fisher_diagonal(model.train(), [ids], nm.Exact()), dict(expected))
    assert model.training


class Int8Linear(nn.Module):
    """A frozen layer of 8-bit weights with a scale for each output, as quantising libraries have them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (weight / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)  # type: ignore[operator]


def test_a_quantised_base() -> None:
    model, ids = lora(), tokens(2, 4)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad:
                setattr(module, name, Int8Linear(child))
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == 8
    found = nm.fisher_diagonal(model, [ids], nm.Exact(), reduction="sum")
    assert_same(found, reference(model, singles(ids), lambda _: range(3)))
    assert set(found.provenance.granularity.values()) <= {"sample", "token"}


def test_saved_and_loaded_adapters_have_the_same_values(tmp_path: Path) -> None:
    model, ids = lora(), tokens(2, 4)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True, torch_device="cpu").double().eval()
    found, expected = (nm.fisher_diagonal(one, [ids], nm.Exact()) for one in (again, model))
    assert_same(found, dict(expected), 1e-4)


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    lora().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got .* with .*adapter_config.json.* It is an adapter: name the model"):
        nm.load_model(str(tmp_path))
