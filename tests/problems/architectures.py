"""Small models of `transformers`: the code that people run, with sizes that a laptop does not notice."""

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

from tests.problems.problem import Net, Problem, in_float64

LABELS = torch.tensor([0, 2, 1, 1])
IDS = torch.tensor([[2, 4, 0, 5], [3, 3, 2, 4], [2, 5, 0, 0], [4, 2, 4, 1]])
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
COMMON = {"num_labels": 3}
SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
BERT = {**COMMON, **SIZES, "vocab_size": 7, "max_position_embeddings": 8}
LLAMA = {**BERT, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": 7, "n_positions": 6, "n_layer": 1, "n_head": 2, "n_embd": 4, "bos_token_id": 0, "eos_token_id": 0}
DISTILBERT = {
    **COMMON,
    **{"vocab_size": 7, "max_position_embeddings": 6, "n_layers": 1, "n_heads": 2, "dim": 4, "hidden_dim": 6},
    "dropout": 0.5,
}
T5 = {**COMMON, "vocab_size": 7, "d_model": 4, "d_kv": 2, "d_ff": 6, "num_layers": 1, "num_heads": 2}
VISION = {**COMMON, "num_channels": 2}


def _text(model: nn.Module, rest: tuple[str, ...] = (), rtol: float = 1e-10) -> Problem:
    return Problem(model, {"input_ids": IDS, "attention_mask": MASK}, LABELS, rest=rest, rtol=rtol)


def _image(model: nn.Module, size: int) -> Problem:
    return Problem(model, {"pixel_values": torch.randn(4, 2, size, size)}, LABELS)


def _t5_encoder() -> nn.Module:
    def run(m: Net, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return m.head(m.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.mean(1))

    return Net(run, encoder=hf.T5EncoderModel(hf.T5Config(**T5)), head=nn.Linear(4, 3))


def _convnext() -> nn.Module:
    config = hf.ConvNextConfig(**VISION, hidden_sizes=[4, 4], depths=[1, 1], num_stages=2, patch_size=2, image_size=8)
    return hf.ConvNextForImageClassification(config)


def _resnet() -> nn.Module:
    config = hf.ResNetConfig(**VISION, embedding_size=4, hidden_sizes=[4, 4], depths=[1, 1], layer_type="basic")
    return hf.ResNetForImageClassification(config)


def _efficientnet() -> nn.Module:
    one = {"kernel_sizes": [3], "in_channels": [4], "out_channels": [4], "strides": [1], "num_block_repeats": [1]}
    more = {"expand_ratios": [2], "depthwise_padding": [], "hidden_dim": 12, "image_size": 8}
    width = {"width_coefficient": 0.01, "depth_divisor": 4}
    return hf.EfficientNetForImageClassification(hf.EfficientNetConfig(**VISION, **one, **more, **width))


def _mobilenet() -> nn.Module:
    config = hf.MobileNetV2Config(**VISION, depth_multiplier=0.1, min_depth=4, depth_divisible_by=4, image_size=16)
    return hf.MobileNetV2ForImageClassification(config)


def _wav2vec2(norm: str) -> nn.Module:
    convolutions = {"conv_dim": [4, 4], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
    position = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": norm}
    config = hf.Wav2Vec2Config(**COMMON, **SIZES, **convolutions, **position, classifier_proj_size=4)
    return hf.Wav2Vec2ForSequenceClassification(config)


def _whisper() -> nn.Module:
    sizes = {"d_model": 4, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 6, "num_mel_bins": 3}
    config = hf.WhisperConfig(**COMMON, **sizes, max_source_positions=4, classifier_proj_size=4, decoder_layers=1)
    return hf.WhisperForAudioClassification(config)


MAKERS: dict[str, Callable[[], Problem]] = {
    "DistilBERT": lambda: _text(hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTILBERT))),
    "BERT": lambda: _text(hf.BertForSequenceClassification(hf.BertConfig(**BERT))),
    "RoBERTa": lambda: _text(hf.RobertaForSequenceClassification(hf.RobertaConfig(**BERT))),
    "GPT-2 (tokens, tied)": lambda: Problem(
        hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        {"input_ids": IDS[:, :3]},
        IDS[:, 1:],
        options={"shift_labels": False},  # they are shifted
    ),
    "GPT-2 (sequences)": lambda: _text(
        hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, **COMMON, pad_token_id=0))
    ),
    "Llama": lambda: _text(hf.LlamaForSequenceClassification(hf.LlamaConfig(**LLAMA)), rtol=1e-5),
    "T5 encoder": lambda: _text(_t5_encoder(), rest=("*relative_attention_bias*",), rtol=1e-5),
    "ViT": lambda: _image(
        hf.ViTForImageClassification(hf.ViTConfig(**VISION, **SIZES, image_size=4, patch_size=2)),
        4,
    ),
    "ConvNeXt": lambda: _image(_convnext(), 8),
    "ResNet": lambda: _image(_resnet(), 8),
    "EfficientNet": lambda: _image(_efficientnet(), 8),
    "MobileNetV2": lambda: _image(_mobilenet(), 16),
    "Wav2Vec2": lambda: Problem(
        _wav2vec2("group"), {"input_values": torch.randn(4, 31)}, LABELS, rest=("*masked_spec*",)
    ),
    "Wav2Vec2, layer norms": lambda: Problem(
        _wav2vec2("layer"), {"input_values": torch.randn(4, 31)}, LABELS, rest=("*masked_spec*",)
    ),
    "Whisper encoder": lambda: Problem(_whisper(), {"input_features": torch.randn(4, 3, 8)}, LABELS),
}


def make_architectures() -> dict[str, Problem]:
    """All of them, seeded, with parameters that are not all zero or one."""
    problems = {}
    for name, make in MAKERS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            problems[name] = make()
            for parameter in problems[name].model.parameters():
                if parameter.requires_grad:
                    parameter.data.add_(0.2 * torch.randn_like(parameter))
    return in_float64(problems)


ARCHITECTURES = make_architectures()
